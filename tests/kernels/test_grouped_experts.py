"""Experts in a fixed number of launches equal their reference, whichever experts have tokens.

Without a GPU the kernels run through Triton's interpreter, in float32 and float16.
"""

from __future__ import annotations

import os

import pytest
import torch

from ridgeline.kernels.grouped_experts import (
    ExpertsCut,
    ExpertTile,
    StackedMatrix,
    choose_cut,
    grouped_experts,
    grouped_experts_reference,
    most_tiles,
)
from ridgeline.kernels.quantize_rows import E4M3

# A GPU if there is one, else the interpreter, which is chosen when the kernels are decorated.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
ours = pytest.importorskip("ridgeline.kernels.grouped_experts_triton")

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SCALES = ["", "rows", "blocks"]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def stacked(
    experts: int, rows: int, columns: int, dtype: torch.dtype, seed: int, scales: str, bias: bool
) -> StackedMatrix:
    """Of size one over the root of its columns; scales of neighbours differ."""
    weight = noise(experts, rows, columns, seed=seed) / columns**0.5
    bias_XN = noise(experts, rows, seed=seed + 9, dtype=dtype) if bias else None
    if not scales:
        return StackedMatrix(weight.to(dtype), None, bias_XN)
    shape = (experts, -(-rows // 128), -(-columns // 128)) if scales == "blocks" else None
    scale = 0.01 * (1 + noise(*(shape or (experts, rows)), seed=seed + 5).abs())
    kind = E4M3 if scales == "blocks" else torch.int8
    return StackedMatrix((weight * 60).clamp(-127, 127).to(kind), scale, bias_XN)


def routing(
    tokens: int, experts: int, active: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some experts are everybody's favourites, and some have nobody."""
    scores = noise(tokens, experts, seed=7) + 3 * noise(experts, seed=8)
    weights, chosen = scores.softmax(-1).topk(active)
    return weights.to(dtype), chosen


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(
    ("tokens", "experts", "active", "width", "inner", "block_m", "tma", "activation"),
    [
        (1, 5, 2, 96, 64, 1, False, "silu"),
        (1, 9, 4, 200, 32, 1, False, "relu"),
        (3, 5, 2, 96, 64, 16, False, "silu"),
        (9, 70, 6, 100, 32, 16, False, "gelu"),
        (33, 4, 2, 128, 160, 16, True, "silu"),
        (90, 3, 2, 64, 96, 64, False, "gelu_tanh"),
        (70, 2, 1, 160, 32, 64, True, "silu"),
    ],
)
def test_experts(
    tokens: int,
    experts: int,
    active: int,
    width: int,
    inner: int,
    block_m: int,
    tma: bool,
    activation: str,
    scales: str,
    dtype: torch.dtype,
) -> None:
    bias = active == 2
    gate_up = stacked(experts, 2 * inner, width, dtype, 1, scales, bias)
    down = stacked(experts, width, inner, dtype, 2, scales, bias)
    weights, chosen = routing(tokens, experts, active, dtype)
    x = noise(tokens, width + 8, seed=3, dtype=dtype)[:, :width]  # with gaps between rows
    size = 16 if block_m == 1 else 32
    cut = ExpertsCut(block_m, ExpertTile(size, 32, tma=tma), ExpertTile(size, 32, tma=tma))
    residual = noise(tokens, width, seed=4, dtype=dtype)
    exact = grouped_experts_reference(
        x.float(), weights, chosen, _wide(gate_up), _wide(down), activation
    )
    for added in (None, residual):
        got = ours.grouped_experts_triton(
            x, weights, chosen, gate_up, down, activation, cut=cut,
            residual_TE=None if added is None else added.clone(),
        )  # fmt: skip
        wanted = exact if added is None else exact + added.float()
        allowed = 2e-6 if dtype == torch.float32 else 2e-3 if dtype == torch.float16 else 1e-2
        assert (got.shape, got.dtype) == (x.shape, dtype)
        assert (got.float() - wanted).norm() <= allowed * wanted.norm()


def _wide(matrix: StackedMatrix) -> StackedMatrix:
    every = [matrix.dequantize(expert).float() for expert in range(len(matrix.codes_XNK))]
    return StackedMatrix(torch.stack(every), None, matrix.bias_XN)


@pytest.mark.parametrize(("tokens", "experts", "active"), [(2, 3, 1), (40, 7, 3), (700, 129, 5)])
def test_each_pair_is_in_one_tile_of_its_expert(tokens: int, experts: int, active: int) -> None:
    _, chosen = routing(tokens, experts, active, torch.float32)
    order = ours.sort_pairs(chosen, experts, 16)
    assert order.num_tiles == most_tiles(tokens * active, experts, 16)
    flat, seen = chosen.flatten().tolist(), []
    for expert, begin, end in order.tiles.T.tolist():
        if expert >= 0:
            assert 0 < end - begin <= 16
            assert all(flat[pair] == expert for pair in order.pairs_P[begin:end].tolist())
            seen += order.pairs_P[begin:end].tolist()
    wanted = sorted(range(tokens * active), key=lambda pair: (flat[pair], pair))
    assert seen == wanted


@pytest.mark.parametrize("tokens", [1, 8, 32, 128, 256, 512, 4096])
def test_a_cut_fits_what_an_expert_has(tokens: int) -> None:
    gate_up = StackedMatrix(torch.empty(8, 256, 128, device="meta"))
    down = StackedMatrix(torch.empty(8, 128, 128, device="meta"))
    cut = choose_cut(tokens, 2, gate_up, down)
    assert cut.block_m == 1 if tokens == 1 else cut.block_m >= min(128, tokens * 2 // 8, 16)


def test_without_a_gpu_the_reference_answers() -> None:
    gate_up = stacked(3, 64, 48, torch.float32, 1, "", False)
    down = stacked(3, 48, 32, torch.float32, 2, "", False)
    weights, chosen = routing(4, 3, 2, torch.float32)
    x, residual = noise(4, 48, seed=3), noise(4, 48, seed=4)
    exact = grouped_experts_reference(x, weights, chosen, gate_up, down) + residual
    got = grouped_experts(x, weights, chosen, gate_up, down, residual_TE=residual)
    assert got is residual
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)
