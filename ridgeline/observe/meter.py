"""What does a step cost, quickly enough to ask at every step, and what part of it is whose?

The figures are those of `ridgeline.cost`: expected seconds from the pricer; operations, bytes and
ideal seconds from the same operators, of which all but attention are counted once for each number
of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.architectures.counts import flops_per_key, layer_attention_flops, layer_kv_bytes
from ridgeline.architectures.spec import AttentionSpec
from ridgeline.cost.communication import wire
from ridgeline.cost.ops import COLLECTIVES, Op, attention_ops, decode_op, output_ops, token_ops
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.totals import AttentionTotals, StepTotals, attention_kinds, chunk_keys
from ridgeline.observe.pricing import StepPrice
from ridgeline.step import StepShape

Sums = tuple[float, float, float]  # operations and bytes of one rank, ideal seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """What all devices of the engine could do at best, per second."""

    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class _DecodeOp:
    """What `decode_op` says of one attention kind, by key and by row of one layer."""

    count: int
    flops_per_key: float
    cached_per_key: float
    read_per_row: float
    written_per_row: float
    peak: float
    bandwidth: float

    def sums(self, num_rows: int, keys: int) -> Sums:
        """To the last bit those of the operator for so many rows and keys."""
        flops = self.flops_per_key * keys
        moved = keys * self.cached_per_key + num_rows * self.read_per_row
        moved += num_rows * self.written_per_row
        compute, memory = flops / self.peak, moved / self.bandwidth
        ideal = compute if compute > memory else memory
        return self.count * flops, self.count * moved, self.count * ideal


class Meter:
    """Prices steps of one setup, and the work of single rows of them."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        setup = pricer.setup
        self._spec, self._layout, self._precision = setup.spec, setup.layout, setup.precision
        self._kinds = attention_kinds(setup.spec)
        self._by_tokens: dict[int, Sums] = {}
        self._by_rows: dict[int, Sums] = {}
        size, kv = setup.precision.dtype_bytes, setup.precision.kv
        self._per_key = tuple(
            (kind, count, count * flops_per_key(kind), count * layer_kv_bytes(kind, size, kv))
            for kind, count in self._kinds.items()
        )
        self._decode_ops = tuple(map(self._decode_op, self._kinds.items()))

    @property
    def limits(self) -> Limits:
        setup = self.pricer.setup
        devices, device = setup.layout.devices, setup.device
        peak = device.peak(setup.precision.compute_dtype)
        return Limits(devices * peak, devices * device.bandwidth)

    def price(self, shape: StepShape, num_logits: int) -> StepPrice:
        """Raises nothing for any shape; an empty one is free."""
        totals = self.pricer.totals(shape)
        seen = self._sums(attention_ops(self._kinds, totals, self._layout, self._precision))
        return self._price(totals, num_logits, seen)

    def price_decodes(self, contexts: tuple[int, ...]) -> StepPrice:
        """`price` of a step with one new token after each of these contexts, all of them sampled:
        the same figures, with less work."""
        totals = self.pricer.decode_totals(contexts)
        num_rows, flops, moved, ideal = len(contexts), 0.0, 0.0, 0.0
        for op, sums in zip(self._decode_ops, totals.attention, strict=True):
            one = op.sums(num_rows, sums.decode_keys)
            flops += one[0]
            moved += one[1]
            ideal += one[2]
        return self._price(totals, num_rows, (flops, moved, ideal))

    def _price(self, totals: StepTotals, num_logits: int, seen: Sums) -> StepPrice:
        """`seen`: of attention."""
        tokens = self._token_sums(totals.num_tokens)
        rows = self._row_sums(num_logits)
        tp = self._layout.tp
        own_flops = own_bytes = 0.0
        for (_, count, flops, cached), sums in zip(self._per_key, totals.attention, strict=True):
            own_flops += flops * sums.decode_keys + count * sums.prefill_flops
            own_bytes += cached * (sums.decode_keys + sums.prefill_keys)
        return StepPrice(
            self.pricer.seconds_of(totals, num_logits),
            tokens[2] + rows[2] + seen[2],
            tp * (tokens[0] + rows[0] + seen[0]),
            tp * (tokens[1] + rows[1] + seen[1]),
            own_flops,
            own_bytes,
        )

    def own_work(self, num_tokens: int, before: int) -> tuple[float, float]:
        """(operations, bytes) of attention that one row alone causes, on all devices together."""
        flops = cached = 0.0
        for kind, count, per_key_flops, per_key_bytes in self._per_key:
            keys = chunk_keys(kind.window, num_tokens, before)
            cached += per_key_bytes * keys
            if num_tokens == 1:
                flops += per_key_flops * keys
            else:
                flops += count * layer_attention_flops(kind, num_tokens, before)
        return flops, cached

    def _decode_op(self, of_layers: tuple[AttentionSpec, int]) -> _DecodeOp:
        kind, count = of_layers
        row = decode_op(kind, 1, 1, AttentionTotals(), self._layout, self._precision)
        key = decode_op(kind, 1, 0, AttentionTotals(1, 1), self._layout, self._precision)
        device = self.pricer.setup.device
        return _DecodeOp(
            count,
            key.flops,
            key.kv_bytes,
            row.read_bytes,
            row.write_bytes,
            device.peak(row.dtype),
            device.bandwidth,
        )

    def _token_sums(self, num_tokens: int) -> Sums:
        found = self._by_tokens.get(num_tokens)
        if found is None:
            ops = token_ops(self._spec, num_tokens, self._layout, self._precision)
            found = self._by_tokens[num_tokens] = self._sums(ops)
        return found

    def _row_sums(self, num_rows: int) -> Sums:
        found = self._by_rows.get(num_rows)
        if found is None:
            ops = output_ops(self._spec, num_rows, self._layout, self._precision)
            found = self._by_rows[num_rows] = self._sums(ops)
        return found

    def _sums(self, ops: Iterable[Op]) -> Sums:
        flops = moved = ideal = 0.0
        for op in ops:
            flops += op.count * op.flops
            moved += op.count * op.bytes
            ideal += op.count * self._ideal(op)
        return flops, moved, ideal

    def _ideal(self, op: Op) -> float:
        device = self.pricer.setup.device
        if op.kind in COLLECTIVES:
            return op.sent_bytes / wire(device, op.ranks).bytes_per_s
        return max(op.flops / device.peak(op.dtype_on(device.kind)), op.bytes / device.bandwidth)
