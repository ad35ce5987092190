"""How long do the operators of a step take one by one? The engine's own kernels, at many sizes.

A case calls what the decoder calls for one operator of `cost.ops`, with weights and cache cold (see
`stopwatch`) and activations warm, as the operator before leaves them. Letters: T tokens, E hidden,
R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import AttentionSpec, DenseSpec, ModelSpec
from ridgeline.cost.ops import Op, step_ops
from ridgeline.cost.precision import Precision
from ridgeline.devices import Device
from ridgeline.kernels.cpu.elementwise import runs_native, turn_and_write
from ridgeline.kernels.draw_rows import draw_rows
from ridgeline.kernels.qk_norm_rope_write import HeadNorms, qk_norm_rope_write, rotate_
from ridgeline.kernels.rms_norm import add_norm, rms_norm
from ridgeline.kernels.silu_mul import gated, silu_mul
from ridgeline.kvcache import KVCache
from ridgeline.measure.stopwatch import Call
from ridgeline.quantization import Parameters
from ridgeline.quantization.plain import PlainWeights
from ridgeline.sampling.batch import SamplingBatch
from ridgeline.sampling.row import Needs
from ridgeline.sampling.sampler import sample

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
        spec,
        kv_groups(spec),
        -(-num_tokens // BLOCK_SIZE),
        BLOCK_SIZE,
        bench.torch_dtype,
        there,
    )
    qkv_TC = bench.numbers(num_tokens, (heads + 2 * kv_heads) * size)
    turned_TND = qkv_TC.view(num_tokens, -1, size)[:, : heads + kv_heads]
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
            turn_and_write(qkv_TC, table_L2D, positions_T, slots_T, views, norms)
            return
        if attention.qk_norm:
            for part in (turned_TND[:, :heads], turned_TND[:, heads:]):
                part.copy_(rms_norm(part, weight_D, spec.norm_eps))
        rotate_(turned_TND, angles_T1D, angles_T1D)
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
