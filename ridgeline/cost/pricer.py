"""What does a step cost? A set-up is compiled once to coefficients, and each step is then a few
multiplications: the same answer as `roofline.step_cost`, fast enough for every step.

All but attention follows from one number n: tokens of the step, or rows that need logits. `ops`
lists these operators for n = 1 and n = 2, which tells all coefficients of each:

  operations a n,  bytes w h(n) + b n,  messages s n,  with h(n) = (1 - (1 - p)^n) / p

w h(n) are weights. p is 1, and h too, where all of them are read whatever n is; of X experts of
which each token chooses k at random p is k / X. Passes over memory are one straight line together;
products stay apart, as each is a power sum over what it computes and what it reads. Attention
follows from the sums of `features`. `DecodeRun` has the next decode steps of the same requests in
closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, repeat

from msgspec import structs

from ridgeline.architectures.counts import flops_per_key, layer_attention_flops, layer_kv_bytes
from ridgeline.architectures.spec import AttentionSpec
from ridgeline.cost.communication import message_s, wire
from ridgeline.cost.constants import AttentionConstants
from ridgeline.cost.decode_run import DecodeLine, DecodeRun
from ridgeline.cost.execution_mode import ExecutionMode, ExecutionModes, sent_tokens
from ridgeline.cost.ops import (
    COLLECTIVES,
    OF_WAVE,
    Op,
    attends_once,
    decode_op,
    mask_bytes,
    output_ops,
    prefill_op,
    query_heads,
    token_ops,
)
from ridgeline.cost.roofline import WRITES_CACHE, StepCost, combine, is_lone, power_sum, step_cost
from ridgeline.cost.setup import Setup
from ridgeline.cost.step_features import (
    AttentionFeatures,
    StepFeatures,
    attention_kinds,
    chunk_keys,
    dealt,
    decode_features,
    distinct_layers,
    step_features,
)
from ridgeline.step import StepPrice, StepShape

__all__ = ["DecodeRun", "Pricer", "Setup", "StepPrice"]

NUM_LATEST = 8  # steps in flight are asked about again when they are over
ALL_WEIGHTS = 1e-9  # from 1: p of weights that are read whatever n is

Work = tuple[float, float, float]  # operations and bytes of one rank, ideal seconds
NO_WORK: Work = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What all devices of the engine could do at best, per second."""

    flops: float
    bytes: float


# ------------------------------------------------------------------------ all but attention


@dataclass(frozen=True, slots=True)
class _Counted:
    """An operator that follows from n: `op` for n = 1, of whose bytes `weights` are w."""

    op: Op
    p: float

    @classmethod
    def of(cls, one: Op, two: Op) -> _Counted:
        p = 2.0 - two.weight_bytes / one.weight_bytes if one.weight_bytes else 1.0
        return cls(one, 1.0 if abs(p - 1.0) < ALL_WEIGHTS else p)

    @property
    def moved(self) -> float:
        """Bytes for each of n."""
        return self.op.bytes - self.op.weight_bytes


def _share(p: float, n: int) -> float:
    """h(n)"""
    return 1.0 if p == 1.0 else (1.0 - (1.0 - p) ** n) / p


@dataclass(frozen=True, slots=True)
class _Product:
    """Seconds of `count` equal products: a power sum of computing, reading and the chain of sums,
    and of one row apart, which may reach another share of the bandwidth."""

    count: int
    compute_s: float
    moved_s: float
    weights_s: float
    p: float
    chain_s: float
    q: float
    vector_rows: float  # rows for each of n
    vector: float  # of one row, times as long to read

    def seconds(self, n: int) -> float:
        memory = self.weights_s * _share(self.p, n) + self.moved_s * n
        if self.vector_rows * n == 1:
            memory *= self.vector
        found = power_sum(self.compute_s * n, memory, self.q)
        return self.count * (power_sum(found, self.chain_s, self.q) if self.chain_s else found)


