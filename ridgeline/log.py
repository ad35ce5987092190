"""How do we say what happened? Standard logging: a fixed sentence and its values, rate-limited, one
line each, as key=value or as JSON."""

from __future__ import annotations

import json
import logging
import re
import time
from datetime import UTC, datetime
from math import isfinite

ACCESS = logging.getLogger("ridgeline.access")  # one line a request, where that is asked for

_PLAIN = re.compile(r"[!#-<>-~]+")  # printable ASCII without space, quote and =: needs no quotes
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
}


class Values(dict[str, object]):
    """The values of one line. As text, whoever chose a value cannot end it or begin another."""

    def __str__(self) -> str:
        return "".join(f" {name}={_quoted(value)}" for name, value in self.items())


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _parts(record: logging.LogRecord) -> tuple[str, Values]:
    """The sentence and the values of a line."""
    args = record.args
    if isinstance(args, tuple) and len(args) == 2 and isinstance(args[1], Values):
        return str(args[0]), args[1]
    return record.getMessage(), Values()


class RateLimit(logging.Filter):
    """At most one line a second from each call site; the next one says how many were dropped."""

    def __init__(self, period_s: float = 1.0) -> None:
        super().__init__()
        self.period_s = period_s
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ACCESS.name:
            return True
        site = (record.pathname, record.lineno)
        now = time.monotonic()
        last, dropped = self._last.get(site, (-self.period_s, 0))
        if now - last < self.period_s and record.levelno < logging.CRITICAL:
            self._last[site] = (last, dropped + 1)
            return False
        self._last[site] = (now, 0)
        if dropped:
            sentence, values = _parts(record)
            record.msg, record.args = "%s%s", (sentence, Values(values, dropped=dropped))
        return True


class _Text(logging.Formatter):
    """One line of ASCII, whatever is in it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record).translate(_CONTROLS)
        return line.encode("ascii", "backslashreplace").decode("ascii")


class _Json(logging.Formatter):
    """One object a line: time, level, logger, message, and the values beside them."""

    def format(self, record: logging.LogRecord) -> str:
        sentence, values = _parts(record)
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        ours: dict[str, object] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": sentence,
        }
        line = ours | {name: _plain(value) for name, value in values.items()} | ours
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _plain(value: object) -> object:
    """What JSON can say of a value."""
    is_number = isinstance(value, int) or (isinstance(value, float) and isfinite(value))
    return value if is_number or value is None else str(value)


FORMATS: dict[str, type[logging.Formatter]] = {"text": _Text, "json": _Json}


def set_up(level: str = "INFO", log_format: str = "text", *, access_log: bool = False) -> None:
    """Send our log lines to standard error, one line each, whatever they contain."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[log_format]())
    handler.addFilter(RateLimit())
    root = logging.getLogger("ridgeline")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    ACCESS.setLevel(logging.INFO if access_log else logging.CRITICAL + 1)


def say(
    logger: logging.Logger, level: int, sentence: str, /, *, trace: bool = False, **values: object
) -> None:
    """Log a fixed sentence and its values, and with `trace` the exception that is being handled;
    never give it prompt text, output text or keys."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s%s", sentence, Values(values), exc_info=trace, stacklevel=2)
