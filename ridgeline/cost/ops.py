"""Which operators does a step run on each device, with how many operations, bytes and messages?

Letters: M tokens of the step, R rows that need logits, E hidden, H query heads, K KV heads, D head
size, F feed-forward, V vocabulary, X experts. Everything is of one device, the fullest ("rank");
the layers of all pipeline stages are listed, because a token passes them all.

With several groups of devices (dp) the tokens of a step are those of one group, but for what is in
`OF_WAVE`: every device does that for the tokens of all groups, which come together before.

Formulas: a matrix product of [M, k] and [k, n] takes 2 M n k operations and moves its weights, its
input and its output once; decode attention reads every visible key and value once; causal prefill
attention computes the visible pairs and reads each visible key once per chunk. Expected experts
with work: X (1 - (1 - k/X)^M), if tokens choose at random. Behind the last layer's attention only
rows that need logits are computed; its attention is counted whole, although a backend may leave
out what nobody needs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.counts import flops_per_key, kept_bits, layer_kv_bytes, nearest_format
from ridgeline.architectures.parts import (
    BEFORE_ATTENTION,
    ROUTER,
    Part,
    branch_norms,
    branches,
    products,
)
from ridgeline.architectures.shares import fullest, fullest_queries, fullest_share
from ridgeline.architectures.spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, ModelSpec
from ridgeline.cost.setup import LOGIT_BYTES, ONE_DEVICE, PLAIN, Layout, Precision
from ridgeline.cost.step_features import (
    MOST_TOGETHER,
    AttentionFeatures,
    StepFeatures,
    attention_kind,
    attention_kinds,
    distinct_layers,
    step_features,
)
from ridgeline.formats import CHECKPOINT
from ridgeline.step import StepShape

KINDS = (
    "matmul",
    "prefill_attention",
    "decode_attention",
    "check_attention",
    "elementwise",
    "embedding",
    "sampling",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "point_to_point",
)
COLLECTIVES = KINDS[-4:]
OF_WAVE = frozenset(
    {
        ROUTER,
        "experts_gate_up",
        "experts_activation",
        "experts_down",
        "experts_sum",
        "sum_experts",
    }
)


@dataclass(frozen=True, slots=True)
class Op:
    """ONE of `count` equal operators of a step, on one rank.

    `read_bytes` and `write_bytes` are memory traffic, with `weight_bytes` and `kv_bytes` the parts
    of it that are weights or cached keys and values; `sent_bytes` go to other ranks. `ranks` take
    part in a collective. `weights` names the weight format of a matmul, and `cpu_dtype` what the
    kernels of CPUs multiply them in, if it is not `dtype`.

    m, n, k of a matmul are those of the product. Attention has m query tokens and k keys read;
    n is the most keys that one request reads (decode), the most new tokens of one (check) or the
    number of chunks (prefill).
    `mixed`: decode and prefill attention occur in the same step.
    """

    name: str
    kind: str
    count: int
    flops: float
    read_bytes: float
    write_bytes: float
    sent_bytes: float = 0.0
    dtype: str = "bf16"
    m: float = 0
    n: int = 0
    k: int = 0
    ranks: int = 1
    weight_bytes: float = 0.0
    mixed: bool = False
    kv_bytes: float = 0.0
    weights: str = "plain"
    cpu_dtype: str | None = None

    @property
    def bytes(self) -> float:
        """Memory traffic of one."""
        return self.read_bytes + self.write_bytes

    def dtype_on(self, kind: str) -> str:
        """In which dtype a device of this kind computes it."""
        return self.cpu_dtype if kind == "cpu" and self.cpu_dtype is not None else self.dtype


def step_ops(
    spec: ModelSpec,
    shape: StepShape,
    layout: Layout = ONE_DEVICE,
    precision: Precision = PLAIN,
    num_logits: int | None = None,
    wave: tuple[int, int] | None = None,
) -> tuple[Op, ...]:
    """The operators of a step; `num_logits` rows need logits (None: one per request). Of a wave
    those of the group that has `shape`; `wave` are the tokens, and the rows of logits, of all
    groups, where it is not the only one with any."""
    kinds = attention_kinds(spec)
    features = step_features(tuple(kinds), shape)
    if not features.num_tokens:
        return ()
    rows = features.num_requests if num_logits is None else num_logits
    every_token, every_row = wave or (features.num_tokens, rows)
    ops = (
        *_part_of_wave(token_ops, spec, features.num_tokens, every_token, layout, precision),
        *attention_ops(kinds, features, layout, precision),
        *_part_of_wave(output_ops, spec, rows, every_row, layout, precision),
    )
    return _merged(ops)


def _part_of_wave(
    build: Callable[..., Iterable[Op]],
    spec: ModelSpec,
    own: int,
    every: int,
    layout: Layout,
    precision: Precision,
) -> Iterator[Op]:
    yield from (
        op for op in build(spec, own, layout, precision) if own == every or op.name not in OF_WAVE
    )
    if own != every:
        yield from (op for op in build(spec, every, layout, precision) if op.name in OF_WAVE)


def stage_ops(
    spec: ModelSpec,
    shape: StepShape,
    layout: Layout,
    precision: Precision,
    stage: int,
    num_logits: int | None = None,
) -> tuple[Op, ...]:
    """Those of `step_ops` that one pipeline stage runs; each but the last ends with a message."""
    features = step_features(tuple(attention_kinds(spec)), shape)
    build = _Builder(spec, features.num_tokens, layout, precision)
    passed = tuple(build.messages([], is_first=True))
    ops = []
    if stage == 0:
        ops += [build.embedding(), *(op for op in passed if op.kind == "all_reduce")]
    alike: dict[tuple[LayerSpec, bool], list[int]] = {}
    for index in layout.stage_layers(spec.num_layers, stage):
        key = (spec.layers[index], index == spec.num_layers - 1)
        alike.setdefault(key, []).append(index)
    for indices in alike.values():
        for op in layer_ops(spec, indices[0], shape, layout, precision):
            ops.append(replace(op, count=op.count * len(indices)))
    if stage == layout.pp - 1:
        rows = features.num_requests if num_logits is None else num_logits
        ops += output_ops(spec, rows, layout, precision)
    else:
        ops += [replace(op, count=1) for op in passed if op.kind == "point_to_point"]
    return _merged(ops)


def layer_ops(
    spec: ModelSpec, index: int, shape: StepShape, layout: Layout, precision: Precision
) -> tuple[Op, ...]:
    """Those of one layer in the order of its work, messages among them; of the last layer without
    what is done for rows of logits alone (see `output_ops`)."""
    layer = spec.layers[index]
    kind = attention_kind(layer.attention)
    features = step_features((kind,), shape)
    build = _Builder(spec, features.num_tokens, layout, precision, layer)
    ops = [
        *build.before_attention(layer, 1),
        *attention_ops({kind: 1}, features, layout, precision),
    ]
    if index == spec.num_layers - 1:
        return tuple(ops)
    out, *inner, norms = build.behind_attention(layer, 1)
    messages = [replace(op, count=1) for op in build.messages([layer], is_first=False)]
    sums = [op for op in messages if op.kind == "all_reduce"]
    return (*ops, out, *sums, norms, *inner, *sums)


def _merged(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Equal operators as one: where all tokens need logits the last layer is like the others."""
    counts: dict[Op, int] = {}
    for op in ops:
        one = replace(op, count=1)
        counts[one] = counts.get(one, 0) + op.count
    return tuple(replace(op, count=count) for op, count in counts.items())


