"""What happened in the engine, exactly enough to make every scheduling decision again?

JSON lines. The first names the engine ("event": "engine"), each later one is an add, an abort, a
plan, a submit or a collect, with the clock reading that the engine used. Token ids are in it;
prompt text, stop strings, cache salts and keys are not (salts appear as digests that tell them
apart). A file may hold several lives of an engine that was started again; a line that was cut off
when the process died is left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec import structs

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.log import say
from ridgeline.request import Request, RequestOutput, SamplingParams
from ridgeline.scheduler.beams import BEAM_MARK
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import (
    BlockTables,
    Listener,
    StepPlan,
    StepResult,
)

VERSION = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHeader:
    """What one life of an engine was made of. `setup` is what pricing needs to know (the model's
    configuration, device, formats), as plain JSON values; empty when it was not known."""

    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...]
    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str
    ttft_slo_s: float | None = None  # what policy slo promises
    tpot_slo_s: float | None = None
    max_in_flight: int
    prefix_caching: bool
    num_drafts: int = 0
    speculate: str = "off"  # who drafts, as on the command line
    draft_config: Mapping[str, Any] = field(default_factory=dict)  # of the model that does
    starvation_limit: int
    max_preemptions: int
    max_num_mixed_tokens: int | None = None
    computes_in_submit: bool = False  # the executor is done with a step when it has taken it
    threads: int = 0  # that compute, of a CPU; 0: not known
    model: str = ""
    setup: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Added:
    """`refused` is the fault's code when the request was turned away. `cpu_s`, here and below: CPU
    seconds that the engine's process had had by then; None: not known."""

    now: float
    request_id: str
    arrival: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    salt: bytes = b""
    fork_of: str | None = None
    refused: str | None = None
    cpu_s: float | None = None
    tenant: bytes = b""
    weight: float = 1.0

    def request(self) -> Request:
        """A fresh one, as it was when it came in."""
        return Request(
            self.request_id,
            self.prompt,
            self.sampling,
            self.arrival,
            priority=self.priority,
            cache_salt=self.salt,
            fork_of=self.fork_of,
            tenant=self.tenant,
            weight=self.weight,
        )


@dataclass(frozen=True, slots=True)
class Aborted:
    now: float
    request_id: str
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A row that a plan opens, without its tokens."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_ids: BlockTables


