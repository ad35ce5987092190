"""How do the stages of a pipeline pass on hidden states, and tokens back to the first?

Ranks of a stage are numbered one after the other, those of the first stage first; each talks to the
rank of the same place in the other stage. Nothing waits until a message has arrived: what is on its
way is kept until it has gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ridgeline.distributed.placement import Collective


class Pipeline:
    """One rank's place in it: `stage` of `stages`, each of `width` ranks, of which it is `place`.
    `collective` is that of all ranks."""

    def __init__(self, collective: Collective, rank: int, stages: int, width: int) -> None:
        self.stage, self.place = divmod(rank, width)
        self.stages, self.width = stages, width
        self._collective = collective
        self._posted: deque[tuple[int, Callable[[], None]]] = deque()  # by step, oldest first

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def pass_on(self, step_id: int, x: torch.Tensor) -> None:
        """To the next stage, which takes it with `take`."""
        self._post(step_id, x, self.stage + 1)

    def take(self, into: torch.Tensor) -> None:
        """From the stage before."""
        self._collective.recv(into, self._rank(self.stage - 1))

    def give_back(self, step_id: int, x: torch.Tensor) -> None:
        """From the last stage to the first, which takes it with `take_back`."""
        self._post(step_id, x, 0)

    def take_back(self, into: torch.Tensor) -> None:
        self._collective.recv(into, self._rank(self.stages - 1))

    def _post(self, step_id: int, x: torch.Tensor, stage: int) -> None:
        """A step so old that no other is in flight with it has arrived long ago."""
        while self._posted and self._posted[0][0] <= step_id - self.stages - 1:
            self._posted.popleft()[1]()
        self._posted.append((step_id, self._collective.post(x, self._rank(stage))))

    def _rank(self, stage: int) -> int:
        return stage * self.width + self.place
