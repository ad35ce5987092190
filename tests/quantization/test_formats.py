"""Every weight format keeps its contract: linear(x) is x @ dequantize().T + bias."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS, KVFormatLine, WeightFormatLine, served
from ridgeline.layers.linear import GatesInput
from ridgeline.quantization import Fusion, open_weight_format

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
    assert not (isinstance(weights, GatesInput) and weights.gates_input(x, kept))


def test_a_format_may_have_no_deterministic_product(monkeypatch: pytest.MonkeyPatch) -> None:
    class Coarse:
        name, bits = "plain", 3

    monkeypatch.setattr("ridgeline.quantization.load", lambda *_: Coarse)
    assert isinstance(open_weight_format("plain"), Coarse)
    with pytest.raises(ConfigError, match="no product that is the same in any company; choose"):
        open_weight_format("plain", deterministic=True)


def test_lines_count_scales() -> None:
    assert WeightFormatLine("x:Y", bits=4, group=128, scale_bytes=2).bits_per_weight(2) == 4.125
    assert KVFormatLine("x:Y", element_bits=8, head_bytes=4).bytes_per_token(8, 128, 2) == 2112
    assert KVFormatLine("x:Y", element_bits=4).bytes_per_token(1, 7, 2) == 2 * 4
