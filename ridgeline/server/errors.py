"""What does a client read when something is refused? One factory for every error body."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import msgspec

from ridgeline.errors import RequestFault

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
RATE_LIMIT = "rate_limit_error"
SERVER = "server_error"

MAX_ECHO = 64  # characters of the client's own words that an error may repeat
MAX_MESSAGE = 500


@dataclass(frozen=True, slots=True)
class Code:
    """What a code of an error means: the HTTP status, the type that OpenAI's clients know, and when
    it comes."""

    status: int
    type: str
    meaning: str


def _invalid(meaning: str, status: int = 400) -> Code:
    return Code(status, INVALID, meaning)


UNKNOWN = _invalid("a fault of the request")
CODES: dict[str, Code] = {
    "invalid_json": _invalid("the body is no JSON object, or has a key twice"),
    "invalid_type": _invalid("a field has another type than it must have"),
    "invalid_value": _invalid("a value is out of its bounds, or two fields contradict each other"),
    "missing_required_parameter": _invalid("a field is missing"),
    "unknown_parameter": _invalid("the field is unknown"),
    "unsupported_parameter": _invalid("a field of OpenAI or vLLM that is not served here"),
    "unsupported_schema": _invalid(
        "a schema, regular expression or grammar that is none, or has a part that is not served"
    ),
    "limit_exceeded": _invalid("more of something than this server gives one request"),
    "context_length_exceeded": _invalid("prompt and answer do not fit into the model's context"),
    "empty_input": _invalid("an empty prompt, message, list or stop string"),
    "invalid_text": _invalid("a lone surrogate or a NUL character"),
    "invalid_token_id": _invalid("no token id of this model"),
    "invalid_messages": _invalid("the chat template refuses these messages, or a role is unknown"),
    "chat_template_missing": _invalid("this model has no chat template; use /v1/completions"),
    "media_url_not_allowed": _invalid("images, sound and video are not fetched"),
    "invalid_http": _invalid("not HTTP/1.1, or a head over the limits (then with status 431)"),
    "headers_too_large": _invalid("shown as invalid_http", 431),
    "invalid_api_key": Code(401, AUTHENTICATION, "no key, or a wrong one"),
    "insufficient_permissions": Code(403, AUTHENTICATION, "the key lacks the path's right"),
    "not_found": _invalid("there is nothing at this path", 404),
    "model_not_found": _invalid("`model` is not the name of the served model", 404),
    "method_not_allowed": _invalid("the path is served with another method", 405),
    "request_timeout": _invalid("the head or the body came too slowly", 408),
    "slow_client": _invalid("shown as request_timeout: a stream was left unread", 408),
    "request_too_large": _invalid("the body is larger than --max-body-bytes", 413),
    "unsupported_media_type": _invalid("Content-Type is not application/json", 415),
    "unsupported_encoding": _invalid("the body is compressed", 415),
    "invalid_host": _invalid("the Host header is no name of this server (--allowed-host)", 421),
    "rate_limit_exceeded": Code(
        429,
        RATE_LIMIT,
        "this key holds as many sequences, or this address as many connections, as it may; or too "
        "many ask for metrics at once",
    ),
    "internal_error": Code(500, SERVER, "a fault of the server; its log has the x-request-id"),
    "overloaded": Code(503, SERVER, "a queue of the server is full, or a promise would be broken"),
    "queue_timeout": Code(
        503, SERVER, "no first step in --queue-timeout-s, or twice the wait foretold"
    ),
    "starting": Code(503, SERVER, "the model is still being loaded"),
    "shutting_down": Code(503, SERVER, "the server drains running answers and ends"),
    "engine_unavailable": Code(503, SERVER, "the engine failed and is being started again"),
    "deadline_exceeded": Code(504, SERVER, "the answer took longer than --run-timeout-s"),
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
        known = CODES.get(code, UNKNOWN)
        self.status, self.kind = known.status, known.type
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
    param, message = fault.param, str(fault)
    if param is not None and rename:
        head = param.partition("[")[0]
        param = rename.get(head, head) + param[len(head) :]
        if param != fault.param and message.startswith(f"{fault.param}:"):
            message = param + message[len(fault.param or "") :]
    return ApiError(fault.code, message, param, retry_after_s=fault.retry_after_s)


def internal_error() -> ApiError:
    """For our own faults: the request id in the header is all that a client learns."""
    return ApiError("internal_error", "the server failed on this request; quote its x-request-id")


def quote(value: object) -> str:
    """At most 64 harmless characters of what the client sent."""
    return repr(_tidy(str(value), MAX_ECHO))


def _tidy(text: str, limit: int) -> str:
    kept = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else "?" for c in kept)