@dataclass(frozen=True, slots=True)
class Planned:
    """`plan` is whole but for `new`, of which `opened` keeps the sizes; `digest` is that of the
    whole plan (see `plan_digest`). A plan that schedules nothing was not sent."""

    now: float
    plan: StepPlan
    opened: tuple[Opened, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Submitted:
    now: float
    step_id: int


@dataclass(frozen=True, slots=True)
class Collected:
    """`result` holds what the scheduler reads: tokens, drafts, faults, the last log-probabilities
    of beams, and as many (empty) prompt log-probabilities as there were. `outputs` say how many
    tokens each request got and how it ended. `is_behind`: it was in flight when an earlier step
    failed, and was taken in together with that one."""

    now: float
    step_id: int
    result: StepResult | None
    outputs: tuple[RequestOutput, ...]
    error: str | None = None
    is_behind: bool = False
    cpu_s: float | None = None  # where a request ended


Event = Added | Aborted | Planned | Submitted | Collected


@dataclass(frozen=True, slots=True)
class EventLog:
    """One life of an engine."""

    header: EngineHeader
    events: tuple[Event, ...]

    def feed(self, *listeners: Listener, before: Callable[[Event], object] | None = None) -> None:
        """Tell listeners everything again, each event to all of them, in order; `before` sees each
        event first."""
        plans: dict[int, StepPlan] = {}
        for event in self.events:
            if before is not None:
                before(event)
            if isinstance(event, Planned):
                plans[event.plan.step_id] = event.plan
            for listener in listeners:
                _tell(event, plans, listener)
            if isinstance(event, Collected):
                del plans[event.step_id]


def _tell(event: Event, plans: Mapping[int, StepPlan], listener: Listener) -> None:
    if isinstance(event, Added):
        fault = None if event.refused is None else RequestFault("", code=event.refused)
        listener.on_add(event.request(), event.now, fault)
    elif isinstance(event, Aborted):
        listener.on_abort(event.request_id, event.now)
    elif isinstance(event, Planned):
        listener.on_plan(event.plan, event.now)
    elif isinstance(event, Submitted):
        listener.on_submitted(plans[event.step_id], event.now)
    else:
        plan = plans[event.step_id]
        listener.on_collect(plan, event.result, event.outputs, event.error, event.now)


def plan_digest(plan: StepPlan) -> str:
    """Equal for equal decisions, whoever made them: all of a plan but the sampling parameters."""
    return _digest(_json(_plan_fields(plan)), plan)


def _digest(body: str, plan: StepPlan) -> str:
    """`body`: the plan's fields as JSON, to which the rows that it opens are added here."""
    opened = [(r.request_id, r.token_ids, r.num_prompt_tokens, r.block_ids) for r in plan.new]
    return blake2b((body + _json(opened)).encode(), digest_size=16).hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# ---------------------------------------------------------------------- writing


def header_of(
    scheduler: Scheduler,
    *,
    policy: str,
    max_in_flight: int,
    computes_in_submit: bool = False,
    threads: int = 0,
    model: str = "",
    setup: Mapping[str, Any] | None = None,
    ttft_slo_s: float | None = None,
    tpot_slo_s: float | None = None,
    speculate: str = "off",
    draft_config: Mapping[str, Any] | None = None,
) -> EngineHeader:
    """The header for an engine with this scheduler."""
    blocks = scheduler.blocks
    return EngineHeader(
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        windows=tuple(blocks.windows),
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_seqs,
        policy=policy,
        ttft_slo_s=ttft_slo_s,
        tpot_slo_s=tpot_slo_s,
        max_in_flight=max_in_flight,
        prefix_caching=blocks.prefix_caching,
        num_drafts=scheduler.num_drafts,
        speculate=speculate,
        draft_config=draft_config or {},
        starvation_limit=scheduler.waiting.starvation_limit,
        max_preemptions=scheduler.state.max_preemptions,
        max_num_mixed_tokens=scheduler.max_num_mixed_tokens,
        computes_in_submit=computes_in_submit,
        threads=threads,
        model=model,
        setup=setup or {},
    )


class LogFile:
    """A file that lines are appended to, each of them at once. ConfigError when it cannot be
    written."""

    def __init__(self, name: str) -> None:
        try:
            self._file = Path(name).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115
            if self._file.tell():
                self._file.write("\n")  # the last life may have died in the middle of a line
        except OSError as problem:
            raise ConfigError(f"event_log {name} cannot be written: {problem.strerror}") from None

    def write(self, line: str) -> object:
        return self._file.write(line)

    def close(self) -> None:
        self._file.close()


class Recorder(Listener):
    """Writes the log of one engine, as one of its listeners.

    `write` takes one line at a time. `key` keeps salts unreadable; any bytes that nobody else has.
    A file that cannot be written any more ends the log, never the engine. `cpu_s` gives the CPU
    seconds of the process; it is asked when a request comes, and when one has ended.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        header: EngineHeader,
        key: bytes,
        cpu_s: Callable[[], float] | None = None,
    ) -> None:
        self._write = write
        self._cpu_s = cpu_s
        self._key = key
        self._beams: set[str] = set()  # requests whose log-probabilities decide
        self._planned = 0.0  # when the step that is being sent was planned
        self._open: set[int] = set()  # steps in flight
        self._behind: set[int] = set()  # of them, those that an earlier one has failed
        self._line("engine", asdict(header))

    def on_add(self, request: Request, now: float, fault: RequestFault | None) -> None:
        if request.sampling.beam_width > 1 and fault is None:
            self._beams.add(request.request_id)
        values: dict[str, Any] = {
            "now": now,
            "id": request.request_id,
            "arrival": request.arrival_time,
            "prompt": request.prompt_token_ids,
            "sampling": _sampling_fields(request.sampling),
        }
        optional = {
            "priority": request.priority,
            "salt": self._salt(request.cache_salt),
            "fork_of": request.fork_of,
            "tenant": self._salt(request.tenant),
            "weight": None if request.weight == 1 else request.weight,
            "refused": None if fault is None else fault.code,
        }
        values |= {name: value for name, value in optional.items() if value}
        self._line("add", values | self._cpu())

    def on_abort(self, request_id: str, now: float) -> None:
        self._beams.discard(request_id)
        self._line("abort", {"now": now, "id": request_id} | self._cpu())

    def on_plan(self, plan: StepPlan, now: float) -> None:
        """One that is sent is written down when it is on its way."""
        if plan.scheduled:
            self._planned = now
        else:
            self._line("plan", {"now": now, "step": plan.step_id})

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        self._write_plan(plan, self._planned)
        self._line("submit", {"now": now, "step": plan.step_id})

    def _write_plan(self, plan: StepPlan, now: float) -> None:
        self._open.add(plan.step_id)
        body = _json(_plan_fields(plan))
        head: dict[str, Any] = {"event": "plan", "now": now, "digest": _digest(body, plan)}
        if plan.new:
            head["new"] = [
                (r.request_id, len(r.token_ids), r.num_prompt_tokens, r.block_ids) for r in plan.new
            ]
        self._put(_json(head)[:-1] + "," + body[1:] + "\n")

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        self._open.discard(plan.step_id)
        values: dict[str, Any] = {"now": now, "step": plan.step_id}
        if result is not None:
            values |= self._result_fields(result)
        if error is not None:
            values["error"] = error
            values |= {"behind": True} if plan.step_id in self._behind else {}
            self._behind = set(self._open)
        values["outputs"] = [
            (o.request_id, len(o.new_token_ids), o.finish_reason and o.finish_reason.value)
            for o in outputs
        ]
        if ended := {o.request_id for o in outputs if o.finish_reason is not None}:
            self._beams -= ended
            values |= self._cpu()
        self._line("collect", values)

    def _cpu(self) -> dict[str, float]:
        return {} if self._cpu_s is None else {"cpu_s": round(self._cpu_s(), 4)}

    def _result_fields(self, result: StepResult) -> dict[str, Any]:
        beams = {
            row: structs.asdict(entries[-1])
            for row, entries in result.logprobs.items()
            if self._beams and row.partition(BEAM_MARK)[0] in self._beams
        }
        prompts = {row: len(entries) for row, entries in result.prompt_logprobs.items()}
        values = {
            "tokens": result.token_ids,
            "drafts": result.draft_token_ids,
            "faults": result.faults,
            "beams": beams,
            "prompt_logprobs": prompts,
        }
        return {name: value for name, value in values.items() if value}

    def _salt(self, salt: bytes) -> str:
        return blake2b(salt, key=self._key, digest_size=16).hexdigest() if salt else ""

    def _line(self, event: str, values: Mapping[str, Any]) -> None:
        self._put(_json({"event": event, **values}) + "\n")

    def _put(self, line: str) -> None:
        try:
            self._write(line)
        except (OSError, ValueError) as problem:  # full, or closed
            say(logger, logging.ERROR, "the event log ends here", problem=problem)
            self._write = _nowhere


def _nowhere(line: str) -> None:
    """Where lines go when the file has failed."""


def _plan_fields(plan: StepPlan) -> dict[str, Any]:
    return {
        "step": plan.step_id,
        "rows": [
            (e.request_id, e.start, e.num_tokens, e.num_draft, int(e.samples), e.new_block_ids)
            for e in plan.scheduled
        ],
        "copies": [(c.request_id, c.group, c.index, c.source, c.target) for c in plan.copies],
        "preempted": list(plan.preempted),
        "finished": list(plan.finished),
    }


_PRIVATE = {"stop"}  # a user's own words, which no scheduler reads


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    values: dict[str, Any] = {}
    for row in structs.fields(SamplingParams):
        value = getattr(sampling, row.name)
        if row.name not in _PRIVATE and value != row.default:
            values[row.name] = sorted(value) if isinstance(value, frozenset) else value
    return values
