"""What does a step with draft tokens cost, how many of them are accepted, and is it worth it?

A step verifies k draft tokens and computes one more token of each request. E tokens come out of it
on average, so with T the time of a step of the target:

  speedup(B, S, k) = E(k) * T(B, 1, S) / (T(B, k + 1, S) + draft(B, S, k))

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, for E
and the simple form in which T(B, k + 1, S) = T(B, 1, S). That holds for one request on a device
that waits for memory; the form above holds for any batch B and context S.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.cost.step_features import StepFeatures, repeated
from ridgeline.errors import ConfigError
from ridgeline.formats import DRAFT_METHODS, LAYERS, MODEL, AskedDrafts
from ridgeline.step import StepShape

MAX_DRAFTS = 16
CAUGHT_UP = 2  # tokens in a draft model's first pass: it has not seen its own last draft token
ACCEPTANCE = DRAFT_METHODS["draft"].acceptance  # as an engine assumes it before it has measured


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Mean tokens of a step whose draft tokens are each accepted with probability `acceptance`, one
    after the other until the first miss; the target's own token after it is included."""
    _check_drafts(num_drafts)
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"an acceptance rate must be in 0 .. 1, not {acceptance:g}")
    return sum([acceptance**k for k in range(num_drafts + 1)])


def expected_curve(acceptance: float, max_drafts: int = MAX_DRAFTS) -> tuple[float, ...]:
    """The same by the number of draft tokens, from 0."""
    return tuple([expected_tokens(acceptance, k) for k in range(max_drafts + 1)])


def simple_speedup(acceptance: float, num_drafts: int, draft_cost: float) -> float:
    """The simple form: a draft token takes `draft_cost` steps of the target, and a step that
    verifies takes as long as one that does not."""
    return expected_tokens(acceptance, num_drafts) / (1 + num_drafts * draft_cost)


# ---------------------------------------------------------------------- drafting


class Drafter:
    """What drafting costs; of this one nothing: the draft tokens are at hand."""

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        """Seconds of the device to draft `num_drafts` tokens for each of `batch` requests of
        `context` tokens (the host plans drafting and verifying as one step). For 0 what a step
        takes longer all the same."""
        return 0.0


@dataclass(frozen=True, slots=True)
class DraftSteps(Drafter):
    """Draft tokens come one after the other from a smaller model, or from a head (see `head_spec`),
    with a KV cache of its own for the whole context. `begin`: tokens of a request in the first
    pass, which may have to catch up with what was accepted before."""

    pricer: Pricer
    begin: int = 1

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        if not num_drafts:
            return 0.0
        run = self.pricer.decode_run((context,) * batch, is_planned=False)
        if self.begin == 1 or context < self.begin:
            return run.total(num_drafts)
        one = self.pricer.features(((self.begin, context + 1 - self.begin),))
        first_s = self.pricer.pass_seconds_of(repeated(one, batch), batch)
        return first_s + run.total(num_drafts - 1, first=1)

    def passes(self, batch: int, context: int, num_drafts: int) -> Iterator[StepShape]:
        """Those that `seconds` is the time of."""
        begin = self.begin if context >= self.begin else 1
        for done in range(num_drafts):
            new = 1 if done else begin
            yield ((new, context + 1 + done - new),) * batch


@dataclass(frozen=True, slots=True)
class DeviceLookup(Drafter):
    """Prompt lookup on the device at the end of every step, for the next one; also where nothing
    is verified."""

    seconds_per_step: float

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return self.seconds_per_step


@dataclass(frozen=True, slots=True)
class HostLookup(Drafter):
    """Draft tokens are copied from earlier text: host time per request, no device time."""

    seconds_per_request: float = 5e-6

    def seconds(self, batch: int, context: int, num_drafts: int) -> float:
        return self.seconds_per_request * batch if num_drafts else 0.0


def drafter_of(setup: Setup, asked: AskedDrafts, draft: ModelSpec | None) -> Drafter:
    """For the model of `setup`, on the same devices and in the same dtype. `draft` is the draft
    model, if there is one; ConfigError where it is lacking. Each rank has all of what drafts."""
    wanted, whole = asked.line.argument, replace(setup, layout=Layout())
    if wanted == MODEL:
        if draft is None:
            raise ConfigError(f"the price of {asked.method} drafts needs the model that drafts")
        plain = Precision(setup.precision.dtype, "plain", setup.precision.kv)
        return DraftSteps(Pricer(replace(whole, spec=draft, precision=plain)), begin=CAUGHT_UP)
    if asked.line.is_head:
        return DraftSteps(Pricer(replace(whole, spec=draft or head_spec(setup.spec))))
    if wanted == LAYERS:
        return DraftSteps(
            Pricer(replace(setup, spec=first_layers(setup.spec, int(asked.argument))))
        )
    return DeviceLookup(setup.constants.host.look_s) if asked.line.looks_ahead else Drafter()


