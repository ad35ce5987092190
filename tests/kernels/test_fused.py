"""The fused kernels equal their references; in bfloat16 they err at most twice as much as PyTorch.

Without a GPU they run through Triton's interpreter, in float32 and float16 and small shapes.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.kernels.qk_norm_rope_write import (
    HeadNorms,
    PagedKV,
    plain_views,
    qk_norm_rope_write,
    qk_norm_rope_write_reference,
    rotate_,
)
from ridgeline.kernels.rms_norm import add_norm, rms_norm
from ridgeline.kernels.silu_mul import silu_mul
from tests.kernels.references import add_norm_reference, silu_mul_reference

# A GPU if there is one, else the interpreter, which is chosen when the kernels are decorated.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

EPS = 1e-5
DTYPES = [torch.float32, torch.float16]
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3}  # of the largest number: a rounding or two
# NumPy, which the interpreter computes with, warns where a GPU gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def triton_of(name: str) -> Any:
    return getattr(import_module(f"ridgeline.kernels.{name}_triton"), f"{name}_triton")


def noise(
    *shape: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    scale: float = 1.0,
) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return made.to(device, dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = x.new_full((x.shape[0], x.shape[1] + 5), torch.nan)
    wide[:, 2:-3] = x
    return wide[:, 2:-3]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).abs().max())


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert error(got, want) <= BOUND[got.dtype] * max(1.0, float(want.abs().max()))


def assert_as_good(got: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Twice their error in the worst place, and in the mean."""
    assert error(got, exact) <= 2 * error(theirs, exact)
    assert (got - exact).norm() <= 1.1 * (theirs - exact).norm()


# ---------------------------------------------------------------------- add_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (5, 33), (3, 1), (2, 5120)])
def test_add_norm(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = strided(noise(tokens, size, dtype=dtype)), noise(tokens, size, seed=1).to(dtype)
    weight = noise(size, seed=2, dtype=dtype)
    ours, theirs = strided(residual), residual.clone()
    got = triton_of("add_norm")(x, ours, weight, EPS)
    assert_near(got, add_norm_reference(x, theirs, weight, EPS))
    assert torch.equal(ours, theirs)
    assert_near(add_norm(x, residual, weight, EPS), got)
    assert torch.equal(residual, ours)


def test_add_norm_is_of_the_rounded_sum() -> None:
    x, residual = noise(20, 100, dtype=torch.float16), noise(20, 100, seed=1).half() * 8
    weight = torch.ones_like(x[0])
    got = triton_of("add_norm")(x, residual.clone(), weight, EPS)
    want = add_norm_reference(x, residual, weight, EPS)
    assert (got != want).float().mean() < 0.01  # a tenth, if of the sum before it is rounded


def test_add_norm_of_nothing_and_of_zeros() -> None:
    run, weight = triton_of("add_norm"), noise(8)
    assert run(noise(0, 8), noise(0, 8), weight, EPS).shape == (0, 8)
    zero = torch.zeros_like(noise(2, 8))
    assert torch.equal(run(zero, zero.clone(), weight, EPS), zero)


# ---------------------------------------------------------------------- silu_mul


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (4, 11), (3, 300), (0, 4)])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = strided(noise(tokens, 2 * width, dtype=dtype, scale=4.0))
    want = silu_mul_reference(gate_up)
    if tokens:
        gate_up[0, 0], want[0, 0] = -6e4, 0.0  # exp(-gate) is infinite in float32
        assert_near(triton_of("silu_mul")(gate_up, block=128), want)
        assert_near(silu_mul(gate_up), want.clone()) if dtype == torch.float32 else None
    else:
        assert triton_of("silu_mul")(gate_up).shape == (0, width)


# ---------------------------------------------------------------------- argmax_rows


# ---------------------------------------------------------------------- qk_norm_rope_write


def rotation(positions: int, size: int, device: str = DEVICE) -> torch.Tensor:
    angles = noise(positions, size // 2, seed=9, device=device)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)


def poisoned_cache(
    kv_heads: int, size: int, block_size: int, heads_first: bool, dtype: torch.dtype
) -> PagedKV:
    shape = (6, block_size, 2 * kv_heads * size)
    store = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
    if not heads_first:
        return plain_views(store, kv_heads)
    k, v = store.view(2, 6, kv_heads, block_size, size).transpose(2, 3).unbind(0)
    return PagedKV(k, v)


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size", "heads_first"),
    [(4, 2, 16, 4, False), (3, 1, 10, 1, True), (5, 5, 2, 3, False), (9, 3, 24, 16, True)],
)
def test_qk_norm_rope_write(
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    heads_first: bool,
    with_norms: bool,
    dtype: torch.dtype,
) -> None:
    slots = torch.tensor([5, -1, 0, 2 * block_size, -1], device=DEVICE)
    positions = torch.tensor([7, 0, 3, 11, 2], device=DEVICE)
    qkv = strided(noise(5, (heads + 2 * kv_heads) * size, dtype=dtype))
    before = qkv.clone()
    weights = noise(2, size, seed=4, dtype=dtype)
    norms = HeadNorms(weights[0], weights[1], EPS) if with_norms else None
    table = rotation(12, size)
    want_kv = poisoned_cache(kv_heads, size, block_size, heads_first, dtype)
    want = qk_norm_rope_write_reference(qkv, table, positions, slots, want_kv, norms=norms)
    for block_heads in (2, 16, None):
        kv = poisoned_cache(kv_heads, size, block_size, heads_first, dtype)
        q = (
            qk_norm_rope_write(qkv, table, positions, slots, kv, norms=norms)
            if block_heads is None
            else triton_of("qk_norm_rope_write")(
                qkv, table, positions, slots, kv, norms=norms, block_heads=block_heads
            )
        )
        assert_near(q, want)
        for got, wanted in ((kv.k_NSKD, want_kv.k_NSKD), (kv.v_NSKD, want_kv.v_NSKD)):
            written = ~wanted.isnan()
            assert torch.equal(~got.isnan(), written)  # padding has touched nothing
            assert written.sum() == 3 * kv_heads * size
            assert_near(got[written], wanted[written])
    assert torch.equal(qkv, before)


