"""Measures everything that a calibration needs, class by class, and hands on the points."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import HostConstants
from ridgeline.cost.execution_mode import (
    Footprint,
    is_captured,
    most_tokens_of,
    own_of,
    still_there,
)
from ridgeline.cost.fit import ALONE, CHECKS, Point
from ridgeline.cost.ops import Op, layer_products, step_ops
from ridgeline.cost.setup import ONE_DEVICE, Precision
from ridgeline.cost.step_features import attention_kinds, step_features
from ridgeline.costing import engine_host
from ridgeline.devices import Device
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.measure.models import Grid, Sample
from ridgeline.measure.operators import (
    NUM_LAYERS,
    Bench,
    Case,
    attention_cases,
    matmul_series,
    open_attention,
    stream_series,
)
from ridgeline.measure.steps import (
    DRAFT_TOKENS,
    LOOK_UPS,
    RIGHT_DRAFTS,
    WARM_UP,
    StepBench,
    StepTimes,
    random_engine,
    step_bench,
)
from ridgeline.measure.stopwatch import Stopwatch, open_device_timer, typical
from ridgeline.speculation.price import first_layers
from ridgeline.step import StepShape

Progress = Callable[[str, int, int], None]  # (stage, done, of how many)
Wanted = Iterator[tuple[str, Callable[[int], StepTimes]]]  # class of point, and what measures it
StepsOf = Callable[[Sample, StepBench], Wanted]
StepPoints = dict[int, Point]  # of one engine, by their places in what was wanted

ROUNDS = 2  # every point is measured in each, so that a disturbance does not hit one alone
STEP_BUDGET_S = 0.4  # of one point of whole steps, per round
MIN_STEPS, MAX_STEPS = 4, 24
ALONE_STEPS = 8  # on the device alone, per round: nobody disturbs there
CHOICES, CHOICE_ROUNDS = 32, 9  # steps with a chosen number of drafts, and how often
LOOKS = 24  # steps that look drafts up
DRAFT_LAYERS = 1  # of a model that drafts by its first layers
LONE = ("prefill_step", "mixed_step")  # are timed from their plan to their tokens


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure each point, and at which dtypes and sizes."""

    grid: Grid
    dtypes: tuple[str, ...]
    operator_s: float


