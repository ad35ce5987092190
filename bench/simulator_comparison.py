"""Would the cost model have foreseen this run? A log's requests again, under predicted times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ridgeline.clock import Rng
from ridgeline.cost.captured import MAX_VERIFIED_TOKENS
from ridgeline.cost.pricer import Pricer
from ridgeline.formats import read_speculate
from ridgeline.observe.engine_header import read_setup
from ridgeline.observe.event_log import Aborted, Added, Collected, EventLog, Planned
from ridgeline.observe.evidence import engine_drafter
from ridgeline.request import FinishReason, Request, SamplingParams
from ridgeline.simulator.executor import Answer, Speculation
from ridgeline.simulator.options import Machine, Options
from ridgeline.simulator.replica import Job
from ridgeline.simulator.report import RequestTimeline, StepSample, Summary
from ridgeline.simulator.simulation import Simulation, SimulationReport
from ridgeline.speculation.report import rows_taken
from ridgeline.step import StepPricer

LATE = 0.5  # of the time between two results: a plan behind that has waited
FEW_LATE = 0.1  # of all plans


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same requests as they were served and as the simulator says they would be. `left_out`
    counts those that it cannot serve (beam searches) or that never ran (refused, aborted early)."""

    measured: SimulationReport
    predicted: SimulationReport
    left_out: int

    def summaries(self) -> tuple[Summary, Summary]:
        """Measured, predicted."""
        return self.measured.summary(), self.predicted.summary()

    def errors(self) -> dict[str, float]:
        """Predicted over measured, less 1, for throughput and the spreads that matter."""
        pairs = zip(*(_figures(summary) for summary in self.summaries()), strict=True)
        return {name: new / old - 1 for (name, old), (_, new) in pairs if old and new}


def _figures(summary: Summary) -> list[tuple[str, float]]:
    spreads = {"ttft": summary.ttft_s, "tpot": summary.tpot_s, "e2e": summary.e2e_s}
    figures = [("output_tokens_per_s", summary.output_tokens_per_s)]
    for name, spread in spreads.items():
        figures += [(f"{name}_p50", spread.p50 or 0.0), (f"{name}_p99", spread.p99 or 0.0)]
    return figures


def simulate(
    log: EventLog,
    pricer: StepPricer | None = None,
    *,
    rng: Rng | None = None,
    macro_steps: bool = True,
) -> Comparison:
    """The log's arrivals under predicted times. `pricer` None: that of the log's own record.

    A request that was aborted is taken to have asked for the tokens that it got. Drafts are
    accepted at the rate of the log (`rng` is needed for that).
    """
    header, runs = log.header, _runs(log)
    start = min((run.added.arrival for run in runs), default=0.0)
    if pricer is None:
        pricer = Pricer(read_setup(header.setup))
    simulation = Simulation(
        Machine(pricer, header.num_blocks, header.windows),
        (),
        _options(log, _speculation(log), macro_steps=macro_steps),
        rng=rng,
    )
    served = [run for run in runs if run.is_served]
    ordered = sorted((run.job(start) for run in served), key=lambda job: job.request.arrival_time)
    predicted = simulation.run_jobs(ordered)
    measured = SimulationReport(
        [run.timeline(start) for run in served],
        _samples(log, start),
        header.max_num_seqs,
        header.num_blocks,
        1,
        0,
    )
    return Comparison(measured, predicted, len(runs) - len(served))


def _options(log: EventLog, speculation: Speculation | None, *, macro_steps: bool) -> Options:
    header = log.header
    return Options(
        policy=header.policy,
        ttft_slo_s=header.ttft_slo_s,
        tpot_slo_s=header.tpot_slo_s,
        prefix_caching=header.prefix_caching,
        max_in_flight=header.max_in_flight,
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        max_num_mixed_tokens=header.max_num_mixed_tokens,
        block_size=header.block_size,
        speculation=speculation,
        computes_in_submit=header.computes_in_submit,
        plans_ahead_s=plans_ahead_s(log),
        macro_steps=macro_steps,
    )


def plans_ahead_s(log: EventLog) -> float | None:
    """How long before the running step ended the next one was planned, where plans waited for that;
    None: they were made as soon as that ran."""
    if log.header.computes_in_submit:
        return None
    num_made, ahead_s = 0, list[float]()
    planned: dict[int, tuple[float, float]] = {}  # by the step that ran: from when on, and when
    flying, free_at = list[int](), 0.0
    for event in log.events:
        if isinstance(event, Planned) and event.plan.scheduled:
            if 0 < len(flying) == log.header.max_in_flight - 1:
                planned[flying[0]] = free_at, event.now
            flying.append(event.plan.step_id)
            free_at = event.now
        elif isinstance(event, Collected):
            flying.remove(event.step_id)
            if event.step_id in planned:
                since, when = planned.pop(event.step_id)
                num_made += 1
                if when - since > LATE * (event.now - since):
                    ahead_s.append(event.now - when)
            free_at = event.now
    return median(ahead_s) if len(ahead_s) > FEW_LATE * num_made else None


