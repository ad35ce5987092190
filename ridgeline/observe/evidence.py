"""What is there to explain a run with? Gathered in a living engine, or from its event log."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace

from ridgeline.architectures import read_spec
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.formats import MODEL, read_speculate
from ridgeline.observe.engine_header import EngineHeader, read_setup
from ridgeline.observe.event_log import Added, AnyEvent, EventLog
from ridgeline.observe.requests import MAX_FINISHED, RequestCosts, TimeBreakdown
from ridgeline.observe.run import CpuTime, RankStatus, Run, Totals
from ridgeline.speculation.price import Drafter, drafter_of
from ridgeline.step import StepShape


@dataclass(frozen=True, slots=True)
class RecentStep:
    """One step: its shape, rows of logits, measured seconds and the host's wait before it."""

    shape: StepShape
    num_logits: int
    seconds: float
    host_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All times in seconds. `time_breakdowns` are those that ended, `active` those that have not,
    up to `now`. `beginnings`: of requests that ended, an earlier one whose tokens, answer included,
    began alike, and for how many tokens, in whole blocks, as far as the prefix cache hashed them.
    `prompt_reuse`: share of prompt tokens that an earlier prompt began with, where it
    is known (a log has the prompts)."""

    header: EngineHeader
    now: float
    totals: Totals
    time_breakdowns: tuple[TimeBreakdown, ...]
    active: tuple[TimeBreakdown, ...]
    recent: tuple[RecentStep, ...]
    num_finished: int
    prompt_reuse: float | None = None
    cpu: CpuTime | None = None  # None: not known
    beginnings: dict[str, tuple[str, int]] = field(default_factory=dict)
    expert_load: tuple[float, ...] = ()  # as `Run.expert_load`; a log does not have it
    ranks: tuple[RankStatus, ...] = ()  # nor these


class RunRecord(Run):
    """The run of an engine that is known by its header, priced by `pricer`."""

    def __init__(
        self,
        header: EngineHeader,
        pricer: Pricer,
        *,
        max_finished: int | None = MAX_FINISHED,
        cpu_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        drafter = engine_drafter(header, pricer.setup)
        super().__init__(
            pricer.price,
            computes_in_submit=header.computes_in_submit,
            decodes_price=pricer.price_decodes,
            draft_price=None if drafter is None else drafter.seconds,
            mask_price=pricer.price_masks,
            max_finished=max_finished,
            cpu_s=cpu_s,
        )
        self.header, self.pricer = header, pricer
        self.request_costs = RequestCosts(pricer)
        self.listeners.append(self.request_costs)

    def evidence(self, now: float, tenant: str | None = None) -> Evidence:
        """As it is now; nothing in it changes any more. With a `tenant` (hex) the requests are its
        own, and what all share is left out: it would tell what others do."""
        finished, active = self.requests.of(tenant, now, self.running, self.last_ended)
        if tenant is not None:
            return Evidence(
                header=self.header, now=now, totals=Totals(), time_breakdowns=finished,
                active=active, recent=(), num_finished=0,
            )  # fmt: skip
        return Evidence(
            header=self.header,
            now=now,
            totals=deepcopy(self.totals),
            time_breakdowns=finished,
            active=active,
            recent=tuple(
                RecentStep(step.plan.shape, step.num_logits, step.seconds, step.host_s)
                for step in self.recent
            ),
            num_finished=self.requests.num_finished,
            cpu=self.cpu_until(now),
            beginnings=self.requests.beginnings(self.header.block_size),
            expert_load=self.expert_load(),
            ranks=self.ranks(),
        )


def engine_drafter(header: EngineHeader, setup: Setup) -> Drafter | None:
    """What making drafts takes in the engine of this header; None where that is not known."""
    asked = read_speculate(header.speculate)
    if asked is None:
        return None
    draft = read_spec(header.draft_config) if header.draft_config else None
    if asked.line.argument == MODEL and draft is None:
        return None
    return drafter_of(setup, asked, draft)


def evidence_of(log: EventLog) -> Evidence:
    """What the engine of a log would have said at its end. Raises ConfigError when the log does
    not say what was priced."""
    reading: list[float | None] = [None]
    pricer = Pricer(read_setup(log.header.setup))
    run = RunRecord(log.header, pricer, max_finished=None, cpu_s=lambda: reading[0])

    def read(event: AnyEvent) -> None:
        reading[0] = getattr(event, "cpu_s", None)

    log.feed(run, before=read)
    now = max((event.now for event in log.events), default=0.0)
    return replace(run.evidence(now), prompt_reuse=prompt_reuse(log))


def prompt_reuse(log: EventLog) -> float:
    """Share of prompt tokens, in whole blocks, that an earlier prompt with the same salt began
    with: the most that a prefix cache could save."""
    size = log.header.block_size
    seen: set[tuple[int, int]] = set()  # (hash of all before, hash of the block), chained
    num_tokens = num_seen = 0
    for event in log.events:
        if not isinstance(event, Added) or event.refused is not None or event.fork_of is not None:
            continue
        num_tokens += len(event.prompt)
        link = hash(event.salt)
        for start in range(0, len(event.prompt) - size, size):
            block = (link, hash(event.prompt[start : start + size]))
            num_seen += size if block in seen else 0
            seen.add(block)
            link = hash(block)
    return num_seen / num_tokens if num_tokens else 0.0
