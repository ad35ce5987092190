"""How are the weights of a linear layer stored and multiplied? One file per format; the table of
their names is `ridgeline.formats.WEIGHT_FORMATS`."""

from __future__ import annotations

from ridgeline.formats import WEIGHT_FORMATS, check_served, served
from ridgeline.kernels.small_linear import Fusion
from ridgeline.quantization.contract import Parameters, WeightFormat
from ridgeline.registry import load

__all__ = ["Fusion", "Parameters", "WeightFormat", "open_weight_format"]


def open_weight_format(name: str) -> WeightFormat:
    """The format of this name; `auto` is `plain`. ConfigError lists the choices."""
    name = "plain" if name == "auto" else name
    check_served(WEIGHT_FORMATS, name, "weight format")
    opened: WeightFormat = load(served(WEIGHT_FORMATS), name, "weight format")()
    return opened
