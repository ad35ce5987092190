"""Whose turn is it, where several tenants share one engine? That of who has had least of it.

Start-time fair queueing over tenants: each has a tag, the seconds of steps that it was charged
with, divided by its weight, and the smallest tag is served first. A step's price is split over its
rows as request costs split it: what all rows use together by tokens, and what the context costs by
the tokens that were read again. Without prices a token stands for a second.

A tenant that begins to wait is lifted to the smallest tag of those who wait, or, where nobody does
and so nobody lacks anything, to the largest of all: time in which it asked for nothing is no
credit. One that is ahead stays ahead when it leaves and comes back.

While a tenant waits that holds less than its share of the seats (or cache), one that holds more
than its own gives way, its newest request first: at once to one that did not wait before, else when
it is LAG_STEPS ahead. Who gains never holds more than its share by that, and who loses held more,
so nobody is made to give back what was gained, and there is an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Admit, InFlight, PolicySetting, Rank
from ridgeline.scheduler.policies.priority import Priority
from ridgeline.step import StepPricer

LAG_STEPS = 8  # usual steps; seats that are left even out what is less


@dataclass(slots=True)
class _Lane:
    """One tenant. `tag` in seconds over weight, and so is `taken`: what the step that is being
    planned will charge it for requests that waited, about."""

    weight: float
    tag: float = 0.0
    taken: float = 0.0
    served_in: int = 0  # the last step that it was part of
    is_fresh: bool = True  # nobody of it waited before
    num_open: int = 0


class Fair(Priority):
    """Among tenants as above; the requests of one tenant as policy priority has them."""

    wants_prices = True

    def __init__(self, pricer: StepPricer | None = None) -> None:
        super().__init__()
        self._pricer = pricer
        self._lanes: dict[bytes, _Lane] = {}  # who asks for something, and who is ahead
        self._token_s = self._step_s = 1.0  # of late
        self._num_steps = 0

    @classmethod
    def make(cls, setting: PolicySetting) -> Self:
        return cls(setting.pricer)

    # ------------------------------------------------------------------ whose turn it is

    def lane(self, request: Request) -> bytes:
        return request.tenant

    def lane_rank(self, lane: bytes) -> Rank:
        found = self._lanes[lane]
        return found.tag + found.taken, found.served_in

    def yields(self, lane: bytes, needs: float, held: Mapping[bytes, float]) -> bytes | None:
        lanes, has = self._lanes, held.get(lane, 0.0)
        total = sum(other.weight for other in lanes.values() if other.num_open)
        mine = lanes[lane]
        if has and has + needs > mine.weight / total:
            return None
        least = mine.tag + (0.0 if mine.is_fresh else LAG_STEPS * self._step_s / total)
        ahead = [
            (lanes[name].tag, part, name)
            for name, part in held.items()
            if name != lane and part > lanes[name].weight / total and lanes[name].tag >= least
        ]
        return max(ahead)[2] if ahead else None

    # ------------------------------------------------------------------ what each has had

    def admit(self, request: Request, now: float) -> Admit:
        lane = self._lanes.setdefault(request.tenant, _Lane(request.weight))
        lane.weight = request.weight
        lane.num_open += 1
        return Admit()

    def on_line(self, lane: bytes, waiting: Iterable[bytes]) -> None:
        lanes = self._lanes
        tags = [lanes[name].tag for name in waiting]
        floor = min(tags) if tags else max(other.tag for other in lanes.values())
        lanes[lane].tag, lanes[lane].is_fresh = max(lanes[lane].tag, floor), True
        if not tags:  # nobody is behind any more
            self._forget(lambda other: True)

    def on_take(self, request: Request) -> None:
        lane = self._lanes[request.tenant]
        lane.is_fresh = False
        lane.taken += self._token_s * request.num_pending_tokens / lane.weight

    def on_plan(self, in_flight: Sequence[InFlight]) -> None:
        lanes = self._lanes
        self._num_steps += 1
        if len(lanes) == 1:
            for only in lanes.values():
                only.served_in, only.taken = self._num_steps, 0.0
            return
        for name, seconds in self._split(in_flight).items():
            lane = lanes[name]
            lane.tag += seconds / lane.weight
            lane.served_in, lane.taken = self._num_steps, 0.0

    def _split(self, in_flight: Sequence[InFlight]) -> dict[bytes, float]:
        """Seconds of this step, by tenant."""
        tokens, again = Counter[bytes](), Counter[bytes]()
        for entry, row, _ in in_flight:
            tokens[row.tenant] += entry.num_tokens
            again[row.tenant] += entry.num_tokens * entry.start
        num_tokens, num_again = tokens.total(), again.total()
        whole_s = own_s = float(num_tokens)
        if self._pricer is not None:
            whole_s = self._pricer.seconds(
                tuple([(e.num_tokens, e.start) for e, _, _ in in_flight])
            )
            # Behind nothing at all a token would be a prompt, not a decode.
            alone = tuple([(e.num_tokens, min(e.start, 1)) for e, _, _ in in_flight])
            own_s = whole_s - min(whole_s, self._pricer.seconds(alone)) if len(tokens) > 1 else 0.0
        self._token_s = whole_s / num_tokens
        self._step_s += (whole_s - self._step_s) / LAG_STEPS
        if self._pricer is None or not num_again:
            own_s = 0.0
        by_token, by_read = (whole_s - own_s) / num_tokens, own_s / max(1, num_again)
        return {name: by_token * tokens[name] + by_read * again[name] for name in tokens}

    def on_end(self, request: Request) -> None:
        """Who asks for nothing is remembered as long as it is ahead of somebody who does."""
        self._lanes[request.tenant].num_open -= 1
        if self._lanes[request.tenant].num_open:
            return
        least = min([lane.tag for lane in self._lanes.values() if lane.num_open], default=inf)
        self._forget(lambda lane: lane.tag <= least)

    def _forget(self, is_even: Callable[[_Lane], bool]) -> None:
        for name, lane in list(self._lanes.items()):
            if not lane.num_open and is_even(lane):
                del self._lanes[name]
