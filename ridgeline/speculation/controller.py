"""How many draft tokens are worth verifying in this step, and for which rows?

All rows of a step verify the same number k of draft tokens, as captured steps have one size. With
E_r(k) tokens expected from row r and T(k) seconds of a step, drafting included, k is where
sum_r E_r(k) / T(k) is largest; 0 is among the choices. E_r follows from acceptance, by position for
all rows together and of row r lately. T is the price of the step, corrected by what such steps have
taken here (`step_times`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from ridgeline.errors import check
from ridgeline.formats import STEP_DRAFTS
from ridgeline.request import UNKNOWN_TOKEN, Request
from ridgeline.speculation.step_times import StepPrices, StepTimes, TimedStep, row_bucket

CHOICES = (0, *STEP_DRAFTS)
MARGIN = 1.02  # gain that drafting needs: prices are not more exact
STAYS = 1.01  # gain that another k needs over the one in use
SURE = 0.98  # no chance is taken to be higher
SAMPLE_ROWS = 16  # that a choice looks at, other ones each time; that one exploration drafts for
ROWS_PER_RESULT = 8  # whose own acceptance one step's result brings up to date
FEW_ROWS = 8  # up to which prompt lookup is asked what it has found for each row
HELD = 4  # steps that a choice holds; where it stays, longer: twice as long for prompt lookup of
LONGEST_HELD = 32  # few rows, at most so long; else one step more for each `ROWS_PER_STEP` rows
ROWS_PER_STEP = 8
ENDS_AFTER, BEGINS_AFTER = 6, 2  # steps without and with an accepted token: a copy ends, or begins
EXPLORED_AFTER = 8  # steps without a draft, at least, until one token is drafted to learn from
EXPLORING = 0.005  # share of the time that this may take
LONGEST_BREAK = 4  # times that break, while nothing new is found
SURPRISE = 0.2  # acceptance above the one expected, after which it is repeated at once
CATCHING_UP = 3.0  # plain steps that a draft model takes to read what many rows got without it
OPTIMISTIC = 0.95  # acceptance with which drafting must pay for exploring to be of use
MAX_ROWS = 8192  # remembered
MOST_UNREAD = 64  # rows of results, and steps, kept until the next choice: the host learns faster
# from many at once, but from too many it would hold the device up
ROW_MEMORY, LATELY = 29 / 30, 7 / 8  # weight left of a row's token after one more: of about 30, 8
BREAK = 0.4  # difference of the two from which on only the latter counts
HOPELESS, ENOUGH = 0.04, 20.0  # acceptance, after so many tokens, of a row that drafts no more
FEW = 8.0  # results that the chance of the position before counts for
ROW_FOUND, SHARED_FOUND = 1 / 16, 1 / 200  # weight of a step in how often prompt lookup finds


@dataclass(slots=True)
class RowAcceptance:
    """Of one request: tokens verified and accepted, older ones counting less, the share accepted
    `lately`, and the chance that prompt lookup finds something after a step in which it found
    nothing, or something (copies come in runs)."""

    found: list[float]
    verified: float = 0.0
    accepted: float = 0.0
    lately: float | None = None
    had_some: bool | None = None

    @property
    def is_hopeless(self) -> bool:
        return self.verified > ENOUGH and self.accepted < HOPELESS * self.verified

    def add(self, verified: int, accepted: int) -> None:
        kept, share = ROW_MEMORY**verified, accepted / verified
        self.verified = self.verified * kept + verified
        self.accepted = self.accepted * kept + accepted
        lately = share if self.lately is None else self.lately
        self.lately = lately + (1 - LATELY**verified) * (share - lately)
        if abs(self.accepted - self.lately * self.verified) > BREAK * self.verified:
            self.verified = min(self.verified, 1 / (1 - LATELY))
            self.accepted = self.lately * self.verified


class Acceptance:
    """Of all rows together: `chances` by position of a draft token whose predecessors were
    accepted, `rate` of all positions. Prompt lookup forgets soon, and of it others say little."""

    def __init__(self, prior: float, max_drafts: int, *, is_looked_up: bool) -> None:
        self._rows_memory, self._steps_memory = (
            (0.995, 15 / 16) if is_looked_up else (0.999, 127 / 128)
        )
        self.weight = 4.0 if is_looked_up else 20.0  # tokens that it counts for in one row
        self._at = [[0.0, 0.0] for _ in range(max_drafts)]  # verified, accepted
        self._at[0] = [20.0, 20 * prior]
        self._chances: list[float] = []  # empty: to be made anew
        self.found = [1.0, 1.0]

    def add_step(self, results: Mapping[tuple[int, int], int]) -> None:
        """How many rows had (verified, accepted) tokens; the first miss ends a row's tokens."""
        kept = max(self._rows_memory ** sum(results.values()), self._steps_memory)
        for seen in self._at:
            seen[0] *= kept
            seen[1] *= kept
        for (verified, accepted), count in results.items():
            for seen in self._at[:verified]:
                seen[0] += count
            for seen in self._at[:accepted]:
                seen[1] += count
        self._chances = []

    @property
    def rate(self) -> float:
        return sum([seen[1] for seen in self._at]) / sum([seen[0] for seen in self._at])

    @property
    def chances(self) -> list[float]:
        """Where few were verified, as at the position before."""
        if not self._chances:
            chance = self.rate
            for verified, accepted in self._at:
                chance = (accepted + FEW * chance) / (verified + FEW)
                self._chances.append(chance)
        return self._chances

    def tokens(self, row: RowAcceptance | None) -> list[float]:
        """Expected of a row, by k; of one that nothing is known of, without `row`."""
        factor = 1.0
        if row is not None and (rate := self.rate) > 0:
            mean = (row.accepted + self.weight * rate) / (row.verified + self.weight)
            factor = mean / rate
        chances = [min(SURE, chance * factor) for chance in self.chances]
        return list(accumulate(accumulate(chances, float.__mul__), initial=1.0))

    def add_found(self, row: RowAcceptance, is_some: bool) -> None:
        """Prompt lookup has found something for this row, or not."""
        if (before := row.had_some) is not None:
            row.found[before] += ROW_FOUND * (is_some - row.found[before])
            self.found[before] += SHARED_FOUND * (is_some - self.found[before])
        row.had_some = is_some


