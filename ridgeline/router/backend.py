"""What does a router know of one backend, and may it send there? Open requests, speed, cache,
failures; times are passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil

import msgspec

from ridgeline.router.policies import ReplicaView
from ridgeline.router.prefixes import PIECE_CHARACTERS, Names, Prefixes, Sent, pieces_found
from ridgeline.router.speeds import FittedSpeed, ReadingSpeed

MAX_FAILURES = 3  # in a row
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 60.0
LATE_MULTIPLE, LATE_S = 4.0, 5.0  # of a first token, over what was predicted
RETRY_SHARE = 0.1  # of requests
SPARE_RETRIES = 10.0  # that a router begins with, and saves up at most
CHARACTERS_PER_TOKEN = 4.0  # until answers tell
BUSY = 0.7  # of a server's time that is meant to be used
GIVEN_UP = 0.8  # of what is meant to be used, below which one server fewer will do
SMOOTHING = 0.1  # weight of the newest answer's


class Load(msgspec.Struct, frozen=True):
    """How a server of ours stands. Requests, seconds and prompt tokens a second; null: unknown.
    `answer_s`: how much of its time an average answer takes when all its places are taken.
    `server_load`: running and waiting together, as vLLM's clients read it."""

    running: int
    waiting: int
    wait_s: float | None
    prompt_tokens_per_s: float | None
    step_s: float | None
    answer_s: float | None = None
    server_load: int | None = None