@dataclass(slots=True)
class _Run:
    """One request of the log: what came in and what it got, when."""

    added: Added
    token_ids: list[int] = field(default_factory=list)
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached: int = 0
    reason: FinishReason | None = None

    @property
    def is_served(self) -> bool:
        is_plain = self.added.sampling.beam_width == 1
        return self.added.refused is None and is_plain and bool(self.token_ids)

    def timeline(self, start: float) -> RequestTimeline:
        added, shift = self.added, _since(start)
        return RequestTimeline(
            added.request_id,
            added.arrival - start,
            len(added.prompt),
            len(self.token_ids),
            0,
            shift(self.started_s),
            shift(self.first_token_s),
            shift(self.finished_s),
            self.num_cached,
            self.num_preemptions,
            "it failed" if self.reason is FinishReason.ERROR else "",
        )

    def job(self, start: float) -> Job:
        """The same request, to be answered with the same tokens."""
        added = self.added
        request: Request = added.request()
        request.arrival_time = added.arrival - start
        if self.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            request.sampling = _ending_after(len(self.token_ids))
        timeline = RequestTimeline(
            added.request_id, request.arrival_time, len(added.prompt), len(self.token_ids)
        )
        return Job(request, Answer(len(added.prompt), tuple(self.token_ids)), timeline)


def _ending_after(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens)


def _since(start: float) -> Callable[[float | None], float | None]:
    return lambda when: None if when is None else when - start


def _runs(log: EventLog) -> list[_Run]:
    """Every request of the log, an id that was used again being another one."""
    runs, live = list[_Run](), dict[str, _Run]()
    for event in log.events:
        if isinstance(event, Added):
            runs.append(_Run(event))
            if event.refused is None:
                live[event.request_id] = runs[-1]
        elif isinstance(event, Aborted):
            live.pop(event.request_id).finished_s = event.now
        elif isinstance(event, Planned):
            _note_plan(event, live)
        elif isinstance(event, Collected):
            _note_outputs(event, live)
    return runs


def _note_plan(event: Planned, live: Mapping[str, _Run]) -> None:
    for row in event.opened:
        run = live.get(row.request_id)
        if run is not None and run.started_s is None:
            run.started_s = event.now
            first = next(e for e in event.plan.scheduled if e.request_id == row.request_id)
            run.num_cached = first.start
    for row_id in event.plan.preempted:
        if row_id in live:
            live[row_id].num_preemptions += 1


def _note_outputs(event: Collected, live: dict[str, _Run]) -> None:
    for output in event.outputs:
        run = live[output.request_id]
        if output.new_token_ids and event.result is not None:
            sampled = event.result.token_ids.get(output.request_id, ())
            run.token_ids += sampled[: len(output.new_token_ids)]
            if run.first_token_s is None:
                run.first_token_s = event.now
        if output.finish_reason is not None:
            run.finished_s, run.reason = event.now, output.finish_reason
            del live[output.request_id]


def _speculation(log: EventLog) -> Speculation | None:
    """Drafts as good as those of the log at each position. What making them cost is priced where
    the log says who did, else it is in its own steps alone."""
    header = log.header
    if not header.num_drafts:
        return None
    looked, right = [0] * header.num_drafts, [0] * header.num_drafts
    sent = (e.plan for e in log.events if isinstance(e, Planned) and e.plan.scheduled)
    drafts = {plan.step_id: plan for plan in sent}
    for event in log.events:
        if isinstance(event, Collected) and event.result is not None:
            plan = drafts[event.step_id]
            for _, row in rows_taken(plan, event.result, event.outputs):
                # Those behind a wrong one were not tried; one that was not there gave as little.
                for position in range(min(row.num_draft_tokens, row.num_taken)):
                    looked[position] += 1
                    right[position] += position < row.num_right
    asked = read_speculate(header.speculate)
    return Speculation(
        header.num_drafts,
        _chances(looked, right),
        drafter=engine_drafter(header, read_setup(header.setup)) if asked is not None else None,
        is_chosen=asked is not None and asked.num_draft_tokens is None,
        max_verified_tokens=MAX_VERIFIED_TOKENS["cpu" if header.computes_in_submit else "gpu"],
    )


def _chances(looked: Sequence[int], right: Sequence[int]) -> tuple[float, ...]:
    """By position; one that was never reached is as good as all others together."""
    mean = sum(right) / sum(looked) if sum(looked) else 0.0
    return tuple(r / n if n else mean for n, r in zip(looked, right, strict=True))


def _samples(log: EventLog, start: float) -> list[StepSample]:
    """The steps of the log that were collected, each from when the device was free for it."""
    plans: dict[int, Planned] = {}
    samples, free_at = list[StepSample](), start
    for event in log.events:
        if isinstance(event, Planned):
            if event.plan.scheduled:  # else it was not sent
                plans[event.plan.step_id] = event
        elif isinstance(event, Collected):
            planned = plans.pop(event.step_id)
            begin, rows = max(free_at, planned.now), planned.plan.scheduled
            free_at = max(begin, event.now)
            num_tokens = sum(entry.num_tokens for entry in rows)
            samples.append(
                StepSample(
                    begin - start, free_at - start, 1, len(rows), num_tokens, len(rows), 0, 0
                )
            )
    return samples
