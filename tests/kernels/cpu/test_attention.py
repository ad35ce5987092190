"""The native attention at every level of instructions, against the definition in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ridgeline.architectures.spec import AttentionSpec, RopeSpec
from ridgeline.attention.native import NativeAttention
from ridgeline.errors import InternalError
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.attention import AttentionBatch, cpu_attention
from ridgeline.kernels.qk_norm_rope_write import plain_views
from tests.attention.cases import Case, Shape, coded, make_case, naive, random_shape

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
BEST = native.LEVELS.index(native.best_level())
LEVELS = [
    level for level in ("avx2", "avx512", "bf16", "amx") if native.LEVELS.index(level) <= BEST
]


def attend(case: Case) -> torch.Tensor:
    spec, backend = case.shape.spec, NativeAttention()
    plan = backend.plan(case.layout, 0, spec.window)
    return backend.attend(case.q_THD, case.layer_kv, plan, spec)


def spec_of(heads: int, kv_heads: int, size: int, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, size, RopeSpec(), window=window)


@pytest.mark.parametrize("level", LEVELS)
def test_ragged_cases_in_float32(level: str) -> None:
    with native.at_level(level):
        for seed in range(60):
            case = make_case(random_shape(random.Random(seed)), seed, device="cpu")
            error = (attend(case).double() - naive(case)).abs().max().item()
            assert error < 1e-5, f"seed {seed}: {error} {case.shape}"


@pytest.mark.parametrize("level", LEVELS)
def test_bfloat16_is_as_near_as_torch(level: str) -> None:
    with native.at_level(level):
        for seed in range(40):
            shape = random_shape(random.Random(500 + seed))
            case = make_case(shape, seed, torch.bfloat16, device="cpu")
            exact = naive(case)
            ours = (attend(case).double() - exact).abs().max().item()
            theirs = (naive(case, torch.bfloat16).double() - exact).abs().max().item()
            floor = torch.finfo(torch.bfloat16).eps * exact.abs().max().item() / 2
            assert ours <= max(2 * theirs, floor), f"seed {seed}: {ours} vs {theirs} {shape}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_sinks(level: str, dtype: torch.dtype) -> None:
    spec, backend = spec_of(6, 2, 32, window=90), NativeAttention()
    case = make_case(Shape(((130, 1), (0, 70), (5, 3)), spec, 16), 4, dtype, device="cpu")
    sinks_H = torch.linspace(-3, 4, 6)
    plan = backend.plan(case.layout, 0, spec.window)
    with native.at_level(level):
        got = backend.attend_with_sinks(case.q_THD, sinks_H, case.layer_kv, plan, spec)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), naive(case, sinks_H=sinks_H), atol=limit, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_soft_caps(level: str, dtype: torch.dtype) -> None:
    spec = replace(spec_of(6, 2, 32, window=90), scores_cap=2.0, scale=1.0)
    case = make_case(Shape(((130, 1), (0, 70), (5, 3)), spec, 16), 4, dtype, device="cpu")
    with native.at_level(level):
        got = attend(case)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), naive(case), atol=limit, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_query_heads_of_a_kv_head(level: str, group: int) -> None:
    spec = spec_of(2 * group, 2, 48)
    case = make_case(Shape(((130, 1), (0, 70), (5, 3)), spec, 16), group, device="cpu")
    with native.at_level(level):
        torch.testing.assert_close(attend(case).double(), naive(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 2, 7, 17, 33, 47, 96, 129, 256])
def test_any_head_size(level: str, size: int) -> None:
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        shape = Shape(((66, 1), (30, 40)), spec_of(4, 2, size, window=50), 8)
        case = make_case(shape, size, dtype, device="cpu")
        with native.at_level(level):
            error = (attend(case).double() - naive(case)).abs().max().item()
        assert error < limit, f"{dtype}: {error}"


def one_of(batch: AttentionBatch, request: int, token: int) -> AttentionBatch:
    """Packed token `token` of a request, as if it were the newest and alone in its step."""
    behind = int(batch.query_start_B1[request + 1]) - 1 - token
    lens = torch.tensor([int(batch.seq_lens_B[request]) - behind], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    return replace(batch, seq_lens_B=lens, query_start_B1=starts, rows_B=torch.tensor([request]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["plain", "int8", "int4", "fp8"])
def test_few_tokens_have_the_bits_that_each_has_alone(name: str, threads: int, level: str) -> None:
    """In any company, with and without parts and windows, for any group of heads."""
    backend, before = NativeAttention(), torch.get_num_threads()
    for seed in range(12):
        rng = random.Random(seed)
        kv_heads, group = rng.randint(1, 3), rng.randint(1, 7)
        size, window = rng.choice([16, 64, 128]), rng.choice([None, 40])
        spec = spec_of(group * kv_heads, kv_heads, size, window)
        cached = (0, 3, 31, 32, 127, 250, 300, 2600)
        requests = tuple((rng.choice(cached), rng.randint(1, 9)) for _ in range(rng.randint(1, 3)))
        dtype = rng.choice([torch.bfloat16, torch.float32])
        case = make_case(Shape(requests, spec, 16), seed, dtype, device="cpu")
        case = case if name == "plain" else coded(case, name)
        plan = backend.plan(case.layout, 0, spec.window)
        native.set_threads(threads)
        try:
            with native.at_level(level):
                found = backend.attend(case.q_THD, case.layer_kv, plan, spec)
                for b, (begin, end) in enumerate(pairwise(plan.query_start_B1.tolist())):
                    for t in range(begin, end):
                        q_THD, one = case.q_THD[t : t + 1], one_of(plan, b, t)
                        alone = backend.attend(q_THD, case.layer_kv, one, spec)
                        assert torch.equal(found[t], alone[0]), (seed, b, t, requests, spec)
        finally:
            native.set_threads(before)


def test_parts_of_a_long_request_are_merged() -> None:
    """Enough keys for several parts, so that each thread has some, with and without a window."""
    for window in (None, 700):
        shape = Shape(((2000, 1), (3, 1), (900, 1)), spec_of(4, 2, 32, window), 16)
        case = make_case(shape, 3, device="cpu")
        torch.testing.assert_close(attend(case).double(), naive(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_fewer_bits(name: str, level: str, dtype: torch.dtype) -> None:
    """As exact as with the numbers that the codes stand for, but for queries of 16 bits."""
    with native.at_level(level):
        for seed in range(40):
            rng = random.Random(900 + seed)
            shape = random_shape(rng)
            if name == "int4":
                size = rng.choice([16, 32, 64, 128])
                shape = replace(shape, spec=replace(shape.spec, head_dim=size))
            case = coded(make_case(shape, seed, dtype, device="cpu"), name)
            exact = naive(case)
            ours = (attend(case).double() - exact).abs().max().item()
            limit = 5e-4
            if dtype == torch.bfloat16:
                theirs = (naive(case, dtype).double() - exact).abs().max().item()
                # Weights times scales have 8 bits as well, in prompts.
                ulp = torch.finfo(dtype).eps * exact.abs().max().item()
                limit = max(2 * theirs, ulp if name == "int4" else ulp / 2)
            assert ours <= limit, f"seed {seed}: {ours} of {limit} {shape}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 7, 48, 63, 65, 129, 256, 1024])
def test_codes_with_any_head_size_and_group(level: str, size: int) -> None:
    for group in (1, 2, 3, 7):
        shape = Shape(((66, 1), (30, 20)), spec_of(2 * group, 2, size), 8)
        case = coded(make_case(shape, size, device="cpu"))
        with native.at_level(level):
            torch.testing.assert_close(attend(case).double(), naive(case), atol=1e-4, rtol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [16, 32, 64, 256, 1024])
def test_four_bits_with_any_group(level: str, size: int) -> None:
    for group in (1, 2, 3, 7):
        shape = Shape(((66, 1), (30, 20)), spec_of(2 * group, 2, size, window=50), 8)
        case = coded(make_case(shape, size, device="cpu"), "int4")
        with native.at_level(level):
            torch.testing.assert_close(attend(case).double(), naive(case), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_parts_of_codes_are_merged(name: str) -> None:
    shape = Shape(((2000, 1), (3, 1), (900, 1)), spec_of(4, 2, 32), 16)
    case = coded(make_case(shape, 3, device="cpu"), name)
    torch.testing.assert_close(attend(case).double(), naive(case), atol=1e-4, rtol=0)


def test_codes_do_not_hide_what_is_not_finite() -> None:
    shape = Shape(((60, 1), (60, 1), (30, 2)), spec_of(4, 2, 64), 16)
    for wrong in (torch.nan, torch.inf):
        case = coded(make_case(shape, 5, device="cpu"))
        case.q_THD[0, 1, 5] = wrong
        broken = attend(case).isnan().all(-1)
        assert broken.tolist() == [[False, True, False, False], *[[False] * 4] * 3]


def test_large_scores_do_not_overflow() -> None:
    case = make_case(Shape(((300, 1), (10, 90)), spec_of(4, 2, 64), 16), 8, device="cpu")
    case.q_THD.mul_(300.0)
    torch.testing.assert_close(attend(case).double(), naive(case), atol=1e-4, rtol=0)


def test_what_is_not_served_is_refused() -> None:
    kv = plain_views(torch.zeros(2, 4, 2 * 2 * 8), 2)
    lens, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    batch = AttentionBatch(torch.ones(1, 1, dtype=torch.int32), lens, starts)
    q_THD = torch.zeros(1, 4, 8)
    assert cpu_attention(q_THD, kv, batch, 1.0).shape == q_THD.shape
    codes = plain_views(torch.zeros(2, 4, 2 * 2 * 8, dtype=torch.int8), 2)
    scales = torch.zeros(2, 4, 2)
    for store in (
        codes,
        replace(codes, k_scales_NSK=scales, v_scales_NSK=scales),
        replace(kv, k_scales_NSK=scales.half(), v_scales_NSK=scales.half()),
        replace(codes, k_scales_NSK=scales.half(), v_scales_NSK=scales.half()[:, :3]),
    ):
        with pytest.raises(InternalError):
            cpu_attention(q_THD, store, batch, 1.0)
    for wrong in (q_THD.double(), q_THD[:, :3], torch.zeros(1, 4, 16)):
        with pytest.raises(InternalError):
            cpu_attention(wrong, kv, batch, 1.0)
