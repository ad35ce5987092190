"""How are the weights of a linear layer stored and multiplied? One file for formats that share
their arithmetic; the table of their names is `ridgeline.formats.WEIGHT_FORMATS`."""

from __future__ import annotations

from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS, check_served, served, weight_line
from ridgeline.kernels.quantized_matrix import Parameters
from ridgeline.kernels.small_linear import Fusion
from ridgeline.quantization.contract import WeightFormat
from ridgeline.registry import load

__all__ = ["Fusion", "Parameters", "WeightFormat", "open_vocabulary_format", "open_weight_format"]


def open_weight_format(name: str, *, deterministic: bool = False) -> WeightFormat:
    """The format of this name; `auto` is `plain`. `deterministic`: with products whose rows do
    not depend on each other. ConfigError lists the choices."""
    name = "plain" if name == "auto" else name
    check_served(WEIGHT_FORMATS, name, "weight format")
    opened: WeightFormat = load(served(WEIGHT_FORMATS), name, "weight format")()
    if not deterministic:
        return opened
    invariant = opened.invariant()
    if invariant is None:
        raise ConfigError(
            f"deterministic: weight format {name} has no product that is the same in any batch;"
            " choose plain or fp8, or leave out deterministic"
        )
    return invariant


def open_vocabulary_format(name: str, *, deterministic: bool = False) -> WeightFormat:
    """How embedding and output matrix are kept beside layers in the weight format `name`."""
    vocabulary = weight_line(name).vocabulary
    opened = open_weight_format(vocabulary, deterministic=deterministic).of_vocabulary()
    if not opened.serves_vocabulary:
        raise ConfigError(
            f"weight format {name}: its vocabulary is to be {vocabulary}, which has no look-up of"
            " rows; choose plain for it"
        )
    return opened
