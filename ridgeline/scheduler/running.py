"""Who is running, in what order, and how many seats are taken?"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Policy, Rank


class RunningSet:
    """Admitted requests. A beam search takes `beam_width` seats, all others one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.num_seats = 0
        self._requests: dict[str, Request] = {}
        self._order: list[tuple[Rank, int, Request]] = []
        self._places: dict[int, tuple[Rank, int]] = {}  # by order of arrival, where ranks are fixed

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    @property
    def requests(self) -> Collection[Request]:
        return self._requests.values()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.num_seats += request.sampling.beam_width
        if self.policy.rank_is_fixed:
            place = self._places[request.order] = (self.policy.rank(request, 0.0), request.order)
            self._order = self._order.copy()
            insort(self._order, (*place, request))

    def discard(self, request: Request) -> bool:
        """True when it was running."""
        if request not in self:
            return False
        del self._requests[request.request_id]
        self.num_seats -= request.sampling.beam_width
        if self.policy.rank_is_fixed:
            self._order = self._order.copy()
            del self._order[bisect_left(self._order, self._places.pop(request.order))]
        return True

    def in_order(self, now: float) -> list[tuple[Rank, int, Request]]:
        """As the policy ranks them. The list that was returned never changes."""
        if not self.policy.rank_is_fixed:
            rank = self.policy.rank
            self._order = sorted([(rank(r, now), r.order, r) for r in self])
        return self._order
