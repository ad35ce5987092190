"""When do experts change ranks? Between steps, as their load of the last while says.

One rank decides for all: each of them counts the tokens of every expert, since each has all tokens
of a layer. The layers of one decision change one after the other, one before each step, so that
nobody waits for all of them at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from ridgeline.clock import Clock
from ridgeline.cost.expert_placement import ExchangePrice, group_loads, worthwhile
from ridgeline.layers.experts import ExpertLoad, Experts
from ridgeline.log import say

PERIOD = 1000  # steps between two decisions

logger = logging.getLogger(__name__)


class ExpertBalance:
    def __init__(
        self, layers: Sequence[Experts], load: ExpertLoad, price: ExchangePrice, clock: Clock
    ) -> None:
        self.period = PERIOD
        self._num_exchanges = 0
        self._layers, self._load = layers, load
        self._price, self._clock = price, clock
        self._num_steps = 0
        self._before = [[0] * layer.spec.num_experts for layer in layers]
        self._since = clock.now()
        self._due: deque[tuple[int, list[tuple[int, int]]]] = deque()
        self._fixed: set[int] = set()

    def next(self) -> tuple[int, list[tuple[int, int]]] | None:
        """A layer, by its place among those with experts, and pairs of experts that change places
        before the next step; None, which is usual: none do."""
        self._num_steps += 1
        if not self._due and self._num_steps % self.period == 0:
            self._decide()
        elif self._num_steps % self.period == self.period - 1:
            self._load.counts()  # begins a copy of the counts, which the decision then reads
        return self._due.popleft() if self._due else None

    def done_so_far(self) -> int:
        """Pairs of experts that have changed places."""
        return self._num_exchanges

    def done(self, at: int, pairs: Sequence[tuple[int, int]], *, moved: bool) -> None:
        """They have changed places, or cannot."""
        if moved:
            self._num_exchanges += len(pairs)
            return
        self._fixed.add(at)
        reason = "they are kept in several forms"
        say(logger, logging.WARNING, "experts of a layer cannot move", layer=at, reason=reason)

    def _decide(self) -> None:
        now, counts = self._clock.now(), self._load.counts()
        elapsed_s = now - self._since
        for at, (layer, row, before) in enumerate(
            zip(self._layers, counts, self._before, strict=True)
        ):
            tokens = [count - old for count, old in zip(row, before, strict=True)]
            num_groups = layer.placement.ep
            pairs = worthwhile(tokens, layer.groups, num_groups, self._price, elapsed_s)
            if not pairs or at in self._fixed:
                continue
            groups = list(layer.groups)
            for one, other in pairs:
                groups[one], groups[other] = groups[other], groups[one]
            loads = [max(group_loads(tokens, g, num_groups)) for g in (layer.groups, groups)]
            mean = sum(tokens) / num_groups
            say(
                logger, logging.INFO, "experts change ranks", layer=at, pairs=len(pairs),
                fullest=f"{loads[0] / mean:.2f}", then=f"{loads[1] / mean:.2f}",
                bytes=2 * len(pairs) * layer.expert_bytes,
            )  # fmt: skip
            self._due.append((at, pairs))
        self._before, self._since = counts, now
