"""The canonical form of integer matrices: what numbers mean, and that it says so where they cannot
be what they are called."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.quantized_matrix import (
    QuantizedMatrix,
    join_bytes,
    outline,
    read_sizes,
    sizes_of,
    split_bytes,
)


def test_what_codes_mean() -> None:
    codes = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)  # 1, 2, 0, 15
    scale = torch.tensor([[2.0, 0.5]])
    matrix = QuantizedMatrix(codes, scale, None, 4, 4, 2)
    assert matrix.dequantize().tolist() == [[-14.0, -12.0, -4.0, 3.5]]
    zero = torch.tensor([[1, 15]], dtype=torch.uint8)
    moved = QuantizedMatrix(codes, scale, zero, 4, 4, 2)
    assert moved.dequantize().tolist() == [[0.0, 2.0, -7.5, 0.0]]
    bytes_ = QuantizedMatrix(codes, scale[:, :1], None, 2, 8, 0)
    assert bytes_.dequantize().tolist() == [[2.0 * (0x21 - 128), 2.0 * (0xF0 - 128)]]


@pytest.mark.parametrize("inputs", [1, 6, 7])
def test_two_codes_in_a_byte(inputs: int) -> None:
    codes = torch.arange(3 * inputs, dtype=torch.uint8).view(3, inputs) % 16
    both = join_bytes(codes, 4)
    assert both.shape == (3, -(-inputs // 2))
    assert torch.equal(split_bytes(both, 4, inputs), codes)


def test_rows_and_parts() -> None:
    noise = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (5, 8), generator=noise, dtype=torch.uint8)
    zero = torch.randint(0, 16, (5, 2), generator=noise, dtype=torch.uint8)
    matrix = QuantizedMatrix(codes, torch.rand(5, 2, generator=noise), zero, 16, 4, 8)
    whole = matrix.dequantize()
    assert torch.equal(matrix.part(1, 4).dequantize(), whole[1:4])
    named = torch.tensor([4, 0, 4])
    assert torch.equal(matrix.rows(named).dequantize(), whole[named])
    assert matrix.nbytes == 40 + 5 * 2 * 4 + 5 * 2


def test_an_outline_takes_no_memory() -> None:
    like = outline(
        1 << 20,
        1 << 20,
        bits=4,
        group=128,
        scale_dtype=torch.float16,
        has_zero=True,
        device=torch.device("cpu"),
    )
    assert like.codes.untyped_storage().nbytes() == 1
    assert (like.outputs, like.inputs, like.groups) == (1 << 20, 1 << 20, 1 << 13)
    assert like.zero is not None
    assert read_sizes({"shape": sizes_of(like)}) == (1 << 20, 1 << 20, 4, 128)
    assert sizes_of(like).nbytes == 0


def test_what_does_not_belong_together_is_refused() -> None:
    codes, scale = torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 2)
    for bits, group, message in ((5, 8, "4 or 8 bits"), (8, -1, "negative"), (8, 2, "scales of")):
        with pytest.raises(InternalError, match=message):
            QuantizedMatrix(codes, scale, None, 8, bits, group)
    with pytest.raises(InternalError, match="codes are bytes"):
        QuantizedMatrix(codes, scale, None, 8, 4, 4)
    with pytest.raises(InternalError, match="scales of groups"):
        QuantizedMatrix(codes, scale.double(), None, 8, 8, 4)
    with pytest.raises(InternalError, match="zero points are bytes"):
        QuantizedMatrix(codes, scale, torch.zeros(2, 1, dtype=torch.uint8), 8, 8, 4)