class DraftLengthController:
    """One per engine. `acceptance` is expected before any draft was verified; `num_drafts` fixes k,
    as far as `max_verified_tokens` (of all rows of a step) allows. `looks_ahead`: prompt lookup,
    whose drafts are found in every step. `has_cache`: a draft model that has to read the tokens of
    steps without drafts before it drafts again."""

    def __init__(
        self,
        prices: StepPrices,
        *,
        acceptance: float,
        max_drafts: int,
        max_verified_tokens: int,
        num_drafts: int | None = None,
        looks_ahead: bool = False,
        has_cache: bool = False,
    ) -> None:
        check(max_drafts >= 1 and 0 <= acceptance <= 1, "there is something to choose")
        self.fixed, most = num_drafts, num_drafts or max_drafts
        self.choices = tuple(sorted({k for k in CHOICES if k < most} | {most}))
        self.max_verified_tokens = max_verified_tokens
        self._looks_ahead, self._has_cache = looks_ahead, has_cache
        self._acceptance = Acceptance(acceptance, most, is_looked_up=looks_ahead)
        self._times = StepTimes(prices, self.choices)
        self._rows: dict[str, RowAcceptance] = {}
        # Choices that hold, by the numbers of tokens that prompt lookup has found (None: unknown).
        self._held: dict[tuple[int, ...] | None, int] = {}
        self._bucket, self._holds, self._held_for = -1, 0, HELD
        self._is_copying, self._num_others = False, 0  # steps that were otherwise
        self._shortest = self._break = EXPLORED_AFTER
        self._undrafted = self._num_choices = self._num_results = 0
        self._expected: float | None = None  # acceptance of an exploration that is under way
        self._explorers: frozenset[str] | None = None  # rows that take part in it; None: all
        self._may_pay = True
        self._hoped = list(accumulate([OPTIMISTIC**k for k in range(most + 1)]))
        self._unread: list[tuple[Callable[[Any], None], Any]] = []
        self._num_unread = 0

    @property
    def times(self) -> StepTimes:
        self._learn()
        return self._times

    @property
    def acceptance(self) -> Acceptance:
        self._learn()
        return self._acceptance

    # ------------------------------------------------------------------ for the scheduler

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        """Draft tokens of each of these rows in the step that is about to be planned."""
        num_rows = len(decoding)
        if not num_rows:
            return 0
        self._explorers, found = None, None
        most = self.max_verified_tokens // num_rows - 1
        fitting = self.choices[max(0, bisect_right(self.choices, most) - 1)] if most > 0 else 0
        if self.fixed is not None:
            return fitting
        if self._looks_ahead and num_rows <= FEW_ROWS and all(map(_is_known, decoding)):
            found = tuple([len(row.draft_token_ids) for row in decoding])
            if not any(found):
                return 0
        bucket = row_bucket(num_rows)
        self._holds -= 1
        if bucket != self._bucket or self._holds <= 0:
            self._renew(decoding, bucket, fitting, found)
        elif found not in self._held:
            self._held[found] = self._best(decoding, fitting, next(iter(self._held.values())))
        k = self._held[found]
        if not k and fitting and not self._looks_ahead:
            return self._explore(decoding)
        self._undrafted = 0
        return min(k, fitting)

    def limit(self, request: Request, k: int) -> int:
        """Draft tokens of this row, at most k."""
        if self._explorers is not None and request.request_id not in self._explorers:
            return 0
        row = self._rows.get(request.request_id)
        return 0 if row is not None and row.is_hopeless else k

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        """(Draft tokens that were there, accepted ones) of the rows of one step."""
        if not verified or self.fixed is not None:
            return
        if self._looks_ahead and len(verified) <= FEW_ROWS:
            is_copying = any(accepted for _, accepted in verified.values())
            self._num_others = 0 if is_copying == self._is_copying else self._num_others + 1
            if self._num_others >= (ENDS_AFTER if self._is_copying else BEGINS_AFTER):
                self._is_copying, self._num_others = is_copying, 0
                self._holds, self._held_for = min(self._holds, HELD), HELD
        self._later(self._add_result, verified, len(verified))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._later(self._drop_row, request_id)
        if 0 <= self._bucket <= FEW_ROWS:
            self._break = self._shortest

    def on_priced(self, step: TimedStep) -> None:
        """A step has run."""
        if self.fixed is None:
            self._later(self._times.on_priced, step)

    # ------------------------------------------------------------------ learning

    def _later(self, learn: Callable[[Any], None], what: object, size: int = 1) -> None:
        self._unread.append((learn, what))
        self._num_unread += size
        if self._num_unread >= MOST_UNREAD:
            self._learn()

    def _learn(self) -> None:
        unread, self._unread, self._num_unread = self._unread, [], 0
        for learn, what in unread:
            learn(what)

    def _drop_row(self, name: str) -> None:
        self._rows.pop(name, None)

    def _add_result(self, results: Mapping[str, tuple[int, int]]) -> None:
        counts: Counter[tuple[int, int]] = Counter()
        for (num_drafts, accepted), count in Counter(results.values()).items():
            if num_drafts:
                counts[min(num_drafts, accepted + 1), accepted] += count
        self._acceptance.add_step(counts)
        self._num_results += 1
        stride = -(-len(results) // ROWS_PER_RESULT)  # of many rows each one matters less
        begin = self._num_results % stride
        for name, (num_drafts, accepted) in islice(results.items(), begin, None, stride):
            row = self._rows.get(name) or self._new_row(name)
            if num_drafts:
                row.add(min(num_drafts, accepted + 1), accepted)
            if self._looks_ahead:
                self._acceptance.add_found(row, num_drafts > 0)
        if self._expected is not None:
            share = sum([n for (_, accepted), n in counts.items() if accepted]) / len(results)
            if share > self._expected + SURPRISE:
                self._break, self._undrafted = self._shortest, self._shortest
            self._expected = None

    def _new_row(self, name: str) -> RowAcceptance:
        if len(self._rows) >= MAX_ROWS:
            del self._rows[next(iter(self._rows))]
        row = self._rows[name] = RowAcceptance(list(self._acceptance.found))
        return row

    # ------------------------------------------------------------------ choosing

    def _renew(
        self, decoding: Sequence[Request], bucket: int, most: int, found: tuple[int, ...] | None
    ) -> None:
        """Choose, and for some steps."""
        before = self._held.get(found, next(iter(self._held.values()), 0))
        before = before if bucket == self._bucket else 0
        k = self._best(decoding, most, before)
        stays = k == before and bucket == self._bucket
        if not stays:
            self._held_for = HELD
        elif self._looks_ahead and len(decoding) <= FEW_ROWS:
            self._held_for = min(2 * self._held_for, LONGEST_HELD)
        else:
            self._held_for = HELD + len(decoding) // ROWS_PER_STEP
        self._held, self._holds, self._bucket = {found: k}, self._held_for, bucket
        if k:
            self._break = self._shortest

    def _best(self, decoding: Sequence[Request], most: int, before: int) -> int:
        """The fastest k; `before`, or 0, where the gain is too small to be sure of."""
        self._learn()
        num_rows = len(decoding)
        context = sum([row.num_computed_tokens for row in decoding]) // num_rows
        seconds = self._times.seconds(num_rows, context)
        stride, self._num_choices = -(-num_rows // SAMPLE_ROWS), self._num_choices + 1
        sample = decoding[self._num_choices % stride :: stride]
        total = [0.0] * (self.choices[-1] + 1)
        for request in sample:
            for k, tokens in enumerate(self._tokens(request)):
                total[k] += tokens
        speeds = {k: total[k] / seconds[k] for k in self.choices if k <= most}
        self._may_pay = any(self._hoped[k] * seconds[0] > MARGIN * seconds[k] for k in speeds)
        loss = 1 - speeds.get(1, 0.0) / speeds[0]  # of plain steps, by exploring
        loss += CATCHING_UP * (self._has_cache and num_rows > FEW_ROWS)
        self._shortest = max(EXPLORED_AFTER, round(loss / EXPLORING))
        self._break = max(self._break, self._shortest)
        best = max(speeds, key=speeds.__getitem__)
        if speeds.get(before, 0.0) * STAYS > speeds[best] and before:
            best = before
        return best if speeds[best] > MARGIN * speeds[0] else 0

    def _tokens(self, request: Request) -> list[float]:
        """Expected of this row, by k."""
        row = self._rows.get(request.request_id)
        if row is not None and row.is_hopeless:
            return [1.0] * (self.choices[-1] + 1)
        tokens = self._acceptance.tokens(row)
        if not self._looks_ahead:
            return tokens
        num_found = len(request.draft_token_ids)
        if _is_known(request):
            return [tokens[min(k, num_found)] for k in range(len(tokens))]
        found = (self._acceptance if row is None else row).found[num_found > 0]
        return [1 + found * (one - 1) for one in tokens]

    def _explore(self, decoding: Sequence[Request]) -> int:
        """Whether drafts have become better tells nothing but a draft, once in a while."""
        self._learn()
        self._undrafted += 1
        if self._undrafted < self._break or not self._may_pay:
            return 0
        self._undrafted, self._holds, self._expected = 0, 0, self._acceptance.rate
        self._break = min(2 * self._break, LONGEST_BREAK * self._shortest)
        if self._has_cache and len(decoding) > SAMPLE_ROWS:
            self._explorers = frozenset([row.request_id for row in decoding[:SAMPLE_ROWS]])
        return 1


def _is_known(request: Request) -> bool:
    """Its last result has been taken in."""
    return request.token_ids[-1] != UNKNOWN_TOKEN
