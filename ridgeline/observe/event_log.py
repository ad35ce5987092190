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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta, field, structs

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.log import say
from ridgeline.observe.engine_header import VERSION, EngineHeader
from ridgeline.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    check_together,
)
from ridgeline.scheduler.beams import BEAM_MARK
from ridgeline.step import BlockCopy, BlockTables, Listener, ScheduledRequest, StepPlan, StepResult

WHAT_IT_IS = "An event log is what --event-log of serve, generate or bench has written"
HIDDEN = "{}"  # in the place of what an answer had to be
logger = logging.getLogger(__name__)


Time = Annotated[float, Meta(ge=-1e12, le=1e12)]  # seconds, of the engine's clock
Number = Annotated[int, Meta(ge=0, le=1 << 31)]
Weight = Annotated[float, Meta(gt=0, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=1 << 24)]
Tokens = dict[str, tuple[int, ...]]
Row = tuple[str, Number, Count, Count, bool | Number, BlockTables]
EVEN = 1.0  # weight of a request; a default is left out where it is this very object
NO_LOGPROBS = TokenLogprobs(0, 0.0, 1)


class BeamEntry(TypedDict):
    token_id: Number
    logprob: float
    rank: Number
    top: tuple[tuple[Number, float], ...]


class Event(
    msgspec.Struct, frozen=True, kw_only=True, dict=True, tag_field="event", omit_defaults=True
):
    """A line of the log, with the clock reading that the engine used. What is made of the fields
    is made once: the same object whenever it is asked for."""

    now: Time


class Added(Event, frozen=True, kw_only=True, tag="add"):
    """`refused` is the fault's code when the request was turned away; the prompt is then whatever
    the client said. `cpu_s`, here and below: CPU seconds that the engine's process had had by then;
    None: not known."""

    request_id: str = field(name="id")
    arrival: Time
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    salt_hex: str = field(name="salt", default="")
    tenant_hex: str = field(name="tenant", default="")
    weight: Weight = EVEN
    fork_of: str | None = None
    refused: str | None = None
    cpu_s: Time | None = None

    @cached_property
    def salt(self) -> bytes:
        return bytes.fromhex(self.salt_hex)

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
            tenant=bytes.fromhex(self.tenant_hex),
            weight=self.weight,
        )

    def tell(self, listener: Listener, plans: Mapping[int, StepPlan]) -> None:
        fault = None if self.refused is None else RequestFault("", code=self.refused)
        listener.on_add(self.request(), self.now, fault)


