"""Random steps of attention: ragged lengths, shuffled blocks, NaN wherever nothing may be read."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from ridgeline.architectures.spec import AttentionSpec, RopeSpec
from ridgeline.attention.layout import AttentionLayout
from ridgeline.kvcache import LayerKV
from ridgeline.kvcache.formats import PlainKV
from tests.conftest import TEST_DEVICE
from tests.kernels.kv_formats import FORMATS, poisoned

HEADS = ((1, 1), (4, 1), (4, 2), (4, 4), (6, 3), (8, 2))
HEAD_DIMS = (8, 16, 24, 40, 64, 80, 128)


@dataclass(frozen=True)
class Shape:
    """What a case is like: (cached, new) tokens per request and the layer's attention."""

    lengths: tuple[tuple[int, int], ...]
    spec: AttentionSpec
    block_size: int


def random_shape(rng: random.Random) -> Shape:
    heads, kv_heads = rng.choice(HEADS)
    window = rng.choice((None, None, 1, 2, 5, 16, 33, 300))
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=rng.choice(HEAD_DIMS),
        rope=RopeSpec(),
        window=window,
        scale=rng.choice((None, None, 0.3)),
    )
    kind = rng.choice(("decode", "prefill", "chunk", "mixed", "mixed"))
    lengths = tuple(_length(rng, kind) for _ in range(rng.randint(1, 6)))
    return Shape(lengths, spec, rng.choice((1, 4, 16)))


def _length(rng: random.Random, kind: str) -> tuple[int, int]:
    if kind == "mixed":
        kind = rng.choice(("decode", "prefill", "chunk"))
    cached = 0 if kind == "prefill" else rng.choice((0, 1, 7, 30, rng.randint(1, 200)))
    new = 1 if kind == "decode" else rng.choice((1, 2, 3, 8, 9, 65, rng.randint(1, 120)))
    return cached, new


@dataclass(frozen=True)
class Case:
    """`keys` and `values` are [n, K, D] of each request, in float64 before rounding."""

    shape: Shape
    layout: AttentionLayout
    q_THD: torch.Tensor
    layer_kv: LayerKV
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def make_case(
    shape: Shape, seed: int, dtype: torch.dtype = torch.float32, device: str = TEST_DEVICE
) -> Case:
    spec, size = shape.spec, shape.block_size
    noise = torch.Generator().manual_seed(seed)
    totals = [cached + new for cached, new in shape.lengths]
    needed = [-(-total // size) for total in totals]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=noise).add_(1).tolist()
    width = spec.num_kv_heads, spec.head_dim
    kv_format = PlainKV()
    store = kv_format.allocate(num_blocks + 1, size, *width, dtype, torch.device(device))
    store[0].fill_(torch.nan)
    flat = store[0].view(-1, 2, *width)
    table = torch.zeros(len(totals), max(needed) + 1, dtype=torch.int32)
    keys, values, slots_T = [], [], []
    for row, (cached, new) in enumerate(shape.lengths):
        blocks = [free.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        total = cached + new
        slots = torch.tensor([blocks[i // size] * size + i % size for i in range(total)])
        kv = torch.randn(total, 2, *width, generator=noise, dtype=torch.float64).to(dtype)
        first = 0 if spec.window is None else max(0, cached + 1 - spec.window)
        flat[slots[first:].to(device)] = kv[first:].to(device)  # what lies behind is NaN
        table[row, : first // size] = 0
        keys.append(kv[:, 0].double())
        values.append(kv[:, 1].double())
        slots_T.append(slots[cached:])
    starts = [0]
    for _, new in shape.lengths:
        starts.append(starts[-1] + new)
    layout = AttentionLayout(
        [new for _, new in shape.lengths],
        totals,
        starts,
        (table.to(device),),
        (torch.cat(slots_T).to(device),),
        size,
    )
    # A slice of something wider, as the fused projection gives it: rows are not contiguous.
    wide = torch.randn(starts[-1], spec.num_heads + 3, spec.head_dim, generator=noise)
    q_THD = wide.to(dtype).to(device)[:, : spec.num_heads]
    return Case(shape, layout, q_THD, LayerKV(kv_format, store, 0, *width), keys, values)


def coded(case: Case, name: str = "int8") -> Case:
    """The same with fewer bits in the cache, and NaN wherever nothing may be read; what is expected
    is what the codes say."""
    spec, (plain,) = case.shape.spec, case.layer_kv.store
    width, dtype = (spec.num_kv_heads, spec.head_dim), case.q_THD.dtype
    kind = FORMATS[name]()
    store = poisoned(kind, (plain.shape[0], case.shape.block_size, *width), dtype)
    rows_NC = plain.reshape(-1, plain.shape[-1])
    written = (~rows_NC[:, 0].isnan()).nonzero().flatten()
    kind.write(store, written, rows_NC[written])
    wide = FORMATS[name]()  # answers in float32
    every = wide.gather(store, torch.arange(len(rows_NC)), *width).double()
    keys, values = [], []
    for row, total in enumerate(case.layout.seq_lens):
        places, size = torch.arange(total), case.shape.block_size
        table = case.layout.block_tables_BM[0][row]
        found = every[table[places // size] * size + places % size].nan_to_num(0.0)
        keys.append(found[:, 0])
        values.append(found[:, 1])
    layer_kv = LayerKV(kind, store, 0, *width)
    return replace(case, layer_kv=layer_kv, keys=keys, values=values)


def naive(
    case: Case, dtype: torch.dtype = torch.float64, sinks_H: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention by its definition with the whole score matrix, in `dtype`; `sinks_H`: with a
    further column of scores."""
    spec = case.shape.spec
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    share = spec.num_heads // spec.num_kv_heads
    outs = []
    for row, (cached, new) in enumerate(case.shape.lengths):
        start = case.layout.query_start[row]
        q = case.q_THD[start : start + new].cpu().to(dtype).transpose(0, 1)
        k, v = (
            x[row].to(dtype).transpose(0, 1).repeat_interleave(share, 0)
            for x in (case.keys, case.values)
        )
        query, key = torch.arange(cached, cached + new)[:, None], torch.arange(cached + new)
        hidden = key > query
        if spec.window is not None:
            hidden = hidden | (key <= query - spec.window)
        scores = q @ k.transpose(1, 2) * scale
        if spec.scores_cap is not None:
            scores = spec.scores_cap * torch.tanh(scores / spec.scores_cap)
        scores = scores.masked_fill(hidden, -torch.inf)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if sinks_H is not None:
            sinks = sinks_H.to(dtype)[:, None, None].expand(-1, new, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = torch.softmax(scores, -1, dtype=wide).to(dtype)[..., : cached + new]
        outs.append((weights @ v).transpose(0, 1))
    return torch.cat(outs)
