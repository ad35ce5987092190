"""How long does attention take over a paged cache? The engine's own backend, step shapes at will.

Letters: B requests, M blocks per table row, T tokens, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention import AttentionBackend, choose_backend
from ridgeline.attention.layout import AttentionLayout
from ridgeline.cost.ops import step_ops
from ridgeline.kernels.paged_decode_cuda import Prologue
from ridgeline.kvcache import KVCache, bytes_per_block
from ridgeline.measure.models import Grid, config
from ridgeline.measure.operators import BLOCK_SIZE, Bench, Case, attention_of
from ridgeline.measure.stopwatch import Call
from ridgeline.step import StepShape

NUM_LAYERS = 6  # caches that take turns
SPREADS = (0.01, 0.15)  # of the contexts that decode together
CACHE_SHARE = 0.4  # of the free memory, for the cache; what attention gathers comes on top


@dataclass(frozen=True, slots=True)
class AttentionBench:
    """One cache of `num_blocks` blocks in `NUM_LAYERS` layers, and the backend that reads it."""

    bench: Bench
    spec: ModelSpec
    backend: AttentionBackend
    cache: KVCache
    order: torch.Tensor  # block ids, shuffled: neighbours in a request are not so in memory

    def fits(self, shape: StepShape) -> bool:
        return sum(_blocks(new + before) for new, before in shape) <= self.cache.num_blocks

    def case(self, what: str, shape: StepShape, label: str) -> Case:
        layout = self._layout(shape)
        plan: Any = self.backend.plan(layout, 0, None)
        attention = self.spec.layers[0].attention
        q_THD = self.bench.numbers(layout.query_start[-1], attention.num_heads, attention.head_dim)

        def call(number: int) -> torch.Tensor:
            layer = self.cache.layers[number % len(self.cache.layers)]
            return self.backend.attend(q_THD, layer, plan, attention)

        ops = step_ops(self.spec, shape, precision=self.bench.precision)
        done = [op for op in ops if op.kind.endswith("_attention")]
        backend = self.backend
        if backend.takes_product(self.cache.layers[0], plan, attention, q_THD.dtype):
            done += [op for op in ops if op.name == "rope_and_cache"]
            return self.bench.case(what, done, self._from_product(backend, layout, plan), label)
        return self.bench.case(what, done, call, label)

    def _from_product(self, backend: AttentionBackend, layout: AttentionLayout, plan: Any) -> Call:
        """One kernel for what the layers then leave to the backend."""
        attention, there = attention_of(self.spec), self.bench.device.torch_device
        heads = attention.num_heads + 2 * attention.num_kv_heads
        qkv_TX = self.bench.numbers(len(layout.seq_lens), heads * attention.head_dim)
        last = [end - 1 for end in layout.seq_lens]
        blocks_BM = layout.block_tables_BM[0].tolist()
        slots = [
            row[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for row, at in zip(blocks_BM, last, strict=True)
        ]
        table_L2D = torch.rand(max(last) + 1, 2, attention.head_dim, device=there)
        prologue = Prologue(table_L2D, torch.tensor(slots, device=there))

        def call(number: int) -> torch.Tensor:
            layer = self.cache.layers[number % len(self.cache.layers)]
            return backend.attend_product(qkv_TX, prologue, layer, plan, attention)

        return call

    def _layout(self, shape: StepShape) -> AttentionLayout:
        there = self.bench.device.torch_device
        lens = [new for new, _ in shape]
        ends = [new + before for new, before in shape]
        width = max(_blocks(end) for end in ends)
        tables_BM = torch.zeros(len(shape), width, dtype=torch.int32)
        used = 0
        for row, end in enumerate(ends):
            tables_BM[row, : _blocks(end)] = self.order[used : used + _blocks(end)]
            used += _blocks(end)
        starts = [sum(lens[:row]) for row in range(len(lens) + 1)]
        return AttentionLayout(
            lens,
            ends,
            starts,
            (tables_BM.to(there),),
            (torch.zeros(0, dtype=torch.int64, device=there),),
            BLOCK_SIZE,
        )


def open_attention(bench: Bench, heads: tuple[int, int, int], grid: Grid) -> AttentionBench:
    """A cache for the largest shape of `grid`, or as large as the memory allows."""
    query_heads, kv_heads, head_dim = heads
    spec = read_spec(
        config(query_heads * head_dim, NUM_LAYERS, query_heads, kv_heads, 64, 64, head_dim=head_dim)
    )
    size = bytes_per_block(spec, BLOCK_SIZE, bench.torch_dtype.itemsize)
    wanted = max(
        sum(_blocks(new + before) for new, before in shape) for _, shape, _ in shapes(grid)
    )
    room = int(bench.device.memory_free() * CACHE_SHARE) // size - 1
    there = bench.device.torch_device
    cache = KVCache(
        spec, kv_groups(spec), max(1, min(wanted, room)), BLOCK_SIZE, bench.torch_dtype, there
    )
    for store in cache.stores:
        for tensor in store:
            tensor.uniform_(-0.1, 0.1)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(cache.num_blocks, generator=generator).to(torch.int32) + 1
    backend = choose_backend("auto", spec, bench.torch_dtype, there)
    return AttentionBench(bench, spec, backend, cache, order)


def attention_cases(bench: AttentionBench, grid: Grid) -> Iterator[Case]:
    """Every shape of the grid that fits in the cache."""
    for what, shape, label in shapes(grid):
        if bench.fits(shape):
            yield bench.case(what, shape, label)


def shapes(grid: Grid) -> list[tuple[str, StepShape, str]]:
    """(class of point, step shape, label) of everything that attention is measured on."""
    found: list[tuple[str, StepShape, str]] = []
    for number, (rows, context) in enumerate(grid.decodes):
        shape = ragged(rows, context, SPREADS[number % len(SPREADS)])
        found.append(("decode_attention", shape, f"decode {rows} x {context}"))
    for contexts in grid.skewed:
        shape = tuple((1, context - 1) for context in contexts)
        found.append(("decode_attention", shape, f"decode {_listed(contexts)}"))
    for new, before in grid.prefills:
        found.append(("prefill_attention", ((new, before),), f"prefill {new} after {before}"))
    for new, rows, context in grid.mixes:
        mix = ((new, 0), *ragged(rows, context, SPREADS[0]))
        found.append(("mixed_attention", mix, f"prefill {new}, decode {rows} x {context}"))
    return found


def ragged(rows: int, context: int, spread: float) -> StepShape:
    """Decodes of `context` tokens on average, from (1 - spread) to (1 + spread) times as many: in
    a living engine no two requests are of one length, and equal ones are a special case."""
    places = [2 * row / (rows - 1) - 1 if rows > 1 else 0.0 for row in range(rows)]
    return tuple((1, max(1, round(context * (1 + spread * place))) - 1) for place in places)


def _listed(contexts: Sequence[int]) -> str:
    return "+".join(f"{contexts.count(c)}x{c}" for c in dict.fromkeys(contexts))


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