def test_the_reference_is_what_the_layers_do() -> None:
    heads, kv_heads, size = 4, 2, 8
    qkv, table = noise(3, 8 * size), rotation(6, size)
    positions, slots = torch.tensor([1, 5, 2]), torch.tensor([4, 1, 9])
    positions, slots = positions.to(DEVICE), slots.to(DEVICE)
    weights = noise(2, size, seed=4)
    kv = poisoned_cache(kv_heads, size, 2, False, torch.float32)
    norms = HeadNorms(weights[0], weights[1], EPS)
    q = qk_norm_rope_write_reference(qkv, table, positions, slots, kv, norms=norms)
    split = qkv.clone().view(3, -1, size)
    split[:, :heads] = rms_norm(split[:, :heads], weights[0], EPS)
    split[:, heads:-kv_heads] = rms_norm(split[:, heads:-kv_heads], weights[1], EPS)
    rotate_(split[:, :-kv_heads], table[positions][:, :1], table[positions][:, 1:])
    assert_near(q, split[:, :heads].contiguous())
    assert_near(kv.k_NSKD[slots // 2, slots % 2], split[:, heads:-kv_heads])
    assert_near(kv.v_NSKD[slots // 2, slots % 2], split[:, -kv_heads:])


# ---------------------------------------------------------------------- bfloat16 on a GPU


@pytest.mark.usefixtures("exact_float32")
class TestBfloat16:
    """Large shapes; the exact result is float32 of the same bfloat16 inputs."""

    pytestmark = gpu

    @staticmethod
    def made(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        return noise(*shape, seed=seed, dtype=torch.bfloat16, device="cuda", scale=scale)

    @pytest.mark.parametrize("pdl", [False, True])
    @pytest.mark.parametrize(("tokens", "size"), [(1, 4096), (2048, 5120), (33, 16384)])
    def test_add_norm(self, tokens: int, size: int, pdl: bool) -> None:
        x, residual, weight = (
            self.made(tokens, size),
            self.made(tokens, size, seed=1),
            self.made(size, seed=2),
        )
        total = residual + x
        exact = rms_norm(total.float(), weight.float(), EPS)
        theirs = rms_norm(total, weight, EPS)
        got = add_norm(x, residual, weight, EPS, pdl=pdl)
        assert torch.equal(residual, total)
        assert_as_good(got, theirs, exact)

    @pytest.mark.parametrize(("tokens", "width"), [(1, 12288), (4096, 3072), (7, 14336)])
    def test_silu_mul(self, tokens: int, width: int) -> None:
        gate_up = self.made(tokens, 2 * width, scale=3.0)
        gate, up = gate_up.chunk(2, -1)
        exact = functional.silu(gate.float()) * up.float()
        assert_as_good(silu_mul(gate_up, pdl=True), functional.silu(gate) * up, exact)

    @pytest.mark.parametrize(("tokens", "size"), [(1, 128), (64, 128), (2048, 64), (500, 96)])
    def test_qk_norm_rope_write(self, tokens: int, size: int) -> None:
        heads, kv_heads = 32, 8
        qkv = self.made(tokens, (heads + 2 * kv_heads) * size)
        weights, table = self.made(2, size, seed=4), rotation(4096, size, "cuda")
        numbers = torch.Generator().manual_seed(5)
        positions = torch.randint(4096, (tokens,), generator=numbers).cuda()
        slots = (torch.randperm(4096, generator=numbers)[:tokens]).cuda()
        store = torch.zeros((256, 16, 2 * kv_heads * size), dtype=torch.bfloat16, device="cuda")
        kv, norms = plain_views(store, kv_heads), HeadNorms(weights[0], weights[1], EPS)
        q = qk_norm_rope_write(qkv, table, positions, slots, kv, norms=norms, pdl=True)

        def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            x, turns = rms_norm(x, weight.to(x.dtype), EPS), table[positions]
            rotate_(x, turns[:, :1], turns[:, 1:])
            return x

        split = qkv.view(tokens, -1, size)
        for got, given, weight in (
            (q, split[:, :heads], weights[0]),
            (kv.k_NSKD[slots // 16, slots % 16], split[:, heads:-kv_heads], weights[1]),
        ):
            assert_as_good(got, plain(given, weight), plain(given.float(), weight))
        assert torch.equal(kv.v_NSKD[slots // 16, slots % 16], split[:, -kv_heads:])
        assert int((store != 0).any(-1).sum()) == tokens
