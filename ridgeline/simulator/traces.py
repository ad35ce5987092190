"""Which requests did somebody else's system see? Recorded traces read as workloads.

Three forms, told apart by their first line: the columns of the Azure LLM inference traces (CSV),
the fields of the Mooncake traces (JSON lines with hashes of 512-token prefix blocks), and the
event log of our own engine. A name that ends in .gz is unpacked while it is read.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

from ridgeline.errors import ConfigError
from ridgeline.observe.event_log import Added, Collected, read_event_log
from ridgeline.simulator.workload import (
    FRESH_TOKEN,
    HASH_BLOCK_TOKENS,
    MAX_LENGTH,
    MAX_REQUESTS,
    Arrival,
    Workload,
    in_order,
)

# (time, prompt tokens, answer tokens) by column name, and the factor that makes the time seconds.
CSV_COLUMNS = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), 1.0),
    (("arrival_time_ns", "input_tokens", "output_tokens"), 1e-9),
    (("arrival_time_s", "input_tokens", "output_tokens"), 1.0),
)
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")  # the time in milliseconds
FORMS = (
    "CSV with the columns TIMESTAMP,ContextTokens,GeneratedTokens (or arrival_time_s,input_tokens,"
    "output_tokens), JSON lines with timestamp, input_length, output_length and hash_ids, or an "
    "event log of this engine"
)


def read_trace(path: Path, limit: int | None = None) -> Workload:
    """The first `limit` requests of a trace, times counted from the first. ConfigError if bad."""
    try:
        with _opened(path) as text:
            arrivals = tuple(islice(_read(text, path), limit or MAX_REQUESTS))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(f"{path}: cannot be read as a trace ({reason})") from None
    if not arrivals:
        raise ConfigError(f"{path}: the trace is empty")
    return in_order(arrivals)


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _read(text: TextIO, path: Path) -> Iterator[Arrival]:
    first = text.readline()
    if not first.strip():
        return iter(())
    if not first.lstrip().startswith("{"):
        return _csv(first, text, path)
    if "event" in _record(first, path, 1):
        return _event_log(path)
    return _mooncake(_numbered(first, text), path)


def _numbered(first: str, rest: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1; blank ones are left out."""
    yield 1, first
    yield from ((n, line) for n, line in enumerate(rest, start=2) if line.strip())


# ---------------------------------------------------------------------- CSV


def _csv(header: str, text: TextIO, path: Path) -> Iterator[Arrival]:
    names = [name.strip() for name in next(csv.reader([header]))]
    found = next((known for known in CSV_COLUMNS if set(known[0]) <= set(names)), None)
    if found is None:
        nearest = max(CSV_COLUMNS, key=lambda known: len(set(known[0]) & set(names)))[0]
        missing = ", ".join(name for name in nearest if name not in names)
        raise ConfigError(
            f"{path}: its columns are {', '.join(names)}; there is no column {missing}. "
            f"A trace is {FORMS}"
        )
    when, num_input, num_output = (names.index(name) for name in found[0])
    for number, row in enumerate(csv.reader(text), start=2):
        if not row:
            continue
        if len(row) != len(names):
            raise _bad(path, number, f"{len(row)} fields where the header has {len(names)}")
        yield Arrival(
            _time(row[when], path, number) * found[1],
            _length(row[num_input], names[num_input], path, number),
            _length(row[num_output], names[num_output], path, number),
        )


def _time(text: str, path: Path, number: int) -> float:
    """Seconds: a plain number, or a date and time with up to seven decimals."""
    try:
        return _seconds(float(text), path, number)
    except ValueError:
        pass
    whole, _, decimals = text.strip().partition(".")
    try:
        moment = datetime.fromisoformat(f"{whole}+00:00")
        return moment.timestamp() + (float(f"0.{decimals}") if decimals else 0.0)
    except ValueError:
        raise _bad(path, number, f"{text!r} is no time such as 2023-11-16 18:15:46.68") from None


def _seconds(value: float, path: Path, number: int) -> float:
    if not 0 <= value < float("inf"):
        raise _bad(path, number, f"the time is {value:g}; it must be 0 or more and finite")
    return value


def _length(value: object, name: str, path: Path, number: int) -> int:
    """A token count; 0 is taken as 1, as the step that reads a prompt always makes a token."""
    try:
        count = int(value) if isinstance(value, str) else value
    except ValueError:
        count = None
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_LENGTH:
        raise _bad(path, number, f"{name} is {value!r}; it must be a number of tokens")
    return max(1, count)


def _bad(path: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {what}")


# ---------------------------------------------------------------------- JSON lines


def _record(line: str, path: Path, number: int) -> Mapping[str, object]:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as problem:
        raise _bad(path, number, f"not JSON ({problem})") from None
    if not isinstance(record, dict):
        raise _bad(path, number, "not a JSON object")
    return record


def _mooncake(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[Arrival]:
    for number, line in lines:
        record = _record(line, path, number)
        for name in MOONCAKE_FIELDS:
            if name not in record:
                raise _bad(path, number, f"there is no field {name}. A trace is {FORMS}")
        when = record["timestamp"]
        if isinstance(when, bool) or not isinstance(when, (int, float)):
            raise _bad(path, number, f"timestamp is {when!r}; it must be milliseconds")
        num_input = _length(record["input_length"], "input_length", path, number)
        num_output = _length(record["output_length"], "output_length", path, number)
        hashes = _hashes(record.get("hash_ids", []), num_input, path, number)
        yield Arrival(_seconds(when / 1000, path, number), num_input, num_output, hashes)


def _hashes(values: object, num_input: int, path: Path, number: int) -> tuple[int, ...]:
    """At most one per block of 512 prompt tokens, the last of which may be partly filled."""
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise _bad(path, number, "hash_ids must be a list of whole numbers")
    if any(not 0 <= value < FRESH_TOKEN for value in values):
        raise _bad(path, number, f"hash_ids must be 0 or more and below {FRESH_TOKEN}")
    most = -(-num_input // HASH_BLOCK_TOKENS)
    if len(values) > most:
        raise _bad(path, number, f"{len(values)} hash_ids, but {num_input} tokens have {most}")
    return tuple(values)


# ---------------------------------------------------------------------- our own engine


def _event_log(path: Path) -> Iterator[Arrival]:
    """Those of the last life in the log that were taken in; each with the answer it got."""
    if path.suffix == ".gz":
        raise ConfigError(f"{path}: an event log is read unpacked; unpack it first")
    events = read_event_log(path).events
    num_output: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Collected):
            for output in event.outputs:
                num_output[output.request_id] += len(output.new_token_ids)
    for event in events:
        if isinstance(event, Added) and event.refused is None:
            length = max(1, num_output[event.request_id])
            prompt = event.prompt
            yield Arrival(event.arrival, len(prompt), length, (), event.request_id, prompt)
