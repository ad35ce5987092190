"""Decode attention as a case: raw products, a cache with NaN wherever nothing may be read, and what
has to come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.kernels import paged_decode_cuda as cuda
from ridgeline.kernels.paged_decode import DecodeBatch, paged_decode_reference
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.qk_norm_rope_write import HeadNorms, qk_norm_rope_write_reference
from ridgeline.kvcache import Store
from tests.kernels.kv_formats import FORMATS, check_near, poisoned

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
    kv: str = "auto"
    new: int = 1


class DecodeCase:
    """Request b has lengths[b] tokens, the new ones included; 0 is padding. The new tokens lie in
    `qkv_TX`; with `fused` they are not in the cache yet."""

    def __init__(
        self, lengths: list[int], shape: Shape, device: torch.device, seed: int = 0
    ) -> None:
        self.shape, self.lengths, self.device = shape, lengths, device
        self.random = torch.Generator().manual_seed(seed)
        self.scale = shape.head_dim**-0.5
        heads = shape.kv_heads * shape.group
        width = (heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = self._random(len(lengths) * shape.new, width + WIDER)[:, :width]
        self.table_L2D = self._rotations(max(lengths) + 1)
        weights = (1 + 0.2 * self._random(2, shape.head_dim).float()).to(shape.dtype)
        self.norms = HeadNorms(weights[0], weights[1], 1e-6) if shape.norms else None
        widths = [-(-length // shape.block_size) for length in lengths]
        tables, slots = self._place(widths)
        num_blocks = sum(widths) + 2
        self.kind = FORMATS[shape.kv]()
        sizes = num_blocks, shape.block_size, shape.kv_heads, shape.head_dim
        store = poisoned(self.kind, sizes, shape.dtype)
        rows = torch.randperm(len(lengths), generator=self.random) + 1
        if not shape.named_rows:
            rows = torch.arange(len(lengths))
        named = torch.zeros(len(lengths) + 1, tables.shape[1] + 1, dtype=torch.int32)
        for row, length in enumerate(lengths):
            last = max(length - shape.new if shape.fused else length, 0)
            first = min(_first_key(length - shape.new + 1, shape.window), last)
            position = torch.arange(first, last)
            blocks = tables[row].long()[position // shape.block_size]
            width = 2 * shape.kv_heads * shape.head_dim
            numbers = torch.randn(len(position), width, generator=self.random).to(shape.dtype)
            self.kind.write(store, blocks * shape.block_size + position % shape.block_size, numbers)
            named[rows[row], : tables.shape[1]] = tables[row]
        self.store: Store = tuple(tensor.to(device) for tensor in store)
        self.slots = slots.to(device)
        self.batch = DecodeBatch(
            named.to(device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.arange(len(lengths) + 1, dtype=torch.int32, device=device) * shape.new,
            shape.new,
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
        slots = torch.zeros(len(widths), self.shape.new, dtype=torch.int64)
        used, size = 0, self.shape.block_size
        for row, width in enumerate(widths):
            tables[row, :width] = shuffled[used : used + width]
            used += width
            for number in range(self.shape.new):
                if (place := self.lengths[row] - self.shape.new + number) >= 0:
                    slots[row, number] = int(tables[row, place // size]) * size + place % size
        return tables, slots.flatten()

    def with_lengths(self, other: DecodeCase) -> None:
        """Takes over the contents of another case of this shape and number of requests, in the
        same memory; the table of rotations and the cache are large enough."""
        self.lengths = other.lengths
        for mine, its in (
            (self.qkv, other.qkv),
            *((mine[: len(its)], its) for mine, its in zip(self.store, other.store, strict=True)),
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

    def views(self, store: Store) -> PagedKV:
        found = self.kind.views(store, self.shape.kv_heads, self.shape.head_dim)
        if found is None:  # nobody reads it in place on a CPU, but for this test
            raise AssertionError("the format has no views")
        return found

    def copy(self) -> Store:
        return tuple(tensor.clone() for tensor in self.store)

    def queries(self) -> torch.Tensor:
        """Of the case without a front, as they are."""
        size = self.shape.head_dim
        row = self.qkv.stride(0)
        return self.qkv.as_strided((len(self.qkv), self.num_heads, size), (row, size, 1))

    def expected(self, written: Store | None = None) -> tuple[torch.Tensor, Store]:
        """Answers in float32, over what was `written` if it is given, and the cache afterwards."""
        store = self.copy()
        q_THD = self.queries()
        if self.shape.fused:
            slots = torch.where(self.is_real, self.slots, -1)
            ends = self.batch.seq_lens_B.long()[:, None] - self.shape.new
            numbers = torch.arange(self.shape.new, device=self.device)
            positions = (ends + numbers).clamp_min(0).flatten()
            q_THD = qk_norm_rope_write_reference(
                self.qkv, self.table_L2D, positions, slots, self.views(store), norms=self.norms
            )
        out = torch.full(q_THD.shape, torch.nan, device=self.device)
        views = self.views(store if written is None else written)
        paged_decode_reference(q_THD.float(), views, self.batch, self.scale, out)
        return out, store

    @property
    def is_real(self) -> torch.Tensor:
        """Tokens of no padding, [T]."""
        return (self.batch.seq_lens_B > 0).repeat_interleave(self.shape.new)

    def schedule(
        self, config: cuda.Config | None = None, num_programs: int | None = None
    ) -> cuda.CudaSchedule:
        """With NaN wherever something is written before it is read."""
        schedule = cuda.make_schedule(
            self.device,
            num_heads=self.num_heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            block_size=self.shape.block_size,
            max_requests=len(self.lengths) + 1,
            numbers=cuda.numbers_of(self.views(self.store)),
            config=config,
            num_programs=num_programs,
            num_new=self.shape.new,
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
        store: Store,
        out: torch.Tensor,
        **options: Any,
    ) -> None:
        kv = self.views(store)
        if not self.shape.fused:
            cuda.paged_decode_cuda(
                self.queries(), kv, self.batch, self.scale, schedule, out, **options
            )
            return
        front = cuda.Prologue(self.table_L2D, self.slots, self.norms)
        cuda.decode_with_prologue(
            self.qkv, front, kv, self.batch, self.scale, schedule, out, **options
        )

    def run(self, schedule: cuda.CudaSchedule, **options: Any) -> tuple[torch.Tensor, Store]:
        store, out = self.copy(), self.blank()
        cuda.refresh(schedule, self.batch)
        self.launch(schedule, store, out, **options)
        return out, store

    def agree(self, schedule: cuda.CudaSchedule, out: torch.Tensor, store: Store) -> None:
        # Of few bits a code may be the next one, which is checked with the cache.
        want, cache = self.expected(None if self.shape.kv == "auto" else store)
        got = out.float()
        assert not got.isnan().any(), "an answer is missing, or saw what it must not"
        limit = NORM_ERROR[self.shape.dtype]
        if self.shape.kv == "int4":  # turned queries are rounded once more
            limit = max(limit, 4e-3)
        error = (got - want).norm(dim=2)
        assert (error <= limit * want.norm(dim=2) + 1e-6).all(), error.max()
        counters = schedule.arrived, schedule.groups_arrived
        assert not any(c.any() for c in counters), "the counters are not back at zero"
        self._same_cache(store, cache)

    def _same_cache(self, got: Store, want: Store) -> None:
        """Old entries and values bit for bit; new keys up to the rounding of the last place, which
        in few bits is seldom another."""
        whole = torch.arange(got[0].shape[0] * got[0].shape[1], device=self.device)
        fresh = torch.isin(whole, self.slots)
        for ours, theirs in zip(got, want, strict=True):
            a, b = (x.reshape(len(whole), -1).view(torch.uint8) for x in (ours, theirs))
            assert torch.equal(a[~fresh], b[~fresh])
            if self.shape.kv in ("auto", "fp8"):
                assert torch.equal(a[:, a.shape[1] // 2 :], b[:, b.shape[1] // 2 :])
        kv = self.shape.kv_heads, self.shape.head_dim
        ours, theirs = (
            self.kind.gather(store, whole[fresh], *kv)[:, 0].float() for store in (got, want)
        )
        if self.shape.kv == "auto":
            torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=1e-5, equal_nan=True)
            return
        if self.shape.kv == "fp8":
            apart = ~torch.isclose(ours, theirs, rtol=8e-3, atol=1e-3, equal_nan=True)
            assert apart.float().mean() < 0.01
            return
        # Padding has a slot too, which nobody writes to.
        check_near(got, want, self.slots[self.is_real])


def check_case(
    lengths: list[int],
    shape: Shape,
    device: torch.device,
    *,
    config: cuda.Config | None = None,
    num_programs: int | None = None,
    seed: int = 0,
) -> None:
    """With the front, and for one new token without it too."""
    for fused in (True, False) if shape.new == 1 else (True,):
        case = DecodeCase(lengths, replace(shape, fused=fused), device, seed)
        schedule = case.schedule(config, num_programs)
        out, store = case.run(schedule)
        case.agree(schedule, out, store)


def _first_key(length: int, window: int | None) -> int:
    return 0 if window is None else max(0, length - window)
