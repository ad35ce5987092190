"""Decode attention as a case: raw products, a cache with NaN wherever nothing may be read, and what
has to come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.kernels import paged_decode_cuda as cuda
from ridgeline.kernels.paged_decode import DecodeBatch, paged_decode_reference
from ridgeline.kernels.qk_norm_rope_write import (
    HeadNorms,
    PagedKV,
    plain_views,
    qk_norm_rope_write_reference,
)

WIDER = 8  # a packed row is longer than what is used of it
NORM_ERROR = {torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the answer's norm


@dataclass(frozen=True, slots=True)
class Shape:
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    named_rows: bool = True
    norms: bool = True
    fused: bool = True


class DecodeCase:
    """Request b has lengths[b] tokens, the new one included; 0 is padding. The new tokens lie in
    `qkv_TX`; with `fused` they are not in the cache yet."""

    def __init__(
        self, lengths: list[int], shape: Shape, device: torch.device, seed: int = 0
    ) -> None:
        self.shape, self.lengths, self.device = shape, lengths, device
        self.random = torch.Generator().manual_seed(seed)
        self.scale = shape.head_dim**-0.5
        heads = shape.kv_heads * shape.group
        width = (heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = self._random(len(lengths), width + WIDER)[:, :width]
        self.table_L2D = self._rotations(max(lengths) + 1)
        weights = (1 + 0.2 * self._random(2, shape.head_dim).float()).to(shape.dtype)
        self.norms = HeadNorms(weights[0], weights[1], 1e-6) if shape.norms else None
        widths = [-(-length // shape.block_size) for length in lengths]
        tables, slots = self._place(widths)
        num_blocks = sum(widths) + 2
        store = torch.full(
            (num_blocks, shape.block_size, 2 * shape.kv_heads * shape.head_dim), torch.nan
        ).to(shape.dtype)
        rows = torch.randperm(len(lengths), generator=self.random) + 1
        if not shape.named_rows:
            rows = torch.arange(len(lengths))
        named = torch.zeros(len(lengths) + 1, tables.shape[1] + 1, dtype=torch.int32)
        for row, length in enumerate(lengths):
            last = length - 1 if shape.fused else length
            position = torch.arange(_first_key(length, shape.window), max(last, 0))
            blocks = tables[row].long()[position // shape.block_size]
            numbers = torch.randn(len(position), store.shape[2], generator=self.random)
            store[blocks, position % shape.block_size] = numbers.to(shape.dtype)
            named[rows[row], : tables.shape[1]] = tables[row]
        self.store = store.to(device)
        self.slots = slots.to(device)
        self.batch = DecodeBatch(
            named.to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.arange(len(lengths) + 1, dtype=torch.int32, device=device),
            1,
            shape.window,
            rows.to(device) if shape.named_rows else None,
        )
        self.num_heads = heads

    def _random(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.random)
        return numbers.to(self.shape.dtype).to(self.device)

    def _rotations(self, length: int) -> torch.Tensor:
        half = self.shape.head_dim // 2
        angle = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(half) / half)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return table.to(self.device)

    def _place(self, widths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Block tables and the slots of new tokens; padding has a slot too, in block 0."""
        shuffled = (torch.randperm(sum(widths), generator=self.random) + 2).int() - 1
        tables = torch.zeros(len(widths), max(1, *widths), dtype=torch.int32)
        slots = torch.zeros(len(widths), dtype=torch.int64)
        used, size = 0, self.shape.block_size
        for row, width in enumerate(widths):
            tables[row, :width] = shuffled[used : used + width]
            used += width
            if (last := self.lengths[row] - 1) >= 0:
                slots[row] = int(tables[row, last // size]) * size + last % size
        return tables, slots

    def with_lengths(self, other: DecodeCase) -> None:
        """Takes over the contents of another case of this shape and number of requests, in the
        same memory; the table of rotations and the cache are large enough."""
        self.lengths = other.lengths
        for mine, its in (
            (self.qkv, other.qkv),
            (self.store[: len(other.store)], other.store),
            (self.slots, other.slots),
            (self.batch.seq_lens_B, other.batch.seq_lens_B),
            (
                self.batch.block_tables_BM[:, : other.batch.block_tables_BM.shape[1]],
                other.batch.block_tables_BM,
            ),
        ):
            mine.copy_(its)
        if self.batch.rows_B is not None and other.batch.rows_B is not None:
            self.batch.rows_B.copy_(other.batch.rows_B)

    def views(self, store: torch.Tensor) -> PagedKV:
        return plain_views(store, self.shape.kv_heads)

    def queries(self) -> torch.Tensor:
        """Of the case without a front, as they are."""
        size = self.shape.head_dim
        row = self.qkv.stride(0)
        return self.qkv.as_strided((len(self.qkv), self.num_heads, size), (row, size, 1))

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Answers in float32, and the cache afterwards."""
        store = self.store.clone()
        q_THD = self.queries()
        if self.shape.fused:
            slots = torch.where(self.batch.seq_lens_B > 0, self.slots, -1)
            positions = (self.batch.seq_lens_B.long() - 1).clamp_min(0)
            q_THD = qk_norm_rope_write_reference(
                self.qkv, self.table_L2D, positions, slots, self.views(store), norms=self.norms
            )
        out = torch.full(q_THD.shape, torch.nan, device=self.device)
        kv = self.views(store)
        paged_decode_reference(q_THD.float(), kv.k_NSKD, kv.v_NSKD, self.batch, self.scale, out)
        return out, store

    def schedule(
        self, config: cuda.Config | None = None, num_programs: int | None = None
    ) -> cuda.CudaSchedule:
        """With NaN wherever something is written before it is read."""
        schedule = cuda.make_schedule(
            self.device,
            num_heads=self.num_heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            max_requests=len(self.lengths) + 1,
            config=config,
            num_programs=num_programs,
            is_fused=self.shape.fused,
        )
        for part in (schedule.parts, schedule.best, schedule.total):
            part.fill_(torch.nan)
        schedule.records.fill_(-1)
        return schedule

    def blank(self) -> torch.Tensor:
        like = self.queries()
        return torch.full(like.shape, torch.nan, dtype=like.dtype, device=self.device)

    def launch(
        self,
        schedule: cuda.CudaSchedule,
        store: torch.Tensor,
        out: torch.Tensor,
        **options: Any,
    ) -> None:
        kv = self.views(store)
        if not self.shape.fused:
            cuda.paged_decode_cuda(
                self.queries(), kv, self.batch, self.scale, schedule, out, **options
            )
            return
        front = cuda.Front(self.table_L2D, self.slots, self.norms)
        cuda.decode_with_front(
            self.qkv, front, kv, self.batch, self.scale, schedule, out, **options
        )

    def run(self, schedule: cuda.CudaSchedule, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        store, out = self.store.clone(), self.blank()
        cuda.refresh(schedule, self.batch)
        self.launch(schedule, store, out, **options)
        return out, store

    def agree(self, schedule: cuda.CudaSchedule, out: torch.Tensor, store: torch.Tensor) -> None:
        want, cache = self.expected()
        got = out.float()
        assert not got.isnan().any(), "an answer is missing, or saw what it must not"
        limit = NORM_ERROR[self.shape.dtype]
        error = (got - want).norm(dim=2)
        assert (error <= limit * want.norm(dim=2) + 1e-6).all(), error.max()
        counters = schedule.arrived, schedule.groups_arrived
        assert not any(c.any() for c in counters), "the counters are not back at zero"
        self._same_cache(store, cache)

    def _same_cache(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Old entries bit for bit; new keys up to the rounding of the last place."""
        whole = torch.arange(got[..., 0].numel(), device=self.device)
        fresh = torch.isin(whole, self.slots).view(got.shape[:2])
        bits = torch.int16
        assert torch.equal(got.view(bits)[~fresh], want.view(bits)[~fresh])
        torch.testing.assert_close(got[fresh], want[fresh], rtol=8e-3, atol=1e-5, equal_nan=True)
        values = got.shape[2] // 2
        assert torch.equal(got.view(bits)[..., values:], want.view(bits)[..., values:])


def check_case(
    lengths: list[int],
    shape: Shape,
    device: torch.device,
    *,
    config: cuda.Config | None = None,
    num_programs: int | None = None,
    seed: int = 0,
) -> None:
    """With the front and without it."""
    for fused in (True, False):
        case = DecodeCase(lengths, replace(shape, fused=fused), device, seed)
        schedule = case.schedule(config, num_programs)
        out, store = case.run(schedule)
        case.agree(schedule, out, store)


def _first_key(length: int, window: int | None) -> int:
    return 0 if window is None else max(0, length - window)
