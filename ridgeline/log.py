"""How do we say what happened? Standard logging: a fixed sentence, then key=value, rate-limited."""

from __future__ import annotations

import logging
import time


class RateLimit(logging.Filter):
    """At most one line a second from each call site; the next one says how many were dropped."""

    def __init__(self, period_s: float = 1.0) -> None:
        super().__init__()
        self.period_s = period_s
        self._last: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        site = (record.pathname, record.lineno)
        now = time.monotonic()
        last, dropped = self._last.get(site, (-self.period_s, 0))
        if now - last < self.period_s and record.levelno < logging.CRITICAL:
            self._last[site] = (last, dropped + 1)
            return False
        self._last[site] = (now, 0)
        if dropped:
            record.msg = f"{record.getMessage()} dropped={dropped}"
            record.args = ()
        return True


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


def set_up(level: str = "INFO") -> None:
    """Send our log lines to standard error, one line each, whatever they contain."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.addFilter(RateLimit())
    root = logging.getLogger("ridgeline")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def say(logger: logging.Logger, level: int, sentence: str, /, **values: object) -> None:
    """Log a fixed sentence and its values; never give it prompt text, output text or keys."""
    if logger.isEnabledFor(level):
        pairs = " ".join(f"{name}={value}" for name, value in values.items())
        logger.log(level, "%s %s" if pairs else "%s%s", sentence, pairs, stacklevel=2)