class _Counts:
    """Operators that follow from n, compiled: `build` lists them. The same for one way to run them
    is `times`."""

    def __init__(self, setup: Setup, build: Callable[[int], Iterable[Op]]) -> None:
        pairs = zip(build(1), build(2), strict=True)
        self.operators = tuple(_Counted.of(one, two) for one, two in pairs)
        self.num_launches = sum(each.op.count for each in self.operators)
        self._setup = setup
        self._known: dict[int, Work] = {0: NO_WORK}

    def work(self, n: int) -> Work:
        found = self._known.get(n)
        if found is None:
            found = self._known[n] = self._work(n)
        return found

    def _work(self, n: int) -> Work:
        device = self._setup.device
        flops = moved = ideal = 0.0
        for each in self.operators:
            op = each.op
            count, computed = op.count, op.flops * n
            read = op.weight_bytes * _share(each.p, n) + each.moved * n
            flops += count * computed
            moved += count * read
            if op.kind in COLLECTIVES:
                ideal += count * op.sent_bytes * n / wire(device, op.ranks).bytes_per_s
            else:
                peak = device.peak(op.dtype_on(device.kind))
                ideal += count * max(computed / peak, read / device.bandwidth)
        return flops, moved, ideal

    def times(self, mode: ExecutionMode) -> _Times:
        return _Times(self._setup, mode, self.operators)


class _Times:
    """Expected seconds by n, of operators that run in one manner."""

    def __init__(self, setup: Setup, mode: ExecutionMode, operators: Iterable[_Counted]) -> None:
        self._fixed_s = self._each_s = 0.0
        self._products: list[_Product] = []
        self._messages: list[tuple[int, float, Callable[[float], float]]] = []
        self._known: dict[int, float] = {0: 0.0}
        bandwidth = setup.device.bandwidth
        for each in operators:
            op = each.op
            if op.name in mode.own.value:
                self._each_s += op.count * op.bytes / bandwidth
            elif op.kind in COLLECTIVES:
                self._messages.append((op.count, op.sent_bytes, _message(setup, op)))
            elif op.kind == "matmul":
                self._add_product(setup, mode, each)
            else:
                self._add_pass(setup, mode, op)

    def _add_product(self, setup: Setup, mode: ExecutionMode, each: _Counted) -> None:
        op, device, host = each.op, setup.device, setup.constants.host
        dtype, bandwidth = op.dtype_on(device.kind), device.bandwidth
        c = setup.constants.matmul_for(dtype, op.weights)
        self._fixed_s += op.count * mode.wait(host) * mode.product_t0(host) * c.t0_s
        self._each_s += op.count * c.q_b * 3 * op.m * op.k / bandwidth
        self._products.append(
            _Product(
                op.count,
                op.flops * (1 + c.k0 / op.k) / (c.e_c * device.peak(dtype)),
                each.moved / (c.e_m * bandwidth),
                op.weight_bytes * (1 + c.k_m / op.k) / (c.e_m * bandwidth),
                each.p,
                c.k_s * op.k,
                c.q,
                op.m,
                1.0 if c.e_v is None else c.e_m / c.e_v,
            )
        )

    def _add_pass(self, setup: Setup, mode: ExecutionMode, op: Op) -> None:
        host = setup.constants.host
        stream = setup.constants.stream_for(op.name, op.kind, op.dtype)
        launch = mode.pass_t0(host) * (mode.wait(host) if op.name == WRITES_CACHE else 1.0)
        self._fixed_s += op.count * launch * stream.t0_s
        self._each_s += op.count * op.bytes / (stream.e_m * setup.device.bandwidth)

    def seconds(self, n: int) -> float:
        found = self._known.get(n)
        if found is None:
            found = self._fixed_s + self._each_s * n
            for product in self._products:
                found += product.seconds(n)
            for count, sent, message in self._messages:
                found += count * message(sent * n)
            self._known[n] = found
        return found


def _message(setup: Setup, op: Op) -> Callable[[float], float]:
    """Seconds of such a message by its bytes."""
    way, constants = wire(setup.device, op.ranks), setup.constants.messages
    alpha_s = way.latency_s if constants.alpha_s is None else constants.alpha_s
    speed, kind, ranks = constants.efficiency * way.bytes_per_s, op.kind, op.ranks

    def seconds(num_bytes: float) -> float:
        return message_s(kind, num_bytes, ranks, speed, alpha_s, is_direct=way.is_direct)

    return seconds