class Aborted(Event, frozen=True, kw_only=True, tag="abort"):
    request_id: str = field(name="id")
    cpu_s: Time | None = None

    def tell(self, listener: Listener, plans: Mapping[int, StepPlan]) -> None:
        listener.on_abort(self.request_id, self.now)


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A row that a plan opens, without its tokens."""

    request_id: str
    num_tokens: Count
    num_prompt_tokens: Count
    block_ids: BlockTables


class Planned(Event, frozen=True, kw_only=True, tag="plan"):
    """`plan` is whole but for `new`, of which `opened` keeps the sizes; `digest` is that of the
    whole plan (see `plan_digest`). A plan that schedules nothing was not sent."""

    step_id: Number = field(name="step")
    digest: str = ""
    opened: tuple[Opened, ...] = field(name="new", default=())
    rows: tuple[Row, ...] = ()
    copies: tuple[tuple[str, Number, Number, Number, Number], ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()

    @cached_property
    def plan(self) -> StepPlan:
        rows = tuple(
            ScheduledRequest(row, start, num, blocks, bool(samples), num_draft)
            for row, start, num, num_draft, samples, blocks in self.rows
        )
        copies = tuple(BlockCopy(*copy) for copy in self.copies)
        return StepPlan(self.step_id, rows, (), copies, self.preempted, self.finished)

    def tell(self, listener: Listener, plans: Mapping[int, StepPlan]) -> None:
        listener.on_plan(self.plan, self.now)


class Submitted(Event, frozen=True, kw_only=True, tag="submit"):
    step_id: Number = field(name="step")

    def tell(self, listener: Listener, plans: Mapping[int, StepPlan]) -> None:
        listener.on_submitted(plans[self.step_id], self.now)


class Collected(Event, frozen=True, kw_only=True, tag="collect"):
    """`result` holds what the scheduler reads: tokens, drafts, faults, the last log-probabilities
    of beams, and as many (empty) prompt log-probabilities as there were. `outputs` say how many
    tokens each request got and how it ended. `is_behind`: it was in flight when an earlier step
    failed, and was taken in together with that one."""

    step_id: Number = field(name="step")
    rows: tuple[tuple[str, Count, FinishReason | None], ...] = field(name="outputs")
    tokens: Tokens = field(default_factory=dict)
    drafts: Tokens = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    beams: dict[str, BeamEntry] = field(default_factory=dict)
    prompt_logprobs: dict[str, Count] = field(default_factory=dict)
    error: str | None = None
    is_behind: bool = field(name="behind", default=False)
    cpu_s: Time | None = None  # where a request ended

    @cached_property
    def outputs(self) -> tuple[RequestOutput, ...]:
        return tuple(RequestOutput(row, (0,) * count, reason) for row, count, reason in self.rows)

    @cached_property
    def result(self) -> StepResult | None:
        if self.error is not None:
            return None
        return StepResult(
            self.tokens,
            self.drafts,
            {row: (TokenLogprobs(**entry),) for row, entry in self.beams.items()},
            {row: (NO_LOGPROBS,) * count for row, count in self.prompt_logprobs.items()},
            self.faults,
        )

    def tell(self, listener: Listener, plans: Mapping[int, StepPlan]) -> None:
        plan = plans[self.step_id]
        listener.on_collect(plan, self.result, self.outputs, self.error, self.now)


AnyEvent = Added | Aborted | Planned | Submitted | Collected
KINDS: tuple[type[AnyEvent], ...] = (Added, Aborted, Planned, Submitted, Collected)
EVENTS = {str(kind.__struct_config__.tag): kind for kind in KINDS}
ENCODER = msgspec.json.Encoder(order="deterministic")  # sets sorted


@dataclass(frozen=True, slots=True)
class EventLog:
    """One life of an engine."""

    header: EngineHeader
    events: tuple[AnyEvent, ...]

    def feed(
        self, *listeners: Listener, before: Callable[[AnyEvent], object] | None = None
    ) -> None:
        """Tell listeners everything again, each event to all of them, in order; `before` sees each
        event first."""
        plans: dict[int, StepPlan] = {}
        for event in self.events:
            if before is not None:
                before(event)
            if isinstance(event, Planned):
                plans[event.step_id] = event.plan
            for listener in listeners:
                event.tell(listener, plans)
            if isinstance(event, Collected):
                del plans[event.step_id]


def plan_digest(plan: StepPlan) -> str:
    """Equal for equal decisions, whoever made them: all of a plan but the sampling parameters."""
    return _digest(msgspec.json.encode(_plan_fields(plan)), plan)


def _digest(body: bytes, plan: StepPlan) -> str:
    """`body`: the plan's fields as JSON, to which the rows that it opens are added here."""
    opened = [(r.request_id, r.token_ids, r.num_prompt_tokens, r.block_ids) for r in plan.new]
    return blake2b(body + msgspec.json.encode(opened), digest_size=16).hexdigest()


# ---------------------------------------------------------------------- writing


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
        self._put(msgspec.json.encode({"event": "engine", **asdict(header)}))

    def on_add(self, request: Request, now: float, fault: RequestFault | None) -> None:
        if request.sampling.beam_width > 1 and fault is None:
            self._beams.add(request.request_id)
        self._line(
            Added(
                now=now,
                request_id=request.request_id,
                arrival=request.arrival_time,
                prompt=request.prompt_token_ids,
                # A user's own words, which no scheduler reads.
                sampling=structs.replace(
                    request.sampling,
                    stop=(),
                    structured_outputs=request.sampling.structured_outputs and HIDDEN,
                ),
                priority=request.priority,
                salt_hex=self._salt(request.cache_salt),
                tenant_hex=self._salt(request.tenant),
                weight=EVEN if request.weight == EVEN else request.weight,
                fork_of=request.fork_of,
                refused=None if fault is None else fault.code,
                cpu_s=self._cpu(),
            )
        )

    def on_abort(self, request_id: str, now: float) -> None:
        self._beams.discard(request_id)
        self._line(Aborted(now=now, request_id=request_id, cpu_s=self._cpu()))

    def on_plan(self, plan: StepPlan, now: float) -> None:
        """One that is sent is written down when it is on its way."""
        if plan.scheduled:
            self._planned = now
        else:
            self._line(Planned(now=now, step_id=plan.step_id))

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        self._write_plan(plan, self._planned)
        self._line(Submitted(now=now, step_id=plan.step_id))

    def _write_plan(self, plan: StepPlan, now: float) -> None:
        self._open.add(plan.step_id)
        body = msgspec.json.encode(_plan_fields(plan))
        head: dict[str, Any] = {"event": "plan", "now": now, "digest": _digest(body, plan)}
        if plan.new:
            head["new"] = [
                (r.request_id, len(r.token_ids), r.num_prompt_tokens, r.block_ids) for r in plan.new
            ]
        self._put(msgspec.json.encode(head)[:-1] + b"," + body[1:])

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        self._open.discard(plan.step_id)
        is_behind = error is not None and plan.step_id in self._behind
        if error is not None:
            self._behind = set(self._open)
        ended = {o.request_id for o in outputs if o.finish_reason is not None}
        found = result or StepResult({})
        beams = {
            row: BeamEntry(token_id=one.token_id, logprob=one.logprob, rank=one.rank, top=one.top)
            for row, (*_, one) in (found.logprobs.items() if self._beams else ())
            if row.partition(BEAM_MARK)[0] in self._beams
        }
        self._beams -= ended
        self._line(
            Collected(
                now=now,
                step_id=plan.step_id,
                rows=tuple(
                    [(o.request_id, len(o.new_token_ids), o.finish_reason) for o in outputs]
                ),
                tokens=found.token_ids,
                drafts=found.draft_token_ids,
                faults=found.faults,
                beams=beams,
                prompt_logprobs={row: len(its) for row, its in found.prompt_logprobs.items()},
                error=error,
                is_behind=is_behind,
                cpu_s=self._cpu() if ended else None,
            )
        )

    def _cpu(self) -> float | None:
        return None if self._cpu_s is None else round(self._cpu_s(), 4)

    def _salt(self, salt: bytes) -> str:
        return blake2b(salt, key=self._key, digest_size=16).hexdigest() if salt else ""

    def _line(self, event: Event) -> None:
        self._put(ENCODER.encode(event))

    def _put(self, line: bytes) -> None:
        try:
            self._write(line.decode() + "\n")
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


