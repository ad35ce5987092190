"""Our packing equals that of the package compressed-tensors, bit for bit.

The cases were made with its `pack_to_int32` and `dequantize` (version 0.20.0): seven widths, codes
at both ends, groups of 8, bfloat16 scales.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.quantization.algorithms.grid import Grid, Quantized, Scales
from ridgeline.quantization.compressed_tensors import (
    grid_of,
    pack_bits,
    quantization_config,
    read_grids,
    read_tensors,
    tensors_of,
    unpack_bits,
)

CASES = json.loads((Path(__file__).parent / "compressed_tensors_cases.json").read_text())["cases"]
NAME = "model.layers.0.self_attn.q_proj.weight"


def quantized(case: dict[str, Any], *, symmetric: bool) -> Quantized:
    grid = Grid(case["bits"], 8, symmetric, torch.bfloat16)
    zero_OG = None if symmetric else torch.tensor(case["zero"], dtype=torch.int8)
    scale_OG = torch.tensor(case["scale"], dtype=torch.bfloat16)
    return Quantized(grid, torch.tensor(case["codes"], dtype=torch.int8), Scales(scale_OG, zero_OG))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['bits']} bits")
def test_words_are_those_of_the_package(case: dict[str, Any]) -> None:
    found = tensors_of(quantized(case, symmetric=False), NAME)
    stem = NAME.removesuffix("weight")
    assert found[stem + "weight_packed"].tolist() == case["packed"]
    assert found[stem + "weight_zero_point"].tolist() == case["packed_zero"]
    assert found[stem + "weight_shape"].tolist() == [3, 40]
    assert found[stem + "weight_packed"].dtype == torch.int32
    assert found[stem + "weight_scale"].dtype == torch.bfloat16


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['bits']} bits")
def test_dequantized_weights_are_those_of_the_package(
    case: dict[str, Any], symmetric: bool
) -> None:
    wanted = torch.tensor(case["symmetric_weight" if symmetric else "weight"])
    made = quantized(case, symmetric=symmetric)
    read = read_tensors(tensors_of(made, NAME), NAME, made.grid)
    assert torch.equal(read.codes_OI, made.codes_OI)
    assert torch.equal(read.dequantize().to(torch.bfloat16).float(), wanted)


@pytest.mark.parametrize("count", [1, 7, 8, 31, 32, 33, 100])
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_come_back(bits: int, count: int) -> None:
    noise = torch.Generator().manual_seed(bits * 1000 + count)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    codes = torch.randint(low, high, (4, count), generator=noise, dtype=torch.int8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (4, -(-count * bits // 32))
    assert torch.equal(unpack_bits(packed, bits, count), codes)


def test_tensors_that_do_not_belong_to_the_grid_are_refused() -> None:
    made = tensors_of(quantized(CASES[2], symmetric=True), NAME)
    with pytest.raises(ConfigError, match="3 x 40 codes of 3 bits in groups of 8"):
        read_tensors(made, NAME, Grid(3, 8))
    with pytest.raises(ConfigError, match="4 bits in groups of 20"):
        read_tensors(made, NAME, Grid(4, 20))
    with pytest.raises(ConfigError, match="weight_packed is missing"):
        read_tensors({}, NAME, Grid(4, 8))


def test_the_config_says_what_was_done_and_is_read_again() -> None:
    grids = {"Linear": Grid(4, 128), "re:.*down_proj": Grid(8, 0, False)}
    config = quantization_config(grids, ignore=["lm_head"], act_order=True)
    assert read_grids(json.loads(json.dumps(config))) == grids
    groups = config["config_groups"]
    assert groups["group_0"]["weights"]["strategy"] == "group"
    assert groups["group_0"]["weights"]["actorder"] == "static"
    assert groups["group_1"]["weights"]["strategy"] == "channel"
    assert groups["group_1"]["weights"]["group_size"] is None
    assert grid_of(grids, NAME) == Grid(4, 128)
    assert grid_of(grids, "model.layers.3.mlp.down_proj.weight") == Grid(8, 0, False)


@pytest.mark.parametrize(
    "config", [{}, {"quant_method": "gptq", "format": "x"}, {"quant_method": 1}]
)
def test_other_layouts_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="none that ridgeline quantize wrote"):
        read_grids(config)