# ------------------------------------------------------------------------ by number of tokens


def token_ops(
    spec: ModelSpec,
    num_tokens: int,
    layout: Layout,
    precision: Precision,
    layers: Mapping[LayerSpec, int] | None = None,
) -> Iterator[Op]:
    """Everything whose cost depends on the number of tokens alone: all but attention, and what the
    last layer does behind its attention (see `output_ops`). `layers` are those of
    `distinct_layers`, for who asks often."""
    build = _Builder(spec, num_tokens, layout, precision)
    last = spec.layers[-1] if spec.has_head else None
    if spec.has_embedding:
        yield build.embedding()
    for layer, count in (layers or distinct_layers(spec)).items():
        build = replace(build, layer=layer)
        yield from build.before_attention(layer, count)
        if later := count - (layer == last):
            yield from build.behind_attention(layer, later)
    layers_here = spec.layers[:-1] if spec.has_head else spec.layers
    yield from build.messages(layers_here, is_first=spec.has_embedding)


def stage_message(spec: ModelSpec, num_tokens: int, layout: Layout, precision: Precision) -> Op:
    """That with which each stage but the last ends."""
    return _Builder(spec, num_tokens, layout, precision).to_next_stage(1)


def layer_products(spec: ModelSpec, layout: Layout, precision: Precision) -> set[tuple[int, int]]:
    """[n, k] of the products of all layers."""
    found: set[tuple[int, int]] = set()
    for layer in distinct_layers(spec):
        build = _Builder(spec, 1, layout, precision, layer)
        ops = (*build.before_attention(layer, 1), *build.behind_attention(layer, 1))
        found.update((op.n, op.k) for op in ops if op.kind == "matmul")
    return found


