"""How much faster is decoding with guesses, and how many guesses are best?

A step checks k guesses and one more token of each request at once. E tokens come out of it on
average, so with T the time of a target step, drafting included:

  speedup(B, S, k) = E(k) * T(B, 1, S) / (T(B, k + 1, S) + draft(B, S, k) + overhead)

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, for E
and the simple form in which T(B, k + 1, S) = T(B, 1, S). That holds for one request on a device
that waits for memory; the form above holds for any batch B and context S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.totals import StepTotals, repeated
from ridgeline.errors import ConfigError
from ridgeline.step import StepShape

MAX_DRAFTS = 16


# ---------------------------------------------------------------------- how many are accepted


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Mean tokens of a step whose guesses are each accepted with probability `acceptance`, one
    after the other until the first miss; the target's own token after it is included."""
    _check_drafts(num_drafts)
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"an acceptance rate must be in 0 .. 1, not {acceptance:g}")
    if acceptance == 1:
        return float(num_drafts + 1)
    return float((1 - acceptance ** (num_drafts + 1)) / (1 - acceptance))


def expected_accepted(acceptance: float, num_drafts: int) -> float:
    """Mean guesses that are accepted: less than acceptance * num_drafts, as a miss ends the run."""
    return expected_tokens(acceptance, num_drafts) - 1


def expected_tokens_from_curve(lengths: Sequence[float], num_drafts: int) -> float:
    """The same from a measurement: `lengths[k - 1]` is the mean number of tokens of a step with k
    guesses, the target's own token included (1 means that no guess was accepted)."""
    _check_drafts(num_drafts)
    if num_drafts > len(lengths):
        raise ConfigError(f"acceptance was measured up to {len(lengths)} guesses, not {num_drafts}")
    return 1.0 if num_drafts == 0 else lengths[num_drafts - 1]


class Acceptance(Protocol):
    """Mean tokens of a step with so many guesses, for up to `max_drafts` of them."""

    @property
    def max_drafts(self) -> int: ...

    def tokens(self, num_drafts: int) -> float: ...


@dataclass(frozen=True, slots=True)
class IndependentAcceptance:
    """Each guess is accepted with the same probability `rate`, whatever came before it."""

    rate: float
    max_drafts: int = MAX_DRAFTS

    def tokens(self, num_drafts: int) -> float:
        return expected_tokens(self.rate, num_drafts)


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """A measured curve; see `expected_tokens_from_curve`. ConfigError for an impossible one."""

    lengths: tuple[float, ...]

    def __post_init__(self) -> None:
        for k, length in enumerate(self.lengths, start=1):
            if not 1 <= length <= k + 1:
                raise ConfigError(
                    f"a step with {k} guesses gives 1 .. {k + 1} tokens, not {length:g}; "
                    "count the target's own token too"
                )

    @property
    def max_drafts(self) -> int:
        return len(self.lengths)

    def tokens(self, num_drafts: int) -> float:
        return expected_tokens_from_curve(self.lengths, num_drafts)


# ---------------------------------------------------------------------- the rule of acceptance


def acceptance_rate(target: Sequence[float], draft: Sequence[float]) -> float:
    """How often a token drawn from `draft` is accepted, with probability min(1, p/q), where
    `target` gives p and `draft` gives q of each token: the overlap of the two."""
    return sum(map(min, target, draft))


def after_rejection(target: Sequence[float], draft: Sequence[float]) -> tuple[float, ...]:
    """Probabilities to draw from instead of a rejected token: max(0, p - q), normalised."""
    excess = [max(0.0, p - q) for p, q in zip(target, draft, strict=True)]
    total = sum(excess)
    return tuple(target) if total == 0 else tuple(value / total for value in excess)


def emitted(target: Sequence[float], draft: Sequence[float]) -> tuple[float, ...]:
    """Probabilities of the token that comes out, accepted or replaced: those of the target."""
    replaced = 1 - acceptance_rate(target, draft)
    rest = after_rejection(target, draft)
    return tuple(min(p, q) + replaced * r for p, q, r in zip(target, draft, rest, strict=True))


# ---------------------------------------------------------------------- the simple form


@dataclass(frozen=True, slots=True)
class Choice:
    """So many guesses a step; `speedup` of tokens per second over decoding without. No guesses
    (num_drafts 0, speedup 1) when none pays."""

    num_drafts: int
    speedup: float


def simple_speedup(acceptance: float, num_drafts: int, draft_ratio: float) -> float:
    """Speedup for one request: a draft step takes `draft_ratio` of a target step, and checking
    takes as long as decoding (both wait for the same weights)."""
    return expected_tokens(acceptance, num_drafts) / (1 + num_drafts * draft_ratio)


def best_simple(acceptance: float, draft_ratio: float, max_drafts: int = MAX_DRAFTS) -> Choice:
    """The best number of guesses in the simple form."""
    return _best(lambda k: simple_speedup(acceptance, k, draft_ratio), max_drafts)


# ---------------------------------------------------------------------- with batch and context


@runtime_checkable
class Target(Protocol):
    """What `ridgeline.cost.pricer.Pricer` has: the price of a step of which `num_logits` rows need
    logits (None: one per request)."""

    def totals(self, shape: StepShape) -> StepTotals: ...

    def seconds_of(
        self,
        totals: StepTotals,
        num_logits: int | None = None,
        drafting_s: float = 0.0,
        host_s: float = 0.0,
    ) -> float: ...


