"""In what order do requests run, and in what order do they wait?"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence

from ridgeline.request import Request
from ridgeline.scheduler.policies.base import Policy, Rank

Place = tuple[Rank, int]  # rank, then order of arrival: never equal for two requests
Line = list[tuple[Rank, int, Request]]  # by place

STARVATION_LIMIT = 256


class RunningSet:
    """Admitted requests. `slots` says how many each lane has."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.slots: Counter[bytes] = Counter()
        self._requests: dict[str, Request] = {}
        self._lines: dict[bytes, Line] = {}  # by lane, where ranks are fixed
        self._places: dict[int, Place] = {}  # by order of arrival, where ranks are fixed

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
        self._count(request, 1)
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
        self._count(request, -1)
        if self.policy.rank_is_fixed:
            lane = self.policy.lane(request)
            line = self._lines[lane] = self._lines[lane].copy()
            del line[bisect_left(line, self._places.pop(request.order))]
            if not line:
                del self._lines[lane]
        return True

    def _count(self, request: Request, change: int) -> None:
        lane = self.policy.lane(request)
        self.slots[lane] += change
        if not self.slots[lane]:
            del self.slots[lane]

    def of_lane(self, lane: bytes) -> Sequence[Request]:
        """In their order; for policies whose ranks are fixed."""
        return [request for _, _, request in self._lines.get(lane, ())]

    def in_order(self, now: float) -> Line:
        """As the policy ranks them. The list that was returned never changes."""
        policy, lines = self.policy, self._lines
        if not policy.rank_is_fixed:
            return sorted([(policy.rank(r, now), r.order, r) for r in self])
        if len(lines) == 1:
            return next(iter(lines.values()))
        return [entry for lane in sorted(lines, key=policy.lane_rank) for entry in lines[lane]]


class WaitingQueue:
    """Requests in the order of the policy, with a bound on how often the oldest is passed over.

    After `starvation_limit` younger ones went before the oldest, nobody else is head until it is
    taken: so nobody starves, whatever the policy ranks by.
    """

    def __init__(self, policy: Policy, starvation_limit: int = STARVATION_LIMIT) -> None:
        self.policy = policy
        self.starvation_limit = starvation_limit
        self._lines: dict[bytes, Line] = {}  # by lane
        self._places: dict[int, Place] = {}  # by order of arrival
        self._by_age: OrderedDict[int, Request] = OrderedDict()
        self._num_overtaken = 0  # of the oldest
        self._ranked_at: float | None = None

    def __len__(self) -> int:
        return len(self._by_age)

    def __contains__(self, request: Request) -> bool:
        return self._by_age.get(request.order) is request

    def add(self, request: Request, now: float) -> None:
        place = (self.policy.rank(request, now), request.order)
        self._places[request.order] = place
        lane = self.policy.lane(request)
        if lane not in self._lines:
            self.policy.on_line(lane, self._lines)
            self._lines[lane] = []
        insort(self._lines[lane], (*place, request))
        self._by_age[request.order] = request

    def put_back(self, request: Request, now: float) -> None:
        """It was running and comes back: it counts as the oldest."""
        self.add(request, now)
        self._by_age.move_to_end(request.order, last=False)
        self._num_overtaken = 0

    def head(self, now: float) -> Request | None:
        if not self._lines:
            return None
        if self._num_overtaken >= self.starvation_limit:
            return next(iter(self._by_age.values()))
        if not self.policy.rank_is_fixed and self._ranked_at != now:
            self._rank_again(now)
        lines = self._lines
        lane = next(iter(lines)) if len(lines) == 1 else min(lines, key=self.policy.lane_rank)
        return lines[lane][0][2]

    def take(self, request: Request) -> None:
        """It starts to run."""
        if next(iter(self._by_age)) == request.order:
            self._num_overtaken = 0
        else:
            self._num_overtaken += 1
        self._remove(request)
        self.policy.on_take(request)

    def discard(self, request: Request) -> None:
        """It will not run from here; safe for one that does not wait."""
        if request not in self:
            return
        if next(iter(self._by_age)) == request.order:
            self._num_overtaken = 0
        self._remove(request)

    def _remove(self, request: Request) -> None:
        del self._by_age[request.order]
        place, lane = self._places.pop(request.order), self.policy.lane(request)
        line = self._lines[lane]
        del line[bisect_left(line, place)]
        if not line:
            del self._lines[lane]

    def _rank_again(self, now: float) -> None:
        self._ranked_at = now
        for lane, line in self._lines.items():
            again = sorted([(self.policy.rank(r, now), r.order, r) for _, _, r in line])
            self._lines[lane] = again
            self._places |= {order: (rank, order) for rank, order, _ in again}