@dataclass(slots=True)
class Session:
    """One run of measurements on one device, with what it has found so far."""

    device: Device
    stopwatch: Stopwatch
    effort: Effort
    cold_bytes: int
    threads: int
    progress: Progress
    own_products: tuple[tuple[int, int], ...] = ()  # see `Calibration`
    own_least: int = 0  # and there
    cache_bytes: int = 0  # of the last cache, where kernels read again what is still there
    points: list[Point] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)  # see `HostConstants.begin_s`
    choices_s: list[float] = field(default_factory=list)  # and `choice_s`
    looks_s: list[float] = field(default_factory=list)  # and `look_s`
    spreads: list[float] = field(default_factory=list)  # of the repeats, one a point of operators

    @property
    def begin_s(self) -> float:
        return max(0.0, median(self.answers_s)) if self.answers_s else 0.0

    @property
    def spread(self) -> float:
        """How much longer the median repeat took than an undisturbed one, of the typical point."""
        return median(self.spreads) if self.spreads else 0.0

    @property
    def choice_s(self) -> float | None:
        """None: not measured where a device is at work beside."""
        return max(0.0, median(self.choices_s)) if self.choices_s else None

    @property
    def look_s(self) -> float:
        return max(0.0, median(self.looks_s)) if self.looks_s else 0.0

    def run(self) -> None:
        """All classes of operators, then whole steps."""
        for dtype in self.effort.dtypes:
            bench = Bench(self.device, dtype, self.cold_bytes)
            self._matmuls(bench)
            self._streams(bench)
            self._attention(bench)
            self._forget()
        for dtype in self.effort.dtypes:
            samples = self.effort.grid.samples
            # Steps of small models wait for the host. Whoever disturbs it may be gone some seconds
            # later, when all others have been measured.
            small = [sample for sample in samples if not sample.has_operators]
            found: dict[tuple[str, str], StepPoints] = {}
            for turn, some in enumerate((samples, *[small] * (self.effort.grid.looks - 1))):
                for sample in some:
                    self._all_steps(sample, dtype, turn, found)
            self.points += [point for points in found.values() for point in points.values()]

    def _all_steps(
        self, sample: Sample, dtype: str, turn: int, found: dict[tuple[str, str], StepPoints]
    ) -> None:
        """Of what has been found in an earlier turn the faster ones are kept."""
        for steps_of, draft_tokens in ((_wanted, ""), *self._drafted(sample)):
            key = sample.name, draft_tokens
            stage = f"whole steps, {sample.name}, {dtype}{', again' if turn else ''}"
            points = self._steps(sample, dtype, steps_of, draft_tokens, stage)
            found[key] = faster(found.get(key, {}), points)
            self._forget()
        if sample.answers[0]:
            self._answers(sample, dtype)
            self._choices(sample, dtype)
            self._look_ups(sample, dtype)

    # -- operators

    def _matmuls(self, bench: Bench) -> None:
        grid, stage = self.effort.grid, f"matrix products, {bench.dtype}"
        samples = _with_operators(grid)
        with torch.inference_mode():
            for done, sample in enumerate(samples):
                self.progress(stage, done, len(samples))
                for series in matmul_series(bench, sample.spec, grid.tokens):
                    self._measure(self._quick_ones(series))
        self.progress(stage, len(samples), len(samples))

    def _streams(self, bench: Bench) -> None:
        grid, stage = self.effort.grid, f"elementwise passes, {bench.dtype}"
        samples = _with_operators(grid)
        with torch.inference_mode():
            for done, sample in enumerate(samples):
                self.progress(stage, done, len(samples))
                for series in stream_series(bench, sample.spec, grid.tokens):
                    self._measure(self._quick_ones(series))
        self.progress(stage, len(samples), len(samples))

    def _attention(self, bench: Bench) -> None:
        grid, stage = self.effort.grid, f"attention, {bench.dtype}"
        with torch.inference_mode():
            for done, heads in enumerate(grid.attention):
                self.progress(stage, done, len(grid.attention))
                cases = attention_cases(open_attention(bench, heads, grid), grid)
                self._measure(list(cases))
                self._forget()
        self.progress(stage, len(grid.attention), len(grid.attention))

    def _warm(self, case: Case) -> float:
        """Of attention, whose caches take turns; all else is measured on what is in no cache."""
        keys = (op.kv_bytes for op in case.ops if op.kind == "decode_attention")
        if case.what != "decode_attention":
            return 0.0
        return still_there(NUM_LAYERS * sum(keys), self.cache_bytes)

    def _quick_ones(self, series: Sequence[Case]) -> list[Case]:
        """Cases in order of size, up to the first that takes too long for one call."""
        kept: list[Case] = []
        for case in series:
            kept.append(case)
            if min(self.stopwatch.times(case.call, 0.0)) > self.effort.grid.max_call_s:
                break
        return kept

    def _measure(self, cases: Sequence[Case]) -> None:
        found: list[list[float]] = [[] for _ in cases]
        for _ in range(ROUNDS):
            for case, times in zip(cases, found, strict=True):
                times += self.stopwatch.times(case.call, self.effort.operator_s / ROUNDS)
        self.spreads += [median(times) / typical(times) - 1 for times in found]
        self.points += [
            Point(
                case.what,
                case.dtype,
                case.ops,
                typical(times),
                label=case.label,
                warm=self._warm(case),
            )
            for case, times in zip(cases, found, strict=True)
        ]

    # -- whole steps

    def _drafted(self, sample: Sample) -> Iterator[tuple[StepsOf, str]]:
        """Steps of engines that draft, and who drafts there."""
        if sample.checks:
            yield _wanted_verifications, DRAFT_TOKENS
        if sample.drafts and open_device_timer(self.device.torch_device) is not None:
            yield _wanted_drafts, f"early:{DRAFT_LAYERS}"

    def _steps(
        self, sample: Sample, dtype: str, steps_of: StepsOf, draft_tokens: str, stage: str
    ) -> StepPoints:
        """Of an engine that makes such drafts; "": none."""
        try:
            return self._measured(sample, dtype, steps_of, draft_tokens, stage)
        except (ConfigError, EngineFault) as reason:
            if not draft_tokens:
                raise
            self.progress(f"checks of drafts are not measured: {reason}", 0, 1)
            return {}  # what cannot draft here is left out

    def _measured(
        self, sample: Sample, dtype: str, steps_of: StepsOf, draft_tokens: str, stage: str
    ) -> StepPoints:
        options = engine_options(sample, self.device, dtype, self.threads)
        if draft_tokens:
            options["speculate"] = draft_tokens
        with random_engine(sample.config, **options) as built:
            bench = step_bench(built)
            host = engine_host(HostConstants(), built.resolved)
            wanted = list(steps_of(sample, bench))
            found: list[list[StepTimes]] = [[] for _ in wanted]
            for turn in range(ROUNDS):
                for done, (what, measure) in enumerate(wanted):
                    self.progress(stage, turn * len(wanted) + done, ROUNDS * len(wanted))
                    found[done].append(measure(self._repeats(what, found[done])))
            self.progress(stage, 1, 1)
        points: StepPoints = {}
        for number, ((what, _), times) in enumerate(zip(wanted, found, strict=True)):
            shape, seconds = times[-1].shape, [s for each in times for s in each.seconds]
            if not seconds:
                self.progress(f"the host is too slow for {what} of {described(shape)}", 0, 1)
                continue
            points[number] = self._step_point(what, sample, dtype, shape, typical(seconds), host)
        return points

    def _answers(self, sample: Sample, dtype: str) -> None:
        num_answers, context = sample.answers
        options = engine_options(sample, self.device, dtype, self.threads)
        with random_engine(sample.config, **options) as built:
            bench = step_bench(built)
            bench.answers(context, WARM_UP)  # what is captured when it is first met is there then
            self.answers_s += bench.answers(context, num_answers)
        self._forget()

    def _choices(self, sample: Sample, dtype: str) -> None:
        """Between other work of the host and of the driver a choice takes longer than in a loop of
        the engine alone."""
        if self.device.torch_device.type != "cuda":
            return
        options = engine_options(sample, self.device, dtype, self.threads)
        try:
            with random_engine(sample.config, **options, speculate=RIGHT_DRAFTS) as built:
                bench, context = step_bench(built), sample.answers[1]
                bench.choosing(context, CHOICES)  # captures, and learns what steps take
                for _ in range(CHOICE_ROUNDS):
                    chosen_s, given_s = bench.choosing(context, CHOICES)
                    self.choices_s.append(chosen_s - given_s)
        except (ConfigError, EngineFault) as reason:  # what cannot draft here is left out
            self.progress(f"the choice of drafts is not measured: {reason}", 0, 1)
        self._forget()

    def _look_ups(self, sample: Sample, dtype: str) -> None:
        """What the device does longer where drafts are looked up, though none is checked."""
        if open_device_timer(self.device.torch_device) is None:
            return
        found = []
        options = engine_options(sample, self.device, dtype, self.threads)
        try:
            for draft_tokens in ("off", LOOK_UPS):
                with random_engine(sample.config, **options, speculate=draft_tokens) as built:
                    bench, context = step_bench(built), sample.answers[1]
                    bench.alone(1, context, 0, WARM_UP)
                    found.append(bench.alone(1, context, 0, LOOKS).seconds)
                self._forget()
        except (ConfigError, EngineFault) as reason:
            self.progress(f"look-ups of drafts are not measured: {reason}", 0, 1)
            return
        if all(found):  # the host was in time
            plain_s, looking_s = map(typical, found)
            self.looks_s.append(looking_s - plain_s)

    def _step_point(
        self,
        what: str,
        sample: Sample,
        dtype: str,
        shape: StepShape,
        seconds: float,
        host: HostConstants,
    ) -> Point:
        precision, kinds = Precision(dtype), tuple(attention_kinds(sample.spec))
        totals = step_features(kinds, shape)
        captured = is_captured(host, totals)
        products = layer_products(sample.spec, ONE_DEVICE, precision)
        point = step_point(what, sample, dtype, shape, seconds, captured)
        point = replace(point, is_lone=what in LONE)
        if not captured:
            return point
        most = most_tokens_of(products, precision, self.own_products, self.own_least)
        return replace(
            point,
            own=own_of(totals, most),
            warm=Footprint.of(sample.spec, precision).warm(totals, self.cache_bytes),
        )

    def _repeats(self, what: str, earlier: Sequence[StepTimes]) -> int:
        if what in ALONE:
            return ALONE_STEPS
        if not earlier:
            return MIN_STEPS
        return max(1, min(MAX_STEPS, int(STEP_BUDGET_S / typical(earlier[0].seconds))))

    def _forget(self) -> None:
        gc.collect()
        if self.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def faster(some: StepPoints, others: StepPoints) -> StepPoints:
    """Of points in the same place the one that was disturbed less."""
    both = [*some.items(), *others.items()]
    both.sort(key=lambda item: (item[0], -item[1].seconds))
    return dict(both)