# ---------------------------------------------------------------------- reading


def read_event_log(path: Path) -> EventLog:
    """The last life in a file. Raises ConfigError as `read_event_logs` does."""
    return read_event_logs(path)[-1]


def read_event_logs(path: Path) -> tuple[EventLog, ...]:
    """All lives in a file, oldest first. ConfigError names the file and the line at fault: one that
    does not read, or that says of a step what cannot be after the lines before it."""
    lives: list[tuple[EngineHeader, list[AnyEvent]]] = []
    open_steps: set[int] = set()  # planned and not collected
    for number, record in _records(path):
        kind = str(record.get("event", ""))
        if kind != "engine" and kind not in EVENTS:
            raise _no_event(path, number, 'it has no "event" that is known')
        if kind != "engine" and not lives:
            raise _no_event(path, number, "the engine is not named before it")
        try:
            if kind == "engine":
                lives.append((_header(record), []))
                open_steps = set()
            else:
                event = msgspec.convert(record, EVENTS[kind])
                _follow(event, open_steps)
                lives[-1][1].append(event)
        except (TypeError, ValueError, RequestFault, msgspec.ValidationError) as problem:
            raise _no_event(path, number, f"its {kind!r} does not read: {problem}") from None
    if not lives:
        raise ConfigError(f"{path} is no event log: it has no line with an event. {WHAT_IT_IS}")
    return tuple(EventLog(header, tuple(events)) for header, events in lives)


def _follow(event: AnyEvent, open_steps: set[int]) -> None:
    """ValueError or RequestFault where what it says cannot be, or is of a step that is not under
    way."""
    if isinstance(event, Added):
        check_together(event.sampling)
        bytes.fromhex(event.salt_hex + event.tenant_hex)
    elif isinstance(event, Planned):
        open_steps.add(event.step_id)  # again, where it could not be sent
    elif isinstance(event, Submitted | Collected):
        if event.step_id not in open_steps:
            raise ValueError(f"no step {event.step_id} is under way; are lines missing before it?")
        if isinstance(event, Collected):
            open_steps.remove(event.step_id)


def _no_event(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"{path} line {number} is no event: {why}. {WHAT_IT_IS}")


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the event log {path} cannot be read: {problem}") from None
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line, parse_constant=_not_a_number)
        except json.JSONDecodeError:
            if number == len(lines) or lines[number].startswith('{"event":"engine"'):
                continue  # the process died while it wrote this line
            raise _no_event(path, number, "it is no JSON") from None
        if not isinstance(record, dict):
            raise _no_event(path, number, "it is no JSON object")
        yield number, record


def _not_a_number(name: str) -> None:
    """NaN and infinities become nothing, which no field is, so that the line is refused."""


def _header(record: dict[str, Any]) -> EngineHeader:
    del record["event"]
    if "version" not in record:
        raise ValueError("it has no version")
    if record["version"] != VERSION:
        raise ValueError(f"version {record['version']}; this program reads {VERSION}")
    if unknown := sorted(record.keys() - {row.name for row in fields(EngineHeader)}):
        raise ValueError(f"there is no field {unknown[0]!r}")
    return msgspec.convert(record, EngineHeader)
