"""What may be asked of this server, and what comes back, in the words of OpenAPI?

Bodies come from the records of bodies.py, replies from the records that are written out, errors
from those of errors.py. Here stands only which of them belongs to which path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import ridgeline
from ridgeline.declared import Declared, Field, declared
from ridgeline.observe.explain import OwnReport, Report
from ridgeline.request import CONSTRAINT, MAX_STOP_LENGTH, MAX_TOKEN_ID, SCHEMA, StructuredOutputs
from ridgeline.router.backend import Load
from ridgeline.server.bodies import (
    CHOICE,
    FORMAT,
    OPEN,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponseFormat,
    TokenizeChat,
    TokenizeText,
)
from ridgeline.server.errors import CODES, RETRY_AFTER_S, SHOWN_AS, ErrorBody
from ridgeline.server.http_protocol import OPEN_PATHS, READY_PATHS
from ridgeline.server.metrics_page import CONTENT_TYPE
from ridgeline.server.model import ModelCard, ModelList, ServerInfo
from ridgeline.server.replies import ChatChoice, ChatPiece, CompletionChoice, Reply
from ridgeline.server.service import Service, send_json
from ridgeline.server.tokenize import Text, Tokens

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"
JSON = "application/json"
EVENTS = "text/event-stream"

# ---------------------------------------------------------------------- what is asked

NO_NUL = "^[^\\u0000]*$"
TEXT: Schema = {"type": "string", "pattern": NO_NUL}
FULL_TEXT: Schema = {**TEXT, "minLength": 1}
STOP_TEXT: Schema = {**TEXT, "maxLength": MAX_STOP_LENGTH}
NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9_:@-]+([./][A-Za-z0-9_:@-]+)*$"}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID - 1}
TOKEN_IDS: Schema = {"type": "array", "minItems": 1, "items": TOKEN_ID}
PROMPTS: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": [FULL_TEXT, TOKEN_IDS]}}


def _within(field: Field, low: str, high: str) -> Schema:
    """Its bounds, by the words that its kind has for them."""
    bounds = {low: field.low, high: field.high}
    return {word: bound for word, bound in bounds.items() if bound is not None}


def _number(field: Field) -> Schema:
    low = "exclusiveMinimum" if field.above else "minimum"
    return {"type": field.kind, **_within(field, low, "maximum")}


def _string(field: Field) -> Schema:
    if field.choices:
        return {"type": "string", "enum": list(field.choices)}
    return {**TEXT, **_within(field, "minLength", "maxLength")}


def _list(field: Field, items: Schema) -> Schema:
    return {"type": "array", **_within(field, "minItems", "maxItems"), "items": items}


def _object(field: Field) -> Schema:
    if field.fields is None:
        return {"type": "object"}
    return object_schema(field.fields, is_open=field.record in OPEN)


def _biases(field: Field) -> Schema:
    return {
        "type": "object",
        **_within(field, "minProperties", "maxProperties"),
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {"anyOf": [_number(field.items[0].items[1]), {"type": "null"}]},
    }


# Kind of a field -> its schema.
KINDS: Mapping[str, Callable[[Field], Schema]] = {
    "number": _number,
    "integer": _number,
    "boolean": lambda field: {"type": "boolean"},
    "string": _string,
    "object": _object,
    "object of numbers": _biases,
    CONSTRAINT: lambda field: object_schema(declared(StructuredOutputs)) | {"minProperties": 1},
    FORMAT: lambda field: object_schema(declared(ResponseFormat)),
    SCHEMA: lambda field: {
        "anyOf": [
            {"type": "object"},
            {"type": "boolean"},
            {"type": "string", "pattern": "^\\s*\\{"},
        ]
    },
    "list of strings": lambda field: _list(field, _string(field.items[0])),
    CHOICE: lambda field: {"anyOf": [{"enum": ["auto", "none", "required"]}, _object(field)]},
    "object or string": lambda field: {"anyOf": [_object(field), TEXT]},
    "list of objects": lambda field: _list(field, _object(field)),
    "list of token ids": lambda field: _list(field, TOKEN_ID),
    "string or list of strings": lambda field: {"anyOf": [STOP_TEXT, _list(field, STOP_TEXT)]},
    "string or list of parts": lambda field: {"anyOf": [TEXT, _list(field, _object(field))]},
    "string, list of strings, list of token ids, or list of such lists": lambda field: {
        "anyOf": [FULL_TEXT, TOKEN_IDS, PROMPTS]
    },
}


def schema_of(field: Field) -> Schema:
    """Of one field. null counts as absent."""
    made = dict(KINDS[field.kind](field))
    if not field.required:
        made = {"anyOf": [made, {"type": "null"}]}
    words = field.meaning + (f" (default: {field.default})" if field.default else "")
    if words:
        made["description"] = words
    if field.example is not None:
        made["examples"] = [field.example]
    return made


def object_schema(fields: Declared, *, is_open: bool = False) -> Schema:
    """`is_open`: a field that is none of these is ignored."""
    closed: Schema = {} if is_open else {"additionalProperties": False}
    return {
        **closed,
        "type": "object",
        "properties": {name: schema_of(field) for name, field in fields.items()},
        "required": [name for name, field in fields.items() if field.required],
    }


BODIES: Mapping[str, tuple[type[msgspec.Struct], ...]] = {
    "CompletionRequest": (CompletionBody,),
    "ChatRequest": (ChatBody,),
    "TokenizeRequest": (TokenizeText, TokenizeChat),
    "DetokenizeRequest": (DetokenizeBody,),
}


def _body_schema(kinds: Sequence[type[msgspec.Struct]]) -> Schema:
    first, *others = (object_schema(declared(kind), is_open=True) for kind in kinds)
    return {"anyOf": [first, *others]} if others else first


# ---------------------------------------------------------------------- what comes back

RECORDS: Mapping[str, Any] = {
    "Completion": Reply[CompletionChoice],
    "ChatCompletion": Reply[ChatChoice],
    "ChatChunk": Reply[ChatPiece],
    "ModelCard": ModelCard,
    "ModelList": ModelList,
    "ServerInfo": ServerInfo,
    "Load": Load,
    "Tokens": Tokens,
    "Text": Text,
    "Report": Report,
    "OwnReport": OwnReport,
    "ErrorBody": ErrorBody,
}

ANYWHERE = (
    "invalid_http", "headers_too_large", "invalid_host", "request_timeout", "internal_error",
    "overloaded", "rate_limit_exceeded",
)  # fmt: skip
KEYED = ("invalid_api_key", "insufficient_permissions")
MODEL = ("starting", "shutting_down", "engine_unavailable")
BODY = (
    *MODEL, "invalid_json", "invalid_type", "invalid_value", "missing_required_parameter",
    "unknown_parameter", "context_length_exceeded", "empty_input", "invalid_text",
    "invalid_token_id", "model_not_found", "request_too_large", "unsupported_media_type",
    "unsupported_encoding", "unsupported_schema",
)  # fmt: skip
CONVERSATION = (
    "invalid_messages", "chat_template_missing", "media_url_not_allowed", "unsupported_parameter",
    "limit_exceeded",
)  # fmt: skip
ANSWER = (
    *BODY, "unsupported_parameter", "limit_exceeded", "queue_timeout", "deadline_exceeded",
    "slow_client",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reference:
    """What a path answers: with which record, in each event of a stream with which; after which
    body; and which errors may come."""

    reply: str | Schema
    codes: Collection[str] = ()
    body: str = ""
    event: str = ""
    content_type: str = JSON


def _says(field: str, schema: Schema) -> Schema:
    return {"type": "object", "properties": {field: schema}, "required": [field]}


PATHS: Mapping[str, Reference] = {
    "/v1/models": Reference("ModelList", MODEL),
    "/v1/models/{name}": Reference("ModelCard", (*MODEL, "model_not_found", "not_found")),
    "/v1/completions": Reference("Completion", ANSWER, "CompletionRequest", "Completion"),
    "/v1/chat/completions": Reference(
        "ChatCompletion", (*ANSWER, *CONVERSATION), "ChatRequest", "ChatChunk"
    ),
    "/tokenize": Reference("Tokens", (*BODY, *CONVERSATION), "TokenizeRequest"),
    "/detokenize": Reference("Text", BODY, "DetokenizeRequest"),
    "/health/live": Reference(_says("status", {"const": "live"})),
    **{path: Reference(_says("status", {"const": "ready"}), MODEL) for path in READY_PATHS},
    "/server_info": Reference("ServerInfo", MODEL),
    "/tokenizer_info": Reference({"type": "object"}, (*MODEL, "not_found")),
    "/load": Reference("Load", MODEL),
    "/metrics": Reference({"type": "string"}, content_type=CONTENT_TYPE),
    "/explain": Reference(
        {"anyOf": [{"$ref": REF.format(name=name)} for name in ("Report", "OwnReport")]},
        (*MODEL, "not_found"),
    ),
    "/openapi.json": Reference({"type": "object"}),
    "/version": Reference(_says("version", {"type": "string"})),
}
HEADERS: Schema = {
    "RequestId": {
        "description": "the id of this request in the server's log",
        "required": True,
        "schema": {"type": "string"},
    },
    "RetryAfter": {
        "description": "seconds after which the same request may work",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
}


def document(routes: Iterable[Route], *, has_keys: bool) -> Schema:
    """The whole document, for a server that asks for keys or does not."""
    paths: Schema = {}
    for route in routes:
        path = route.path_format
        method = "post" if "POST" in (route.methods or ()) else "get"
        with_key = has_keys and path not in OPEN_PATHS
        paths[path] = {method: _operation(path, route.endpoint.__doc__ or "", with_key=with_key)}
    schemes = {"key": {"type": "http", "scheme": "bearer"}} if has_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ridgeline",
            "version": ridgeline.__version__,
            "description": "An inference server that speaks OpenAI's API for one model.",
        },
        "paths": paths,
        "components": {"schemas": _schemas(), "headers": HEADERS, "securitySchemes": schemes},
    }


def _schemas() -> Schema:
    """Of bodies and replies, by name."""
    refs, made = msgspec.json.schema_components(RECORDS.values(), ref_template=REF)
    ours = [ref["$ref"].rpartition("/")[2] for ref in refs]
    named = {name: made.pop(our) for name, our in zip(RECORDS, ours, strict=True)}
    bodies = {name: _body_schema(kinds) for name, kinds in BODIES.items()}
    return {**bodies, **named, **made}


def _ref(what: str | Schema) -> Schema:
    return {"$ref": REF.format(name=what)} if isinstance(what, str) else what


def _operation(path: str, doc: str, *, with_key: bool) -> Schema:
    summary = doc.strip().partition("\n\n")[0]
    reference = PATHS[path]
    codes = {*ANYWHERE, *reference.codes, *(KEYED if with_key else ())}
    made: Schema = {
        "summary": " ".join(summary.split()),
        "operationId": path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {"200": _success(reference), **_refusals(codes)},
        "security": [{"key": []}] if with_key else [],
    }
    if "{name}" in path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": NAME}]
    if reference.body:
        content = {JSON: {"schema": _ref(reference.body)}}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _success(reference: Reference) -> Schema:
    content = {reference.content_type: {"schema": _ref(reference.reply)}}
    if reference.event:
        event = {"anyOf": [_ref(reference.event), _ref("ErrorBody")]}
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": event}
        content[EVENTS] = {"schema": _says("data", {"anyOf": [{"const": "[DONE]"}, data]})}
    return _response("the answer", content, ["RequestId"])


def _refusals(codes: Collection[str]) -> Schema:
    """By status, in the order of CODES."""
    by_status: dict[int, list[str]] = {}
    for code, known in CODES.items():
        if code in codes:
            by_status.setdefault(known.status, []).append(code)
    return {str(status): _refusal(some) for status, some in sorted(by_status.items())}


def _refusal(codes: list[str]) -> Schema:
    shown = sorted({SHOWN_AS.get(code, code) for code in codes})
    narrowed = _says("error", _says("code", {"enum": shown}))
    headers = ["RequestId"]
    if all(code in RETRY_AFTER_S for code in codes):
        headers.append("RetryAfter")
    words = "; ".join(f"{code}: {CODES[code].meaning}" for code in codes)
    return _response(words, {JSON: {"schema": {"allOf": [_ref("ErrorBody"), narrowed]}}}, headers)


def _response(words: str, content: Schema, headers: Iterable[str]) -> Schema:
    names = {"RequestId": "x-request-id", "RetryAfter": "Retry-After"}
    shown = {names[name]: {"$ref": f"#/components/headers/{name}"} for name in headers}
    return {"description": words, "content": content, "headers": shown}


class Page:
    """This API as an OpenAPI 3.1 document."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._made: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._made is None:
            has_keys = bool(scope["state"]["tenant"].key)
            routes = scope["router"].routes
            pages = self._service.pages
            async with pages.turn():
                if self._made is None:
                    self._made = await pages.run(_encode, routes, has_keys)
        await send_json(send, self._made)


def _encode(routes: Iterable[Route], has_keys: bool) -> bytes:
    """In the pages' thread: it takes 30 ms."""
    return msgspec.json.encode(document(routes, has_keys=has_keys))