def _wanted(sample: Sample, bench: StepBench) -> Wanted:
    for tokens in sample.prefills:
        yield "prefill_step", lambda n, tokens=tokens: bench.prefill(tokens, n)  # type: ignore[misc]
    for rows, context in sample.decodes:
        yield "decode_step", lambda n, r=rows, c=context: bench.decode(r, c, n)  # type: ignore[misc]
        if rows <= bench.most_alone:
            yield "decode_device", lambda n, r=rows, c=context: bench.alone(r, c, 0, n)  # type: ignore[misc]
    for tokens, rows, context in sample.mixes:
        yield (
            "mixed_step",
            lambda n, t=tokens, r=rows, c=context: bench.mixed(t, r, c, n),  # type: ignore[misc]
        )


def _wanted_verifications(sample: Sample, bench: StepBench) -> Wanted:
    for rows, context, draft_tokens in sample.checks:
        yield (
            "check_step",
            lambda n, r=rows, c=context, k=draft_tokens: bench.check(r, c, k, n),  # type: ignore[misc]
        )


def _wanted_drafts(sample: Sample, bench: StepBench) -> Wanted:
    for rows, context, draft_tokens in sample.drafts:
        if rows * (draft_tokens + 1) <= bench.most_alone:
            yield (
                "draft_device",
                lambda n, r=rows, c=context, k=draft_tokens: bench.alone(r, c, k, n),  # type: ignore[misc]
            )


