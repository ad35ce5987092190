"""Where did the time go, what binds, how far is it from the limit, and what would help most?

Floors are what the cost model expects of the same work with nobody else around: a request's own
prompt, then its own tokens, one step each. The gap of a server is taken apart in the same spirit:
what an ideal device needs, what the kernels are expected to add, what is unexplained, the host.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ridgeline.cost.pricer import Pricer
from ridgeline.observe.advice import MOST_UNEXPLAINED, Change, Finding, changes, findings
from ridgeline.observe.engine_header import read_setup
from ridgeline.observe.evidence import Evidence
from ridgeline.observe.requests import Parts, TimeBreakdown
from ridgeline.observe.run import CpuTime, RankStatus, Regime
from ridgeline.observe.run_summary import Achieved, ratio, run_summary

NOTHING = "nothing has run yet"


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds that a request's prompt and its answer would take alone, as expected here."""

    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class RequestTime:
    """`parts` sum to `latency_s`. `ttft_s` None: no token came. `end` is empty until it ends."""

    request_id: str
    end: str
    latency_s: float
    ttft_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int | None
    parts: Parts
    floor: Floor


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds of all steps taken apart; the parts sum to `measured_s` + `host_s`.

    `ideal_s`: the data sheet's limits. `kernels_s`: what real kernels are expected to take beyond
    them. `unexplained_s`: what was measured beyond that (negative: steps were faster than
    expected). `host_s`: the device waited for the host.
    """

    ideal_s: float
    kernels_s: float
    unexplained_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Server(Achieved):
    """What all steps did together."""

    num_finished: int
    gap: Gap
    regimes: dict[str, Regime]
    bound_s: dict[str, float]  # expected seconds of recent steps by what binds their operators
    binds: str
    unexplained_share: float  # of all steps' and the host's time, whichever way it is off
    cpu: CpuTime | None
    expert_load: tuple[float, ...]  # of each layer with experts, the busiest over the mean one
    ranks: tuple[RankStatus, ...]  # of a group; whoever waits least is who the others wait for
    num_masked_rows: int = 0  # rows of logits that a grammar had a mask for
    mask_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class OwnReport:
    """`whole` sums the parts of all requests in `requests`, `floor` their floors."""

    model: str
    requests: tuple[RequestTime, ...]
    whole: Parts
    floor: Floor


@dataclass(frozen=True, slots=True)
class Report(OwnReport):
    """`findings` is empty unless too much of the time is unexplained; then `changes` is."""

    server: Server
    changes: tuple[Change, ...] = field(default=())
    findings: tuple[Finding, ...] = field(default=())

    @property
    def next_change(self) -> Change | None:
        """The best of those that this version serves."""
        return next((change for change in self.changes if change.served_today), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; programs read this, and so do the tables of `ridgeline explain`."""
        best = self.next_change
        return {**asdict(self), "next_change": None if best is None else asdict(best)}


def explain(evidence: Evidence) -> Report:
    """The report. Raises ConfigError when the evidence does not say what was priced."""
    pricer = Pricer(read_setup(evidence.header.setup))
    own = _own_report(evidence, pricer)
    server = _server(evidence, pricer, own.whole)
    report = Report(own.model, own.requests, own.whole, own.floor, server)
    if server.unexplained_share > MOST_UNEXPLAINED:
        return replace(report, findings=findings(evidence, pricer.setup.constants))
    return replace(report, changes=changes(evidence, pricer, own.whole))


def explain_own(evidence: Evidence) -> OwnReport:
    """A tenant's report, of its own requests alone. What others, their blocks and the host took is
    all in `queue`, and preemptions are not told: that, taken apart, is what others do."""
    report = _own_report(evidence, Pricer(read_setup(evidence.header.setup)))
    return replace(
        report,
        requests=tuple(
            replace(request, parts=_own(request.parts), num_preemptions=None)
            for request in report.requests
        ),
        whole=_own(report.whole),
    )


def _own(parts: Parts) -> Parts:
    queue = parts.total - parts.own_prefill - parts.decode
    return Parts(queue, parts.own_prefill, decode=parts.decode)


def _own_report(evidence: Evidence, pricer: Pricer) -> OwnReport:
    chunk = evidence.header.max_num_batched_tokens
    requests = tuple(
        _request(breakdown, pricer, chunk)
        for breakdown in (*evidence.time_breakdowns, *evidence.active)
    )
    whole = Parts()
    for request in requests:
        whole.add(request.parts)
    floor = Floor(
        sum(request.floor.prefill_s for request in requests),
        sum(request.floor.decode_s for request in requests),
    )
    return OwnReport(evidence.header.model, requests, whole, floor)


