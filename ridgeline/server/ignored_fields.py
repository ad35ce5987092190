"""Which fields of a body are taken although nothing comes of them, and who hears of it?

The client in a header of the reply, the operator once for each name in the log. Fields that the
server knows and does not serve are no such fields: they are refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ridgeline.clock import Clock
from ridgeline.declared import declared, unknown_field
from ridgeline.log import say
from ridgeline.server.bodies import NO_EFFECT, OPEN, UNSUPPORTED
from ridgeline.server.errors import from_fault

HEADER = b"x-ignored-fields"
MAX_NAMES = 16  # in one header
MAX_NAME_LENGTH = 64
MAX_LOGGED = 256  # names that a server tells in its log
LOG_PERIOD_S = 1.5  # the log takes a line of one place each second

Body = Mapping[str, object]
Kind = type[msgspec.Struct]

logger = logging.getLogger(__name__)


class IgnoredFields:
    """What one server does with them. `strict` refuses those that it does not know;
    `has_priorities`: the order in which requests are served heeds `priority`."""

    def __init__(self, clock: Clock, *, strict: bool, has_priorities: bool) -> None:
        self._clock = clock
        self._strict = strict
        self._has_priorities = has_priorities
        self._seen: set[str] = set()
        self._unlogged: list[str] = []
        self._logged_at = -LOG_PERIOD_S

    def known(self, body: Body, kinds: Sequence[Kind]) -> tuple[Body, list[str]]:
        """What the body says that the first of `kinds` which fits it knows, and the names of the
        fields without effect. Raises ApiError unknown_parameter where that is asked for."""
        fitting = (kind for kind in kinds if _required(kind) <= body.keys())
        ignored: dict[str, None] = {}
        kept = self._object(body, next(fitting, kinds[0]), "", "", ignored)
        if not self._has_priorities and body.get("priority"):
            ignored["priority"] = None
        if ignored:
            self._log(ignored)
        return kept, list(ignored)[:MAX_NAMES]

    def _log(self, names: Iterable[str]) -> None:
        """Each name once. The log drops lines that come too fast: what is new waits for a later
        request."""
        for name in names:
            if name not in self._seen and len(self._seen) < MAX_LOGGED:
                self._seen.add(name)
                self._unlogged.append(name)
        now = self._clock.now()
        if self._unlogged and now - self._logged_at >= LOG_PERIOD_S:
            told = ",".join(self._unlogged)
            say(logger, logging.WARNING, "fields of requests have no effect", fields=told)
            self._unlogged, self._logged_at = [], now

    def _object(
        self, given: Body, kind: Kind, path: str, shown: str, ignored: dict[str, None]
    ) -> Body:
        """`path` is its place, `shown` the same without numbers."""
        fields, unserved = declared(kind), UNSUPPORTED.get(kind, {})
        kept: dict[str, object] = {}
        for name, value in given.items():
            field = fields.get(name)
            if field is None and name not in unserved:
                if self._strict:
                    raise from_fault(unknown_field(path + name, name))
                ignored[_header_name(shown + name)] = None
                continue
            if field is not None and field.meaning == NO_EFFECT and value:
                ignored[shown + name] = None
            if field is not None and field.record in OPEN:
                value = self._value(value, field.record, path + name, shown + name, ignored)
            kept[name] = value
        return kept

    def _value(
        self, value: object, kind: Kind, path: str, shown: str, ignored: dict[str, None]
    ) -> object:
        if isinstance(value, dict):
            return self._object(value, kind, path + ".", shown + ".", ignored)
        if isinstance(value, list):
            return [
                self._value(item, kind, f"{path}[{i}]", shown + "[]", ignored)
                for i, item in enumerate(value)
            ]
        return value


def _required(kind: Kind) -> set[str]:
    return {name for name, field in declared(kind).items() if field.required}


def _header_name(name: str) -> str:
    """Fit for a header and a line of the log."""
    kept = "".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in name)
    return kept[:MAX_NAME_LENGTH]