def _with_operators(grid: Grid) -> list[Sample]:
    return [sample for sample in grid.samples if sample.has_operators]


def engine_options(sample: Sample, device: Device, dtype: str, threads: int) -> dict[str, object]:
    """An engine that takes the largest of the sample's steps at once."""
    rows = [rows for rows, _ in sample.decodes] + [rows for _, rows, _ in sample.mixes]
    loads = [rows * (c + 128) for rows, c in sample.decodes]
    checks = (*sample.checks, *sample.drafts)
    rows += [rows for rows, _, _ in checks]
    loads += [rows * (c + 128 + MAX_STEPS * k) for rows, c, k in checks]
    loads += [tokens + rows * (c + 128) for tokens, rows, c in sample.mixes]
    loads += list(sample.prefills)
    longest = max([c for _, c in sample.decodes] + list(sample.prefills))
    most = max(rows, default=1)
    return {
        "device": device.name,
        "dtype": dtype,
        "threads": threads,
        "num_blocks": -(-max(loads) // 16) + 2 * most + 8,
        "max_num_seqs": max(most + 1, 8),
        "max_num_batched_tokens": max([t + r for t, r, _ in sample.mixes] + [*sample.prefills, 64]),
        "max_model_len": longest + 512,
    }


def step_point(
    what: str, sample: Sample, dtype: str, shape: StepShape, seconds: float, captured: bool = False
) -> Point:
    """A whole step as a point to fit, or what the device does of it; every request of it gets a
    token, and each draft a row of logits too."""
    precision = Precision(dtype)
    num_logits = sum(new for new, _ in shape) if what in CHECKS else None
    ops = step_ops(sample.spec, shape, precision=precision, num_logits=num_logits)
    passes = max(new for new, _ in shape) - 1 if what == "draft_device" else 0
    if passes:
        ops += draft_ops(first_layers(sample.spec, DRAFT_LAYERS), shape, passes, precision)
    label = f"{sample.name}: {described(shape)}"
    requests, short = None if what in ALONE else len(shape), precision.short_dtype
    return Point(what, short, ops, seconds, requests, label, captured, num_passes=passes)


def draft_ops(
    spec: ModelSpec, shape: StepShape, num_passes: int, precision: Precision
) -> tuple[Op, ...]:
    """The operators of so many passes in which `spec` drafts, one token of each request after the
    other: all as in the middle one, as little depends on the context."""
    middle = tuple((1, before + num_passes // 2) for _, before in shape)
    ops = step_ops(spec, middle, precision=precision)
    return tuple(replace(op, count=op.count * num_passes) for op in ops)


def described(shape: StepShape) -> str:
    """A step shape in words."""
    contexts = [before + 1 for new, before in shape if new == 1]
    if step_features((), shape).is_verification:
        draft_tokens, mean = max(new for new, _ in shape) - 1, sum(b for _, b in shape) / len(shape)
        return f"check {len(shape)} x {round(mean)}, {draft_tokens} drafts"
    chunks = [f"prefill {new}" for new, _ in shape if new > 1]
    if contexts:
        chunks.append(f"decode {len(contexts)} x {round(sum(contexts) / len(contexts))}")
    return ", ".join(chunks)
