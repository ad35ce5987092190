"""How long do the operators of a step take one by one? The engine's own kernels, at many sizes.

A case calls what the decoder calls for one operator of `cost.ops`, with weights and cache cold (see
`stopwatch`) and activations warm, as the operator before leaves them. Attention runs over a paged
cache with the engine's own backend, in step shapes at will. Letters: T tokens, E hidden, R rows of
logits, V vocabulary, B requests, M blocks per table row, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import AttentionSpec, DenseSpec, ModelSpec
from ridgeline.attention import AttentionBackend, choose_backend
from ridgeline.attention.layout import AttentionLayout
from ridgeline.cost.ops import Op, step_ops
from ridgeline.cost.setup import Precision
from ridgeline.devices import Device
from ridgeline.kernels.cpu.elementwise import rotate_and_write, runs_native
from ridgeline.kernels.draw_rows import draw_rows
from ridgeline.kernels.paged_decode_cuda import Prologue
from ridgeline.kernels.qk_norm_rope_write import HeadNorms, qk_norm_rope_write, rotate_
from ridgeline.kernels.rms_norm import add_norm, rms_norm
from ridgeline.kernels.silu_mul import gated, silu_mul
from ridgeline.kvcache import KVCache, bytes_per_block
from ridgeline.measure.models import Grid, config
from ridgeline.measure.stopwatch import Call
from ridgeline.quantization import Parameters
from ridgeline.quantization.plain import PlainWeights
from ridgeline.sampling.batch import SamplingBatch
from ridgeline.sampling.row import Needs
from ridgeline.sampling.sampler import sample
from ridgeline.step import StepShape

BLOCK_SIZE = 16
MAX_COPIES = 64
MAX_LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """`call(i)` runs all of `ops` once, on the i-th copy of its inputs."""

    what: str
    dtype: str
    ops: tuple[Op, ...]
    call: Call
    label: str


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the cases run. `cold_bytes` of other data push everything out of the last cache."""

    device: Device
    dtype: str  # float32, bfloat16, float16
    cold_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def precision(self) -> Precision:
        return Precision(self.dtype)

    def numbers(self, *shape: int) -> torch.Tensor:
        """Random numbers: on a GPU zeros would be faster than the truth."""
        there = self.device.torch_device
        blank = torch.empty(shape, dtype=self.torch_dtype, device=there)
        return blank.uniform_(-0.1, 0.1)

    def copies(self, *shape: int) -> list[torch.Tensor]:
        """As many tensors as it takes that the first is cold again after the last."""
        size = self.torch_dtype.itemsize * int(np.prod(shape))
        count = max(1, min(MAX_COPIES, -(-self.cold_bytes // size)))
        return [self.numbers(*shape) for _ in range(count)]

    def case(self, what: str, ops: Sequence[Op], call: Call, label: str) -> Case:
        ones = tuple(replace(op, count=1) for op in ops)
        return Case(what, self.precision.short_dtype, ones, call, label)


def by_name(spec: ModelSpec, num_tokens: int, precision: Precision) -> dict[str, Op]:
    """The operators of a step of `num_tokens` requests with one token each."""
    ops = step_ops(spec, ((1, 0),) * num_tokens, precision=precision)
    return {op.name: op for op in ops}


# ------------------------------------------------------------------------ matrix products


def matmul_series(bench: Bench, spec: ModelSpec, tokens: Sequence[int]) -> Iterator[list[Case]]:
    """For each product of the model the cases with more and more rows."""
    names = [op.name for op in by_name(spec, 1, bench.precision).values() if op.kind == "matmul"]
    for name in names:
        rows = [n for n in tokens if name != "lm_head" or n <= MAX_LOGIT_ROWS]
        ops = [by_name(spec, n, bench.precision)[name] for n in rows]
        plain = PlainWeights()
        weights = [
            plain.finish({"weight": weight})
            for weight in bench.copies(int(ops[0].n), int(ops[0].k))
        ]
        yield [_matmul(bench, op, plain, weights) for op in ops]


def _matmul(bench: Bench, op: Op, plain: PlainWeights, weights: list[Parameters]) -> Case:
    x_TE = bench.numbers(int(op.m), int(op.k))

    def call(number: int) -> torch.Tensor:
        return plain.linear(x_TE, weights[number % len(weights)], None)

    return bench.case("matmul", (op,), call, f"{op.name} {int(op.m)}x{op.n}x{op.k}")


# ------------------------------------------------------------------------ elementwise passes


def stream_series(bench: Bench, spec: ModelSpec, tokens: Sequence[int]) -> Iterator[list[Case]]:
    """Norm with residual, rotation with cache write, activation, embedding, sampling."""
    makers: dict[str, Callable[[Bench, ModelSpec, int], Call]] = {
        "norm": _norm,
        "rope_and_cache": _rope_and_cache,
        "activation": _activation,
        "embedding": _embedding,
        "sampling": _sampling,
    }
    for name, make in makers.items():
        rows = [n for n in tokens if name != "sampling" or n <= MAX_LOGIT_ROWS]
        yield [_stream(bench, spec, name, n, make(bench, spec, n)) for n in rows]


def _stream(bench: Bench, spec: ModelSpec, name: str, num_tokens: int, call: Call) -> Case:
    op = by_name(spec, num_tokens, bench.precision)[name]
    return bench.case(op.kind, (op,), call, f"{name} {num_tokens} tokens")


def _norm(bench: Bench, spec: ModelSpec, num_tokens: int) -> Call:
    x_TE, y_TE = (bench.numbers(num_tokens, spec.hidden_size) for _ in range(2))
    weight_E = bench.numbers(spec.hidden_size)

    return lambda number: add_norm(y_TE, x_TE, weight_E, spec.norm_eps)


def _rope_and_cache(bench: Bench, spec: ModelSpec, num_tokens: int) -> Call:
    """As `layers.attention` does it between its two products, but for attention itself."""
    attention, there = spec.layers[0].attention, bench.device.torch_device
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    cache = KVCache(
        spec, kv_groups(spec), -(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, bench.torch_dtype, there
    )
    qkv_TC = bench.numbers(num_tokens, (heads + 2 * kv_heads) * size)
    rotated_TND = qkv_TC.view(num_tokens, -1, size)[:, : heads + kv_heads]
    angles_T1D = torch.rand(num_tokens, 1, size, device=there)
    slots_T = torch.arange(BLOCK_SIZE, BLOCK_SIZE + num_tokens, device=there)
    weight_D = bench.numbers(size)
    norms = HeadNorms(weight_D, weight_D, spec.norm_eps) if attention.qk_norm else None
    table_L2D = torch.rand(num_tokens, 2, size, device=there)
    positions_T = torch.arange(num_tokens, device=there)

    def call(number: int) -> None:
        views = cache.layers[number % len(cache.layers)].views
        if views is not None and qkv_TC.is_cuda:
            qk_norm_rope_write(qkv_TC, table_L2D, positions_T, slots_T, views, norms=norms)
            return
        if views is not None and runs_native(there, bench.torch_dtype):
            rotate_and_write(qkv_TC, table_L2D, positions_T, slots_T, views, norms)
            return
        if attention.qk_norm:
            for part in (rotated_TND[:, :heads], rotated_TND[:, heads:]):
                part.copy_(rms_norm(part, weight_D, spec.norm_eps))
        rotate_(rotated_TND, angles_T1D, angles_T1D)
        layer = cache.layers[number % len(cache.layers)]
        layer.write(slots_T, qkv_TC[:, heads * size :])

    return call


def _activation(bench: Bench, spec: ModelSpec, num_tokens: int) -> Call:
    inner = spec.layers[0].feed_forward
    x_TG = bench.numbers(num_tokens, 2 * inner.intermediate_size)
    name = inner.activation if isinstance(inner, DenseSpec) else "silu"
    return lambda number: silu_mul(x_TG) if name == "silu" else gated(x_TG, name)


def _embedding(bench: Bench, spec: ModelSpec, num_tokens: int) -> Call:
    table_VE = bench.numbers(spec.vocab_size, spec.hidden_size)
    ids_T = torch.randint(spec.vocab_size, (num_tokens,), device=bench.device.torch_device)
    return lambda number: functional.embedding(ids_T, table_VE)


def _sampling(bench: Bench, spec: ModelSpec, num_rows: int) -> Call:
    """Greedy, from the logits as the output matrix leaves them to the copy for the host; on a GPU
    as captured steps do it, in one launch."""
    there = bench.device.torch_device
    logits_RV = bench.numbers(num_rows, spec.vocab_size).float()
    batch = SamplingBatch(num_rows, Needs(0))
    host_positions = np.zeros(num_rows, np.int64)
    positions_R = torch.zeros(num_rows, dtype=torch.int64, device=there)
    last_ids_N = torch.zeros(num_rows, dtype=torch.int64, device=there)
    slots_R = torch.arange(num_rows, device=there)
    answer_R = torch.empty(num_rows, dtype=torch.int64)
    if there.type == "cuda":
        return lambda number: draw_rows(logits_RV, positions_R, None)

    def call(number: int) -> torch.Tensor:
        found = sample(logits_RV, batch, positions_R, host_positions)
        last_ids_N.index_copy_(0, slots_R, found.token_ids_R)
        ids_R = found.token_ids_R.where(found.is_sound_R, -1)
        return answer_R.copy_(ids_R)

    return call


def attention_of(spec: ModelSpec) -> AttentionSpec:
    """The attention of a model whose layers are all alike."""
    return spec.layers[0].attention


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