# ------------------------------------------------------------------------ attention


@dataclass(frozen=True, slots=True)
class _PrefillLine:
    """Seconds of one layer's prefill attention: s_p (per_flop f + per_key k + per_token m + t0)."""

    per_flop_s: float
    per_key_s: float
    per_token_s: float
    t0_s: float
    mixed: float

    def seconds(self, sums: AttentionFeatures, num_tokens: int, *, is_mixed: bool) -> float:
        alone = (
            sums.prefill_flops * self.per_flop_s
            + sums.prefill_keys * self.per_key_s
            + num_tokens * self.per_token_s
            + self.t0_s
        )
        return alone * self.mixed if is_mixed else alone


@dataclass(frozen=True, slots=True)
class _CheckLine:
    """Seconds of one layer's attention of a few new tokens of each request: those of a decode,
    max(per_flop f, per_key k + per_token m) + t0, and a share of it for each further token."""

    decode: DecodeLine
    per_flop_s: float
    constants: AttentionConstants

    def seconds(self, sums: AttentionFeatures, num_tokens: int, longest: int) -> float:
        compute = sums.prefill_flops * self.per_flop_s
        memory = sums.prefill_keys * self.decode.memory_per_key_s
        memory += num_tokens * self.decode.memory_per_row_s
        return self.constants.verify_s(max(compute, memory) + self.decode.t0_s, longest)


