"""Decodes with several new tokens, drafts among them: each is answered as the definition says, and
drafts without a block reach nobody before them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from ridgeline.architectures.spec import AttentionSpec, RopeSpec
from ridgeline.attention.layout import DecodeLayout
from ridgeline.attention.native import NativeAttention
from ridgeline.attention.paged import PagedAttention
from ridgeline.kernels import nvrtc
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.recorder import Arena, Replay, record
from ridgeline.kernels.paged_decode_cuda import unsupported
from ridgeline.kernels.paged_kv import plain_views
from tests.attention.cases import Case, Shape, coded, make_case, naive
from tests.conftest import TEST_DEVICE

LEVELS = native.LEVELS[1 : native.LEVELS.index(native.best_level()) + 1]
HAS_NATIVE = native.library() is not None and TEST_DEVICE == "cpu"
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no native CPU kernels here")
CACHED = (0, 1, 3, 15, 30, 66, 130)


@dataclass(frozen=True)
class Drafted:
    """A case in which request b has blocks for 1 + limits[b] of its new tokens."""

    case: Case
    layout: DecodeLayout
    limits: list[int]

    def wanted(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return naive(self.case, dtype)

    def checked(self) -> torch.Tensor:
        """Which tokens have a block, [T]."""
        places = torch.arange(self.layout.num_new)
        return torch.cat([places <= limit for limit in self.limits])


def shape_of(rng: random.Random, num_new: int, **spec: int | None) -> Shape:
    group = rng.randint(1, 8)
    heads = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": 32, "rope": RopeSpec()}
    lengths = tuple((rng.choice(CACHED), num_new) for _ in range(rng.randint(1, 5)))
    return Shape(lengths, AttentionSpec(**heads | spec), rng.choice((4, 16)))  # type: ignore[arg-type]


def drafted(case: Case, rng: random.Random) -> Drafted:
    """Without blocks for some of the last tokens, whose places in the table lead to the null block,
    or are past its end; with a request of padding, and the rows in another order."""
    size, num_new = case.shape.block_size, case.shape.lengths[0][1]
    limits = [rng.randint(0, num_new - 1) for _ in case.shape.lengths]
    layout = case.layout
    tables, slots_T = layout.block_tables_BM[0].clone(), layout.slots_T[0].clone()
    for row, (cached, _) in enumerate(case.shape.lengths):
        known, start = cached + 1 + limits[row], layout.query_start[row]
        for tensor in case.layer_kv.store:
            flat = tensor.flatten(0, 1)
            lost = slots_T[start + 1 + limits[row] : start + num_new]
            flat[lost] = 0x7F if flat.dtype in (torch.int8, torch.uint8) else torch.nan
        tables[row, -(-known // size) :] = 0
    tables = tables[:, : 1 + int(tables.nonzero()[:, 1].max())]
    num = len(limits)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(rng.randint(0, 99))) + 1
    named = torch.zeros(num + 2, tables.shape[1], dtype=torch.int32, device=tables.device)
    named[order] = tables
    new = DecodeLayout(
        torch.cat((order, torch.zeros(1, dtype=torch.int64))).to(tables.device),
        (named,),
        torch.tensor([*layout.seq_lens, 2], dtype=torch.int32, device=tables.device),
        torch.arange(num + 2, dtype=torch.int32, device=tables.device) * num_new,
        (slots_T,),
        size,
        num_new,
    )
    wide = torch.cat((case.q_THD, torch.randn_like(case.q_THD[:num_new])))
    return Drafted(replace(case, q_THD=wide), new, limits)


def answer(backend: NativeAttention | PagedAttention, of: Drafted) -> torch.Tensor:
    spec = of.case.shape.spec
    plan = backend.plan_decodes(of.layout, 0, spec.window)
    out = backend.attend(of.case.q_THD, of.case.layer_kv, plan, spec).cpu()  # type: ignore[arg-type]
    return out[: len(of.limits) * of.layout.num_new]


def off_by(out: torch.Tensor, of: Drafted, want: torch.Tensor) -> float:
    there = of.checked()
    return float((out.double()[there] - want.double()[there]).abs().max())


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_new", range(2, 10))
def test_native_in_float32(level: str, num_new: int) -> None:
    with native.at_level(level):
        for seed in range(8):
            rng = random.Random(100 * num_new + seed)
            shape = shape_of(rng, num_new, window=rng.choice((None, None, 1, 5, 40)))
            of = drafted(make_case(shape, seed, device="cpu"), rng)
            error = off_by(answer(NativeAttention(), of), of, of.wanted())
            assert error < 1e-5, f"seed {seed}: {error} {shape} {of.limits}"


@needs_native
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["auto", "fp8", "int8", "int4"])
def test_native_in_bfloat16_and_fewer_bits(level: str, name: str) -> None:
    with native.at_level(level):
        for seed in range(12):
            rng = random.Random(seed)
            shape = shape_of(rng, rng.randint(2, 9), window=rng.choice((None, 20)))
            case = make_case(shape, seed, torch.bfloat16, device="cpu")
            case = case if name == "auto" else coded(case, name)
            of = drafted(case, rng)
            exact = of.wanted()
            theirs = off_by(of.wanted(torch.bfloat16), of, exact)
            limit = max(2 * theirs, torch.finfo(torch.bfloat16).eps * float(exact.abs().max()))
            error = off_by(answer(NativeAttention(), of), of, exact)
            assert error <= limit, f"seed {seed}: {error} of {limit} {shape} {of.limits}"


@needs_native
@pytest.mark.parametrize("name", ["auto", "fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whoever_sees_what_is_no_number_says_so(name: str, dtype: torch.dtype) -> None:
    shape = Shape(((40, 5), (3, 5)), AttentionSpec(4, 2, 32, RopeSpec()), 16)
    case = make_case(shape, 4, dtype, device="cpu")
    case = case if name == "auto" else coded(case, name)
    for level in LEVELS:
        with native.at_level(level):
            of = drafted(case, random.Random(11))
            broken = answer(NativeAttention(), of).isnan().flatten(1)
        assert any(limit < 4 for limit in of.limits), of.limits
        assert torch.equal(broken.all(1), ~of.checked())
        assert torch.equal(broken.any(1), ~of.checked())


@needs_native
def test_a_recorded_step_serves_other_lengths() -> None:
    spec = AttentionSpec(4, 2, 32, RopeSpec())
    rng, backend = random.Random(5), NativeAttention()
    first, other = (
        drafted(make_case(Shape(lengths, spec, 16), 3, device="cpu"), rng)
        for lengths in (((90, 3), (5, 3)), ((9, 3), (70, 3)))
    )
    plan = backend.plan_decodes(first.layout, 0, None)
    q_THD, layer_kv = first.case.q_THD.clone(), first.case.layer_kv
    answers: list[torch.Tensor] = []
    replay = Replay(
        record(lambda: answers.append(backend.attend(q_THD, layer_kv, plan, spec)), Arena())
    )
    mine, its = first.layout, other.layout
    q_THD.copy_(other.case.q_THD)
    mine.rows_B.copy_(its.rows_B)
    mine.seq_lens_B.copy_(its.seq_lens_B)
    mine.tables_NM[0].zero_()[:, : its.tables_NM[0].shape[1]].copy_(its.tables_NM[0])
    cache = other.case.layer_kv.store[0]
    layer_kv.store[0][: len(cache)].copy_(cache)
    replay()
    error = off_by(answers[-1][: len(other.checked())], other, other.wanted())
    assert error < 1e-5, error


@pytest.mark.parametrize("num_new", [2, 5, 9])
def test_paged(num_new: int) -> None:
    """By the definition on a CPU, by the Triton kernel on a GPU."""
    for seed in range(6):
        rng = random.Random(7 * num_new + seed)
        shape = shape_of(rng, num_new, head_dim=64, window=rng.choice((None, 5, 40)))
        of = drafted(make_case(shape, seed), rng)
        error = off_by(answer(PagedAttention(), of), of, of.wanted())
        assert error < 1e-5, f"seed {seed}: {error} {shape} {of.limits}"


def test_a_plan_has_as_many_new_tokens_as_the_layout() -> None:
    spec = AttentionSpec(4, 2, 64, RopeSpec())
    for num_new in (1, 2):
        of = drafted(make_case(Shape(((20, num_new),), spec, 16), 1), random.Random(1))
        plan = PagedAttention().plan_decodes(of.layout, 0, None)
        assert plan.decodes is not None
        assert plan.decodes.max_new == num_new


@pytest.mark.parametrize(
    ("heads", "num_new", "num_requests", "reason"),
    [
        (16, 8, 16, None),
        (8, 2, 32, None),
        (8, 32, 1, None),
        (8, 33, 1, "33 new tokens of 1 heads: 32 queries"),
        (64, 5, 1, "5 new tokens of 8 heads: 32 queries"),
        (32, 5, 33, "several new tokens of 264 KV heads: 256"),
    ],
)
def test_which_steps_one_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, heads: int, num_new: int, num_requests: int, reason: str | None
) -> None:
    """That kernel needs a GPU; what it says of numbers does not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "available", lambda: True)
    cache = torch.zeros(2, 16, 2 * 8 * 64, dtype=torch.bfloat16)
    found = unsupported(
        torch.device("cuda"),
        torch.bfloat16,
        plain_views(cache, 8),
        num_heads=heads,
        num_new=num_new,
        num_requests=num_requests,
    )
    assert found == reason
