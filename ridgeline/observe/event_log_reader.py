"""What does an event log say? Its lines become events again, each checked.

A file that anybody may have cut, joined or edited: a line that does not read, or that says of a
step what cannot be after the lines before it, is named with its number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.observe.event_log import (
    VERSION,
    Aborted,
    Added,
    Collected,
    EngineHeader,
    Event,
    EventLog,
    Opened,
    Planned,
    Submitted,
)
from ridgeline.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from ridgeline.step import BlockCopy, BlockTables, ScheduledRequest, StepPlan, StepResult

WHAT_IT_IS = "An event log is what --event-log of serve, generate or bench has written"


def read_event_log(path: Path) -> EventLog:
    """The last life in a file. Raises ConfigError as `read_event_logs` does."""
    return read_event_logs(path)[-1]


def read_event_logs(path: Path) -> tuple[EventLog, ...]:
    """All lives in a file, oldest first. ConfigError names the file and the line at fault: one that
    does not read, or that says of a step what cannot be after the lines before it."""
    lives: list[tuple[EngineHeader, list[Event]]] = []
    open_steps: set[int] = set()  # planned and not collected
    for number, record in _records(path):
        kind = str(record.pop("event", ""))
        if kind != "engine" and kind not in _READERS:
            raise _no_event(path, number, 'it has no "event" that is known')
        if kind != "engine" and not lives:
            raise _no_event(path, number, "the engine is not named before it")
        try:
            if kind == "engine":
                lives.append((_header(record), []))
                open_steps = set()
            else:
                shape, read = _READERS[kind]
                event = read(msgspec.convert(record, shape))
                _follow(event, open_steps)
                lives[-1][1].append(event)
        except (TypeError, ValueError, RequestFault, msgspec.ValidationError) as problem:
            raise _no_event(path, number, f"its {kind!r} does not read: {problem}") from None
    if not lives:
        raise ConfigError(f"{path} is no event log: it has no line with an event. {WHAT_IT_IS}")
    return tuple(EventLog(header, tuple(events)) for header, events in lives)


def _follow(event: Event, open_steps: set[int]) -> None:
    """ValueError where the event is of a step that is not under way."""
    if isinstance(event, Planned):
        open_steps.add(event.plan.step_id)  # again, where it could not be sent
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


_NAMES = frozenset(row.name for row in fields(EngineHeader))
_AT_LEAST_ONE = (
    "num_blocks",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_in_flight",
)


def _header(record: dict[str, Any]) -> EngineHeader:
    if "version" not in record:
        raise ValueError("it has no version")
    if record["version"] != VERSION:
        raise ValueError(f"version {record['version']}; this program reads {VERSION}")
    if unknown := sorted(record.keys() - _NAMES):
        raise ValueError(f"there is no field {unknown[0]!r}")
    header = msgspec.convert(record, EngineHeader)
    for name in _AT_LEAST_ONE:
        if getattr(header, name) < 1:
            raise ValueError(f"{name} is {getattr(header, name)}")
    return header


# ---------------------------------------------------------------------- what a line may say

Time = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]  # seconds, of the engine's clock
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Tokens = dict[str, tuple[int, ...]]
Row = tuple[str, Number, Count, Count, bool | Number, BlockTables]


class AddLine(TypedDict):
    now: Time
    id: str
    arrival: Time
    prompt: tuple[int, ...]  # of one that was refused, whatever the client said
    sampling: dict[str, Any]
    priority: NotRequired[int]
    salt: NotRequired[str]
    tenant: NotRequired[str]
    weight: NotRequired[Weight]
    fork_of: NotRequired[str]
    refused: NotRequired[str]
    cpu_s: NotRequired[Time]


class AbortLine(TypedDict):
    now: Time
    id: str
    cpu_s: NotRequired[Time]


class PlanLine(TypedDict):
    now: Time
    step: Number
    digest: NotRequired[str]
    new: NotRequired[tuple[tuple[str, Count, Count, BlockTables], ...]]
    rows: NotRequired[tuple[Row, ...]]
    copies: NotRequired[tuple[tuple[str, Number, Number, Number, Number], ...]]
    preempted: NotRequired[tuple[str, ...]]
    finished: NotRequired[tuple[str, ...]]


class SubmitLine(TypedDict):
    now: Time
    step: Number


class BeamEntry(TypedDict):
    token_id: Number
    logprob: float
    rank: Number
    top: tuple[tuple[Number, float], ...]


class CollectLine(TypedDict):
    now: Time
    step: Number
    outputs: tuple[tuple[str, Count, str | None], ...]
    tokens: NotRequired[Tokens]
    drafts: NotRequired[Tokens]
    faults: NotRequired[dict[str, str]]
    beams: NotRequired[dict[str, BeamEntry]]
    prompt_logprobs: NotRequired[dict[str, Count]]
    error: NotRequired[str]
    behind: NotRequired[bool]
    cpu_s: NotRequired[Time]


def _added(line: AddLine) -> Added:
    sampling = line["sampling"]
    if "logit_bias" in sampling:
        sampling["logit_bias"] = tuple((i, value) for i, value in sampling["logit_bias"])
    return Added(
        line["now"],
        line["id"],
        line["arrival"],
        line["prompt"],
        SamplingParams(**sampling),
        line.get("priority", 0),
        bytes.fromhex(line.get("salt", "")),
        line.get("fork_of"),
        line.get("refused"),
        line.get("cpu_s"),
        bytes.fromhex(line.get("tenant", "")),
        line.get("weight", 1.0),
    )


def _aborted(line: AbortLine) -> Aborted:
    return Aborted(line["now"], line["id"], line.get("cpu_s"))


def _planned(line: PlanLine) -> Planned:
    plan = StepPlan(
        line["step"],
        tuple(
            ScheduledRequest(row, start, num, blocks, bool(samples), num_draft)
            for row, start, num, num_draft, samples, blocks in line.get("rows", ())
        ),
        (),
        tuple(BlockCopy(*copy) for copy in line.get("copies", ())),
        line.get("preempted", ()),
        line.get("finished", ()),
    )
    opened = tuple(Opened(*row) for row in line.get("new", ()))
    return Planned(line["now"], plan, opened, line.get("digest", ""))


def _submitted(line: SubmitLine) -> Submitted:
    return Submitted(line["now"], line["step"])


def _collected(line: CollectLine) -> Collected:
    outputs = tuple(
        RequestOutput(i, (0,) * count, None if reason is None else FinishReason(reason))
        for i, count, reason in line["outputs"]
    )
    error = line.get("error")
    result = _result(line) if error is None else None
    behind, cpu_s = line.get("behind", False), line.get("cpu_s")
    return Collected(line["now"], line["step"], result, outputs, error, behind, cpu_s)


def _result(line: CollectLine) -> StepResult:
    nothing = TokenLogprobs(0, 0.0, 1)
    return StepResult(
        line.get("tokens", {}),
        line.get("drafts", {}),
        {row: (TokenLogprobs(**entry),) for row, entry in line.get("beams", {}).items()},
        {row: (nothing,) * count for row, count in line.get("prompt_logprobs", {}).items()},
        line.get("faults", {}),
    )


_READERS: dict[str, tuple[Any, Callable[[Any], Event]]] = {
    "add": (AddLine, _added),
    "abort": (AbortLine, _aborted),
    "plan": (PlanLine, _planned),
    "submit": (SubmitLine, _submitted),
    "collect": (CollectLine, _collected),
}
