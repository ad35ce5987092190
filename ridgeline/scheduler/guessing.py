"""How many guesses are worth checking in this step, and of which rows?

All rows of a step check the same number k, as captured steps are of one size: a step then computes
k + 1 tokens of each row. With E_r(k) tokens expected from row r and T(k) the seconds of drafting
and checking, k is where sum_r E_r(k) / T(k) is largest, 0 among the choices. E_r follows from what
was right of this row lately, T from the cost model, corrected by what such steps have taken here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from ridgeline.errors import check
from ridgeline.formats import MAX_GUESSES, STEP_GUESSES
from ridgeline.request import UNKNOWN_TOKEN, Request
from ridgeline.scheduler.guess_acceptance import (
    LOOKED_UP_WEIGHT,
    PRIOR_WEIGHT,
    CopyRuns,
    RowAcceptance,
    SharedAcceptance,
)
from ridgeline.scheduler.guess_times import GuessPrices, StepTimes, TimedStep, row_bucket

CHOICES = (0, *STEP_GUESSES)
MARGIN = 1.02  # what guesses have to gain: prices are no better than this
STAYS = 1.01  # what another number has to gain over the one in use
SURE = 0.98  # of no guess more is expected
RENEWED_AFTER = 4  # steps that a choice holds, at least
ROWS_PER_STEP = 8  # and one more for each so many rows, once its steps have been compared
CHOOSING_S = 100e-6  # of the host, about, with cold caches
# Share of the time that it may take while look-ups of few rows go on as before. Where a draft
# guesses, steps are longer, and what is right changes with every answer.
CHOOSING = 0.02
LONGEST_HELD = 32  # steps
ROWS_PER_RESULT = 8  # whose own acceptance is brought up to date by one step
ROWS_PER_CHOICE = 16  # that a choice looks at: of more, others each time
# Steps without a guess, at least, where only checking tells how many would be right.
EXPLORED_AFTER = 8
LONGEST_BREAK = 4  # times as many, as long as none is
LOW, SURPRISE = 0.6, 0.2  # acceptance, and more than that, after which one looks once more
EXPLORING = 0.005  # share of the time that it may take
EXPLORED_ROWS = 16  # whose guesses tell enough of all: a draft has to catch up with each
CATCHING_UP = 3.0  # plain steps that many rows take in which a draft reads what it was not asked of
FEW_ROWS = 8  # of which a new one is worth finding out about at once
LEVELS = 64  # of acceptance, that are told apart
MAX_ROWS = 8192  # that are remembered
MOST_UNREAD = 64  # that are kept until somebody chooses: rows of results, rows that ended, steps
OPTIMISTIC = 0.95  # acceptance with which guesses must pay for exploring to be of use


class GuessChooser:
    """One per engine. `acceptance` is expected of a guess before any was checked; `num_guesses`
    always checks so many, as far as `max_checked_tokens` (of a step, of all rows together) allows.
    `looks_ahead`: what was found is measured in steps that check nothing too. `has_cache`: before
    it guesses again, the draft has to read what came out of steps without a guess. `is_measured`:
    prices are those of such a device, not assumed.
    """

    def __init__(
        self,
        prices: GuessPrices,
        *,
        acceptance: float,
        max_guesses: int,
        max_checked_tokens: int,
        num_guesses: int | None = None,
        looks_ahead: bool = False,
        has_cache: bool = False,
        is_measured: bool = False,
    ) -> None:
        check(max_guesses >= 1 and 0 <= acceptance <= 1, "there is something to choose")
        self.fixed = num_guesses
        most = num_guesses or max_guesses
        self.choices = tuple(sorted({k for k in CHOICES if k < most} | {most}))
        self._times = StepTimes(prices, self.choices, is_measured=is_measured)
        self._acceptance = SharedAcceptance(acceptance, most, is_looked_up=looks_ahead)
        self.max_checked_tokens = max_checked_tokens
        self._looks_ahead, self._has_cache = looks_ahead, has_cache
        self._weight = LOOKED_UP_WEIGHT if looks_ahead else PRIOR_WEIGHT
        self._rows: dict[str, RowAcceptance] = {}
        self._hopeless: set[str] = set()
        self._chosen = 0
        self._chosen_for = -1  # bucket of the number of rows
        self._holds = 0  # steps
        self._copies = CopyRuns()  # of what is looked up, in steps of few rows
        # The choices that hold, by the guesses of each row, where these are known beforehand.
        self._held: dict[tuple[int, ...] | None, int] = {}
        self._shortest = self._break = EXPLORED_AFTER
        self._unseen = 0  # steps without a guess
        self._turn = self._num_looks = 0
        # What was expected to be right in a step whose guesses would not pay, as far as is known.
        self._explores: float | None = None
        self._asked: frozenset[str] | None = None  # rows that have guesses; None: all
        self._may_pay = True
        self._seconds: Mapping[int, float] = {}  # of steps like the last, by number of guesses
        # What is not learned from yet. To learn from some steps at once takes less than from each
        # as it ends, when the host's caches are cold for it.
        self._results: list[Mapping[str, tuple[int, int]]] = []
        self._ended: list[str] = []  # of which there may be results among them
        self._ran: list[TimedStep] = []

    @property
    def times(self) -> StepTimes:
        """What steps take, as far as they have run."""
        self._take_in()
        return self._times

    @property
    def acceptance(self) -> SharedAcceptance:
        """How many guesses of all rows are right."""
        self._take_in()
        return self._acceptance

    # ------------------------------------------------------------------ for the scheduler

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        """Guesses of each of these rows in the step that is about to be planned."""
        num_rows = len(decoding)
        if not num_rows:
            return 0
        if self._looks_ahead and num_rows <= FEW_ROWS and _has_nothing(decoding):
            return 0
        most = self.max_checked_tokens // num_rows - 1
        self._asked = None
        if self.fixed is not None:
            return self._fitting(most)
        bucket = row_bucket(num_rows)
        there = None
        if self._looks_ahead and num_rows <= FEW_ROWS and _is_known(decoding[0]):
            there = tuple([len(row.draft_token_ids) for row in decoding])
        self._holds -= 1
        if bucket != self._chosen_for or self._holds <= 0:
            self._renew(decoding, bucket, most, there)
        elif there in self._held:
            self._chosen = self._held[there]
        else:
            self._held[there] = self._chosen = self._best(decoding, bucket, most, self._chosen)
        if self._chosen == 0 and not self._looks_ahead and most >= 1:
            return self._explored(decoding)
        self._unseen = 0
        return min(self._chosen, self._fitting(most))

    def limit(self, request: Request, k: int) -> int:
        """Guesses of this row, at most k: none where next to none was right, or others tell."""
        if self._asked is not None and request.request_id not in self._asked:
            return 0
        return 0 if request.request_id in self._hopeless else k

    def observe(self, checked: Mapping[str, tuple[int, int]]) -> None:
        """Of the rows of one step: (guesses there were, right ones before the first miss). Nothing
        is learned where nothing is chosen."""
        if checked and self.fixed is None:
            self._results.append(checked)
            if self._looks_ahead and len(checked) <= FEW_ROWS:
                is_right = any(num_right for _, num_right in checked.values())
                if self._copies.add(is_right):  # it is time to choose
                    self._holds = min(self._holds, RENEWED_AFTER)
            if len(self._results) * len(checked) >= MOST_UNREAD:
                self._take_in()

    def _take_in(self) -> None:
        """Learn from the steps that have run since the last time."""
        if self._results:
            results, self._results = self._results, []
            for checked in results:
                self._learn(checked)
        if self._ended:
            for request_id in self._ended:
                self._rows.pop(request_id, None)
                self._hopeless.discard(request_id)
            self._ended.clear()
        if self._ran:
            ran, self._ran = self._ran, []
            for step in ran:
                self._times.on_priced(step)

    def _learn(self, checked: Mapping[str, tuple[int, int]]) -> None:
        """Of one step."""
        rows, num_rows = self._rows, len(checked)
        num_good, told = 0, []
        for (num_checked, num_right), count in _counted(checked).items():
            if num_checked > 0:
                told.append((num_right + (num_right < num_checked), num_right, count))
                num_good += count * (num_right > 0)
        self._acceptance.add_step(told)
        stride = -(-num_rows // ROWS_PER_RESULT)  # the more there are, the less each one matters
        self._turn = (self._turn + 1) % stride
        for name, (num_checked, num_right) in islice(checked.items(), self._turn, None, stride):
            row = rows.get(name) or self._new_row(name)
            if num_checked > 0:
                row.add(num_right + (num_right < num_checked), num_right)
                if row.is_hopeless:
                    self._hopeless.add(name)
                else:
                    self._hopeless.discard(name)
            if self._looks_ahead:
                self._acceptance.add_found(row, num_checked > 0)
        expected = self._explores
        if expected is not None and expected < LOW and num_good > (expected + SURPRISE) * num_rows:
            self._break, self._unseen = self._shortest, self._shortest  # and once more
        self._explores = None

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._ended.append(request_id)
        if len(self._ended) >= MOST_UNREAD:
            self._take_in()
        if 0 <= self._chosen_for <= FEW_ROWS:
            self._break = self._shortest

    def acceptance_of(self, request_id: str) -> float:
        """Chance that the next guess of this row is right."""
        prior = self.acceptance.rate  # when all is taken in
        row = self._rows.get(request_id)
        return prior if row is None else row.rate(prior, self._weight)

    def on_priced(self, step: TimedStep) -> None:
        """A step has run: if it only checked guesses, or only decoded, its time is learned."""
        if self.fixed is None:
            self._ran.append(step)
            if len(self._ran) >= MOST_UNREAD:
                self._take_in()

    # ------------------------------------------------------------------ choosing

    def _fitting(self, most: int) -> int:
        """The largest choice that is not more."""
        found = bisect_left(self.choices, most + 1) - 1
        return self.choices[found] if found >= 0 else 0

    def _new_row(self, name: str) -> RowAcceptance:
        """Who ends is forgotten, and not named again; of too many the oldest goes all the same."""
        if len(self._rows) >= MAX_ROWS:
            oldest = next(iter(self._rows))
            del self._rows[oldest]
            self._hopeless.discard(oldest)
        row = self._rows[name] = RowAcceptance()
        return row

    def _renew(
        self,
        decoding: Sequence[Request],
        bucket: int,
        most: int,
        there: tuple[int, ...] | None,
    ) -> None:
        """Choose anew, and for some steps."""
        is_like = bucket == self._chosen_for
        before = self._held.get(there, self._chosen) if is_like else 0
        self._chosen = self._best(decoding, bucket, most, before)
        self._held = {there: self._chosen}
        self._holds = RENEWED_AFTER
        if self._chosen == before and is_like:
            if self._times.has_learned(bucket, self._chosen):  # else it is on trial
                self._holds += len(decoding) // ROWS_PER_STEP
            if len(decoding) <= FEW_ROWS and self._copies.is_settled:
                pays_after = int(CHOOSING_S / (CHOOSING * self._seconds[self._chosen]))
                self._holds = max(self._holds, min(pays_after, LONGEST_HELD))
        self._chosen_for = bucket
        if self._chosen:
            self._break = self._shortest

    def _best(self, decoding: Sequence[Request], bucket: int, most: int, before: int) -> int:
        """By all that is known now; `before` where nothing else gains much."""
        self._take_in()
        seconds = self._times.seconds(bucket, _mean_context(decoding))
        if seconds is not self._seconds:
            self._look_at(seconds, most)
        tokens = self._tokens(decoding)
        speeds = {k: tokens[k] / seconds[k] for k in self.choices if k <= most or not k}
        loses = 1 - speeds.get(self.choices[1], 0.0) / speeds[0]  # a step with a guess, by this
        if self._has_cache and len(decoding) > FEW_ROWS:
            loses += CATCHING_UP
        self._shortest = max(EXPLORED_AFTER, round(loses / EXPLORING))
        self._break = max(self._break, self._shortest)
        return _best(speeds, before)

    def _look_at(self, seconds: Mapping[int, float], most: int) -> None:
        """Could guesses pay at these prices?"""
        self._seconds = seconds
        hoped = _tokens(OPTIMISTIC, [1.0] * self.choices[-1])
        speeds = [hoped[k] / seconds[k] for k in self.choices if k <= most or not k]
        self._may_pay = max(speeds) > MARGIN * speeds[0]

    def _tokens(self, decoding: Sequence[Request]) -> list[float]:
        """Expected of a row, by the number of guesses: the mean of those that are looked at."""
        prior = self._acceptance.rate
        counts: dict[tuple[int, int], float] = {}  # of rows with guesses, by acceptance and number
        stride = -(-len(decoding) // ROWS_PER_CHOICE)
        self._num_looks += 1
        looked_at = decoding[self._num_looks % stride :: stride]
        num_rows = len(looked_at)
        for request in looked_at:
            if request.request_id in self._hopeless:
                continue
            row = self._rows.get(request.request_id)
            level = round((prior if row is None else row.rate(prior, self._weight)) * LEVELS)
            found, there = 1.0, MAX_GUESSES
            if self._looks_ahead:
                found, there = self._found(request, row)
            counts[level, there] = counts.get((level, there), 0.0) + found
        total = [1.0] * (self.choices[-1] + 1)
        for (level, there), count in counts.items():
            expected = _tokens(level / LEVELS, self._acceptance.shape())
            for k in range(1, len(total)):
                total[k] += (expected[min(k, there)] - 1) * count / num_rows
        return total

    def _found(self, request: Request, row: RowAcceptance | None) -> tuple[float, int]:
        """How likely something is there to check, and how much. It is known where the last result
        has been taken in."""
        num_guesses = len(request.draft_token_ids)
        if _is_known(request):
            return 1.0, num_guesses
        return self._acceptance.found(row, num_guesses > 0), MAX_GUESSES

    def _explored(self, decoding: Sequence[Request]) -> int:
        """Nothing tells whether guesses have become better but a guess, once in a while."""
        self._take_in()
        self._unseen += 1
        if self._unseen < self._break or not self._may_pay:
            return 0
        self._unseen, self._holds, self._explores = 0, 0, self._acceptance.rate
        self._break = min(2 * self._break, LONGEST_BREAK * self._shortest)
        if self._has_cache and len(decoding) > EXPLORED_ROWS:
            self._asked = frozenset([row.request_id for row in decoding[:EXPLORED_ROWS]])
        return 1


def _tokens(rate: float, shape: Sequence[float]) -> list[float]:
    """Expected of a row by the number of guesses, `shape[j]` times as likely right as usual at
    position j when all before are."""
    total, reached = 1.0, 1.0
    tokens = [total]
    for factor in shape:
        reached *= min(SURE, rate * factor)
        total += reached
        tokens.append(total)
    return tokens


def _best(speeds: Mapping[int, float], current: int) -> int:
    """The fastest; the current one, or none, where the gain is too small to be sure of."""
    best = max(speeds, key=lambda k: speeds[k])
    if current in speeds and current and speeds[best] < STAYS * speeds[current]:
        best = current
    return best if speeds[best] > MARGIN * speeds[0] else 0


def _counted(checked: Mapping[str, tuple[int, int]]) -> Mapping[tuple[int, int], int]:
    """How many rows had which result."""
    return Counter(checked.values()) if len(checked) > 1 else dict.fromkeys(checked.values(), 1)


def _has_nothing(decoding: Sequence[Request]) -> bool:
    """Is it known that there is nothing to check?"""
    for request in decoding:
        if request.draft_token_ids or request.token_ids[-1] == UNKNOWN_TOKEN:
            return False
    return True


def _is_known(request: Request) -> bool:
    """Has its last result been taken in?"""
    return request.token_ids[-1] != UNKNOWN_TOKEN


def _mean_context(decoding: Sequence[Request]) -> int:
    return sum([row.num_computed_tokens for row in decoding]) // len(decoding)
