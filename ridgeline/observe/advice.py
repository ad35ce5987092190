"""Which change would help most? Each is priced on the steps that were really run; where too much of
their time is unexplained, prices say nothing, and what can be seen is named instead.

A step's new time is its measured time, scaled by what the cost model expects of it after and
before the change, so that what the model does not know stays in. A gain is of tokens per second of
the devices' time, host included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from ridgeline.cost.captured import MAX_ROWS
from ridgeline.cost.constants import Calibration
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.figures import number
from ridgeline.formats import DRAFT_METHODS
from ridgeline.observe.evidence import Evidence, RecentStep
from ridgeline.observe.requests import Parts
from ridgeline.observe.run import CpuTime
from ridgeline.speculation.price import DraftPrices, HostLookup, expected_curve
from ridgeline.step import StepShape

LEAST_GAIN = 1.01  # smaller ones are noise
ASSUMED_ACCEPTANCE = DRAFT_METHODS["ngram"].acceptance  # until it has been measured


MOST_UNEXPLAINED = 0.3  # of the time; beyond it no change can be priced
FEW_STEPS = 100  # of which the first ones, which prepare others of their kind, are a large part
FULL_SHARE = 0.8  # of its threads' time that an undisturbed process computes at least


@dataclass(frozen=True, slots=True)
class Finding:
    """What can be seen of a run whose time is unexplained, and what to do about it."""

    what: str
    how: str


def findings(evidence: Evidence, constants: Calibration) -> tuple[Finding, ...]:
    """The surest first; never none."""
    cpu, threads = evidence.cpu or CpuTime(0.0, 0.0), max(1, evidence.header.threads)
    is_short = cpu.cpu_s < FULL_SHARE * threads * cpu.wall_s
    num_steps = evidence.totals.num_steps
    rows = (
        (
            constants.origin == "assumed",
            "not calibrated: what steps should take is assumed",
            "ridgeline calibrate",
        ),
        (
            constants.origin == "extrapolated",
            "the calibration is of another number of threads",
            f"ridgeline calibrate --threads {evidence.header.threads or 'N'}",
        ),
        (bool(constants.caveat), constants.caveat, "ridgeline calibrate, once nothing else runs"),
        (
            is_short and evidence.header.computes_in_submit,
            f"the process had {number(cpu.cpu_s)} CPU seconds in {number(cpu.wall_s)} seconds "
            f"with requests, on {threads} thread{'s' * (threads > 1)}",
            "if other programs ran, stop them or give the process more of the machine",
        ),
        (
            num_steps < FEW_STEPS,
            f"only {num_steps} steps ran, and the first of a kind take longer",
            "look at a longer run",
        ),
    )
    nothing = Finding(
        "nothing that is recorded explains it",
        "ridgeline profile shows which kernels take longer than expected",
    )
    return tuple(Finding(what, how) for holds, what, how in rows if holds) or (nothing,)


@dataclass(frozen=True, slots=True)
class Change:
    """`gain`: tokens per second after over before, or latency before over after, as `of` says.
    `how` is what to ask for. A change that is not `served_today` is priced only: this version
    cannot run it, or has no kernels for it on this kind of device."""

    name: str
    gain: float
    how: str
    because: str
    served_today: bool = True
    of: str = "tokens/s"


def changes(evidence: Evidence, pricer: Pricer, whole: Parts) -> tuple[Change, ...]:
    """Those that gain at least one percent, the best first."""
    if not evidence.recent or evidence.totals.measured_s <= 0:
        return ()
    advisor = _Advisor(evidence, pricer, whole)
    found = [change for change in advisor.all() if change.gain >= LEAST_GAIN]
    return tuple(sorted(found, key=lambda change: -change.gain))


class _Advisor:
    def __init__(self, evidence: Evidence, pricer: Pricer, whole: Parts) -> None:
        self.evidence = evidence
        self.header = evidence.header
        self.pricer = pricer
        self.setup = pricer.setup
        self.whole = whole
        self.before = [_seconds(pricer, step) for step in evidence.recent]
        self.decodes = [s for s in evidence.recent if all(new == 1 for new, _ in s.shape)]

    def all(self) -> Iterator[Change]:
        yield from self._formats()
        yield from self._host()
        yield from self._graphs()
        yield from self._batch()
        yield from self._cache_size()
        yield from self._prefix_cache()
        yield from self._speculation()

    # ------------------------------------------------------------------ other prices per step

    def _gain(self, setup: Setup) -> float:
        """Of running the recent steps with another setup."""
        pricer, old, new = Pricer(setup), 0.0, 0.0
        for step, before in zip(self.evidence.recent, self.before, strict=True):
            old += step.seconds + step.host_s
            new += step.seconds * _seconds(pricer, step) / before + step.host_s
        return old / new if new > 0 else 1.0

    def _formats(self) -> Iterator[Change]:
        precision = self.setup.precision
        options = []
        if precision.dtype == "float32":
            options.append(("16-bit weights and cache", "--dtype bfloat16", {"dtype": "bfloat16"}))
        if precision.weights == "plain":
            options += [
                (f"{name} weights", f"--weight-format {name}", {"weights": name})
                for name in ("int8", "fp8", "int4")
                if name != "fp8" or self._multiplies_fp8()
            ]
        if precision.kv == "auto":
            options.append(("fp8 KV cache", "--kv-cache-dtype fp8", {"kv": "fp8"}))
        for name, how, values in options:
            changed = replace(precision, **values)
            because = "fewer bytes for each step to read"
            gain = self._gain(replace(self.setup, precision=changed))
            served = changed.fast_on(*self.setup.device.traits)
            yield Change(name, gain, how, because, served)

    def _multiplies_fp8(self) -> bool:
        """Elsewhere fp8 weights are smaller, not faster."""
        is_16_bit = self.setup.precision.dtype != "float32"
        return is_16_bit and "fp8" in self.setup.device.peak_flops

    def _graphs(self) -> Iterator[Change]:
        """One launch for a whole step, where launches are dearer than kernels."""
        constants = self.setup.constants
        host = constants.host
        if self.setup.device.kind != "gpu" or host.captured_tokens or not host.per_launch_s:
            return
        host = replace(host, captured_tokens=MAX_ROWS["gpu"])
        setup = replace(self.setup, calibration=replace(constants, host=host))
        because = "a step would be one launch instead of one per operator"
        yield Change("captured graphs", self._gain(setup), "leave out --enforce-eager", because)

    # ------------------------------------------------------------------ the host

    def _host(self) -> Iterator[Change]:
        totals = self.evidence.totals
        if self.header.max_in_flight > 1 or self.header.computes_in_submit:
            return
        if not totals.measured_s:
            return
        gain = (totals.measured_s + totals.host_s) / totals.measured_s
        because = "the next step is planned while one runs"
        yield Change("overlap with the host", gain, "--max-in-flight 2", because)

    # ------------------------------------------------------------------ more of the same

    def _batch(self) -> Iterator[Change]:
        """Twice the requests at once, where requests wait for a place in the batch."""
        rows = max((len(step.shape) for step in self.decodes), default=0)
        limit = self.header.max_num_seqs
        timed = [step for step in self.decodes if step.seconds > 0]
        if not timed or rows < limit or self.whole.queue < 0.05 * self.whole.total:
            return
        gains = []
        for step in timed:
            once, twice = self._ratio(step, step.shape), self._ratio(step, step.shape * 2)
            gains.append(2 * (once + step.host_s) / (twice + step.host_s))
        because = f"requests wait while all {limit} places are taken, and a larger step costs less "
        yield Change(
            "a larger batch", median(gains), f"--max-num-seqs {2 * limit}", because + "per token"
        )

    def _ratio(self, step: RecentStep, shape: StepShape) -> float:
        """Seconds of the step if it had this shape."""
        before = self.pricer.seconds(step.shape)
        return step.seconds * self.pricer.seconds(shape) / before

    def _cache_size(self) -> Iterator[Change]:
        """Room for all that run, where requests lose their blocks to each other."""
        lost, total = self.whole.preemption, self.whole.total
        if lost <= 0:
            return
        because = f"{lost / total:.0%} of the requests' time went to blocks that they lost"
        gain = total / (total - lost)
        yield Change("a larger KV cache", gain, "--num-blocks", because, of="latency")

    def _prefix_cache(self) -> Iterator[Change]:
        reuse = self.evidence.prompt_reuse
        if self.header.prefix_caching or not reuse:
            return
        totals = self.evidence.totals
        regimes = totals.regimes
        prompts = regimes["prefill"].measured_s + regimes["mixed"].measured_s
        old = totals.measured_s + totals.host_s
        gain = old / (old - reuse * prompts)
        because = f"{reuse:.0%} of the prompt tokens had been seen before"
        yield Change("prefix cache", gain, "leave out --no-prefix-caching", because)

    def _speculation(self) -> Iterator[Change]:
        """Draft tokens copied from earlier text; they cost no device time of their own."""
        if self.header.num_drafts or not self.decodes:
            return
        batch = round(median(len(step.shape) for step in self.decodes))
        context = round(median(before for step in self.decodes for _, before in step.shape))
        prices = DraftPrices(self.pricer, HostLookup())
        num_drafts, speedup = prices.best(batch, context, expected_curve(ASSUMED_ACCEPTANCE))
        old = sum(step.seconds + step.host_s for step in self.evidence.recent)
        decoding = sum(step.seconds for step in self.decodes)
        gain = old / (old - decoding * (1 - 1 / speedup))
        because = (
            f"{num_drafts} draft tokens a step at batch {batch}, if each is accepted with chance "
            f"{ASSUMED_ACCEPTANCE:g} (assumed)"
        )
        is_served = self.setup.precision.dtype == "bfloat16" or self.setup.device.kind == "gpu"
        yield Change("speculation", gain, "--speculate ngram", because, is_served)


def _seconds(pricer: Pricer, step: RecentStep) -> float:
    return pricer.seconds_of(pricer.features(step.shape), step.num_logits)