# ---------------------------------------------------------------------- requests


def _request(breakdown: TimeBreakdown, pricer: Pricer, chunk: int) -> RequestTime:
    first = breakdown.first_token
    return RequestTime(
        **_same(RequestTime, breakdown),
        latency_s=breakdown.latency,
        ttft_s=None if first is None else first - breakdown.arrival,
        floor=floor_of(breakdown, pricer, chunk),
    )


def _same(kind: type, found: object) -> dict[str, Any]:
    """What `found` has under the names of fields of `kind`."""
    return {row.name: getattr(found, row.name) for row in fields(kind) if hasattr(found, row.name)}


def floor_of(breakdown: TimeBreakdown, pricer: Pricer, chunk: int) -> Floor:
    """What the work it has done so far would take alone."""
    if not breakdown.has_started:
        return Floor(0.0, 0.0)
    num_prompt = min(breakdown.num_prompt_tokens, breakdown.num_done)
    prefill = prefill_alone_s(pricer, breakdown.num_cached_tokens, num_prompt, chunk)
    num_steps = max(0, breakdown.num_output_tokens - 1)
    return Floor(prefill, decode_alone_s(pricer, breakdown.num_prompt_tokens, num_steps))


def prefill_alone_s(pricer: Pricer, start: int, end: int, chunk: int) -> float:
    """Expected seconds to compute the prompt's tokens start .. end - 1 in steps of `chunk`, the
    last of which makes a token."""
    total = 0.0
    for first in range(start, end, chunk):
        features = pricer.features(((min(chunk, end - first), first),))
        total += pricer.seconds_of(features, int(first + chunk >= end))
    return total


def decode_alone_s(pricer: Pricer, context: int, num_steps: int) -> float:
    """Expected seconds of `num_steps` decode steps after `context` tokens."""
    if num_steps <= 0:
        return 0.0
    return pricer.decode_run((context,)).total(num_steps)


# ---------------------------------------------------------------------- the server


def _server(evidence: Evidence, pricer: Pricer, whole: Parts) -> Server:
    totals, done = evidence.totals, run_summary("", pricer, evidence.totals)
    kernels = max(0.0, done.expected_s - totals.ideal_s)
    unexplained = done.measured_s - totals.ideal_s - kernels
    gap = Gap(totals.ideal_s, kernels, unexplained, totals.host_s)
    bounds = bound_seconds(evidence, pricer)
    return Server(
        **_same(Achieved, done),
        num_finished=evidence.num_finished,
        gap=gap,
        regimes=totals.regimes,
        bound_s=bounds,
        binds=what_binds(gap, bounds, whole),
        unexplained_share=ratio(abs(unexplained), done.measured_s + totals.host_s),
        cpu=evidence.cpu,
        expert_load=evidence.expert_load,
        ranks=evidence.ranks,
        num_masked_rows=totals.num_masked_rows,
        mask_bytes=totals.mask_bytes,
    )


def bound_seconds(evidence: Evidence, pricer: Pricer) -> dict[str, float]:
    """Expected seconds of the recent steps, by the resource that binds each operator."""
    found = {"compute": 0.0, "memory": 0.0, "link": 0.0, "latency": 0.0}
    for step in evidence.recent:
        cost = pricer.cost(step.shape, step.num_logits)
        for name, seconds in cost.seconds_by_bound().items():
            found[name] += seconds
    return found


BOUND_WORDS = {
    "compute": "arithmetic: the devices' peak",
    "memory": "memory: the bandwidth to weights and KV cache",
    "link": "the links between devices",
    "latency": "launches and other fixed times of small operators",
}


def what_binds(gap: Gap, bounds: dict[str, float], whole: Parts) -> str:
    """One sentence: the largest part of the gap, and whether requests wait before all of it."""
    device = gap.ideal_s + gap.kernels_s
    if device <= 0 or not any(bounds.values()):
        return NOTHING
    bound = max(bounds, key=lambda name: bounds[name])
    reasons = {
        BOUND_WORDS[bound]: device,
        "the host: the device waits between steps": gap.host_s,
        "something that the model does not know: steps take longer than expected": max(
            0.0, gap.unexplained_s
        ),
    }
    sentence = max(reasons, key=lambda reason: reasons[reason])
    if whole.preemption > 0.1 * whole.total:
        sentence += "; the KV cache is too small, requests lose their blocks to each other"
    if whole.queue > 0.5 * whole.total:
        sentence += "; most of the requests' time is spent in the queue"
    return sentence