def first_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model that ends after so many of its layers, with the same output matrix."""
    return replace(spec, layers=spec.layers[:num_layers])


def head_spec(target: ModelSpec) -> ModelSpec:
    """A draft head: one more layer like the target's last, and the target's output matrix."""
    last = replace(target.layers[-1].attention, cache_layer=None)
    return replace(target, layers=(replace(target.layers[-1], attention=last),))


# ---------------------------------------------------------------------- a step


@runtime_checkable
class Target(Protocol):
    """What `ridgeline.cost.pricer.Pricer` has: the price of a step of which `num_logits` rows need
    logits (None: one per request)."""

    def features(self, shape: StepShape) -> StepFeatures: ...

    def seconds_of(
        self,
        features: StepFeatures,
        num_logits: int | None = None,
        drafting_s: float = 0.0,
        host_s: float = 0.0,
    ) -> float: ...


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """What steps with draft tokens take. `choice_s` is what the host does to choose their number,
    `token_s` for each token that comes out of a row behind its first, and `begin_s` for an answer
    alone beside its steps."""

    target: Target
    drafter: Drafter
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
        """Choosing, drafting and verifying so many tokens for each of `batch` requests of `context`
        tokens; for 0, choosing and a decode step of an engine that drafts. `tokens` come out of
        each request; where that is open, the host's work for more than one is left out. `begins`:
        so many answers alone begin in a step, on average."""
        _check_drafts(num_drafts)
        num_more = 0.0 if tokens is None else tokens - 1
        host_s = self.choice_s + self.token_s * batch * num_more + self.begin_s * begins
        drafting_s = self.drafter.seconds(batch, context, num_drafts)
        return self._step_seconds(batch, context, num_drafts, drafting_s, host_s)

    def plain_seconds(self, batch: int, context: int, begins: float = 0.0) -> float:
        """A decode step of an engine that never drafts."""
        return self._step_seconds(batch, context, 0, 0.0, self.begin_s * begins)

    def _step_seconds(
        self, batch: int, context: int, num_drafts: int, drafting_s: float, host_s: float
    ) -> float:
        rows = num_drafts + 1
        features = repeated(self.target.features(((rows, context),)), batch)
        return self.target.seconds_of(features, rows * batch, drafting_s, host_s)

    def speedup(self, batch: int, context: int, num_drafts: int, tokens: float) -> float:
        """Tokens per second over those without drafts, if so many come out of a request."""
        plain = self.seconds(batch, context, 0)
        return tokens * plain / self.seconds(batch, context, num_drafts)

    def best(self, batch: int, context: int, curve: Sequence[float]) -> tuple[int, float]:
        """The number of draft tokens that gives the most tokens per second here, and the speedup,
        if `curve` says how many tokens come out of a request by that number, from 0."""
        return max(enumerate(self.speedups(batch, context, curve)), key=lambda one: one[1])

    def speedups(self, batch: int, context: int, curve: Sequence[float]) -> list[float]:
        """By the number of draft tokens, from 0."""
        plain = self.seconds(batch, context, 0)
        return [n * plain / self.seconds(batch, context, k) for k, n in enumerate(curve)]


def draft_prices(target: Pricer, asked: AskedDrafts, draft: ModelSpec | None) -> DraftPrices:
    """Of steps of the engine that `target` prices; arguments and errors as `drafter_of`."""
    host = target.setup.constants.host
    return DraftPrices(
        target,
        drafter_of(target.setup, asked, draft),
        choice_s=host.choice_s if asked.num_draft_tokens is None else 0.0,
        token_s=host.token_s,
        begin_s=host.begin_s,
    )


@dataclass(frozen=True, slots=True)
class PlannedDrafting:
    """The assumptions behind plans with speculative decoding: a head of one layer drafts
    `num_drafts` tokens a step, each accepted with chance `ACCEPTANCE`. As a pricer: of steps whose
    decodes carry their draft tokens, drafting included."""

    target: Pricer
    drafter: Drafter
    num_drafts: int

    @property
    def tokens_per_step(self) -> float:
        return expected_tokens(ACCEPTANCE, self.num_drafts)

    @property
    def curve(self) -> tuple[float, ...]:
        """Tokens of a step by its number of draft tokens, from 1."""
        return expected_curve(ACCEPTANCE, self.num_drafts)[1:]

    def seconds(self, shape: StepShape) -> float:
        decodes = [context for new, context in shape if new == 1]
        if not decodes:
            return self.target.seconds(shape)
        rows = 1 + self.num_drafts
        verified = tuple((rows, context) if new == 1 else (new, context) for new, context in shape)
        num_logits = len(shape) + self.num_drafts * len(decodes)
        return self.target.seconds(verified, num_logits) + self.draft_seconds(shape)

    def draft_seconds(self, shape: StepShape) -> float:
        """Drafting alone, for the rows of `shape` that make a token."""
        contexts = [context for _, context in shape]
        if not contexts:
            return 0.0
        mean = round(sum(contexts) / len(contexts))
        return self.drafter.seconds(len(contexts), mean, self.num_drafts)


def planned_drafting(setup: Setup, target: Pricer, num_drafts: int) -> PlannedDrafting:
    """For a model that `target` prices."""
    head = Setup(head_spec(setup.spec), setup.device, Layout(), setup.precision, setup.calibration)
    return PlannedDrafting(target, DraftSteps(Pricer(head)), num_drafts)


def _check_drafts(num_drafts: int) -> None:
    if num_drafts < 0:
        raise ConfigError(f"the number of draft tokens must be at least 0, not {num_drafts}")
