"""How are the weights of a linear layer stored and multiplied? One file per format; the table of
their names is `ridgeline.formats.WEIGHT_FORMATS`."""

from __future__ import annotations

from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.quantization.contract import Parameters, WeightFormat
from ridgeline.registry import load

__all__ = ["Parameters", "WeightFormat", "open_weight_format"]


def open_weight_format(name: str) -> WeightFormat:
    """The format of this name; `auto` is `plain`. ConfigError lists the choices."""
    table = {known: line.where for known, line in WEIGHT_FORMATS.items()}
    opened: WeightFormat = load(table, "plain" if name == "auto" else name, "weight format")()
    return opened
