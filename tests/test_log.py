"""Is a line of the log one line, whatever it says, and can nobody forge another?"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import log

PAIR = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)')
LOGGER = logging.getLogger("ridgeline.test_log")
Written = Callable[[], list[str]]


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Our root logger, put back as it was."""
    logger = logging.getLogger("ridgeline")
    before = (logger.handlers[:], logger.level, logger.propagate, log.ACCESS.level)
    yield logger
    logger.handlers[:], level, logger.propagate, access = before
    logger.setLevel(level)
    log.ACCESS.setLevel(access)


def lines_of(root: logging.Logger) -> Written:
    """What was written since, line by line as any reader splits it."""
    [handler] = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    text = io.StringIO()
    handler.setStream(text)
    return lambda: text.getvalue().splitlines()


def formatted(log_format: str, **values: object) -> str:
    record = logging.LogRecord("ridgeline.x", logging.INFO, "file", 1, "%s%s", None, None)
    record.args = ("it happened", log.Values(values))
    return log.FORMATS[log_format]().format(record)


@settings(max_examples=50)
@given(st.text(), st.text())
def test_any_value_stays_one_value_of_one_line(one: str, other: str) -> None:
    line = formatted("text", reason=one, other=other)
    assert len(line.splitlines()) == 1
    assert line.isascii()
    assert line.isprintable()
    _, found, pairs = line.partition(" it happened")
    assert found
    read = {n: json.loads(v) if v.startswith('"') else v for n, v in PAIR.findall(pairs)}
    assert read == {"reason": one, "other": other}


@given(st.text())
def test_json_gives_values_back(value: str) -> None:
    line = formatted("json", reason=value)
    assert len(line.splitlines()) == 1
    assert json.loads(line)["reason"] == value


def test_plain_values_need_no_quotes() -> None:
    line = formatted("text", model="demo:chat", n=3, seconds=0.25, none=None, words="two words")
    assert line.endswith(
        ' it happened model=demo:chat n=3 seconds=0.25 none=None words="two words"'
    )


def test_a_line_of_json() -> None:
    row = json.loads(formatted("json", n=3, ok=True, bad=float("nan"), level="mine", none=None))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row.pop("time"))
    assert row == {
        "level": "INFO",  # nothing that is said replaces who said it
        "logger": "ridgeline.x",
        "message": "it happened",
        "n": 3,
        "ok": True,
        "bad": "nan",
        "none": None,
    }


@pytest.mark.parametrize("log_format", log.FORMATS)
def test_an_exception_is_part_of_its_line(root: logging.Logger, log_format: str) -> None:
    log.set_up("INFO", log_format)
    written = lines_of(root)
    try:
        raise ValueError("no\n2026-01-01 INFO ridgeline all is well \u2028")
    except ValueError:
        log.say(LOGGER, logging.ERROR, "it failed", trace=True, request_id="req-1")
    [line] = written()
    assert "Traceback" in line
    assert "req-1" in line


@pytest.mark.parametrize(("log_format", "said"), [("text", "dropped=2"), ("json", '"dropped": 2')])
def test_one_line_a_second_from_each_place(
    root: logging.Logger, log_format: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((100.0, 100.1, 100.9, 101.0))
    monkeypatch.setattr("ridgeline.log.time.monotonic", lambda: next(clock))
    log.set_up("INFO", log_format)
    written = lines_of(root)
    for _ in range(4):
        log.say(LOGGER, logging.INFO, "again", n=1)
    assert len(written()) == 2
    assert said in written()[1]


def test_access_lines_come_only_when_asked_for_and_then_all_of_them(root: logging.Logger) -> None:
    for asked in (False, True):
        log.set_up("ERROR", access_log=asked)
        written = lines_of(root)
        for number in range(3):
            log.say(log.ACCESS, logging.INFO, "request", number=number)
        assert len(written()) == (3 if asked else 0)