class _Attention:
    """One kind of attention, of `count` layers: what it computes and moves of one rank for each key
    that is read and for each new token, and in which time."""

    def __init__(self, setup: Setup, kind: AttentionSpec, count: int) -> None:
        layout, precision, device = setup.layout, setup.precision, setup.device
        token = decode_op(kind, 1, 1, AttentionFeatures(), layout, precision)
        key = decode_op(kind, 1, 0, AttentionFeatures(1, 1), layout, precision)
        chunk_key = prefill_op(
            kind,
            1,
            AttentionFeatures(prefill_keys=1),
            layout,
            precision,
            StepFeatures(1, 0, 0, 0, ()),
        )
        self.kind, self.count = kind, count
        self._tp, self._bandwidth = layout.tp, device.bandwidth
        self._peak = device.peak(precision.short_dtype)
        self._key_flops, self._key_bytes, self._token_bytes = key.flops, key.bytes, token.bytes
        # Of one row alone, on all devices together.
        self._own_flops = count * flops_per_key(kind)
        self._own_bytes = count * layer_kv_bytes(kind, precision.dtype_bytes, precision.kv)
        c = self._constants = setup.constants.attention_for(precision.short_dtype)
        self._prefill = _PrefillLine(
            query_heads(kind, layout.tp) / kind.num_heads / (c.prefill_e_c * self._peak),
            chunk_key.bytes / (c.prefill_e_m * device.bandwidth),
            token.bytes / (c.prefill_e_m * device.bandwidth),
            c.prefill_t0_s,
            max(1.0, c.mixed_prefill),
        )

    def decode_line(self, wait: float) -> DecodeLine:
        """`wait`: share of its t0 (see `ExecutionMode.wait`)."""
        c = self._constants
        rate = c.decode_e_m * self._bandwidth
        return DecodeLine(
            compute_per_key_s=self._key_flops / (c.decode_e_c * self._peak),
            memory_per_key_s=self._key_bytes / rate,
            memory_per_row_s=self._token_bytes / rate,
            t0_s=wait * c.decode_t0_s,
            skew=c.skew,
            mixed=c.mixed_decode,
            overlap_s=c.mixed_overlap_s,
        )

    def check_line(self, decode: DecodeLine) -> _CheckLine:
        c = self._constants
        return _CheckLine(decode, 1.0 / self._tp / (c.decode_e_c * self._peak), c)

    def several_seconds(
        self, line: _CheckLine, sums: AttentionFeatures, features: StepFeatures
    ) -> float:
        """Of the requests with several new tokens, in one layer."""
        num_tokens = features.num_prefill_tokens
        if attends_once(self.kind, features):
            return line.seconds(sums, num_tokens, features.longest_chunk)
        return self._prefill.seconds(sums, num_tokens, is_mixed=features.is_mixed)

    def work(self, sums: AttentionFeatures, features: StepFeatures) -> Work:
        """Of all its layers."""
        flops = moved = ideal = 0.0
        for computed, keys, tokens in (
            (self._key_flops * sums.decode_keys, sums.decode_keys, features.num_decodes),
            (sums.prefill_flops // self._tp, sums.prefill_keys, features.num_prefill_tokens),
        ):
            if tokens:
                read = keys * self._key_bytes + tokens * self._token_bytes
                flops += self.count * computed
                moved += self.count * read
                ideal += self.count * max(computed / self._peak, read / self._bandwidth)
        return flops, moved, ideal

    def own_work(self, sums: AttentionFeatures) -> tuple[float, float]:
        """(operations, bytes) that single rows cause, on all devices together."""
        flops = self._own_flops * sums.decode_keys + self.count * sums.prefill_flops
        return flops, self._own_bytes * (sums.decode_keys + sums.prefill_keys)

    def own_work_of(self, num_tokens: int, before: int) -> tuple[float, float]:
        """The same of one row with so many new tokens."""
        keys = chunk_keys(self.kind.window, num_tokens, before)
        if num_tokens == 1:
            return self._own_flops * keys, self._own_bytes * keys
        flops = self.count * layer_attention_flops(self.kind, num_tokens, before)
        return flops, self._own_bytes * keys


# ------------------------------------------------------------------------ the price


class _Compiled:
    """A set-up whose steps run in one manner."""

    def __init__(self, pricer: Pricer, mode: ExecutionMode) -> None:
        host = pricer.setup.constants.host
        self.tokens, self.rows = pricer.by_tokens.times(mode), pricer.by_rows.times(mode)
        self.wave_tokens = pricer.by_wave_tokens.times(mode)
        self.wave_rows = pricer.by_wave_rows.times(mode)
        wait = mode.wait(host)
        self.decode = tuple(each.decode_line(wait) for each in pricer.attention)
        self.check = tuple(
            each.check_line(line) for each, line in zip(pricer.attention, self.decode, strict=True)
        )
        # What is no operator of the model, of a step and of a pass that drafts.
        self.step_s = host.captured_s if mode.captured else 0.0
        self.pass_s = host.pass_s if mode.captured else 0.0


class Pricer:
    """Prices steps of one setup. `seconds` is the StepPricer protocol of `step.py`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._host = setup.constants.host
        spec, layout, precision = setup.spec, setup.layout, setup.precision
        layers = distinct_layers(spec)
        self._num_groups = layout.dp

        def by_tokens(n: int, *, of_wave: bool) -> Iterable[Op]:
            ops = token_ops(spec, n, layout, precision, layers=layers)
            return (op for op in ops if self._is_of_wave(op) == of_wave)

        def by_rows(n: int, *, of_wave: bool) -> Iterable[Op]:
            ops = output_ops(spec, n, layout, precision)
            return (op for op in ops if self._is_of_wave(op) == of_wave)

        self.by_tokens = _Counts(setup, partial(by_tokens, of_wave=False))
        self.by_rows = _Counts(setup, partial(by_rows, of_wave=False))
        self.by_wave_tokens = _Counts(setup, partial(by_tokens, of_wave=True))
        self.by_wave_rows = _Counts(setup, partial(by_rows, of_wave=True))
        kinds = attention_kinds(spec)
        self.kinds: tuple[AttentionSpec, ...] = tuple(kinds)
        self.attention = tuple(_Attention(setup, *one) for one in kinds.items())
        self._num_layers = sum(kinds.values())
        self._modes = ExecutionModes(setup)
        self._compiled: dict[ExecutionMode, _Compiled] = {}
        self._known_decodes: dict[
            tuple[ExecutionMode, int], tuple[_Compiled, float, float, float]
        ] = {}
        # The last shapes that were summed up; told apart by identity, as comparing takes longer.
        self._latest: tuple[tuple[object, StepFeatures], ...] = ()

    # -- what decides the price of a step

    def _is_of_wave(self, op: Op) -> bool:
        return self._num_groups > 1 and op.name in OF_WAVE

    def features(self, shape: StepShape) -> StepFeatures:
        return self._known(shape) or self._keep(shape, self._features(shape))

    def _features(self, shape: StepShape) -> StepFeatures:
        if self._num_groups == 1:
            return step_features(self.kinds, shape)
        return self.wave_features(dealt(shape, self._num_groups))

    def wave_features(self, parts: Sequence[StepShape]) -> StepFeatures:
        """Of a wave of which each group of devices has one of the parts."""
        groups = tuple(step_features(self.kinds, part) for part in parts)
        each = (structs.replace(one, groups=groups) for one in groups)
        return max(each, key=self.seconds_of)

    def decode_features(self, contexts: tuple[int, ...]) -> StepFeatures:
        """Sums of a step with one new token after each of these contexts."""
        if self._num_groups > 1:
            return self._known(contexts) or self._keep(
                contexts, self._features(tuple([(1, context) for context in contexts]))
            )
        return self._known(contexts) or self._keep(contexts, decode_features(self.kinds, contexts))

    def _known(self, what: object) -> StepFeatures | None:
        for known, features in self._latest:
            if known is what:
                return features
        return None

    def _keep(self, what: object, features: StepFeatures) -> StepFeatures:
        self._latest = ((what, features), *self._latest[: NUM_LATEST - 1])
        return features

    # -- seconds

    def seconds(self, shape: StepShape, num_logits: int | None = None) -> float:
        """Expected seconds of a step of which `num_logits` rows need logits (None: one of every
        request)."""
        return self.seconds_of(self.features(shape), num_logits)

    def wave_seconds(self, parts: Sequence[StepShape]) -> float:
        """The same of a wave of which each group of devices has one of the parts."""
        return self.seconds_of(self.wave_features(parts))

    def decodes_seconds(self, contexts: tuple[int, ...]) -> float:
        """The same of a step with one new token after each of these contexts."""
        features, rows = self.decode_features(contexts), len(contexts)
        if not rows or self._num_groups > 1:
            return self.seconds_of(features)
        compiled, kernels, floor_s, added_s = self._decodes(features)
        for each, line, sums in zip(
            self.attention, compiled.decode, features.attention, strict=True
        ):
            kernels += each.count * line.seconds(rows, sums.decode_keys, sums.longest_decode)
        return added_s + max(kernels + compiled.step_s, floor_s)

    def _decodes(self, features: StepFeatures) -> tuple[_Compiled, float, float, float]:
        """What of a step of decodes depends on their number alone: all kernels but attention's, the
        host's work beside the device, and before it."""
        mode, rows = self._modes.of(features), features.num_requests
        found = self._known_decodes.get((mode, rows))
        if found is None:
            compiled, host = self._compiled_for(mode), self._host
            launches = 0 if mode.captured else self._launches(rows, rows) + self._num_layers
            plan_s, launch_s = host.c0_s + host.c1_s * rows, host.per_launch_s * launches
            found = self._known_decodes[mode, rows] = (
                compiled,
                compiled.tokens.seconds(rows) + compiled.rows.seconds(rows),
                launch_s + (plan_s if host.overlapped else 0.0),
                0.0 if host.overlapped else plan_s,
            )
        return found

    def seconds_of(
        self,
        features: StepFeatures,
        num_logits: int | None = None,
        drafting_s: float = 0.0,
        host_s: float = 0.0,
    ) -> float:
        """Expected seconds of a step with these sums and `num_logits` rows of logits (None: one
        per request), in which the device makes drafts for `drafting_s` before and the host works
        for `host_s` more than for other such steps."""
        kernels, launches, compiled = self._kernels(features, num_logits)
        return combine(
            self._host,
            kernels + compiled.step_s + drafting_s,
            features.num_wave_requests,
            launches,
            is_lone=not features.num_decodes and is_lone(features),
            num_verified=features.num_verified,
            more_s=host_s,
        )[2]

    def pass_seconds_of(self, features: StepFeatures, num_logits: int | None = None) -> float:
        """Of a pass that drafts: the device's part of such a step, in which the host has none."""
        kernels, launches, compiled = self._kernels(features, num_logits)
        return max(kernels + compiled.pass_s, launches * self._host.per_launch_s)

    def _kernels(
        self, features: StepFeatures, num_logits: int | None
    ) -> tuple[float, int, _Compiled]:
        """Seconds of all kernels, and how many are launched one by one."""
        mode = self._modes.of(features)
        compiled = self._compiled_for(mode)
        num_rows = features.own_logits(num_logits)
        num_tokens = features.num_tokens
        if features.num_chunks:
            num_tokens = sent_tokens(self._host, mode, features)
        kernels = compiled.tokens.seconds(num_tokens) + compiled.rows.seconds(num_rows)
        if self._num_groups > 1:
            every_row = features.num_wave_requests if num_logits is None else num_logits
            kernels += compiled.wave_tokens.seconds(features.num_wave_tokens)
            kernels += compiled.wave_rows.seconds(every_row)
        num_decodes, is_mixed = features.num_decodes, features.is_mixed
        for i, sums in enumerate(features.attention):
            each = self.attention[i]
            if num_decodes:
                kernels += each.count * compiled.decode[i].seconds(
                    num_decodes, sums.decode_keys, sums.longest_decode, is_mixed=is_mixed
                )
            if features.num_prefill_tokens:
                kernels += each.count * each.several_seconds(compiled.check[i], sums, features)
        if mode.captured:
            return kernels, 0, compiled
        launches = self._launches(num_tokens, num_rows)
        launches += self._num_layers * (bool(num_decodes) + bool(features.num_prefill_tokens))
        return kernels, launches, compiled

    def _launches(self, num_tokens: int, num_rows: int) -> int:
        """Of all but attention."""
        by_tokens, by_rows = (
            (self.by_tokens, self.by_wave_tokens),
            (self.by_rows, self.by_wave_rows),
        )
        found = sum([each.num_launches for each in by_tokens]) if num_tokens else 0
        return found + (sum([each.num_launches for each in by_rows]) if num_rows else 0)

    def _compiled_for(self, mode: ExecutionMode) -> _Compiled:
        found = self._compiled.get(mode)
        if found is None:
            found = self._compiled[mode] = _Compiled(self, mode)
        return found

    def each_decode(self, contexts: Sequence[int]) -> Iterator[float]:
        """Seconds of the coming decode steps of such requests, one after the other, to the last bit
        those of `decode_run`."""
        if len(self.kinds) > 1 or self.kinds[0].window is not None or self._num_groups > 1:
            yield from map(self.decode_run(contexts).seconds, count())
        rows, num_layers = len(contexts), self.attention[0].count
        features = decode_features(self.kinds, contexts)
        compiled, fixed_s, floor_s, added_s = self._decodes(features)
        keys, longest = features.attention[0].decode_keys, features.attention[0].longest_decode
        line, beside_s = compiled.decode[0], compiled.step_s
        per_flop, per_key, skew = line.compute_per_key_s, line.memory_per_key_s, line.skew
        rows_s, t0_s = rows * line.memory_per_row_s, line.t0_s
        while True:
            stretched = keys + skew * (rows * longest - keys)  # as in `DecodeLine.seconds`
            compute, memory = stretched * per_flop, stretched * per_key + rows_s
            attention_s = num_layers * ((compute if compute > memory else memory) + t0_s)
            kernels = fixed_s + attention_s + beside_s
            yield added_s + (kernels if kernels > floor_s else floor_s)
            keys += rows
            longest += 1

    def decode_run(
        self, contexts: Sequence[int], num_logits: int | None = None, *, is_planned: bool = True
    ) -> DecodeRun:
        """The coming decode steps of requests with `contexts` computed tokens each, all in the
        manner of the first. `is_planned` False: the host has no part in them, as in passes that
        draft. Of a wave those of the group that is the slowest in the first."""
        host, every = (
            self._host if is_planned else replace(self._host, c0_s=0.0, c1_s=0.0),
            contexts,
        )
        if self._num_groups > 1:
            parts = dealt(tuple([(1, context) for context in every]), self._num_groups)
            contexts = [context for _, context in max(parts, key=lambda part: sum(map(sum, part)))]
            host = replace(host, c0_s=host.c0_s + host.c1_s * (len(every) - len(contexts)))
        rows = len(contexts)
        num_logits = rows if num_logits is None else -(-num_logits * rows // max(1, len(every)))
        mode = self._modes.of(decode_features(self.kinds, contexts))
        compiled = self._compiled_for(mode)
        fixed_s = compiled.tokens.seconds(rows) + compiled.rows.seconds(num_logits)
        if self._num_groups > 1:
            fixed_s += compiled.wave_tokens.seconds(len(every))
            fixed_s += compiled.wave_rows.seconds(len(every))
        return DecodeRun(
            contexts,
            [(each.kind.window, each.count) for each in self.attention],
            compiled.decode,
            fixed_s,
            compiled.step_s if is_planned else compiled.pass_s,
            host,
            0 if mode.captured else self._launches(rows, num_logits) + self._num_layers,
        )

    # -- work

    def price(self, shape: StepShape, num_logits: int) -> StepPrice:
        """Raises nothing for any shape; an empty one is free."""
        return self._price(self.features(shape), num_logits)

    def price_decodes(self, contexts: tuple[int, ...]) -> StepPrice:
        """The same of a step with one new token after each of these contexts, all of them
        sampled."""
        return self._price(self.decode_features(contexts), len(contexts))

    def _price(self, features: StepFeatures, num_logits: int) -> StepPrice:
        layout, seconds = self.setup.layout, self.seconds_of(features, num_logits)
        shared = (
            self.by_wave_tokens.work(features.num_wave_tokens if self._num_groups > 1 else 0),
            self.by_wave_rows.work(num_logits if self._num_groups > 1 else 0),
        )
        flops, moved, ideal = map(sum, zip(*shared, strict=True))
        flops, moved = layout.expert_devices * flops, layout.expert_devices * moved
        own_flops = own_bytes = slowest = 0.0
        for group in features.groups or (features,):
            here = (
                self.by_tokens.work(group.num_tokens),
                self.by_rows.work(
                    structs.replace(group, groups=features.groups).own_logits(num_logits)
                ),
                *map(_Attention.work, self.attention, group.attention, repeat(group)),
            )
            computed, read, least_s = map(sum, zip(*here, strict=True))
            flops, moved = flops + layout.tp * computed, moved + layout.tp * read
            slowest = max(slowest, least_s)
            for each, sums in zip(self.attention, group.attention, strict=True):
                own = each.own_work(sums)
                own_flops += own[0]
                own_bytes += own[1]
        return StepPrice(seconds, ideal + slowest, flops, moved, own_flops, own_bytes)

    def own_work(self, num_tokens: int, before: int) -> tuple[float, float]:
        """(operations, bytes) of attention that one row alone causes, on all devices together."""
        own = [each.own_work_of(num_tokens, before) for each in self.attention]
        return sum([flops for flops, _ in own]), sum([moved for _, moved in own])

    def price_masks(self, num_rows: int) -> tuple[float, float]:
        """(bytes on all devices together, expected seconds) of a grammar's masks for so many rows
        of logits. The host makes them while the device computes."""
        setup, stream = self.setup, self.setup.constants.sampling
        moved = mask_bytes(num_rows, setup.spec.vocab_size)
        seconds = moved / (stream.e_m * setup.device.bandwidth) + stream.t0_s * (num_rows > 0)
        return moved * setup.layout.tp, seconds

    @property
    def limits(self) -> Limits:
        setup = self.setup
        devices, device = setup.layout.devices, setup.device
        peak = device.peak(setup.precision.compute_dtype)
        return Limits(devices * peak, devices * device.bandwidth)

    def cost(self, shape: StepShape, num_logits: int | None = None) -> StepCost:
        """The same step operator by operator; many times slower."""
        return step_cost(self.setup, shape, num_logits)