class Arrivals:
    """What came in the last `window_s` seconds, and how many servers it keeps busy."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._came: deque[tuple[float, int]] = deque()
        self._num_tokens = 0
        self._began: float | None = None

    def add(self, now: float, num_tokens: int) -> None:
        """A request with so many tokens to read."""
        self._began = now if self._began is None else self._began
        self._came.append((now, num_tokens))
        self._num_tokens += num_tokens

    def need(self, now: float, loads: Iterable[Load]) -> float | None:
        """At the speed that such servers tell, corrected by what steps took of late; None: none
        tells one. What waits now should be gone within a quarter of the window. One that is always
        at work counts as 1 / BUSY servers, so that some is spare."""
        while self._came and self._came[0][0] <= now - self._window_s:
            self._num_tokens -= self._came.popleft()[1]
        told = [
            (load.prompt_tokens_per_s, load.answer_s, load.waiting)
            for load in loads
            if load.prompt_tokens_per_s is not None and load.answer_s is not None
        ]
        if not told:
            return None
        token_s = sum(1 / rate for rate, _, _ in told) / len(told)
        answer_s = sum(seconds for _, seconds, _ in told) / len(told)
        work_s = self._num_tokens * token_s + len(self._came) * answer_s
        waiting_s = sum(num for *_, num in told) * answer_s
        soon_s = self._window_s / 4
        known_s = now - (now if self._began is None else self._began)
        return (work_s / min(self._window_s, max(known_s, soon_s)) + waiting_s / soon_s) / BUSY


def replicas_wanted(need: float | None, num_now: int, least: int, most: int) -> int:
    """One is given up only when those that are left have room to spare."""
    if need is None:
        return min(max(num_now, least), most)
    wanted = ceil(need)
    if wanted < num_now:
        wanted = min(num_now, ceil(need / GIVEN_UP))
    return min(max(wanted, least), most)


class Breaker:
    """Nothing is sent for a while to what fails. Then one request is tried: if it fails too, the
    pause is twice as long; if not, all is well again."""

    def __init__(self) -> None:
        self.num_opened = 0
        self._num_failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._closed_again: float | None = None  # when one may be tried; None: nothing is wrong
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        return self._closed_again is not None

    def admits(self, now: float) -> bool:
        if self._closed_again is None:
            return True
        return now >= self._closed_again and not self._is_probing

    def sent(self) -> bool:
        """Whether this one request decides if it closes."""
        is_probe = self.is_open
        self._is_probing = self._is_probing or is_probe
        return is_probe

    def succeeded(self) -> None:
        self._num_failures, self._pause_s = 0, FIRST_PAUSE_S
        self._closed_again, self._is_probing = None, False

    def failed(self, now: float, *, was_probe: bool = False) -> None:
        """`was_probe`: of the request that was tried. Of others, those that were sent before it
        opened say nothing new."""
        self._num_failures += 1
        if was_probe:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._open(now)
        elif not self.is_open and self._num_failures >= MAX_FAILURES:
            self._open(now)

    def late(self, now: float) -> None:
        """A first token has not come in any time that could be expected."""
        if not self.is_open:
            self._open(now)

    def undecided(self) -> None:
        """The request that was tried ended before it told anything: its client has gone."""
        self._is_probing = False

    def _open(self, now: float) -> None:
        self.num_opened += 1
        self._closed_again, self._is_probing = now + self._pause_s, False


class RetryBudget:
    """Retries of what a living backend refused: at most a share of all requests, so that a fleet
    that is full does not get its load twice."""

    def __init__(self) -> None:
        self._left = SPARE_RETRIES

    def request(self) -> None:
        self._left = min(self._left + RETRY_SHARE, SPARE_RETRIES)

    def take(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(slots=True, eq=False)
class Placed:
    """A request at a backend. `num_to_read`: tokens of its prompt that the cache there is not
    thought to hold; `num_before`: those that were to be read before it."""

    sent: Sent
    num_characters: int
    num_to_read: int
    num_before: int
    predicted_s: float  # to its first token
    at: float
    streams: bool
    is_probe: bool
    has_begun: bool = False

    def is_read(self, now: float) -> bool:
        """Its prompt has been. An answer that is not streamed tells nothing of its beginning."""
        return self.has_begun or (not self.streams and now > self.at + self.predicted_s)

    @property
    def late_at_s(self) -> float:
        """Seconds from its sending after which a first token is far too late."""
        return LATE_MULTIPLE * self.predicted_s + LATE_S


@dataclass(slots=True, eq=False)
class Backend:
    """Load is the set of open requests, never a counter. `load` is what a server of ours says;
    foreign ones are known by the times of their first tokens."""

    url: str
    prefixes: Prefixes
    is_up: bool = False
    is_leaving: bool = False  # it finishes what it has
    reason: str = "it has not answered yet"
    models: tuple[str, ...] = ()
    load: Load | None = None
    open: set[Placed] = field(default_factory=set)
    breaker: Breaker = field(default_factory=Breaker)
    fitted: FittedSpeed = field(default_factory=FittedSpeed)
    characters_per_token: float = CHARACTERS_PER_TOKEN

    def is_ready(self, now: float) -> bool:
        return self.is_up and not self.is_leaving and self.breaker.admits(now)

    @property
    def speed(self) -> ReadingSpeed:
        load = self.load
        if load is None or load.prompt_tokens_per_s is None or load.step_s is None:
            return self.fitted.speed
        return ReadingSpeed(load.prompt_tokens_per_s, load.step_s)

    def num_tokens(self, num_characters: int) -> int:
        return max(1, round(num_characters / self.characters_per_token))

    def view(self, names: Names, num_tokens: int, now: float) -> ReplicaView:
        """As the policy sees it, for a prompt of these pieces. What other routers sent there is
        in its own words alone."""
        waiting = [placed for placed in self.open if not placed.is_read(now)]
        num_waiting, num_running = len(waiting), len(self.open) - len(waiting)
        load, speed = self.load, self.speed
        if load is not None:
            num_waiting = max(num_waiting, load.waiting)
            num_running = max(num_running, load.running)
        num_held = int(self.prefixes.held(names) * PIECE_CHARACTERS / self.characters_per_token)
        return ReplicaView(
            num_running,
            num_waiting,
            sum(placed.num_to_read for placed in waiting),
            min(num_held, num_tokens),
            self.is_ready(now),
            speed.tokens_per_s,
            speed.step_s,
            0.0 if load is None else load.wait_s or 0.0,
        )

    def place(
        self, names: Names, num_characters: int, view: ReplicaView, now: float, *, streams: bool
    ) -> Placed:
        num_tokens = self.num_tokens(num_characters)
        placed = Placed(
            self.prefixes.send(names),
            num_characters,
            max(1, num_tokens - view.num_cached_tokens),
            view.num_pending_tokens,
            view.first_token_s(num_tokens),
            now,
            streams,
            self.breaker.sent(),
        )
        self.open.add(placed)
        return placed

    # ------------------------------------------------------------------ what becomes of it

    def begun(self, placed: Placed, now: float) -> None:
        """The first bytes of its answer are here."""
        placed.has_begun = True
        self.breaker.succeeded()
        self.prefixes.begun(placed.sent)
        if placed.streams:
            self.fitted.saw(placed.num_before + placed.num_to_read, now - placed.at)

    def failed(self, placed: Placed, now: float) -> None:
        self.breaker.failed(now, was_probe=placed.is_probe)

    def used(self, placed: Placed, num_tokens: int, num_cached: int | None) -> None:
        """What its answer says of the prompt."""
        if not num_tokens or not placed.num_characters:
            return
        seen = placed.num_characters / num_tokens
        self.characters_per_token += SMOOTHING * (seen - self.characters_per_token)
        if num_cached is not None:
            found = pieces_found(placed.num_characters, num_tokens, num_cached)
            self.prefixes.found(placed.sent, found)

    def ended(self, placed: Placed) -> None:
        """However it ended."""
        self.open.discard(placed)
        if placed.is_probe and not placed.has_begun:
            self.breaker.undecided()

    def lost(self, reason: str) -> None:
        """Nobody answers there: what it held in its cache is gone with it."""
        self.is_up, self.reason, self.load = False, reason, None
        self.prefixes.clear()
