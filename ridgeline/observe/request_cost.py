"""What did each request cost? The measured time of every step, and its operations and bytes, are
shared among its rows, so that the shares sum to the whole, to the last nanosecond.

A row's part of the time is by the price of its work on an ideal device: its operations over the
peak plus its bytes over the bandwidth. The attention over its own cache is its own; what all rows
use together (the weights) is shared by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.pricer import Pricer
from ridgeline.observe.pricing import PricedStep
from ridgeline.scheduler.beams import BEAM_MARK

NANO = 1_000_000_000


@dataclass(slots=True)
class RequestCost:
    """Integers, so that nothing is lost in adding them up. `device_ns`: on all devices of the
    engine at once, so two devices for a second are a second."""

    device_ns: int = 0
    flops: int = 0
    bytes: int = 0

    def add(self, other: RequestCost) -> None:
        self.device_ns += other.device_ns
        self.flops += other.flops
        self.bytes += other.bytes

    def take(self, part: RequestCost) -> None:
        """Make `part` no larger than what is left here, and take it away."""
        part.device_ns = min(part.device_ns, self.device_ns)
        part.flops = min(part.flops, self.flops)
        part.bytes = min(part.bytes, self.bytes)
        self.device_ns -= part.device_ns
        self.flops -= part.flops
        self.bytes -= part.bytes


class RequestCosts:
    """Writes request costs for those who asked, and one for all others together; a follower of the
    pricing. Steps without anyone who asked cost one look each."""

    def __init__(self, pricer: Pricer) -> None:
        self.others = RequestCost()
        self._pricer = pricer
        self._open: dict[str, RequestCost] = {}
        limits = pricer.limits
        self._per_flop_s, self._per_byte_s = 1.0 / limits.flops, 1.0 / limits.bytes

    def ask(self, request_id: str) -> None:
        """Keep the costs for this request, until `close`."""
        self._open[request_id] = RequestCost()

    def get(self, request_id: str) -> RequestCost | None:
        """What it has cost so far; None when nobody asked."""
        return self._open.get(request_id)

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def on_priced(self, step: PricedStep) -> None:
        left = RequestCost(
            round(step.seconds * NANO), round(step.price.flops), round(step.price.bytes)
        )
        if not self._open:
            self.others.add(left)
            return
        rows = step.plan.scheduled
        asked = [(e, r) for e in rows if (r := self._of(e.request_id)) is not None]
        if not asked:
            self.others.add(left)
            return
        price, num_tokens = step.price, sum([new for new, _ in step.shape])
        shared_flops = max(0.0, price.flops - price.own_flops) / num_tokens
        shared_bytes = max(0.0, price.bytes - price.own_bytes) / num_tokens
        whole_s = price.flops * self._per_flop_s + price.bytes * self._per_byte_s
        device_ns = left.device_ns
        for entry, request_cost in asked:
            flops, moved = self._pricer.own_work(entry.num_tokens, entry.start)
            flops += shared_flops * entry.num_tokens
            moved += shared_bytes * entry.num_tokens
            seconds = flops * self._per_flop_s + moved * self._per_byte_s
            share = RequestCost(round(device_ns * (seconds / whole_s)), round(flops), round(moved))
            left.take(share)
            request_cost.add(share)
        # What rounding left over is the others' or, where all have asked, the last one's.
        (self.others if len(asked) < len(rows) else asked[-1][1]).add(left)

    def _of(self, row: str) -> RequestCost | None:
        found = self._open.get(row)
        if found is None and BEAM_MARK in row:
            found = self._open.get(row.partition(BEAM_MARK)[0])
        return found
