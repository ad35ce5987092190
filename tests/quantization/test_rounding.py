"""Rounding to a few bits: within half a scale, symmetric, and safe with zeros and ragged groups."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.quantization.rounding import dequantize_groups, largest_integer, quantize_groups


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("inputs", "group"), [(128, 32), (100, 32), (7, 128), (32, 1)])
def test_numbers_are_off_by_half_a_scale_at_most(bits: int, inputs: int, group: int) -> None:
    weight = noise(5, inputs)
    integers, scales = quantize_groups(weight, bits=bits, group=group)
    assert integers.shape == weight.shape
    assert scales.shape == (5, -(-inputs // group))
    assert int(integers.abs().max()) == largest_integer(bits)  # the largest of a group is exact
    back = dequantize_groups(integers, scales, group=group)
    each = scales.repeat_interleave(group, dim=1)[:, :inputs]
    assert bool(((back - weight).abs() <= 0.5001 * each).all())


def test_groups_do_not_share_scales() -> None:
    weight = torch.tensor([[0.01, -0.02, 0.03, 100.0, -50.0, 25.0]])
    integers, scales = quantize_groups(weight, bits=8, group=3)
    assert scales[0].tolist() == pytest.approx([0.03 / 127, 100 / 127])
    assert integers[0, :3].tolist() == [42, -85, 127]


def test_a_sign_changes_nothing_else() -> None:
    weight = noise(3, 64)
    plus, scales = quantize_groups(weight, bits=4, group=16)
    minus, same = quantize_groups(-weight, bits=4, group=16)
    assert torch.equal(plus, -minus)
    assert torch.equal(scales, same)


def test_zeros_beside_numbers() -> None:
    weight = torch.tensor([[0.0, 0.0, 1.2, -2.0]])
    integers, scales = quantize_groups(weight, bits=4, group=2)
    assert integers.tolist() == [[0, 0, 4, -7]]
    assert torch.equal(dequantize_groups(integers, scales, group=2)[:, :2], weight[:, :2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_rounded_in_float32(dtype: torch.dtype) -> None:
    weight = noise(4, 64).to(dtype)
    integers, scales = quantize_groups(weight, bits=4, group=32)
    exact, exact_scales = quantize_groups(weight.float(), bits=4, group=32)
    assert torch.equal(integers, exact)
    assert torch.equal(scales, exact_scales)
    assert scales.dtype == torch.float32


@pytest.mark.parametrize("bits", [1, 9])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(InternalError, match="2 to 8 bits"):
        quantize_groups(noise(1, 4), bits=bits, group=4)


def test_golden_numbers() -> None:
    weight = torch.tensor([[0.12, -0.83, 0.45, -0.21]])
    integers, scales = quantize_groups(weight, bits=4, group=4)
    assert integers.tolist() == [[1, -7, 4, -2]]
    assert float(scales) == pytest.approx(0.118571, abs=1e-6)
    off = (dequantize_groups(integers, scales, group=4) - weight).abs()
    assert float(off.max()) == pytest.approx(0.0271, abs=1e-4)
