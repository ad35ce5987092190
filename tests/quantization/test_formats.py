"""Every weight format keeps its contract: linear(x) is x @ dequantize().T + bias."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS, KVFormatLine, WeightFormatLine, served
from ridgeline.quantization import open_weight_format

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ["auto", *served(WEIGHT_FORMATS)])
def test_linear_is_a_product_with_the_dequantized_weights(name: str, has_bias: bool) -> None:
    weights = open_weight_format(name)
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


def test_lines_count_scales() -> None:
    assert WeightFormatLine("x:Y", bits=4, group=128, scale_bytes=2).bits_per_weight(2) == 4.125
    assert KVFormatLine("x:Y", element_bits=8, head_bytes=4).bytes_per_token(8, 128, 2) == 2112
    assert KVFormatLine("x:Y", element_bits=4).bytes_per_token(1, 7, 2) == 2 * 4
