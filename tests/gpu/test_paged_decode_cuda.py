"""On a GPU the CUDA decode kernel equals its definition, on ragged batches and in the same bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ridgeline.kernels.paged_decode_cuda import Config, refresh, unsupported
from ridgeline.kernels.stream_linear import MAX_ROWS, stream_linear
from ridgeline.kernels.tiles import Tile
from tests.kernels.decode_case import DecodeCase, Shape, check_case
from tests.kernels.kv_formats import bits_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

CUDA = torch.device("cuda", 0)
LENGTHS = [1, 2, 15, 16, 17, 100, 191, 700, 3000]
PRODUCT = Tile(32, 64, 1, 8, 3, per_sm=0, stream=True)
RANGES = Config(2, 1, 2)
CONFIGS = [
    RANGES,
    Config(4, 1, 5),
    Config(2, 2, 2),
    Config(6, 1, 1),
    Config(2, 1, 8, split=True, whole_steps=33),
    Config(1, 2, 1, split=True),
    Config(3, 2, 8, split=True, warps=4, whole_steps=33),
]
ODD = [0, 3000, 1, 0, 17, 191, 0, 0, 700, 16]


def ragged(num: int, seed: int) -> list[int]:
    print(f"seed {seed}")
    chosen = random.Random(seed)
    return [chosen.choice([0, *LENGTHS[:-2]]) for _ in range(num)]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 16])
def test_heads(kv_heads: int, group: int, head_dim: int) -> None:
    shape = Shape(kv_heads=kv_heads, group=group, head_dim=head_dim)
    check_case(LENGTHS, shape, CUDA)
    in_16 = replace(shape, dtype=torch.float16)
    check_case(ragged(30, kv_heads + group), in_16, CUDA)
    check_case(ragged(30, kv_heads + group), in_16, CUDA, config=RANGES)


@pytest.mark.parametrize("kv", ["auto", "fp8", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("group", "new"), [(1, 8), (2, 3), (4, 2), (4, 5), (4, 8), (16, 2)])
def test_several_new_tokens(group: int, new: int, head_dim: int, kv: str) -> None:
    shape = Shape(kv_heads=8, group=group, head_dim=head_dim, new=new, kv=kv)
    lengths = [0, *(length + new for length in (0, 1, *LENGTHS))]
    for window in (None, 40):
        check_case(lengths, replace(shape, window=window), CUDA)
    check_case([191], replace(shape, norms=False, dtype=torch.float16), CUDA)


@pytest.mark.parametrize("kv_heads", [3, 5, 12])
def test_heads_in_odd_numbers(kv_heads: int) -> None:
    for config in (None, RANGES):
        check_case(ODD, Shape(kv_heads=kv_heads, group=11, head_dim=128), CUDA, config=config)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("named_rows", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_layouts(block_size: int, named_rows: bool, norms: bool) -> None:
    shape = Shape(
        kv_heads=8,
        group=4,
        head_dim=128,
        block_size=block_size,
        named_rows=named_rows,
        norms=norms,
    )
    for config in (None, RANGES):
        check_case(ODD, shape, CUDA, config=config)


KINDS = ["fp8", "int8", "int4"]


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 11])
@pytest.mark.parametrize("kv_heads", [3, 8])
def test_fewer_bits(kv_heads: int, group: int, head_dim: int, kv: str) -> None:
    shape = Shape(kv_heads=kv_heads, group=group, head_dim=head_dim, kv=kv)
    for config in (None, RANGES):
        check_case(LENGTHS, shape, CUDA, config=config)
        check_case(ODD, replace(shape, window=33, block_size=32), CUDA, config=config)
    in_16 = replace(shape, dtype=torch.float16, norms=False, named_rows=False)
    check_case(ragged(30, kv_heads + group), in_16, CUDA)
    check_case(ragged(70, kv_heads + group), in_16, CUDA)


@pytest.mark.parametrize("kv", KINDS)
def test_fewer_bits_always_in_the_same_ones(kv: str) -> None:
    for num in (60, 3):
        shape = Shape(kv_heads=8, group=4, head_dim=128, kv=kv)
        case = DecodeCase(ragged(num, 5) + LENGTHS, shape, CUDA)
        schedule = case.schedule()
        first, cache = case.run(schedule, pdl=False)
        case.agree(schedule, first, cache)
        for attempt in range(10):
            out, store = case.run(schedule, pdl=attempt % 2 == 0)
            assert torch.equal(out, first)
            assert torch.equal(bits_of(store), bits_of(cache))


@pytest.mark.parametrize("window", [1, 5, 16, 33, 1024])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_windows(window: int, head_dim: int) -> None:
    shape = Shape(kv_heads=8, group=2, head_dim=head_dim, window=window)
    check_case(LENGTHS, shape, CUDA)
    check_case(ODD, shape, CUDA, num_programs=3)
    check_case(ODD, shape, CUDA, num_programs=3, config=RANGES)


@pytest.mark.parametrize("num_requests", [1, 2, 3, 33, 70])
@pytest.mark.parametrize("num_programs", [None, 1, 7, 1000])
def test_batches(num_requests: int, num_programs: int | None) -> None:
    shape = Shape(kv_heads=8, group=4, head_dim=128)
    check_case(ragged(num_requests, num_requests), shape, CUDA, num_programs=num_programs)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tunings(config: Config) -> None:
    check_case(LENGTHS, Shape(kv_heads=8, group=2), CUDA, config=config)
    check_case(LENGTHS, Shape(kv_heads=1, group=8), CUDA, config=config)


def test_always_the_same_bits() -> None:
    for kv_heads, num in ((1, 60), (8, 60), (8, 20), (1, 3)):
        shape = Shape(kv_heads=kv_heads, group=4, head_dim=128)
        case = DecodeCase(ragged(num, 5) + LENGTHS, shape, CUDA)
        schedule = case.schedule()
        first, cache = case.run(schedule, pdl=False)
        case.agree(schedule, first, cache)
        for attempt in range(20):
            out, store = case.run(schedule, pdl=attempt % 2 == 0)
            assert torch.equal(out, first)
            assert torch.equal(bits_of(store), bits_of(cache))


def test_one_launch_after_the_other() -> None:
    """Early launches of layers that share a schedule, each over the answer of the one before."""
    case = DecodeCase(LENGTHS, Shape(kv_heads=8, group=4, head_dim=128, fused=False), CUDA)
    schedule = case.schedule()
    refresh(schedule, case.batch)
    size = case.num_heads * case.shape.head_dim
    answers = []
    for pdl in (False, True):
        case.qkv[:, :size].copy_(DecodeCase(LENGTHS, case.shape, CUDA).qkv[:, :size])
        for _ in range(30):
            case.launch(schedule, case.store, case.queries(), pdl=pdl)
        answers.append(case.queries().clone())
    assert torch.equal(*answers)
    assert not answers[0].isnan().any()


@pytest.mark.parametrize("num_requests", [1, 12, 30, 90])
def test_what_is_old_is_read_before_the_product_has_ended(num_requests: int) -> None:
    """The product of q, k and v, which lets the next kernel begin, over NaN."""
    case = DecodeCase(ragged(num_requests, 3), Shape(kv_heads=8, group=4, head_dim=128), CUDA)
    schedule = case.schedule()
    refresh(schedule, case.batch)
    torch.manual_seed(num_requests)
    num_rows = min(num_requests, MAX_ROWS)
    x = torch.randn(num_rows, 1024, device=CUDA).bfloat16()
    weight = (torch.randn(case.qkv.shape[1], 1024, device=CUDA) / 32).bfloat16()
    found = []
    for attempt in range(20):
        store, out = case.copy(), case.blank()
        case.qkv[:num_rows].fill_(torch.nan)
        stream_linear(x, weight, tile=PRODUCT, out_MO=case.qkv[:num_rows])
        case.launch(schedule, store, out, early=attempt > 0)
        found.append((out, bits_of(store)))
    assert not found[0][0].isnan().any()
    for out, bits in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(bits, found[0][1])


@pytest.mark.parametrize("fused", [False, True])
def test_replays_with_other_lengths(fused: bool) -> None:
    shape = Shape(kv_heads=8, group=4, head_dim=128, fused=fused)
    case = DecodeCase([3000] * 8, shape, CUDA)
    schedule, out = case.schedule(), case.blank()
    case.run(schedule)  # compiles
    store = case.store
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refresh(schedule, case.batch)
        case.launch(schedule, store, out)
    for lengths in ([1, 0, 17, 191, 2, 700, 0, 16], [1] * 8, [3000, *[0] * 7], [100] * 8):
        case.with_lengths(DecodeCase(lengths, shape, CUDA, seed=len(lengths)))
        before = case.copy()
        out.fill_(torch.nan)
        graph.replay()
        after = case.copy()
        for mine, its in zip(store, before, strict=True):
            mine.copy_(its)
        case.agree(schedule, out, after)


def test_what_is_not_supported_is_named() -> None:
    case = DecodeCase([5], Shape(kv_heads=2, group=2), CUDA)
    kv = case.views(case.store)
    assert unsupported(CUDA, torch.bfloat16, kv, num_heads=4) is None
    assert "16 bits" in (unsupported(CUDA, torch.float32, kv, num_heads=4) or "")
    assert "16 to one" in (unsupported(CUDA, torch.bfloat16, kv, num_heads=66) or "")
