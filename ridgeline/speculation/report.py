"""What did drafting tokens bring? How many were right, at which positions, what making and checking
them took, and how much longer the same tokens would have taken without.

Counted are steps that check drafts and read no prompts. Their measured time is shared between
drafting and checking by the prices of the two; what they would have taken without drafts is the
price of as many plain decode steps as their tokens needed, times what such steps were measured to
take over their price.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ridgeline.figures import percent
from ridgeline.formats import MAX_DRAFT_TOKENS
from ridgeline.request import RequestOutput
from ridgeline.step import ScheduledRequest, StepPlan, StepResult

ENOUGH_STEPS = 16  # without drafts, to say what such steps take over their price


@dataclass(slots=True)
class DraftTotals:
    """Sums over steps that checked drafts; all only rise. `num_rows`: rows of these steps, each
    time. `num_looked`, `num_right`: by position, drafts that were reached, and right ones.
    `drafting_s` is part of `measured_s`. `plain_s`: the price of the same tokens without drafts.
    """

    num_steps: int = 0
    num_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    measured_s: float = 0.0
    expected_s: float = 0.0
    drafting_s: float = 0.0
    plain_s: float = 0.0
    num_looked: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    num_right: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)

    def since(self, start: DraftTotals) -> DraftTotals:
        """What came after the snapshot `start`."""
        return DraftTotals(
            self.num_steps - start.num_steps,
            self.num_rows - start.num_rows,
            self.num_draft_tokens - start.num_draft_tokens,
            self.num_accepted - start.num_accepted,
            self.num_tokens - start.num_tokens,
            self.measured_s - start.measured_s,
            self.expected_s - start.expected_s,
            self.drafting_s - start.drafting_s,
            self.plain_s - start.plain_s,
            [a - b for a, b in zip(self.num_looked, start.num_looked, strict=True)],
            [a - b for a, b in zip(self.num_right, start.num_right, strict=True)],
        )

    def count_step(self, seconds: float, expected_s: float, drafting_s: float) -> None:
        """A step has run; of its price, `drafting_s` was for making the drafts."""
        self.num_steps += 1
        self.measured_s += seconds
        self.expected_s += expected_s
        if expected_s > 0:
            self.drafting_s += seconds * drafting_s / expected_s

    def count_result(
        self, plan: StepPlan, result: StepResult, outputs: Sequence[RequestOutput], plain_s: float
    ) -> int:
        """A step was taken in; without drafts it would have cost `plain_s`, and given one token
        to each row. How many rows got any: not those that had ended while it was under way."""
        num_rows = num_tokens = 0
        kinds = [kind for _, kind in rows_taken(plan, result, outputs)]
        counts = Counter(kinds) if len(kinds) > 1 else dict.fromkeys(kinds, 1)
        for kind, count in counts.items():
            num_rows += count
            num_tokens += count * kind.num_taken
            self._count_rows(kind, count)
        self.num_rows += num_rows
        self.num_tokens += num_tokens
        if num_rows:
            self.plain_s += plain_s * num_tokens / num_rows
        return num_rows

    def _count_rows(self, kind: Taken, count: int) -> None:
        self.num_draft_tokens += count * kind.num_draft_tokens
        self.num_accepted += count * kind.num_right
        for position in range(min(kind.num_looked, MAX_DRAFT_TOKENS)):
            self.num_looked[position] += count
            self.num_right[position] += count * (position < kind.num_right)


class Taken(NamedTuple):
    """A row of a step with drafts: so many were planned, of which `num_there` were looked at (a
    look-up may have found fewer, or none); `num_sampled` tokens came out, `num_taken` of them up to
    where the answer ends."""

    num_draft_tokens: int
    num_there: int
    num_sampled: int
    num_taken: int

    @property
    def num_right(self) -> int:
        """Drafts of the answer."""
        return min(self.num_sampled - 1, self.num_taken)

    @property
    def num_looked(self) -> int:
        """The same and the first wrong one, if the answer goes so far."""
        return min(self.num_there, self.num_taken)


def rows_taken(
    plan: StepPlan, result: StepResult, outputs: Sequence[RequestOutput]
) -> Iterator[tuple[ScheduledRequest, Taken]]:
    """Each row that got tokens. One that ended while the step was under way gets none, whatever
    came out."""
    sampled, verified = result.token_ids, result.verified
    num_taken = {output.request_id: len(output.new_token_ids) for output in outputs}
    for row in plan.scheduled:
        name = row.request_id
        if (num := num_taken.get(name)) and name in sampled:  # of beams the best ones are told
            num_there = verified[name][0] if row.num_draft and name in verified else row.num_draft
            yield row, Taken(row.num_draft, num_there, len(sampled[name]), num)


@dataclass(frozen=True, slots=True)
class DraftReport:
    """`accepted_length`: tokens that a row of a step with drafts gives, its own one included.
    `by_position`: how often a draft that is reached is right. `drafting_share` and
    `verifying_share` are of the time of these steps, by price. `gain`: tokens per second over those
    of steps without drafts; `is_measured` says that such steps have run here, else the error of
    their price is taken to be that of the others."""

    num_steps: int
    num_draft_tokens: int
    num_accepted: int
    accepted_length: float
    acceptance: float
    by_position: tuple[float, ...]
    drafting_s: float
    verifying_s: float
    drafting_share: float
    verifying_share: float
    gain: float
    is_measured: bool

    def lines(self, *, is_calibrated: bool) -> tuple[str, ...]:
        """All of it in a line or two, but what rests on assumed prices."""
        positions = " ".join(f"{share:.2f}" for share in self.by_position)
        right = f"{percent(self.acceptance)} right ({positions} by position)"
        said = [f"{self.accepted_length:.2f} tokens a row and step, {right}"]
        if self.is_measured or is_calibrated:
            known = "measured" if self.is_measured else "expected"
            said.append(f"{self.gain:.2f}x of the {known} speed without drafts")
        if is_calibrated:
            said[-1] += f", {percent(self.drafting_share, 0)} of the time to draft (by price)"
        return tuple(said)


def draft_report(
    totals: DraftTotals, num_plain: int, plain_measured_s: float, plain_expected_s: float
) -> DraftReport | None:
    """None when nothing was drafted. `num_plain` steps without drafts or prompts took
    `plain_measured_s` and should have taken `plain_expected_s`."""
    if not totals.num_steps or not totals.num_draft_tokens:
        return None
    is_measured = num_plain >= ENOUGH_STEPS and plain_expected_s > 0
    ratio = _ratio(totals.measured_s, totals.expected_s)
    if is_measured:
        ratio = plain_measured_s / plain_expected_s
    share = _ratio(totals.drafting_s, totals.measured_s)
    looked = [num for num in totals.num_looked if num]
    return DraftReport(
        totals.num_steps,
        totals.num_draft_tokens,
        totals.num_accepted,
        _ratio(totals.num_tokens, totals.num_rows),
        _ratio(sum(totals.num_right), sum(totals.num_looked)),
        tuple(right / num for num, right in zip(looked, totals.num_right, strict=False)),
        totals.drafting_s,
        totals.measured_s - totals.drafting_s,
        share,
        1 - share,
        _ratio(totals.plain_s * ratio, totals.measured_s),
        is_measured,
    )


def _ratio(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
