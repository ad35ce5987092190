"""Attention cut in one way: a token gets the same bits alone, in chunks and beside others.

Without a GPU the kernel runs through Triton's interpreter, in float32 and float16 and small shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ridgeline.kernels.paged_decode import DecodeBatch, paged_decode_reference
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.paged_prefill import Config, PrefillBatch, paged_prefill, work_items
from tests.thinning import slow

pytest.importorskip("ridgeline.kernels.paged_prefill_triton")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16][: 3 if CUDA else 2]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CONFIGS = {"as served": Config(64, 32, 4, 2), "small": Config(16, 16, 4, 2)}
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 16
LENGTH = 61
SEED = 11

Piece = tuple[int, int]  # first and last + 1 token of the request


class Request:
    """One request of LENGTH tokens, all cached, and a shorter one as company; whatever no token
    may see is NaN."""

    def __init__(self, dtype: torch.dtype, cached: torch.dtype, window: int | None) -> None:
        print(f"seed {SEED}")
        random = torch.Generator().manual_seed(SEED)
        width = -(-LENGTH // BLOCK_SIZE)
        blocks = torch.randperm(2 * width, generator=random).int() + 1
        self.tables = blocks.view(2, width).to(DEVICE)
        kv = torch.randn(
            (2 * width + 1, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM),
            generator=random,
            dtype=torch.float32,
        )
        kv[0] = torch.nan
        kv[blocks[width - 1].long(), LENGTH % BLOCK_SIZE :] = torch.nan
        self.kv = PagedKV(*kv.to(cached).to(DEVICE).unbind(2))
        q = torch.randn(2 * LENGTH, HEADS, HEAD_DIM, generator=random)
        q = q.to(dtype).to(DEVICE)
        self.q, self.other_q = q[:LENGTH], q[LENGTH:]
        self.window = window

    def answer(
        self, config: Config, pieces: Sequence[Piece], company: Sequence[Piece] = ()
    ) -> torch.Tensor:
        """The rows of the pieces, which are requests of one launch, before or among the batch."""
        others = [(1, *piece) for piece in company]
        asked = [
            *others[: len(others) // 2],
            *((0, *p) for p in pieces),
            *others[len(others) // 2 :],
        ]
        q = torch.cat([(self.other_q if row else self.q)[a:b] for row, a, b in asked])
        new, lengths = [b - a for _, a, b in asked], [b for _, _, b in asked]
        work = work_items(
            new,
            lengths,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            window=self.window,
            config=config,
        )
        tables = self.tables[torch.tensor([row for row, _, _ in asked], device=DEVICE)]
        on_device = torch.from_numpy(work).to(DEVICE)
        batch = PrefillBatch(tables, on_device, self.window, config)
        out = paged_prefill(q, self.kv, batch, HEAD_DIM**-0.5)
        rows = torch.split(out, new)
        return torch.cat([part for part, (row, _, _) in zip(rows, asked, strict=True) if row == 0])

    def expected(self) -> torch.Tensor:
        out = torch.empty(self.q.shape, device=DEVICE)
        lengths = torch.tensor([LENGTH], dtype=torch.int32)
        starts = torch.tensor([0, LENGTH], dtype=torch.int32)
        every = DecodeBatch(self.tables[:1], lengths, starts, LENGTH, self.window)
        paged_decode_reference(self.q.float(), self.kv, every, HEAD_DIM**-0.5, out)
        return out


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.view(kind), other.view(kind))


@pytest.mark.every_pair
@pytest.mark.parametrize("window", [None, pytest.param(9, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("cached", ["as it is", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_bits(dtype: torch.dtype, cached: str, window: int | None) -> None:
    kept = torch.float8_e4m3fn if cached == "e4m3" else dtype
    assert_same_bits(Request(dtype, kept, window), CONFIGS["as served"])


@pytest.mark.parametrize("window", [*slow(None), 40])
def test_a_token_gets_the_same_bits_of_many_small_tiles(window: int | None) -> None:
    assert_same_bits(Request(torch.float32, torch.float32, window), CONFIGS["small"])


def assert_same_bits(request: Request, config: Config) -> None:
    whole = request.answer(config, [(0, LENGTH)])
    bound = TOLERANCE[whole.dtype]
    torch.testing.assert_close(whole.float(), request.expected(), rtol=bound, atol=bound)
    for size in (7, 33):
        chunks = [(a, min(a + size, LENGTH)) for a in range(0, LENGTH, size)]
        # All are in the cache already, so chunks can as well be requests of one step.
        assert equal(request.answer(config, chunks, [(0, 20), (39, 40), (5, 6)]), whole)
        for chunk in chunks[1:3]:
            assert equal(request.answer(config, [chunk]), whole[slice(*chunk)]), chunk
    for one in (0, 31, 32, LENGTH - 1):
        piece = (one, one + 1)
        assert equal(request.answer(config, [piece]), whole[one : one + 1]), one
        beside = request.answer(config, [piece], [(3, 40), (7, 8)])
        assert equal(beside, whole[one : one + 1]), one
