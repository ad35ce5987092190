"""Whose fault is it?

RidgelineError
  ConfigError     what was asked for cannot be had here; the message says what can
    DoesNotFit    it would not fit in memory; carries the itemised table
  RequestFault    one request is at fault and no other is harmed
  EngineFault     a step failed: what was in flight fails, the engine goes on or restarts
  EngineLost      a part of the engine is gone: nothing can be served before it is started again
  InternalError   an invariant of ours broke (raised by `check` alone)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RidgelineError(Exception):
    """Base of everything we raise on purpose."""


class ConfigError(RidgelineError):
    """A start-up choice, model folder or file is unusable; names it, the reason and the way out."""


class DoesNotFit(ConfigError):
    """The model or its cache needs more memory than there is.

    `items` is (what, bytes) per line of the contract; `changes` are the cheapest ways out, in
    words. `settings` has one mapping for each of them: fields of EngineConfig and their new values,
    empty for a change that is no setting.
    """

    def __init__(
        self,
        message: str,
        items: tuple[tuple[str, int], ...] = (),
        changes: tuple[str, ...] = (),
        settings: tuple[Mapping[str, Any], ...] = (),
    ) -> None:
        super().__init__(message)
        self.items = items
        self.changes = changes
        self.settings = settings or ({},) * len(changes)


class RequestFault(RidgelineError):
    """This request cannot be served; the message says what would make it servable.

    `param` is the field at fault; `code` is a short stable name such as `invalid_value`,
    `limit_exceeded`, `context_length_exceeded` or `empty_input`. `retry_after_s`: seconds after
    which the same request may be servable.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class EngineFault(RidgelineError):
    """A step failed on the device; requests that were in flight fail with it."""


class EngineLost(RidgelineError):
    """A rank of a group has ended, failed or is stuck; names it. Another engine must be started."""


class InternalError(RidgelineError):
    """Raised by `check` alone."""


def check(condition: bool, what: str, **values: object) -> None:
    """An assertion that `python -O` keeps."""
    if not condition:
        detail = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise InternalError(f"{what} ({detail})" if detail else what)
