"""Paged prefill attention equals its definition on ragged pieces. Whatever must not be read is NaN,
and so is whatever must be written, or belongs to a request that takes no part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.paged_decode import DecodeBatch, paged_decode_reference
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.paged_prefill import (
    RECORD,
    Config,
    PrefillBatch,
    paged_prefill,
    piece_items,
    prefill_config,
    work_items,
)
from tests.kernels.kv_formats import CODES, cache_of

if TYPE_CHECKING:
    from ridgeline.kernels import paged_prefill_triton as triton_kernel
else:
    triton_kernel = pytest.importorskip("ridgeline.kernels.paged_prefill_triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
WORKSPACE = (1 << 22, 1 << 13) if DEVICE.type == "cuda" else (1 << 20, 1 << 10)
SMALL = Config(block_m=16, block_n=16, num_warps=4, num_stages=2)


class Step:
    """A cache in which only the visible tokens are numbers; request b asks with new[b] of its
    lengths[b] tokens. K and V lie as `PlainKV` lays them out."""

    def __init__(
        self,
        new: list[int],
        lengths: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        block_size: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        cached: torch.dtype | None = None,
        codes: str | None = None,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.new, self.lengths, self.heads, self.window = new, lengths, heads, window
        self.scale = head_dim**-0.5
        widths = [-(-length // block_size) for length in lengths]
        shuffled = (torch.randperm(sum(widths) + 2, generator=random) + 1).int()
        tables = torch.zeros(len(lengths), max(1, *widths), dtype=torch.int32)
        kv = torch.full((sum(widths) + 3, block_size, 2, heads[1], head_dim), torch.nan)
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
            tables[row, : first // block_size] = 0  # given back, as a window does
        self.k, self.v = kv.to(cached or dtype).to(DEVICE).unbind(2)
        self.kv = cache_of(kv, codes, DEVICE) if codes else PagedKV(self.k, self.v)
        q = torch.randn(sum(new) + 1, heads[0] + 2, head_dim, generator=random)
        self.q = q.to(dtype).to(DEVICE)[:, 1:-1]  # rows are not contiguous, as in a projection
        self.tables = tables.to(DEVICE)

    def work(
        self, config: Config | None, requests: list[int] | None = None, num_programs: int = 0
    ) -> np.ndarray[Any, np.dtype[np.int32]]:
        return work_items(
            self.new,
            self.lengths,
            requests,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            window=self.window,
            config=config,
            num_programs=num_programs,
        )

    def run(
        self,
        config: Config | None,
        requests: list[int] | None = None,
        *,
        num_programs: int = 0,
        padding: int = 0,
    ) -> torch.Tensor:
        work = self.work(config, requests, num_programs)
        work = np.concatenate((work, np.zeros((padding, RECORD), np.int32)))
        workspace = None
        if num_programs:
            workspace = make_workspace(DEVICE, *WORKSPACE)
            workspace.partial_P.fill_(torch.nan)
        on_device = torch.from_numpy(work).to(DEVICE)
        batch = PrefillBatch(self.tables, on_device, self.window, config, workspace)
        out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=DEVICE)
        result = paged_prefill(self.q, self.kv, batch, self.scale, out_THD=out)
        assert result is out
        assert workspace is None or not workspace.arrivals_A.any(), "counters are not back at zero"
        return out

    def expected(self, requests: list[int] | None = None) -> torch.Tensor:
        """In float32; NaN where nothing may be written."""
        starts = torch.tensor([0, *self.new]).cumsum(0)
        every = DecodeBatch(
            self.tables,
            torch.tensor(self.lengths, dtype=torch.int32),
            starts.int(),
            max(self.new),
            self.window,
        )
        out = torch.full(self.q.shape, torch.nan, device=DEVICE)
        paged_decode_reference(self.q.float(), self.kv, every, self.scale, out)
        for row in range(len(self.new)):
            if requests is not None and row not in requests:
                out[starts[row] : starts[row + 1]] = torch.nan
        return out


def agree(step: Step, config: Config | None, requests: list[int] | None = None, **how: int) -> None:
    got, tolerance = step.run(config, requests, **how), TOLERANCE[step.q.dtype]
    torch.testing.assert_close(
        got.float(), step.expected(requests), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", list(TOLERANCE) if DEVICE.type == "cuda" else list(TOLERANCE)[:2])
@pytest.mark.parametrize("window", [None, 30])
def test_a_cache_in_e4m3(window: int | None, dtype: torch.dtype) -> None:
    step = Step([30, 1, 5], [40, 40, 5], window=window, dtype=dtype, cached=torch.float8_e4m3fn)
    agree(step, SMALL)
    agree(step, SMALL, num_programs=4)


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", list(TOLERANCE) if DEVICE.type == "cuda" else list(TOLERANCE)[:2])
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 30])
@pytest.mark.parametrize("codes", CODES)
def test_a_cache_of_codes(codes: str, window: int | None, dtype: torch.dtype) -> None:
    for head_dim in (32, 64):
        how = {"head_dim": head_dim, "window": window, "dtype": dtype, "codes": codes}
        step = Step([30, 1, 5], [40, 40, 5], **how)  # type: ignore[arg-type]
        agree(step, SMALL)
        agree(step, SMALL, num_programs=4)


@pytest.mark.parametrize("window", [None, 1, 7, 30])
def test_the_reference_is_the_definition(window: int | None) -> None:
    agree(Step([300, 1, 5], [310, 40, 5], window=window), None)
    agree(Step([3, 8, 20], [3, 40, 52], window=window), None, [2, 0])


@pytest.mark.every_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 9, 24, 200])
def test_ragged_pieces(window: int | None, dtype: torch.dtype) -> None:
    agree(Step([1, 40, 8, 3, 17], [1, 41, 70, 67, 17], window=window, dtype=dtype), SMALL)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 1), (10, 2), (6, 3), (2, 2)])
def test_groups_of_any_size(heads: tuple[int, int]) -> None:
    agree(Step([13, 2, 1], [30, 2, 18], heads=heads), SMALL)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    agree(Step([20, 3], [25, 40], head_dim=head_dim, window=20), SMALL)


@pytest.mark.every_value
@pytest.mark.parametrize("block_size", [8, 16, 24, 64])
@pytest.mark.parametrize("block_n", [16, 32])
def test_block_sizes(block_size: int, block_n: int) -> None:
    config = Config(block_m=32, block_n=block_n, num_warps=4, num_stages=2)
    agree(Step([33, 7], [80, 64], block_size=block_size), config)
    agree(Step([33, 7], [80, 64], block_size=block_size, window=29), config)


def test_other_requests_are_left_alone() -> None:
    step = Step([1, 20, 1, 9, 1], [50, 20, 30, 33, 7])
    agree(step, SMALL, [1, 3])
    agree(step, SMALL, [3], padding=3)
    agree(step, SMALL, [])


@pytest.mark.every_value
@pytest.mark.parametrize("window", [None, 600, 40])
@pytest.mark.parametrize("num_programs", [3, 8, 40])
def test_keys_that_are_dealt_out(num_programs: int, window: int | None) -> None:
    step = Step([5, 2], [1100, 1500], window=window)
    agree(step, Config(block_m=16, block_n=64, num_warps=4), num_programs=num_programs, padding=1)


def test_keys_are_dealt_out_where_programs_would_be_idle() -> None:
    step = Step([8, 1], [4096, 1024], heads=(2, 1))
    work = step.work(Config(block_m=16, block_n=64), num_programs=8)
    assert work[:, 9].max() > 1
    assert len(work) <= 8
    for request in (0, 1):
        mine = work[work[:, 0] == request]
        mine = mine[np.argsort(mine[:, 8])]
        assert mine[:, 8].tolist() == list(range(len(mine)))
        assert (mine[:, 9] == len(mine)).all()
        assert mine[0, 5] == 0
        assert mine[-1, 6] == step.lengths[request] // 64
        assert (mine[1:, 5] == mine[:-1, 6]).all(), "parts meet"
    slots = work[:, 7] + work[:, 8]
    assert sorted(slots.tolist()) == list(range(len(work))), "every part has its own place"
    assert (step.work(SMALL, num_programs=1)[:, 9] == 1).all()


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1)])
def test_every_row_has_one_item_with_all_its_keys(
    heads: tuple[int, int], window: int | None
) -> None:
    step, group = Step([1, 50, 9], [1, 90, 40], heads=heads, window=window), heads[0] // heads[1]
    work = step.work(SMALL)
    lengths = work[:, 6] - work[:, 5]
    assert (np.diff(lengths) <= 0).all(), "longest first"
    seen: dict[tuple[int, int], int] = {}
    for request, start, new, length, first, begin, end, *_ in work.tolist():
        assert (new, length) == (step.new[request], step.lengths[request])
        assert start == sum(step.new[:request])
        for row in range(first, min(first + 16, new * group)):
            position = length - new + row // group
            oldest = 0 if window is None else max(0, position - window + 1)
            assert begin * 16 <= oldest
            assert position < end * 16
            seen[request, row] = seen.get((request, row), 0) + 1
        last = length - new + (min(first + 16, new * group) - 1) // group
        assert end == last // 16 + 1, "no tile of keys for nothing"
    assert set(seen.values()) == {1}
    assert len(seen) == sum(step.new) * group


@pytest.mark.parametrize("num_programs", [0, 40])
def test_pieces_stand_where_their_numbers_say(num_programs: int) -> None:
    rows, starts = [5, 2, 9], [70, 0, 300]
    new, lengths = [1, 50, 9], [1, 2000, 40]
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "window": None, "config": SMALL}
    pieces = np.array([rows, starts, new, lengths])
    work = piece_items(pieces, **shape, num_programs=num_programs)
    step = work_items(new, lengths, **shape, num_programs=num_programs)
    assert (work[:, 2:] == step[:, 2:]).all()
    assert work[:, 0].tolist() == [rows[piece] for piece in step[:, 0]]
    assert work[:, 1].tolist() == [starts[piece] for piece in step[:, 0]]
    assert (work[:, 9] > 1).any() == (num_programs > 0)
    assert piece_items(pieces[:, :0], **shape).shape == (0, RECORD)


def test_there_is_a_config_only_where_the_kernel_runs() -> None:
    cuda = torch.device("cuda")
    assert prefill_config(torch.device("cpu"), head_dim=64, num_rows=99) is None
    assert prefill_config(cuda, head_dim=80, num_rows=99) is None
    for head_dim in (16, 64, 128, 256):
        for num_rows in (1, 64, 9999):
            for dtype in (torch.float32, torch.bfloat16):
                config = prefill_config(cuda, head_dim=head_dim, num_rows=num_rows, dtype=dtype)
                assert config is not None


# ---------------------------------------------------------------------- on a GPU


LARGE: list[dict[str, Any]] = [
    {"new": [2000], "lengths": [2000], "heads": (32, 8)},
    {"new": [512, 1, 3], "lengths": [8192, 700, 900], "heads": (16, 8)},
    {"new": [1, 17, 300, 64], "lengths": [1, 800, 301, 2000], "heads": (20, 4), "window": 256},
    {"new": [700, 50], "lengths": [900, 50], "heads": (8, 8), "head_dim": 64},
    {"new": [700, 50], "lengths": [900, 50], "heads": (8, 1), "head_dim": 256},
    {"new": [90, 50], "lengths": [900, 50], "heads": (6, 2), "head_dim": 16, "block_size": 64},
    {"new": [90, 50], "lengths": [900, 50], "heads": (6, 2), "head_dim": 32, "block_size": 8},
]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("num_programs", [0, 132])
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_large_on_a_gpu(large: dict[str, Any], num_programs: int) -> None:
    options: dict[str, Any] = {"head_dim": 128, "dtype": torch.bfloat16}
    step = Step(**(options | large))
    rows = max(step.new) * step.heads[0] // step.heads[1]
    config = prefill_config(DEVICE, head_dim=step.q.shape[2], num_rows=rows)
    assert config is not None
    agree(step, config, num_programs=num_programs)
    if len(step.new) > 1:
        agree(step, config, [1], num_programs=num_programs)
    first = step.run(config, num_programs=num_programs)
    for _ in range(10):  # whoever arrives last, the result is the same
        again = step.run(config, num_programs=num_programs)
        assert torch.equal(again[:-1], first[:-1])


@pytest.mark.parametrize("window", [None, 40])
def test_a_piece_alone_has_the_same_items_wherever_it_lies(window: int | None) -> None:
    def items(row: int, start: int) -> Any:
        piece = np.array([[row], [start], [70], [100]])
        return piece_items(
            piece, num_heads=4, num_kv_heads=2, window=window, config=SMALL, num_programs=32
        )

    first = items(0, 0).copy()
    assert first[:, 2:4].tolist() == [[70, 100]] * len(first)
    there = items(7, 3)
    assert there[:, :2].tolist() == [[7, 3]] * len(there)
    assert np.array_equal(there[:, 2:], first[:, 2:])
    there[:] = -1  # whoever has them may write to them
    assert np.array_equal(items(0, 0), first)
