"""Every weight format keeps its contract: linear(x) is x @ dequantize().T + bias."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.counts import layer_scale_bytes, weight_bytes
from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS, KVFormatLine, WeightFormatLine, served
from ridgeline.quantization import Fusion, open_weight_format
from tests.architectures.configs import config
from tests.extensions.toy_weight_format import Int8Groups

CPU = torch.device("cpu")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ["auto", *served(WEIGHT_FORMATS)])
def test_linear_is_a_product_with_the_dequantized_weights(
    name: str, has_bias: bool, deterministic: bool
) -> None:
    weights = open_weight_format(name, deterministic=deterministic)
    parameters = weights.parameters(24, 16, torch.float32, CPU)
    noise = torch.Generator().manual_seed(0)
    parameters["weight"].normal_(generator=noise)
    bias = torch.randn(24, generator=noise) if has_bias else None
    kept = weights.finish(parameters)
    x = torch.randn(5, 16, generator=noise)
    wanted = x @ weights.dequantize(kept).T + (0 if bias is None else bias)
    torch.testing.assert_close(weights.linear(x, kept, bias), wanted)


def test_plain_weights_stay_as_they_are() -> None:
    weights = open_weight_format("plain")
    parameters = weights.parameters(3, 4, torch.bfloat16, CPU)
    assert weights.finish(parameters)["weight"] is parameters["weight"]
    assert weights.bits is None
    assert WEIGHT_FORMATS["plain"].bits_per_weight(2) == 16


def test_unknown_format_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="unknown weight format 'int3'; choose one of plain"):
        open_weight_format("int3")


@pytest.mark.parametrize("name", served(WEIGHT_FORMATS))
def test_a_deterministic_format_leaves_nothing_to_kernels_for_few_rows(name: str) -> None:
    weights = open_weight_format(name, deterministic=True)
    assert weights.name == name
    parameters = weights.parameters(24, 16, torch.float32, CPU)
    kept = weights.finish({"weight": parameters["weight"].fill_(0.5)})
    x = torch.ones(1, 16)
    assert weights.fused(x, kept, None, Fusion(residual_TO=torch.ones(1, 24))) is None
    assert not weights.gates_input(x, kept)


def test_a_format_may_have_no_deterministic_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.quantization.load", lambda *_: Int8Groups)
    assert isinstance(open_weight_format("plain"), Int8Groups)
    with pytest.raises(ConfigError, match="no product that is the same in any batch; choose"):
        open_weight_format("plain", deterministic=True)


def test_lines_count_scales() -> None:
    assert WeightFormatLine("x:Y", bits=4, group=128, scale_bytes=2).bits_per_weight(2) == 4.125
    assert KVFormatLine("x:Y", element_bits=8, head_bytes=4).bytes_per_token(8, 128, 2) == 2112
    assert KVFormatLine("x:Y", element_bits=4).bytes_per_token(1, 7, 2) == 2 * 4


def test_zero_points_and_blocks_are_counted() -> None:
    asym = WEIGHT_FORMATS["int4-g32-asym"]
    assert asym.bits_per_weight(2) == 4 + 8 * (2 + 1) / 32
    assert WEIGHT_FORMATS["int4-g64"].bits_per_weight(2) == 4.25
    assert WEIGHT_FORMATS["fp8-block"].bits_per_weight(2) == 8 + 8 * 4 / 128**2


def test_the_documentation_lists_every_format() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "weight-formats.md"
    lines = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines()]
    rows = [(cells[1].strip(), cells[2].strip()) for cells in lines if len(cells) == 7]
    told = {name.split("`")[1]: bits for name, bits in rows if name.startswith("`")}
    rounded = {name for name, line in WEIGHT_FORMATS.items() if line.bits is not None}
    assert told.keys() - {"plain"} == rounded
    for name, line in WEIGHT_FORMATS.items():
        if name in rounded:
            assert float(told[name]) == pytest.approx(line.bits_per_weight(2), abs=5e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("name", ["int4-asym", "int4-g64-asym", "int4-g32-asym"])
def test_zero_points_of_models_are_counted(name: str, family: str) -> None:
    """A byte for each group beside what the symmetric format takes."""
    spec = read_spec(config(family))
    group = WEIGHT_FORMATS[name].group
    rest = {spec.tensor_names[role] for role in ("embedding", "lm_head")}
    groups = sum(
        shape[0] * -(-shape[1] // group)
        for tensor, shape in expected_tensors(spec).items()
        if len(shape) == 2 and tensor not in rest and "gate.weight" not in tensor
    )
    more = weight_bytes(spec, 2, name) - weight_bytes(spec, 2, name.removesuffix("-asym"))
    assert more == groups > 0


def test_blocks_span_the_matrices_of_a_layer() -> None:
    """q, k and v are one matrix, gate and up are one: 96 + 2 * 48 rows are two blocks of rows."""
    spec = read_spec(
        config("llama")
        | {
            "hidden_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 48,
            "intermediate_size": 100,
        }
    )
    blocks = 2 + 1 + 2 + 1
    assert layer_scale_bytes(96, spec.layers[0], "fp8-block") == 4 * blocks
