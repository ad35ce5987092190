"""Experts in a fixed number of launches equal their reference, whichever experts have tokens.

Without a GPU the kernels run through Triton's interpreter, in float32 and float16.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ridgeline.architectures.spec import ExpertsSpec
from ridgeline.distributed.placement import Placement
from ridgeline.kernels.grouped_experts import (
    Choice,
    ExpertsCut,
    ExpertTile,
    StackedMatrix,
    choose_cut,
    grouped_experts,
    grouped_experts_reference,
    most_tiles,
)
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.quantize_rows import E4M3
from ridgeline.kernels.rms_norm import rms_norm_reference
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.layers.linear import Linear
from ridgeline.layers.routing import Router
from ridgeline.quantization.integers import GroupRounding, SpanRounding
from ridgeline.quantization.plain import PlainWeights

# A GPU if there is one, else the interpreter, which is chosen when the kernels are decorated.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
ours = pytest.importorskip("ridgeline.kernels.grouped_experts_triton")

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SCALES = ["", "rows", "blocks", "groups", "groups with zeros"]


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
    if scales.startswith("groups"):
        weight = weight * torch.linspace(0.5, 2.0, rows, device=DEVICE)[:, None]
        rounding = (SpanRounding if "zeros" in scales else GroupRounding)(
            4, 32, torch.bfloat16, "zeros" in scales
        )
        each = [rounding.round_rows(one) for one in weight.float()]
        zeros = [one.zero for one in each if one.zero is not None]
        return StackedMatrix(
            torch.stack([one.codes for one in each]),
            torch.stack([one.scale for one in each]),
            bias_XN,
            torch.stack(zeros) if zeros else None,
            32,
        )
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
        (1, 9, 4, 200, 32, 1, False, "relu2"),
        (1, 5, 2, 96, 64, 1, False, "clamped"),
        (3, 5, 2, 96, 64, 16, False, "clamped"),
        (5, 20, 6, 100, 32, 16, False, "gelu"),
        (20, 3, 2, 128, 160, 16, True, "silu"),
        (90, 3, 2, 64, 96, 64, False, "gelu_tanh"),
        (70, 3, 1, 160, 32, 64, True, "silu"),
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
    tma = tma and not scales.startswith("groups")
    size = 16 if block_m == 1 else 32
    tile = ExpertTile(size, 32, tma=tma)
    cut = ExpertsCut(block_m, tile, tile)
    residual = noise(tokens, width, seed=4, dtype=dtype)
    exact = grouped_experts_reference(
        x.float(), weights, chosen, _wide(gate_up), _wide(down), activation
    )
    load = torch.zeros(experts, dtype=torch.int64, device=DEVICE)
    for added in (None, residual):
        got = ours.grouped_experts_triton(
            x, weights, chosen, gate_up, down, activation, cut=cut,
            residual_TE=None if added is None else added.clone(), load_X=load,
        )  # fmt: skip
        wanted = exact if added is None else exact + added.float()
        allowed = 2e-6 if dtype == torch.float32 else 2e-3 if dtype == torch.float16 else 1e-2
        assert (got.shape, got.dtype) == (x.shape, dtype)
        assert (got.float() - wanted).norm() <= allowed * wanted.norm()
    assert load.tolist() == (2 * torch.bincount(chosen.flatten(), minlength=experts)).tolist()


def _wide(matrix: StackedMatrix) -> StackedMatrix:
    every = [matrix.dequantize(expert).float() for expert in range(len(matrix.codes))]
    return StackedMatrix(torch.stack(every), None, matrix.bias_XN)


RULES = [
    {},
    {"renormalize": False, "weight_scale": 2.5},
    {"scoring": "sigmoid", "score_bias": True, "weight_scale": 1.5},
]


@pytest.mark.parametrize("rule", RULES, ids=["softmax", "not to one", "sigmoid"])
@pytest.mark.parametrize(("tokens", "experts", "active"), [(1, 5, 2), (7, 8, 3), (3, 70, 6)])
def test_choices(tokens: int, experts: int, active: int, rule: dict[str, Any]) -> None:
    """In one launch, with the product or after it, as the layer says it in PyTorch."""
    linear = partial(
        Linear,
        weight_format=PlainWeights(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        placement=Placement(),
    )
    spec, shared = ExpertsSpec(experts, active, 32, **rule), active - 1
    router = Router(spec, 96, str, linear, slices=shared)
    weight = router.linear.parameters["weight"].copy_(noise(experts, 96, seed=1))
    choice = Choice(experts, active, rule.get("scoring") == "sigmoid")
    choice = replace(choice, renormalize=rule.get("renormalize", True))
    choice = replace(choice, scale=rule.get("weight_scale", 1.0))
    if router.score_bias is not None:
        router.score_bias.values.copy_(noise(experts, seed=2))
        choice = replace(choice, bias_X=router.score_bias.values.to(DEVICE))
    choice = replace(choice, shared=shared)
    ones = InputNorm(torch.ones(96, device=DEVICE), 0.0)
    x = rms_norm_reference(noise(tokens, 100, seed=3)[:, :96], ones.weight_K, 0.0)
    x = torch.nn.functional.pad(x, (0, 4))[:, :96]
    exact = router.route(x.cpu())
    room = make_workspace(x.device, 512, 8)
    normed = ours.route_triton(3 * x, weight.to(DEVICE), choice, norm=ones, workspace=room)
    torch.testing.assert_close(normed[2], x)
    for weights, chosen, *_ in (
        ours.choose_experts_triton(x @ weight.to(DEVICE).T, choice),
        ours.route_triton(x, weight.to(DEVICE), choice, workspace=room),
        normed,
    ):
        assert chosen.tolist() == exact.experts_TA.tolist()
        torch.testing.assert_close(weights.cpu(), exact.weights_TA, rtol=1e-5, atol=1e-6)
    assert not room.arrivals_A.any()


def test_a_token_of_nan_goes_to_experts_that_there_are() -> None:
    logits = torch.full((2, 5), torch.nan, device=DEVICE)
    _, chosen = ours.choose_experts_triton(logits, Choice(5, 3))
    assert (chosen >= 0).all()
    assert (chosen < 5).all()


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
