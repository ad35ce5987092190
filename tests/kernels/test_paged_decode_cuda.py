"""The CUDA decode kernel, compiled for the CPU and run lane by lane, equals its definition.

What differs from a GPU is in cuda_on_cpu.h: the instructions, of which each has one line of C++.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.paged_decode_cuda import Config, choose_config, refresh, unsupported
from tests.kernels.decode_case import NORM_ERROR, DecodeCase, Shape, check_case
from tests.kernels.emulation import Compiled, Launch, on_cpu

pytest.importorskip("triton")
pytestmark = on_cpu

CPU = torch.device("cpu")
LENGTHS = [1, 2, 0, 15, 16, 17, 48, 100]


def run_programs(library: ctypes.CDLL, launch: Launch) -> None:
    """In an order of their own."""
    num_programs, groups, _ = launch.grid
    order = list(range(num_programs))
    random.Random(num_programs).shuffle(order)
    programs = (ctypes.c_int * num_programs)(*order)
    library.launch(launch.arguments, programs, num_programs, groups, launch.warps)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("kernels"), "paged_decode_on_cpu.cpp", run_programs)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch, compiled: Compiled) -> None:
    compiled.stand_in(monkeypatch)


RANGES = Config(2, 1, 2)  # of many requests: a warp for each KV head
SPLIT = Config(2, 1, 1, split=True, warps=4)
WHOLE = Config(1, 2, 8, split=True, whole_steps=33)

PIECES = Config(1, 2, 2, split=True, whole_steps=3, uneven=4)  # few are short enough to be whole

SPLIT8 = Config(2, 1, 1, split=True)

run = partial(check_case, device=CPU)


@pytest.mark.every_value
@pytest.mark.parametrize("num_programs", [1, 5, 12, 40])
@pytest.mark.parametrize(
    "config", [RANGES, SPLIT, WHOLE, PIECES], ids=["ranges", "split", "whole", "pieces"]
)
def test_ranges_of_steps(config: Config, num_programs: int) -> None:
    run(LENGTHS, Shape(head_dim=128), config=config, num_programs=num_programs)


@pytest.mark.parametrize("new", [1, 3])
def test_each_request_has_programs_of_its_own(new: int) -> None:
    """Its pieces, all but the last of them as long, follow one another, and are merged."""
    lengths, pieces = [700, 20, 0, 1300, 560, 33], []
    case = DecodeCase(lengths, Shape(kv_heads=1, group=3, new=new), CPU)
    schedule = case.schedule(replace(PIECES, uneven=16), num_programs=20)
    out, store = case.run(schedule)
    case.agree(schedule, out, store)
    for request, _, tile, count, size, *_ in schedule.records.tolist():
        if count:
            pieces.append((request, tile, count))
            assert tile % size == 0
    assert pieces == sorted(pieces)
    for request, length in enumerate(lengths):
        own = [count for name, _, count in pieces if name == request]
        assert sum(own) == max(1, -(-(length - new) // 16))
        assert all(count == own[0] for count in own[:-1])
    assert 6 + 5 < len(pieces) <= 20


@pytest.mark.every_value
@pytest.mark.parametrize("config", [RANGES, SPLIT], ids=["ranges", "split"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(kv_heads=1, group=1),
        Shape(kv_heads=3, group=4, block_size=32, dtype=torch.float16),
        Shape(kv_heads=1, group=8, head_dim=128, norms=False, named_rows=False),
        Shape(kv_heads=1, group=11, window=20),
    ],
    ids=str,
)
def test_shapes(shape: Shape, config: Config) -> None:
    run([33, 1, 0, 70], shape, num_programs=3, config=config)


@pytest.mark.parametrize("config", [RANGES, SPLIT], ids=["ranges", "split"])
def test_windows(config: Config) -> None:
    shape = Shape(window=33, block_size=32, head_dim=128, kv_heads=1)
    run([1, 200, 33, 0, 34, 50, 80], shape, num_programs=4, config=config)


def test_windows_of_one_token_and_of_many() -> None:
    shape = Shape(block_size=32, kv_heads=1)
    run([1, 17, 16, 40], replace(shape, window=1), num_programs=2, config=SPLIT)
    run([600], replace(shape, window=580), num_programs=2, config=RANGES)


@pytest.mark.parametrize(
    ("kv", "head_dim", "config"),
    [
        pytest.param("fp8", 128, RANGES, marks=pytest.mark.slow),
        ("fp8", 64, SPLIT),
        ("int8", 64, RANGES),
        pytest.param("int8", 128, SPLIT, marks=pytest.mark.slow),
        pytest.param("int4", 128, RANGES, marks=pytest.mark.slow),
        ("int4", 64, SPLIT),
    ],
)
def test_formats_of_fewer_bits(kv: str, head_dim: int, config: Config) -> None:
    shape = Shape(kv=kv, head_dim=head_dim, kv_heads=1 if head_dim == 64 else 2)
    run(LENGTHS[:-1], shape, config=config, num_programs=5)
    odd = replace(shape, kv_heads=3, group=3, window=40, block_size=32, dtype=torch.float16)
    run([70, 1, 0, 33], replace(odd, norms=False), config=config, num_programs=3)


@pytest.mark.parametrize("kv", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_many_heads_in_fewer_bits(kv: str) -> None:
    run([40, 9], Shape(kv=kv, kv_heads=1, group=11), config=RANGES, num_programs=2)
    run([290, 3], Shape(kv=kv, kv_heads=1), config=replace(RANGES, stages=4), num_programs=20)


def test_small_values_keep_their_digits() -> None:
    """Values far below the numbers that float16 has, beside one that draws all attention."""
    for kv in ("int8", "int4"):
        case = DecodeCase([50], Shape(kv=kv, fused=False, kv_heads=1), CPU)
        rows = torch.randn(50, 2 * 64, generator=case.random)
        rows[:, 64:] *= 2e-4
        rows[3, 64:] *= 1e-3
        rows[3, :64] *= 4
        table = case.batch.block_tables_BM[int(case.batch.rows_B[0])].long()  # type: ignore[index]
        place = torch.arange(50)
        case.kind.write(case.store, table[place // 16] * 16 + place % 16, rows.bfloat16())
        schedule = case.schedule(SPLIT, 2)
        out, store = case.run(schedule)
        case.agree(schedule, out, store)


def test_more_steps_than_entries_are_asked_for_at_once() -> None:
    run([1100, 3, 530], Shape(kv_heads=1), config=RANGES, num_programs=2)
    run([2500, 3, 530], Shape(kv_heads=1), config=SPLIT, num_programs=1)


def test_more_requests_than_are_known_at_once() -> None:
    run([1, 20, 0] * 24, Shape(kv_heads=1), config=replace(RANGES, stages=4), num_programs=2)


def test_many_pieces_are_merged_in_two_levels() -> None:
    run([530, 3, 260], Shape(kv_heads=1), config=replace(RANGES, min_steps=1), num_programs=40)


def test_heads_of_several_ctas() -> None:
    run([17, 40], Shape(kv_heads=16, group=1), num_programs=3, config=RANGES)


@pytest.mark.parametrize(
    ("lengths", "config", "shares"),
    [
        ([257] * 9, RANGES, [16] * 9 + [0]),  # a step more leaves no request cut
        ([257] * 4 + [200], RANGES, [8] * 9 + [5]),
        ([2049] * 4, RANGES, [52] * 9 + [44]),  # whole ones would take 76 more
        ([257, 240, 0], WHOLE, [16, 15, 1] + [0] * 7),  # the last one writes zeros
        ([257, 20], WHOLE, [16, 2] + [0] * 8),  # however different they are
        ([257, 240] * 6, WHOLE, [19] * 9 + [15]),  # more than programs
        ([529, 20], WHOLE, [33, 2] + [0] * 8),
        ([545, 20], WHOLE, [8] * 4 + [2, 2] + [0] * 4),  # nobody ends where another begins
        ([1025], WHOLE, [8] * 8 + [0] * 2),  # too long to be whole
    ],
)
def test_short_requests_stay_whole(lengths: list[int], config: Config, shares: list[int]) -> None:
    case = DecodeCase(lengths, Shape(kv_heads=1), CPU)
    schedule = case.schedule(config, num_programs=10)
    refresh(schedule, case.batch)
    assert schedule.records[:, 3].tolist() == shares


NEW = [5, 9, 0, 17, 20, 21, 37, 52, 100]


@pytest.mark.every_value
@pytest.mark.parametrize("num_programs", [2, 11, 30])
@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (Shape(kv_heads=1, group=4, new=5), SPLIT8),
        (Shape(kv_heads=2, group=4, head_dim=128, new=5, norms=False), WHOLE),
        (Shape(kv_heads=1, group=3, new=4, window=33, dtype=torch.float16), SPLIT),
        (Shape(kv_heads=1, group=1, new=8, window=3, block_size=32), SPLIT8),
        (Shape(kv_heads=1, group=16, new=2, window=20), SPLIT),
        (Shape(kv_heads=1, group=4, new=5, kv="fp8"), SPLIT8),
        pytest.param(
            Shape(kv_heads=1, group=4, new=3, kv="int8", window=40), SPLIT, marks=pytest.mark.slow
        ),
        (Shape(kv_heads=1, group=2, new=5, kv="int4"), SPLIT8),
        (Shape(kv_heads=1, group=3, new=4), PIECES),
        pytest.param(Shape(kv_heads=1, group=3, new=9), SPLIT8, marks=pytest.mark.slow),
        (Shape(kv_heads=1, group=3, new=9, norms=False), PIECES),
        (Shape(kv_heads=1, group=2, new=9, head_dim=128, window=4), SPLIT),
        (Shape(kv_heads=1, group=1, new=17, window=20), SPLIT),
        pytest.param(Shape(kv_heads=1, group=2, new=9, kv="fp8"), SPLIT8, marks=pytest.mark.slow),
        (Shape(kv_heads=1, group=2, new=13, kv="int8", window=40), SPLIT),
        (Shape(kv_heads=1, group=1, new=9, kv="int4"), SPLIT8),
    ],
    ids=str,
)
def test_several_new_tokens(shape: Shape, config: Config, num_programs: int) -> None:
    lengths = [length for length in NEW if length >= shape.new or not length]
    run(lengths, shape, config=config, num_programs=num_programs)


@pytest.mark.every_value
@pytest.mark.parametrize("new", [4, 6])
@pytest.mark.parametrize("kv", ["auto", "fp8", "int8", "int4"])
def test_a_new_token_that_is_no_number_reaches_nobody_before_it(kv: str, new: int) -> None:
    """As of guesses without a block: those behind the second token, of which one is NaN, share a
    slot of the null block, and positions go on past the end of the table."""
    case = DecodeCase([40, 18, 70], Shape(kv_heads=1, new=new, kv=kv), CPU, 3)
    want, _ = case.expected()
    lost = torch.arange(3 * new).view(3, new)[:, 2:].flatten()
    case.slots[lost] = 7
    case.qkv[lost[::2]] = torch.nan
    case.table_L2D = case.table_L2D[:68].contiguous()
    out, _ = case.run(case.schedule(SPLIT, 3))
    got, limit = out.float(), 4e-2 if kv == "int4" else NORM_ERROR[torch.bfloat16]
    kept = torch.arange(3 * new).view(3, new)[:, :2].flatten()
    error = (got[kept] - want[kept]).norm(dim=2)
    assert (error <= limit * want[kept].norm(dim=2)).all(), error
    assert got[lost].isnan().all()


def test_several_new_tokens_take_what_there_is() -> None:
    """More queries than a warp has room for, or many requests, are for another kernel."""
    assert choose_config(128, 8, 32, num_new=5).warps == 8
    assert choose_config(128, 8, 32, num_new=4).warps == 4
    case = DecodeCase([5, 9], Shape(new=5), CPU)
    case.schedule(SPLIT, num_programs=1)
    with pytest.raises(InternalError, match="new tokens that the kernel takes"):
        case.schedule(RANGES, num_programs=1)
    with pytest.raises(InternalError, match="new tokens that the kernel takes"):
        DecodeCase([5], Shape(new=5, group=8), CPU).schedule(SPLIT8, num_programs=1)


def test_few_requests_get_a_cta_for_each_head() -> None:
    chosen = [choose_config(128, 8, n) for n in (1, 8, 16, 32, 64)]
    assert [config.split for config in chosen] == [True] * 4 + [False]
    assert [config.warps for config in chosen[:4]] == [8, 8, 4, 4]
    assert choose_config(64, 1, 256).split
    assert not choose_config(64, 32, 16).split


def test_what_does_not_fit_is_refused() -> None:
    case = DecodeCase([5, 9], Shape(), CPU)
    assert "CUDA" in (unsupported(CPU, torch.bfloat16, case.views(case.store), num_heads=4) or "")
    with pytest.raises(InternalError, match="the ring fits"):
        case.schedule(Config(stages=40), num_programs=1)
    schedule = case.schedule(num_programs=1)
    with pytest.raises(InternalError, match="the cache lies as"):
        case.launch(schedule, (case.store[0].flip(0)[:, ::2],), case.blank())
    other = DecodeCase([5, 9], Shape(fused=False), CPU)
    with pytest.raises(InternalError, match="a schedule for what is launched"):
        other.launch(schedule, other.store, other.blank())
    odd = torch.zeros(2, 4, 65, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(InternalError, match="answers lie on 16 bytes"):
        case.launch(schedule, case.store, odd)
