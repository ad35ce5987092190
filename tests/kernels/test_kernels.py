"""Every kernel equals its definition; in 16 bits it errs at most twice as much as plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ridgeline.kernels.qk_norm_rope_write import rotate_, rotate_reference
from ridgeline.kernels.rms_norm import rms_norm, rms_norm_reference
from ridgeline.kernels.silu_mul import ACTIVATIONS, gated
from tests.conftest import TEST_DEVICE

SHAPES = [(1, 64), (7, 33), (3, 5, 16), (129, 8)]
HALVES = [torch.bfloat16, torch.float16]


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(TEST_DEVICE)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(shape: tuple[int, ...], scale: float) -> None:
    x, weight = noise(*shape, scale=scale), noise(shape[-1], seed=1)
    exact = exact_norm(x, weight, 1e-5)
    assert error(rms_norm(x, weight, 1e-5), exact) < 1e-5
    assert error(rms_norm_reference(x, weight, 1e-5), exact) < 1e-5


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_in_half(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = noise(*shape).to(dtype), noise(shape[-1], seed=1).to(dtype)
    exact = exact_norm(x, weight, 1e-5)
    theirs = functional.rms_norm(x, weight.shape, weight, 1e-5)
    for ours in (rms_norm, rms_norm_reference):
        assert error(ours(x, weight, 1e-5), exact) <= 2 * error(theirs, exact)


def test_rms_norm_reads_any_strides_and_zero_rows() -> None:
    wide = noise(6, 40)
    x, weight = wide[:, 3:19], noise(16, seed=1)
    assert not x.is_contiguous()
    assert error(rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5)) < 1e-5
    assert torch.equal(rms_norm(torch.zeros_like(x), weight, 1e-5), torch.zeros_like(x))


def tables(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = noise(tokens, 1, dim // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


@pytest.mark.parametrize("dim", [2, 8, 64, 128])
def test_rotation(dim: int) -> None:
    wide = noise(5, 9, dim)
    cos, sin = tables(5, dim)
    x = wide[:, 2:7]  # rows are not contiguous, as in a fused projection
    exact = rotate_reference(x, cos, sin)
    rotate_(x, cos, sin)
    assert error(x, exact.double()) < 1e-6
    assert torch.equal(wide[:, :2], noise(5, 9, dim)[:, :2])
    torch.testing.assert_close(x.norm(dim=-1), noise(5, 9, dim)[:, 2:7].norm(dim=-1))


@pytest.mark.parametrize("dtype", HALVES)
def test_rotation_in_half_rounds_once(dtype: torch.dtype) -> None:
    x = noise(5, 4, 64).to(dtype)
    cos, sin = tables(5, 64)
    exact = rotate_reference(x.double(), cos, sin)
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], x[..., :half]), -1)
    theirs = x * cos.to(dtype) + turned * sin.to(dtype)
    rotate_(x, cos, sin)
    assert error(x, exact) <= 2 * error(theirs, exact)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation: str) -> None:
    gate_up = noise(4, 22)
    gate, up = gate_up[:, :11].double(), gate_up[:, 11:].double()
    exact = {
        "silu": gate * torch.sigmoid(gate),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": functional.gelu(gate, approximate="tanh"),
        "relu": gate.clamp(min=0),
        "relu2": gate.clamp(min=0) ** 2,
    }[activation]
    before = gate_up.clone()
    assert error(gated(gate_up, activation), exact * up) < 1e-6
    assert torch.equal(gate_up, before)
