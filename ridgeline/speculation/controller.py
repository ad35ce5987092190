"""How many draft tokens are worth verifying in this step?

All rows of a step verify the same number k of draft tokens, as captured steps have one size. With
E_r(k) tokens expected of row r and T(k) seconds of a step, drafting included, sum_r E_r(k) / T(k)
is largest at k, which may be 0. E_r follows from acceptance, by position and of row r lately, T
from the price of the step and what such steps have taken here (`step_times`).
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
from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.speculation.step_times import StepSeconds, StepTimes, row_bucket
from ridgeline.step import Listener, PricedStep

CHOICES = (0, *STEP_DRAFTS)
MARGIN = 1.02  # gain that drafting needs: prices are not more exact
SURE = 0.98  # no chance is taken to be higher
SAMPLE_ROWS = 16  # rows that a choice looks at, other ones each time
ROWS_PER_RESULT = 8  # rows whose own acceptance the result of one step brings up to date
FEW_ROWS = 8  # up to which prompt lookup is asked what it has found for each row
MAX_ROWS = 8192  # rows that are remembered
MOST_UNREAD = 64  # rows of results that wait for a choice: the host learns faster from many at once

# A choice takes the host about 100 us, as long as a short step. It holds for HELD steps and one
# more for each ROWS_PER_STEP rows; a choice of prompt lookup of few rows that stays the same holds
# twice as long each time, at most LONGEST_HELD, until a copy begins or ends: so many steps with, or
# without, an accepted token.
HELD, LONGEST_HELD, ROWS_PER_STEP = 4, 32, 8
ENDS_AFTER, BEGINS_AFTER = 6, 2

# Without drafts nothing is learned of them, so one token is drafted after EXPLORED_AFTER steps at
# least, such that this costs a share EXPLORING of the time; each time nothing new is found the
# break doubles, up to LONGEST_BREAK times that. After an acceptance that is higher than expected by
# SURPRISE the next one follows at once.
EXPLORED_AFTER, EXPLORING, LONGEST_BREAK, SURPRISE = 8, 0.005, 4, 0.2
OPTIMISTIC = 0.95  # acceptance with which drafting must pay for exploring to be of use
CATCHING_UP = 3.0  # plain steps that a draft model takes to read what many rows got without it

ROW_MEMORY = 19 / 20  # weight left of a row's token after one more: about 20 tokens count
FEW = 8.0  # results that the chance of the position before counts for
FOUND_WEIGHT = 1 / 64  # of a row's step in how often prompt lookup finds something


@dataclass(slots=True)
class RowAcceptance:
    """Tokens of one request that were verified and accepted, older ones counting less.
    `had_some`: prompt lookup found something in its last step (None: no step yet)."""

    verified: float = 0.0
    accepted: float = 0.0
    had_some: bool | None = None

    def add(self, verified: int, accepted: int) -> None:
        kept = ROW_MEMORY**verified
        self.verified = self.verified * kept + verified
        self.accepted = self.accepted * kept + accepted


class Acceptance:
    """Of all rows together: `chances` by position of a draft token whose predecessors were
    accepted, `rate` of all positions, and how often prompt lookup `found` something after a step in
    which it found nothing, or something. Of prompt lookup, older results and other rows say less.
    """

    def __init__(self, prior: float, max_drafts: int, *, is_looked_up: bool) -> None:
        memory = (0.995, 15 / 16) if is_looked_up else (0.999, 127 / 128)
        self._rows_memory, self._steps_memory = memory
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
            self.found[before] += FOUND_WEIGHT * (is_some - self.found[before])
        row.had_some = is_some


class DraftLengthController(DraftLengths, Listener):
    """One per engine; `prices` are those of its steps, drafting included. `acceptance` is expected
    before any draft token was verified; `num_drafts` fixes k, as far as `max_verified_tokens` (of
    all rows of a step) allows. `looks_ahead`: prompt lookup, whose drafts are found in every step.
    `has_cache`: a draft model that has to read the tokens of steps without drafts before it drafts
    again."""

    def __init__(
        self,
        prices: StepSeconds,
        *,
        acceptance: float,
        max_drafts: int,
        max_verified_tokens: int,
        num_drafts: int | None = None,
        looks_ahead: bool = False,
        has_cache: bool = False,
    ) -> None:
        check(max_drafts >= 1 and 0 <= acceptance <= 1, "there is something to choose")
        super().__init__(most := num_drafts or max_drafts)
        self.fixed = num_drafts
        self.choices = tuple(sorted({k for k in CHOICES if k < most} | {most}))
        self.max_verified_tokens = max_verified_tokens
        self._looks_ahead, self._has_cache = looks_ahead, has_cache
        self.acceptance = Acceptance(acceptance, most, is_looked_up=looks_ahead)
        self.times = StepTimes(prices, self.choices)
        self._rows: dict[str, RowAcceptance] = {}
        # Choices that hold, by the numbers of tokens that prompt lookup has found (None: unknown).
        self._held: dict[tuple[int, ...] | None, int] = {}
        self._bucket, self._holds, self._held_for = -1, 0, HELD
        self._is_copying, self._num_others = False, 0  # steps that were otherwise
        self._shortest = self._break = EXPLORED_AFTER
        self._undrafted = self._num_choices = self._num_results = self._num_unread = 0
        self._may_pay = True
        self._expected: float | None = None  # acceptance of an exploration that is under way
        self._unread: list[tuple[Callable[[Any], object], Any]] = []

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        if not (num_rows := len(decoding)):
            return 0
        found = None
        most = self.max_verified_tokens // num_rows - 1
        fitting = self.choices[max(0, bisect_right(self.choices, most) - 1)] if most > 0 else 0
        if self.fixed is not None:
            return fitting
        is_small = self._looks_ahead and num_rows <= FEW_ROWS
        if is_small and all(row.token_ids[-1] != UNKNOWN_TOKEN for row in decoding):
            found = tuple([len(row.draft_token_ids) for row in decoding])
            if not any(found):
                return 0
        bucket = row_bucket(num_rows)
        self._holds -= 1
        if bucket != self._bucket or self._holds <= 0:
            self._renew(decoding, bucket, fitting, found)
        elif found not in self._held:
            self._held[found] = self._best(decoding, fitting)
        k = self._held[found]
        if not k and fitting and not self._looks_ahead:
            return self._explore()
        self._undrafted = 0
        return min(k, fitting)

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
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
        self._later(lambda name: self._rows.pop(name, None), request_id)
        if 0 <= self._bucket <= FEW_ROWS:
            self._break = self._shortest

    def on_priced(self, step: PricedStep) -> None:
        if self.fixed is None:
            self._later(self.times.on_priced, step)

    def _later(self, learn: Callable[[Any], object], what: object, size: int = 1) -> None:
        self._unread.append((learn, what))
        self._num_unread += size
        if self._num_unread >= MOST_UNREAD:
            self.learn()

    def learn(self) -> None:
        """Take in what waits, as every choice does."""
        unread, self._unread, self._num_unread = self._unread, [], 0
        for learn, what in unread:
            learn(what)

    def _add_result(self, results: Mapping[str, tuple[int, int]]) -> None:
        counts: Counter[tuple[int, int]] = Counter()
        for (num_drafts, accepted), count in Counter(results.values()).items():
            if num_drafts:
                counts[min(num_drafts, accepted + 1), accepted] += count
        self.acceptance.add_step(counts)
        self._num_results += 1
        stride = -(-len(results) // ROWS_PER_RESULT)  # of many rows each one matters less
        begin = self._num_results % stride
        for name, (num_drafts, accepted) in islice(results.items(), begin, None, stride):
            row = self._rows.setdefault(name, RowAcceptance())
            if num_drafts:
                row.add(min(num_drafts, accepted + 1), accepted)
            if self._looks_ahead:
                self.acceptance.add_found(row, num_drafts > 0)
        while len(self._rows) > MAX_ROWS:
            del self._rows[next(iter(self._rows))]
        if self._expected is not None:
            share = sum([n for (_, accepted), n in counts.items() if accepted]) / len(results)
            if share > self._expected + SURPRISE:
                self._break, self._undrafted = self._shortest, self._shortest
            self._expected = None

    def _renew(
        self, decoding: Sequence[Request], bucket: int, most: int, found: tuple[int, ...] | None
    ) -> None:
        """Choose, and for some steps."""
        before = self._held.get(found, next(iter(self._held.values()), 0))
        k = self._best(decoding, most)
        if k != before or bucket != self._bucket:
            self._held_for = HELD
        elif self._looks_ahead and len(decoding) <= FEW_ROWS:
            self._held_for = min(2 * self._held_for, LONGEST_HELD)
        else:
            self._held_for = HELD + len(decoding) // ROWS_PER_STEP
        self._held, self._holds, self._bucket = {found: k}, self._held_for, bucket
        if k:
            self._break = self._shortest

    def _best(self, decoding: Sequence[Request], most: int) -> int:
        """The fastest k; 0 where the gain is too small to be sure of."""
        self.learn()
        num_rows = len(decoding)
        context = sum([row.num_computed_tokens for row in decoding]) // num_rows
        seconds = self.times.seconds(num_rows, context)
        stride, self._num_choices = -(-num_rows // SAMPLE_ROWS), self._num_choices + 1
        sample = decoding[self._num_choices % stride :: stride]
        total = [sum(column) for column in zip(*map(self._tokens, sample), strict=True)]
        speeds = {k: total[k] / seconds[k] for k in self.choices if k <= most}
        hoped = {k: (1 - OPTIMISTIC ** (k + 1)) / (1 - OPTIMISTIC) for k in speeds}
        self._may_pay = any(hoped[k] * seconds[0] > MARGIN * seconds[k] for k in speeds)
        loss = 1 - speeds.get(1, 0.0) / speeds[0]  # of plain steps, by exploring
        loss += CATCHING_UP * (self._has_cache and num_rows > FEW_ROWS)
        self._shortest = max(EXPLORED_AFTER, round(loss / EXPLORING))
        self._break = max(self._break, self._shortest)
        best = max(speeds, key=speeds.__getitem__)
        return best if speeds[best] > MARGIN * speeds[0] else 0

    def _tokens(self, request: Request) -> list[float]:
        """Expected of this row, by k."""
        tokens = self.acceptance.tokens(self._rows.get(request.request_id))
        if not self._looks_ahead:
            return tokens
        num_found = len(request.draft_token_ids)
        if request.token_ids[-1] != UNKNOWN_TOKEN:
            return [tokens[min(k, num_found)] for k in range(len(tokens))]
        found = self.acceptance.found[num_found > 0]
        return [1 + found * (one - 1) for one in tokens]

    def _explore(self) -> int:
        """Only a draft tells whether drafts have become better: one token, once in a while."""
        self.learn()
        self._undrafted += 1
        if self._undrafted < self._break or not self._may_pay:
            return 0
        self._undrafted, self._holds, self._expected = 0, 0, self.acceptance.rate
        self._break = min(2 * self._break, LONGEST_BREAK * self._shortest)
        return 1
