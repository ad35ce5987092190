"""Who is running, in what order, and how many seats are taken?"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Policy, Rank

_Line = list[tuple[Rank, int, Request]]


class RunningSet:
    """Admitted requests. `seats` are those of each lane."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seats: Counter[bytes] = Counter()
        self._requests: dict[str, Request] = {}
        self._lines: dict[bytes, _Line] = {}  # by lane, where ranks are fixed
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
        self._sit(request, 1)
        if self.policy.rank_is_fixed:
            lane = self.policy.lane(request)
            place = self._places[request.order] = (self.policy.rank(request, 0.0), request.order)
            line = self._lines[lane] = self._lines.get(lane, []).copy()
            insort(line, (*place, request))

    def discard(self, request: Request) -> bool:
        """True when it was running."""
        if request not in self:
            return False
        del self._requests[request.request_id]
        self._sit(request, -1)
        if self.policy.rank_is_fixed:
            lane = self.policy.lane(request)
            line = self._lines[lane] = self._lines[lane].copy()
            del line[bisect_left(line, self._places.pop(request.order))]
            if not line:
                del self._lines[lane]
        return True

    def _sit(self, request: Request, num_seats: int) -> None:
        lane = self.policy.lane(request)
        self.seats[lane] += num_seats
        if not self.seats[lane]:
            del self.seats[lane]

    def of_lane(self, lane: bytes) -> Sequence[Request]:
        """In their order; for policies whose ranks are fixed."""
        return [request for _, _, request in self._lines.get(lane, ())]

    def in_order(self, now: float) -> _Line:
        """As the policy ranks them. The list that was returned never changes."""
        policy, lines = self.policy, self._lines
        if not policy.rank_is_fixed:
            return sorted([(policy.rank(r, now), r.order, r) for r in self])
        if len(lines) == 1:
            return next(iter(lines.values()))
        return [entry for lane in sorted(lines, key=policy.lane_rank) for entry in lines[lane]]