class Drafter(Protocol):
    """What drafting costs."""

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        """Time to guess `num_drafts` tokens for each of `batch` requests of `context` tokens, of
        the device: the host plans guesses and their check as one step. For 0 what a step takes
        longer all the same."""
        ...


@dataclass(frozen=True, slots=True)
class DraftSteps:
    """Guesses come one after the other from a smaller model, or from a head (see `head_spec`),
    with a KV cache of its own for the whole context. `begin`: tokens of a request in the first
    pass, which may have to catch up with what was right of the guesses before."""

    pricer: Pricer
    begin: int = 1

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        if not num_drafts:
            return 0.0
        run = self.pricer.decode_run((context,) * batch, is_planned=False)
        if self.begin == 1 or context < self.begin:
            return run.total(num_drafts)
        one = self.pricer.totals(((self.begin, context + 1 - self.begin),))
        first_s = self.pricer.pass_seconds_of(repeated(one, batch), batch)
        return first_s + run.total(num_drafts - 1, first=1)

    def passes(self, batch: int, context: int, num_drafts: int) -> Iterator[StepShape]:
        """Those that `seconds` is the time of."""
        begin = self.begin if context >= self.begin else 1
        for done in range(num_drafts):
            new = 1 if done else begin
            yield ((new, context + 1 + done - new),) * batch


def head_spec(target: ModelSpec) -> ModelSpec:
    """A draft head: one more layer like the target's last, and the target's output matrix."""
    last = replace(target.layers[-1].attention, cache_layer=None)
    return replace(target, layers=(replace(target.layers[-1], attention=last),))


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Guesses are looked up on the device at the end of every step, for the next one; also where
    none is checked."""

    seconds_per_step: float

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return self.seconds_per_step


@dataclass(frozen=True, slots=True)
class Free:
    """The guesses are at hand."""

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Lookup:
    """Guesses are copied from earlier text (n-grams): host time per request, no device time."""

    seconds_per_request: float = 5e-6

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return self.seconds_per_request * batch if num_drafts else 0.0


@dataclass(frozen=True, slots=True)
class GuessPrices:
    """What steps with guesses take; `overhead_s` is what one costs beside drafting and checking,
    `choice_s` what the host does to choose their number, `token_s` for each token that comes out
    of a row behind its first, and `begin_s` for an answer alone beside its steps."""

    target: Target
    drafter: Drafter
    overhead_s: float = 0.0
    choice_s: float = 0.0
    token_s: float = 0.0
    begin_s: float = 0.0

    def seconds(
        self,
        batch: int,
        context: int,
        num_drafts: int,
        tokens: float | None = None,
        begins: float = 0.0,
    ) -> float:
        """Choosing, drafting and checking so many guesses for each of `batch` requests of `context`
        tokens; for 0, choosing and a decode step of an engine that guesses. `tokens` come out of
        each request; where that is open, the host's work for more than one is left out. `begins`:
        so many answers alone begin in a step, on average."""
        _check_drafts(num_drafts)
        num_more = 0.0 if tokens is None else tokens - 1
        host_s = self.choice_s + self.token_s * batch * num_more + self.begin_s * begins
        drafting_s = self.drafter.seconds(batch, context, num_drafts)
        step_s = self._step_seconds(batch, context, num_drafts, drafting_s, host_s)
        return step_s + self.overhead_s if num_drafts else step_s

    def plain_seconds(self, batch: int, context: int, begins: float = 0.0) -> float:
        """A decode step of an engine that never guesses."""
        return self._step_seconds(batch, context, 0, 0.0, self.begin_s * begins)

    def check_seconds(self, batch: int, context: int, num_drafts: int) -> float:
        """Without the drafting."""
        return self._step_seconds(batch, context, num_drafts, 0.0, 0.0)

    def _step_seconds(
        self, batch: int, context: int, num_drafts: int, drafting_s: float, host_s: float
    ) -> float:
        rows = num_drafts + 1
        totals = repeated(self.target.totals(((rows, context),)), batch)
        return self.target.seconds_of(totals, rows * batch, drafting_s, host_s)


@dataclass(frozen=True, slots=True)
class Speculation:
    """A target and its drafter; `overhead_s` is what a step with guesses costs beside both."""

    target: Target
    drafter: Drafter
    acceptance: Acceptance
    overhead_s: float = 0.0

    @property
    def prices(self) -> GuessPrices:
        return GuessPrices(self.target, self.drafter, self.overhead_s)

    def step_seconds(self, batch: int, context: int, num_drafts: int) -> float:
        """Drafting and checking; without guesses, a decode step."""
        return self.prices.seconds(batch, context, num_drafts)

    def speedup(self, batch: int, context: int, num_drafts: int) -> float:
        """Tokens per second with guesses over those without."""
        plain = self.step_seconds(batch, context, 0)
        step = self.step_seconds(batch, context, num_drafts)
        return self.acceptance.tokens(num_drafts) * plain / step

    def best(self, batch: int, context: int, max_drafts: int = MAX_DRAFTS) -> Choice:
        """The number of guesses that gives the most tokens per second here."""
        limit = min(max_drafts, self.acceptance.max_drafts)
        return _best(lambda k: self.speedup(batch, context, k), limit)


def _best(speedup: Callable[[int], float], max_drafts: int) -> Choice:
    _check_drafts(max_drafts)
    choices = [Choice(0, 1.0), *(Choice(k, speedup(k)) for k in range(1, max_drafts + 1))]
    return max(choices, key=lambda choice: choice.speedup)


def _check_drafts(num_drafts: int) -> None:
    if num_drafts < 0:
        raise ConfigError(f"the number of guesses must be at least 0, not {num_drafts}")
