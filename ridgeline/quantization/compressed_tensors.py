"""How do quantized matrices look in a checkpoint of the compressed-tensors layout?

Format "pack-quantized", as version 0.20 of that package reads and writes it: `weight_packed` holds
the codes of a row one behind the other, `bits` bits each, the first in the lowest bits of the first
int32 word, with 2^(bits-1) added so that none is negative; `weight_scale` [O, G]; `weight_shape`
[O, I]; and for asymmetric codes `weight_zero_point`, packed like that down the rows of [O, G].
Letters: O outputs, I inputs, G groups of a row, N numbers, W words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ridgeline.errors import ConfigError
from ridgeline.quantization.algorithms.grid import Grid, Quantized, Scales

WORD_BITS = 32
PIECE_CODES = 1 << 18  # that are 8 bytes each at once
PACKED, SCALE = "weight_packed", "weight_scale"
SHAPE, ZERO = "weight_shape", "weight_zero_point"
VERSION = "0.20.0"


def pack_bits(codes_RN: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes [R, N], int8 -> [R, ceil(N * bits / 32)] int32; codes may cross words."""
    step = max(1, PIECE_CODES // max(1, codes_RN.shape[1]))
    return torch.cat([_pack_rows(some_RN, bits) for some_RN in torch.split(codes_RN, step)])


def _pack_rows(codes_RN: torch.Tensor, bits: int) -> torch.Tensor:
    rows, count = codes_RN.shape
    words = -(-count * bits // WORD_BITS)
    shifted_RN = codes_RN.to(torch.int64) + (1 << (bits - 1))
    first_N = torch.arange(count, device=codes_RN.device) * bits
    word_N, offset_N = first_N // WORD_BITS, first_N % WORD_BITS
    # One word more than there are: the last code may seem to reach into it with no bit of its own.
    out_RW = torch.zeros(rows, words + 1, dtype=torch.int64, device=codes_RN.device)
    wide_RN = shifted_RN << offset_N
    out_RW.index_add_(1, word_N, wide_RN & 0xFFFFFFFF)
    out_RW.index_add_(1, word_N + 1, wide_RN >> WORD_BITS)
    words_RW = out_RW[:, :words]
    signed_RW = torch.where(words_RW >= 1 << 31, words_RW - (1 << 32), words_RW)
    return signed_RW.to(torch.int32).contiguous()


def unpack_bits(packed_RW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The opposite: [R, W] int32 -> signed codes [R, count], int8."""
    step = max(1, PIECE_CODES // max(1, count))
    return torch.cat([_unpack_rows(some, bits, count) for some in torch.split(packed_RW, step)])


def _unpack_rows(packed_RW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    words_RW = torch.nn.functional.pad(packed_RW.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    first_N = torch.arange(count, device=packed_RW.device) * bits
    word_N, offset_N = first_N // WORD_BITS, first_N % WORD_BITS
    both_RN = words_RW[:, word_N] | words_RW[:, word_N + 1] << WORD_BITS
    codes_RN = (both_RN >> offset_N & ((1 << bits) - 1)) - (1 << (bits - 1))
    return codes_RN.to(torch.int8)


def tensors_of(quantized: Quantized, weight_name: str) -> dict[str, torch.Tensor]:
    """What stands in the checkpoint for the matrix called `weight_name`, which ends in .weight."""
    bits, stem = quantized.grid.bits, _stem(weight_name)
    found = {
        stem + PACKED: pack_bits(quantized.codes_OI, bits),
        stem + SCALE: quantized.scales.scale_OG.contiguous(),
        stem + SHAPE: torch.tensor(quantized.codes_OI.shape, dtype=torch.int64),
    }
    if quantized.scales.zero_OG is not None:
        found[stem + ZERO] = pack_bits(quantized.scales.zero_OG.T, bits).T.contiguous()
    return found


def read_tensors(tensors: Mapping[str, torch.Tensor], weight_name: str, grid: Grid) -> Quantized:
    """The matrix again. ConfigError if tensors and grid do not belong together."""
    stem = _stem(weight_name)
    if stem + PACKED not in tensors:
        raise ConfigError(f"tensor {stem + PACKED} is missing; quantize this model again")
    outputs, inputs = tensors[stem + SHAPE].tolist()
    scale_OG = tensors[stem + SCALE]
    zero_OG = None
    if not grid.symmetric:
        zero_OG = unpack_bits(tensors[stem + ZERO].T, grid.bits, outputs).T
    packed_OW = tensors[stem + PACKED]
    wanted = (outputs, -(-inputs * grid.bits // WORD_BITS)), (outputs, inputs // grid.size(inputs))
    if (tuple(packed_OW.shape), tuple(scale_OG.shape)) != wanted:
        raise ConfigError(
            f"tensors of {weight_name} do not hold {outputs} x {inputs} codes of {grid.bits} bits"
            f" in groups of {grid.group}; quantize this model again"
        )
    return Quantized(grid, unpack_bits(packed_OW, grid.bits, inputs), Scales(scale_OG, zero_OG))


def _stem(weight_name: str) -> str:
    return weight_name.removesuffix("weight")


def quantization_config(
    grids: Mapping[str, Grid], *, ignore: Sequence[str], act_order: bool
) -> dict[str, Any]:
    """For config.json. `grids`: target ("Linear", or "re:..." of module names) to grid."""
    alike: dict[Grid, list[str]] = {}
    for target, grid in grids.items():
        alike.setdefault(grid, []).append(target)
    return {
        "config_groups": {
            f"group_{index}": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": targets,
                "weights": _arguments(grid, act_order),
            }
            for index, (grid, targets) in enumerate(alike.items())
        },
        "format": "pack-quantized",
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "version": VERSION,
    }


def _arguments(grid: Grid, act_order: bool) -> dict[str, Any]:
    return {
        # Groups are those of the matrix as it stands: no reader has to know the order.
        "actorder": "static" if act_order else None,
        "dynamic": False,
        "group_size": grid.group or None,
        "num_bits": grid.bits,
        "strategy": "group" if grid.group else "channel",
        "symmetric": grid.symmetric,
        "type": "int",
    }


def read_grids(config: Mapping[str, Any]) -> dict[str, Grid]:
    """Target -> grid of a quantization_config that `quantization_config` wrote; scales are taken
    as float32. ConfigError for any other."""
    try:
        if config["quant_method"] != "compressed-tensors" or config["format"] != "pack-quantized":
            raise ValueError("another layout")
        return {
            target: _grid(group["weights"])
            for group in config["config_groups"].values()
            for target in group["targets"]
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"quantization_config is none that ridgeline quantize wrote ({error!r})"
        ) from None


def _grid(arguments: Mapping[str, Any]) -> Grid:
    if arguments["type"] != "int" or not 2 <= arguments["num_bits"] <= 8:
        raise ValueError("codes are no integers of 2 to 8 bits")
    return Grid(arguments["num_bits"], arguments["group_size"] or 0, arguments["symmetric"])


def grid_of(grids: Mapping[str, Grid], weight_name: str) -> Grid:
    """That of the matrix called `weight_name`: of the first pattern that its module matches, else
    that of all linear layers."""
    module = weight_name.removesuffix(".weight")
    for target, grid in grids.items():
        if target.startswith("re:") and re.match(target[3:], module):
            return grid
    if "Linear" not in grids:
        raise ConfigError(f"quantization_config has no target for {module}")
    return grids["Linear"]
