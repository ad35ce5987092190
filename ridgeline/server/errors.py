"""What does a client read when something is refused? One factory for every error body."""

from __future__ import annotations

from math import ceil

import msgspec

from ridgeline.errors import RequestFault

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"

MAX_ECHO = 64  # characters of the client's own words that an error may repeat
MAX_MESSAGE = 500

# code -> (HTTP status, type). A code that is not here is a request's fault: 400.
CODES: dict[str, tuple[int, str]] = {
    "invalid_json": (400, INVALID),
    "unsupported_media_type": (415, INVALID),
    "unsupported_encoding": (415, INVALID),
    "request_too_large": (413, INVALID),
    "invalid_http": (400, INVALID),
    "headers_too_large": (431, INVALID),
    "request_timeout": (408, INVALID),
    "not_found": (404, INVALID),
    "method_not_allowed": (405, INVALID),
    "invalid_host": (421, INVALID),
    "invalid_api_key": (401, AUTHENTICATION),
    "model_not_found": (404, INVALID),
    "rate_limit_exceeded": (429, RATE_LIMIT),
    "overloaded": (503, SERVER),
    "queue_timeout": (503, SERVER),
    "starting": (503, SERVER),
    "shutting_down": (503, SERVER),
    "deadline_exceeded": (504, SERVER),
    "internal_error": (500, SERVER),
    "engine_unavailable": (503, SERVER),
    "slow_client": (408, INVALID),
}
RETRY_AFTER_S: dict[str, int] = {
    "rate_limit_exceeded": 1,
    "overloaded": 1,
    "queue_timeout": 5,
    "starting": 5,
    "shutting_down": 30,
    "engine_unavailable": 5,
}
SHOWN_AS = {"headers_too_large": "invalid_http", "slow_client": "request_timeout"}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """A refusal with everything its HTTP reply needs; `code` decides status and type."""

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        close: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = _tidy(message, MAX_MESSAGE)
        self.param = None if param is None else _tidy(param, MAX_ECHO)
        self.close = close
        self.status, self.kind = CODES.get(code, (400, INVALID))
        self.headers: list[tuple[bytes, bytes]] = []
        if code in RETRY_AFTER_S:
            wait_s = RETRY_AFTER_S[code] if retry_after_s is None else max(1, ceil(retry_after_s))
            self.headers.append((b"retry-after", b"%d" % wait_s))
        if code == "invalid_api_key":
            self.headers.append((b"www-authenticate", b"Bearer"))

    def body(self) -> bytes:
        code = SHOWN_AS.get(self.code, self.code)
        return msgspec.json.encode(
            ErrorBody(ErrorDetail(self.message, self.kind, self.param, code))
        )

    def event(self) -> bytes:
        """The same as the last event of a stream that has already begun."""
        return b"data: " + self.body() + b"\n\n"


def from_fault(fault: RequestFault, rename: dict[str, str] | None = None) -> ApiError:
    """The reply to a fault that text, answer or engine found; `rename` maps its field names to
    those of the request body."""
    param = fault.param
    if param is not None and rename:
        head = param.partition("[")[0]
        param = rename.get(head, head) + param[len(head) :]
    return ApiError(fault.code, str(fault), param, retry_after_s=fault.retry_after_s)


def internal_error() -> ApiError:
    """For our own faults: the request id in the header is all that a client learns."""
    return ApiError("internal_error", "the server failed on this request; quote its x-request-id")


def quote(value: object) -> str:
    """At most 64 harmless characters of what the client sent."""
    return repr(_tidy(str(value), MAX_ECHO))


def _tidy(text: str, limit: int) -> str:
    kept = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else "?" for c in kept)