@dataclass(frozen=True, slots=True)
class _Builder:
    spec: ModelSpec
    num_tokens: int
    layout: Layout
    precision: Precision
    layer: LayerSpec | None = None  # whose operators they are

    # -- parts of an operator

    def elementwise(self, name: str, count: int, read: float, written: float) -> Op:
        """`read` and `written` are numbers per token, in the serving dtype."""
        size = self.num_tokens * self.precision.dtype_bytes
        return Op(
            name,
            "elementwise",
            count,
            0,
            read * size,
            written * size,
            dtype=self.precision.short_dtype,
            m=self.num_tokens,
        )

    def matmul(
        self,
        name: str,
        count: int,
        n: int,
        k: int,
        *,
        m: float | None = None,
        copies: float = 1.0,
        is_packed: bool = True,
        out_bytes: int | None = None,
    ) -> Op:
        """[m, k] @ [k, n]. `copies` such matrices are read (experts with work); `is_packed`: in
        the weight format, else in the serving dtype. `out_bytes` of a result, unless it is of the
        serving dtype."""
        rows = self.num_tokens if m is None else m
        precision, bits = self._weights_of(name)
        size = precision.dtype_bytes
        is_packed = is_packed and precision.weights != "plain"
        rounded = is_packed and precision.weight_line.compute is not None
        bits = bits if is_packed else 8 * size
        weights = copies * n * k * bits / 8
        return Op(
            name,
            "matmul",
            count,
            2 * rows * n * k,
            weights + rows * k * (1 if rounded else size),
            rows * n * (out_bytes or size),
            dtype=precision.compute_dtype if is_packed else precision.short_dtype,
            m=rows,
            n=n,
            k=k,
            weight_bytes=weights,
            weights=precision.weights if is_packed else "plain",
            cpu_dtype=precision.weight_line.cpu_compute if is_packed else None,
        )

    def _weights_of(self, name: str) -> tuple[Precision, float]:
        """In what precision the weights of this product are, and the bits of one and its part of
        the scales. Where they are kept as a checkpoint stores them that is the layer's matter."""
        precision, layer = self.precision, self.layer
        if precision.weights != CHECKPOINT or layer is None or name == ROUTER:
            return precision, precision.weight_bits
        matrices = self._matrices(layer)[name]
        bits = kept_bits(matrices, layer, precision.dtype_bytes)
        return replace(precision, weights=nearest_format(matrices, layer)), bits

    def _matrices(self, layer: LayerSpec) -> Mapping[str, tuple[Part, ...]]:
        return products(layer, self.spec.hidden_size)

    def product(self, layer: LayerSpec, name: str, count: int) -> Op:
        """Of all tokens, with what this rank holds of its matrices."""
        n, k = self._share(layer, name, self.layout.tp)
        is_packed = self._matrices(layer)[name][0].is_packed
        return self.matmul(name, count, n, k, is_packed=is_packed)

    def _share(self, layer: LayerSpec, name: str, ranks: int) -> tuple[int, int]:
        """Rows and columns of a product on one of `ranks`."""
        matrices, weights = self._matrices(layer)[name], self.precision.weights
        shares = [fullest_share(part, layer, weights, ranks) for part in matrices]
        return sum(rows for rows, _ in shares), shares[0][1]

    # -- layers

    def embedding(self) -> Op:
        numbers, precision = self.num_tokens * self.spec.hidden_size, self.precision
        read = numbers * precision.vocabulary.weight_bits / 8
        written = numbers * precision.dtype_bytes
        return Op(
            "embedding",
            "embedding",
            1,
            0,
            read,
            written,
            dtype=precision.short_dtype,
            m=self.num_tokens,
        )

    def before_attention(self, layer: LayerSpec, count: int) -> Iterator[Op]:
        """What it needs of every token: queries, keys and values."""
        attention, tp = layer.attention, self.layout.tp
        if branches(layer)[0].norm_in is not None:
            yield self._norms(count)
        for name in BEFORE_ATTENTION:
            if name in self._matrices(layer):
                yield self.product(layer, name, count)
        heads = query_heads(attention, tp)
        if attention.latent is not None:
            down = attention.latent.cached_width + (attention.latent.q_lora_rank or 0)
            yield self.elementwise("latent_norm", count, down, down)
            rotated = (heads + 1) * attention.latent.qk_rope_head_dim
        else:
            kv_heads = 0 if attention.cache_layer is not None else -(-attention.num_kv_heads // tp)
            rotated = (heads + kv_heads) * attention.head_dim * (2 if attention.qk_norm else 1)
        yield self._rotate_and_write(attention, count, rotated)

    def behind_attention(self, layer: LayerSpec, count: int) -> Iterator[Op]:
        """What becomes of its results."""
        yield self.product(layer, "attention_out", count)
        yield from self._feed_forward(layer, count)
        norms = len(branch_norms(layer)) - (branches(layer)[0].norm_in is not None)
        yield self._norms(count * norms)

    def _norms(self, count: int) -> Op:
        width = 2 * self.spec.hidden_size  # the residual and what is added to it
        return self.elementwise("norm", count, width, width)

    def _rotate_and_write(self, attention: AttentionSpec, count: int, rotated: int) -> Op:
        """Rotation (and head norms) in place; new keys and values go to the cache."""
        op = self.elementwise("rope_and_cache", count, rotated, rotated)
        if attention.cache_layer is not None:
            return op
        size, precision = self.num_tokens, self.precision
        cached = size * layer_kv_bytes(
            attention, precision.dtype_bytes, precision.kv, self.layout.tp
        )
        plain = size * layer_kv_bytes(attention, precision.dtype_bytes, "auto", self.layout.tp)
        return Op(
            op.name,
            op.kind,
            count,
            0,
            op.read_bytes + plain,
            op.write_bytes + cached,
            dtype=op.dtype,
            m=size,
            kv_bytes=cached,
        )

    def _feed_forward(self, layer: LayerSpec, count: int) -> Iterator[Op]:
        inner = layer.feed_forward
        if isinstance(inner, DenseSpec):
            yield from self._gated(layer, "", count)
            return
        yield self.product(layer, ROUTER, count)
        yield from self._experts(layer, inner, count)
        if inner.shared_size:
            yield from self._gated(layer, "shared_", count)

    def _gated(self, layer: LayerSpec, prefix: str, count: int) -> Iterator[Op]:
        both, _ = self._share(layer, f"{prefix}gate_up", self.layout.tp)
        yield self.product(layer, f"{prefix}gate_up", count)
        _, inner = self._share(layer, f"{prefix}down", self.layout.tp)
        yield self.elementwise(f"{prefix}activation", count, both, inner)
        yield self.product(layer, f"{prefix}down", count)

    def _experts(self, layer: LayerSpec, inner: ExpertsSpec, count: int) -> Iterator[Op]:
        """Tokens of the fullest rank's experts, on average: a grouped product of M * active rows,
        if it has all experts."""
        ep, width = self.layout.ep, self.spec.hidden_size
        both, _ = self._share(layer, "experts_gate_up", self.layout.expert_devices // ep)
        held = fullest(inner.num_experts, ep) / inner.num_experts
        active = inner.num_active * held
        rows = self.num_tokens * inner.num_active if ep == 1 else self.num_tokens * active
        hit = experts_hit(inner.num_experts, inner.num_active, self.num_tokens) * held
        yield self.matmul("experts_gate_up", count, both, width, m=rows, copies=hit)
        yield self.elementwise("experts_activation", count, both * active, both // 2 * active)
        yield self.matmul("experts_down", count, width, both // 2, m=rows, copies=hit)
        yield self.elementwise("experts_sum", count, width * active, width)

    # -- messages

    def messages(self, layers: Sequence[LayerSpec], *, is_first: bool) -> Iterator[Op]:
        """Of these layers; `is_first`: and of what leads to all layers."""
        tp, pp = self.layout.tp, self.layout.pp
        size = float(self.num_tokens * self.spec.hidden_size * self.precision.dtype_bytes)
        experts = [one.feed_forward for one in layers if isinstance(one.feed_forward, ExpertsSpec)]
        if tp > 1:  # after the embedding, every attention and every feed-forward
            count = 2 * len(layers) + is_first
            if self.layout.dp > 1:  # routed experts are summed up by all ranks
                count -= sum(not one.shared_size for one in experts)
            yield self._message("all_reduce", count, 2 * (tp - 1) / tp * size, tp)
        if self.layout.dp > 1 and experts:
            # How many tokens each rank has, then those of all, as many of each as the fullest has,
            # and then what all experts make of them.
            count, ranks = len(experts), self.layout.expert_devices
            yield self._message("all_gather", count, 0.0, ranks, "gather_counts")
            yield self._message("all_gather", count, (ranks - 1) * size, ranks, "gather_tokens")
            sent = 2 * (ranks - 1) / ranks * size
            yield self._message("all_reduce", count, sent, ranks, "sum_experts")
        if pp > 1 and is_first:
            yield self.to_next_stage(pp - 1)

    def to_next_stage(self, count: int) -> Op:
        """Over what all ranks of a replica talk over."""
        size = float(self.num_tokens * self.spec.hidden_size * self.precision.dtype_bytes)
        return self._message("point_to_point", count, size, self.layout.devices)

    def _message(self, kind: str, count: int, sent: float, ranks: int, name: str = "") -> Op:
        dtype = self.precision.short_dtype
        return Op(name or kind, kind, count, 0, 0, 0, sent, dtype, self.num_tokens, ranks=ranks)


def query_heads(attention: AttentionSpec, ranks: int) -> int:
    """Of the fullest rank."""
    kv_heads = attention.num_heads if attention.latent is not None else attention.num_kv_heads
    return fullest_queries(attention.num_heads, kv_heads, ranks)


def experts_hit(num_experts: int, num_active: int, num_tokens: int) -> float:
    """Different experts that `num_tokens` tokens choose, expected, if each chooses at random."""
    return num_experts * (1 - (1 - num_active / num_experts) ** num_tokens)


# ------------------------------------------------------------------------ by context


def attention_ops(
    kinds: Mapping[AttentionSpec, int], features: StepFeatures, layout: Layout, precision: Precision
) -> Iterator[Op]:
    for (kind, count), sums in zip(kinds.items(), features.attention, strict=True):
        if features.num_decodes:
            yield decode_op(kind, count, features.num_decodes, sums, layout, precision, features)
        if features.num_chunks:
            several = check_op if attends_once(kind, features) else prefill_op
            yield several(kind, count, sums, layout, precision, features)


def decode_op(
    kind: AttentionSpec,
    count: int,
    num_rows: int,
    sums: AttentionFeatures,
    layout: Layout,
    precision: Precision,
    features: StepFeatures | None = None,
) -> Op:
    """One new token of `num_rows` requests each, that see `sums.decode_keys` keys together."""
    keys = sums.decode_keys
    cached = keys * layer_kv_bytes(kind, precision.dtype_bytes, precision.kv, layout.tp)
    read, written = _query_and_output_bytes(kind, num_rows, layout, precision)
    return Op(
        "decode_attention",
        "decode_attention",
        count,
        flops_per_key(kind) * query_heads(kind, layout.tp) // kind.num_heads * keys,
        cached + read,
        written,
        dtype=precision.short_dtype,
        m=num_rows,
        n=sums.longest_decode,
        k=keys,
        mixed=features is not None and features.is_mixed,
        kv_bytes=cached,
    )


def attends_once(kind: AttentionSpec, features: StepFeatures) -> bool:
    """One launch norms, turns, caches and attends, as for decodes: drafts, and not too many."""
    is_short = features.is_verification and features.longest_chunk <= MOST_TOGETHER
    return is_short and kind.latent is None


def check_op(
    kind: AttentionSpec,
    count: int,
    sums: AttentionFeatures,
    layout: Layout,
    precision: Precision,
    features: StepFeatures,
) -> Op:
    """Requests with a few new tokens each, that see the same keys but for the last of them."""
    op = prefill_op(kind, count, sums, layout, precision, features)
    return replace(op, name="check_attention", kind="check_attention", n=features.longest_chunk)


def prefill_op(
    kind: AttentionSpec,
    count: int,
    sums: AttentionFeatures,
    layout: Layout,
    precision: Precision,
    features: StepFeatures,
) -> Op:
    """Requests with several new tokens: chunks of prompts, and checks of many drafts."""
    cached = sums.prefill_keys * layer_kv_bytes(
        kind, precision.dtype_bytes, precision.kv, layout.tp
    )
    read, written = _query_and_output_bytes(kind, features.num_prefill_tokens, layout, precision)
    return Op(
        "prefill_attention",
        "prefill_attention",
        count,
        sums.prefill_flops * query_heads(kind, layout.tp) // kind.num_heads,
        cached + read,
        written,
        dtype=precision.short_dtype,
        m=features.num_prefill_tokens,
        n=features.num_chunks,
        k=sums.prefill_keys,
        mixed=features.is_mixed,
        kv_bytes=cached,
    )


def _query_and_output_bytes(
    kind: AttentionSpec, num_tokens: int, layout: Layout, precision: Precision
) -> tuple[int, int]:
    latent = kind.latent
    read = kind.head_dim if latent is None else latent.cached_width
    written = kind.head_dim if latent is None else latent.kv_lora_rank
    size = num_tokens * query_heads(kind, layout.tp) * precision.dtype_bytes
    return size * read, size * written


def mask_bytes(num_rows: int, vocab_size: int) -> float:
    """What a grammar's masks move for so many rows of logits on each device that samples: a bit for
    each token is read and a byte written, which one pass reads that copies the logits."""
    return num_rows * vocab_size * (1 / 8 + 2 + 2 * LOGIT_BYTES)


# ------------------------------------------------------------------------ by rows of logits


def output_ops(
    spec: ModelSpec, num_rows: int, layout: Layout, precision: Precision
) -> Sequence[Op]:
    """What is done for `num_rows` rows that need logits alone: all behind the last attention, final
    norm, output matrix, the gather of its parts, sampling."""
    if not num_rows or not spec.has_head:
        return ()
    tp, last = layout.tp, spec.layers[-1]
    build = _Builder(spec, num_rows, layout, precision, last)
    head = _Builder(spec, num_rows, layout, precision.vocabulary)
    logits = float(num_rows * spec.vocab_size * LOGIT_BYTES)
    gather = build._message("all_gather", 1, (tp - 1) / tp * logits, tp, "gather_logits")
    dtype = precision.short_dtype
    sampling = Op("sampling", "sampling", 1, 0, logits, 0, dtype=dtype, m=num_rows)
    return (
        *build.behind_attention(last, 1),
        *build.messages([last], is_first=False),
        build.elementwise("final_norm", 1, spec.hidden_size, spec.hidden_size),
        head.matmul(
            "lm_head", 1, -(-spec.vocab_size // tp), spec.hidden_size, out_bytes=LOGIT_BYTES
        ),
        *([gather] if tp > 1 else []),
        sampling,
    )
