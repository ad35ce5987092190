"""Paged decode attention equals its definition on ragged batches, and its definition equals the
tiled reference. Whatever must not be read is NaN, and so is whatever must be written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from ridgeline.kernels.paged_attention import paged_attention_reference
from ridgeline.kernels.paged_decode import DecodeBatch, paged_decode, schedule_for
from ridgeline.kernels.paged_kv import PagedKV
from tests.kernels.kv_formats import CODES, cache_of

if TYPE_CHECKING:
    from ridgeline.kernels import paged_decode_triton as triton_kernel
else:
    triton_kernel = pytest.importorskip("ridgeline.kernels.paged_decode_triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


class Case:
    """A cache in which only the visible tokens of `lengths` are numbers; request b asks with
    new[b] tokens. K and V are laid out as `PlainKV` does, or a head after the other."""

    def __init__(
        self,
        lengths: list[int],
        new: list[int],
        *,
        heads: tuple[int, int],
        head_dim: int = 64,
        block_size: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        by_head: bool = False,
        seed: int = 0,
        cached: torch.dtype | None = None,
        codes: str | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.heads, self.scale, self.new, self.lengths = heads, head_dim**-0.5, new, lengths
        widths = [-(-length // block_size) for length in lengths]
        num_blocks = sum(widths) + 3
        shuffled = (torch.randperm(num_blocks - 1, generator=random) + 1).int()
        tables = torch.zeros(len(lengths), max(1, *widths) + 1, dtype=torch.int32)
        shape = (num_blocks, block_size, 2, heads[1], head_dim)
        kv = torch.full(shape, torch.nan)
        used = 0
        for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
            tables[row, :width] = shuffled[used : used + width]
            used += width
            first = 0 if window is None else max(0, length - new[row] - window + 1)
            position = torch.arange(first, length)
            blocks = tables[row].long()[position // block_size]
            kv[blocks, position % block_size] = torch.randn(
                (length - first, 2, heads[1], head_dim), generator=random
            )
        wide = kv
        kv = kv.to(cached or dtype).to(DEVICE)
        if by_head:
            kv = kv.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
        self.k, self.v = kv.unbind(2)
        self.kv = cache_of(wide, codes, DEVICE) if codes else PagedKV(self.k, self.v)
        q = torch.randn(sum(new) + 1, heads[0] + 2, head_dim, generator=random)
        self.q = q.to(dtype).to(DEVICE)[:, 1:-1]  # rows are not contiguous, as in a projection
        starts = torch.tensor([0, *new]).cumsum(0).int()
        self.batch = DecodeBatch(
            tables.to(DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            starts.to(DEVICE),
            max(new),
            window,
        )

    def blank(self) -> torch.Tensor:
        return torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=DEVICE)

    def expected(self) -> torch.Tensor:
        """In float32, the last row untouched."""
        return paged_decode(
            self.q.float(), self.kv, self.batch, self.scale, out_THD=self.blank().float()
        )

    def schedule(
        self, num_programs: int | None = None, config: triton_kernel.Config | None = None
    ) -> triton_kernel.Schedule:
        schedule = triton_kernel.make_schedule(
            DEVICE,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.q.shape[2],
            max_requests=len(self.lengths) + 1,
            max_new=self.batch.max_new,
            config=config,
            num_programs=num_programs,
        )
        for part in (schedule.parts, schedule.best, schedule.total):
            part.fill_(torch.nan)
        schedule.records.fill_(-1)
        return schedule

    def run(self, schedule: triton_kernel.Schedule) -> torch.Tensor:
        triton_kernel.refresh(schedule, self.batch)
        return paged_decode(
            self.q,
            self.kv,
            self.batch,
            self.scale,
            schedule=schedule,
            out_THD=self.blank(),
        )


def agree(case: Case, num_programs: int, config: triton_kernel.Config | None = None) -> None:
    schedule = case.schedule(num_programs, config or triton_kernel.Config(block_n=16))
    got = case.run(schedule)
    assert got[-1].isnan().all(), "a row of no request was written"
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(
        got[:-1].float(), case.expected()[:-1], rtol=tolerance, atol=tolerance
    )
    assert not schedule.arrived.any(), "the counters are not back at zero"


def test_the_definition_equals_the_tiled_reference() -> None:
    case = Case([7, 33, 4], [1, 3, 4], heads=(6, 2), window=9)
    expected, starts = case.expected(), case.batch.query_start_B1.tolist()
    for row, length in enumerate(case.lengths):
        out = torch.empty_like(case.q[starts[row] : starts[row + 1]])

        def gather(first: int, last: int, row: int = row) -> torch.Tensor:
            position = torch.arange(first, last, device=DEVICE)
            block = case.batch.block_tables_BM[row][position // 16].long()
            return torch.stack((case.k[block, position % 16], case.v[block, position % 16]), 1)

        paged_attention_reference(
            case.q[starts[row] : starts[row + 1]],
            gather,
            seq_len=length,
            num_kv_heads=2,
            scale=case.scale,
            window=9,
            out_THD=out,
        )
        torch.testing.assert_close(expected[starts[row] : starts[row + 1]], out)


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_programs", [1, 3, 40])
def test_ragged_decodes(num_programs: int, dtype: torch.dtype) -> None:
    agree(Case([1, 0, 37, 16, 90, 0], [1] * 6, heads=(4, 2), dtype=dtype), num_programs)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (16, 1), (5, 5), (12, 4)])
def test_heads(heads: tuple[int, int]) -> None:
    agree(Case([21, 3], [1, 1], heads=heads), 5)


@pytest.mark.every_value
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("num_programs", [2, 13])
def test_drafts_are_causal_among_themselves(num_programs: int, window: int | None) -> None:
    case = Case([3, 50, 8, 0, 71], [3, 2, 8, 1, 1], heads=(4, 2), window=window)
    agree(case, num_programs)


def lose(case: Case, lost: list[int]) -> torch.Tensor:
    """The last lost[b] tokens of each request have no blocks: the table ends before them or leads
    to block 0, where everything is NaN. Which rows of q see nothing of them, [T]."""
    batch, kv, size = case.batch, case.kv, case.k.shape[1]
    known = [length - gone for length, gone in zip(case.lengths, lost, strict=True)]
    parts: list[torch.Tensor | None] = [kv.k_NSKD, kv.v_NSKD]
    if kv.k_scales_NSK is not None:
        parts = [kv.k_scales_NSK, kv.v_scales_NSK, kv.k_lows_NSK, kv.v_lows_NSK]
    for row, length in enumerate(case.lengths):
        for position in range(known[row], length):
            block, place = int(batch.block_tables_BM[row, position // size]), position % size
            for part in parts:
                if part is not None:
                    part[block, place] = torch.full(part.shape[2:], torch.nan).to(part)
        batch.block_tables_BM[row, -(-known[row] // size) :] = 0
    widest = max(1, *(-(-length // size) for length in known))
    case.batch = replace(batch, block_tables_BM=batch.block_tables_BM[:, :widest])
    rows = [torch.arange(new) < new - gone for new, gone in zip(case.new, lost, strict=True)]
    return torch.cat(rows)


@pytest.mark.every_value
@pytest.mark.parametrize(
    ("new", "lost"), [(2, [1, 0, 1, 0]), (5, [3, 4, 0, 1]), (9, [8, 0, 2, 5]), (17, [16, 3, 9, 16])]
)
@pytest.mark.parametrize("kind", ["float32", "float16", "e4m3", *CODES])
def test_drafts_without_a_block_reach_nobody_before_them(
    new: int, lost: list[int], kind: str
) -> None:
    dtype = torch.float16 if kind == "float16" else torch.float32
    case = Case(
        [new, new + 14, 33 + new, 90 + new],
        [new] * 4,
        heads=(8, 2),
        dtype=dtype,
        window=40 if new == 5 else None,
        cached=torch.float8_e4m3fn if kind == "e4m3" else None,
        codes=kind if kind in CODES else None,
    )
    want = case.expected()[:-1]
    seen = lose(case, lost)
    again = case.expected()[:-1]
    torch.testing.assert_close(again[seen], want[seen])
    assert again[~seen].isnan().all()
    tolerance = TOLERANCE[dtype]
    for num_programs in (3, 11):
        got = case.run(case.schedule(num_programs, triton_kernel.Config(block_n=16)))[:-1]
        torch.testing.assert_close(
            got[seen].float(), want[seen], rtol=tolerance, atol=tolerance, equal_nan=False
        )
        if kind != "e4m3" or DEVICE.type == "cuda":  # the interpreter's e4m3 has no NaN
            assert got[~seen].isnan().all()


@pytest.mark.parametrize("new", [2, 6])
def test_padding_is_shorter_than_what_is_asked(new: int) -> None:
    """Row 0 of a captured step: two tokens of the null block, whatever the number of new ones."""
    case = Case([2, 30 + new], [new, new], heads=(4, 2))
    case.batch.block_tables_BM[0] = 0
    want = case.expected()
    got = case.run(case.schedule(4, triton_kernel.Config(block_n=16)))
    torch.testing.assert_close(got[new:], want[new:], rtol=2e-5, atol=2e-5, equal_nan=True)
    assert not got[new:-1].isnan().any()


@pytest.mark.parametrize(
    ("block_size", "block_n", "head_dim", "by_head"),
    [(32, 16, 128, False), (64, 32, 64, True), (16, 64, 128, True), (32, 32, 64, False)],
)
def test_layouts(block_size: int, block_n: int, head_dim: int, by_head: bool) -> None:
    case = Case(
        [100, 64, 65],
        [1, 1, 2],
        heads=(4, 2),
        head_dim=head_dim,
        block_size=block_size,
        by_head=by_head,
        window=70,
    )
    agree(case, 7, triton_kernel.Config(block_n=block_n))


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_head", [False, True])
def test_a_cache_in_e4m3(by_head: bool, dtype: torch.dtype) -> None:
    e4m3 = torch.float8_e4m3fn
    case = Case(
        [21, 0, 75, 40], [1, 1, 3, 1], heads=(4, 2), dtype=dtype, by_head=by_head, cached=e4m3
    )
    assert case.k.dtype == e4m3
    agree(case, 5)
    windowed = Case([90, 33], [1, 1], heads=(4, 2), dtype=dtype, window=40, cached=e4m3)
    agree(windowed, 3)


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("codes", CODES)
def test_codes(codes: str, dtype: torch.dtype) -> None:
    """Codes are exact in both types, so the cache costs no more than the rounding of q."""
    for head_dim, heads in ((64, (4, 2)), (128, (3, 3)), (32, (8, 1))):
        how = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "codes": codes}
        agree(Case([21, 0, 75, 40], [1, 1, 3, 1], **how), 5)  # type: ignore[arg-type]
        agree(Case([90, 33], [1, 2], window=40, **how), 3)  # type: ignore[arg-type]


def test_no_program_takes_less_than_the_least() -> None:
    case = Case([64, 10], [1, 1], heads=(2, 1))
    schedule = case.schedule(9, triton_kernel.Config(block_n=16, min_tiles=3))
    got = case.run(schedule)
    assert schedule.records[:, 3].tolist() == [3, 2, 0, 0, 0, 0, 0, 0, 0]
    torch.testing.assert_close(got[:-1], case.expected()[:-1], rtol=2e-5, atol=2e-5)


def test_a_schedule_serves_other_lengths_and_fewer_requests() -> None:
    """As in a captured graph: same memory, other contents."""
    schedule = Case([80, 33, 5], [1, 1, 1], heads=(4, 2)).schedule(
        4, triton_kernel.Config(block_n=16)
    )
    for lengths in ([80, 33, 5], [1, 1, 64], [17], [0, 0, 0, 48]):
        case = Case(lengths, [1] * len(lengths), heads=(4, 2), seed=len(lengths))
        got = case.run(schedule)
        torch.testing.assert_close(got[:-1], case.expected()[:-1], rtol=2e-5, atol=2e-5)


def test_every_tile_has_one_program() -> None:
    case = Case([40, 0, 7, 129], [1, 1, 3, 2], heads=(2, 2), window=50)
    schedule = case.schedule(6, triton_kernel.Config(block_n=16))
    triton_kernel.refresh(schedule, case.batch)
    tiles = []
    for length, new in zip(case.lengths, case.new, strict=True):
        first = max(0, length - new - 49)
        tiles.append(max(1, math.ceil(length / 16) - first // 16))
    order = [(b, h, t) for b, n in enumerate(tiles) for h in range(2) for t in range(n)]
    share = math.ceil(len(order) / 6)
    for program, record in enumerate(schedule.records.tolist()):
        mine = order[program * share : (program + 1) * share]
        assert record[3] == len(mine)
        assert record[4] == share
        assert not mine or tuple(record[:3]) == mine[0]


def test_there_is_no_schedule_without_a_gpu() -> None:
    shape = {"num_heads": 4, "num_kv_heads": 2, "max_requests": 2, "max_new": 1}
    assert schedule_for(torch.device("cpu"), head_dim=64, **shape) is None
    assert schedule_for(torch.device("cuda"), head_dim=80, **shape) is None


# ---------------------------------------------------------------------- on a GPU


def plain(case: Case) -> torch.Tensor:
    """The definition with every product and sum in the dtype of q."""
    out = torch.empty_like(case.q)
    starts = case.batch.query_start_B1.tolist()
    tables, size = case.batch.block_tables_BM, case.k.shape[1]
    window = case.batch.window or 1 << 30
    for row, length in enumerate(case.lengths):
        q = case.q[starts[row] : starts[row + 1]]
        first = max(0, length - q.shape[0] - window + 1)
        key = torch.arange(first, length, device=DEVICE)
        query = torch.arange(length - q.shape[0], length, device=DEVICE)[:, None]
        slots = tables[row][key // size].long(), key % size
        share = case.heads[0] // case.heads[1]
        k, v = (x[slots].repeat_interleave(share, 1).transpose(0, 1) for x in (case.k, case.v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) * case.scale
        hidden = (key > query) | (key <= query - window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[starts[row] : starts[row + 1]] = (weights @ v).transpose(0, 1)
    return out


LARGE: list[dict[str, object]] = [
    {"lengths": [8192], "new": [1], "heads": (32, 8)},
    {"lengths": [1, 511, 2048, 64, 700, 4097], "new": [1] * 6, "heads": (16, 8)},
    {"lengths": [2000, 33, 700], "new": [8, 1, 5], "heads": (32, 8), "window": 512},
    {"lengths": [600, 999], "new": [1, 1], "heads": (16, 16), "head_dim": 64},
    {"lengths": [600, 999], "new": [2, 8], "heads": (16, 1), "block_size": 64},
    {"lengths": list(range(1, 1500, 13)), "new": [1] * 116, "heads": (32, 8)},
]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_large_on_a_gpu(
    large: dict[str, object], block_n: int, by_head: bool, dtype: torch.dtype
) -> None:
    options: dict[str, object] = {"head_dim": 128, "block_size": 16} | large
    case = Case(dtype=dtype, by_head=by_head, **options)  # type: ignore[arg-type]
    exact = case.expected()[:-1]
    schedule = case.schedule(config=triton_kernel.Config(block_n=block_n, num_stages=2))
    theirs = float((plain(case)[:-1].float() - exact).abs().max())
    first = case.run(schedule)
    assert float((first[:-1].float() - exact).abs().max()) <= 2 * theirs
    for _ in range(20):  # whoever arrives last, the result is the same
        assert torch.equal(case.run(schedule)[:-1], first[:-1])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_n", [32, 128])
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_large_in_e4m3_on_a_gpu(large: dict[str, object], block_n: int, dtype: torch.dtype) -> None:
    """Numbers of e4m3 are exact in both, so the cache costs no more than the rounding of q."""
    options: dict[str, object] = {"head_dim": 128, "block_size": 16} | large
    case = Case(dtype=dtype, cached=torch.float8_e4m3fn, **options)  # type: ignore[arg-type]
    exact = case.expected()[:-1]
    got = case.run(case.schedule(config=triton_kernel.Config(block_n=block_n, num_stages=2)))
    assert got.dtype == dtype
    assert float((got[:-1].float() - exact).norm() / exact.norm()) <= 0.005


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_large_codes_on_a_gpu(large: dict[str, object], codes: str, dtype: torch.dtype) -> None:
    options: dict[str, object] = {"head_dim": 128, "block_size": 16} | large
    case = Case(dtype=dtype, codes=codes, **options)  # type: ignore[arg-type]
    exact = case.expected()[:-1]
    first = case.run(case.schedule())
    assert float((first[:-1].float() - exact).norm() / exact.norm()) <= 0.005


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_a_captured_graph_serves_any_lengths() -> None:
    case = Case([900, 1300, 77], [1, 1, 1], heads=(32, 8), head_dim=128, dtype=torch.bfloat16)
    schedule, out = case.schedule(), case.blank()

    def step() -> None:
        triton_kernel.refresh(schedule, case.batch)
        paged_decode(case.q, case.kv, case.batch, case.scale, schedule=schedule, out_THD=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([900, 1300, 77], [1, 1299, 5], [450, 0, 76]):
        case.batch.seq_lens_B.copy_(torch.tensor(lengths))
        case.lengths = lengths
        out.fill_(torch.nan)
        graph.replay()
        expected = case.expected()[:-1]
        torch.testing.assert_close(out[:-1].float(), expected, rtol=2e-2, atol=2e-2)
