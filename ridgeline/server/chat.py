"""What does a body of POST /v1/chat/completions ask for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.server.calls import (
    Call,
    Conversation,
    Kind,
    Message,
    read_stream,
    refuse_cost_unseen,
    refuse_too_many,
    refuse_unstreamable,
)
from ridgeline.server.declared import CHAT as DECLARED
from ridgeline.server.declared import MESSAGE, ROLES, TEMPLATE_OPTIONS, TEXT_PART
from ridgeline.server.errors import ApiError, quote
from ridgeline.server.fields import Fields, check_text, wrong_type
from ridgeline.server.sampling_fields import (
    read_priority,
    read_salt,
    read_sampling,
)
from ridgeline.server.unsupported import CHAT, refuse_unsupported

# Of an assistant's earlier message, as clients send it back; they must hold nothing.
EMPTY_FIELDS = ("tool_calls", "function_call", "audio", "refusal", "annotations", "tool_call_id")
MEDIA = ("image_url", "video_url", "audio_url")


def read_chat(body: Mapping[str, object], defaults: Mapping[str, Any], max_sequences: int) -> Call:
    """The call that a parsed body makes. Raises ApiError naming the field at fault."""
    fields = Fields(body, DECLARED)
    refuse_unsupported(fields, CHAT)
    fields.require("model")
    model = fields.text("model")
    conversation = read_conversation(fields)
    max_tokens, asked_as = _max_tokens(fields)
    stream = read_stream(fields)
    logprobs = _logprobs(fields)
    sampling = read_sampling(fields, defaults, logprobs=logprobs, max_tokens=max_tokens)
    refuse_too_many(1, sampling, max_sequences)
    refuse_unstreamable(sampling, stream)
    include_cost = bool(fields.flag("include_cost"))
    refuse_cost_unseen(stream, include_cost=include_cost)
    return Call(
        Kind.CHAT,
        model or "",
        (),
        conversation,
        sampling,
        {"prompt": "messages", "max_tokens": asked_as},
        stream=stream,
        top_logprobs=logprobs,
        return_token_ids=bool(fields.flag("return_token_ids")),
        cache_salt=read_salt(fields),
        priority=read_priority(fields),
        include_cost=include_cost,
    )


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    """How many, and by which name: the newer one counts, two that differ are a mistake."""
    old = fields.integer("max_tokens")
    new = fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise ApiError(
            "invalid_value", "max_tokens and max_completion_tokens differ", "max_completion_tokens"
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs")
    if top and not wanted:
        raise ApiError("invalid_value", "top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def read_conversation(fields: Fields) -> Conversation:
    """`messages` and how to render them. Raises ApiError with the message's place."""
    fields.require("messages")
    items = fields.items("messages") or []
    prompt = fields.flag("add_generation_prompt")
    return Conversation(
        tuple(_message(item, f"messages[{i}]") for i, item in enumerate(items)),
        True if prompt is None else prompt,
        _template_options(fields),
    )


def _template_options(fields: Fields) -> tuple[tuple[str, bool], ...]:
    options = fields.nested("chat_template_kwargs")
    if options is None:
        return ()
    for name in fields.get("chat_template_kwargs") or ():  # type: ignore[attr-defined]
        if name not in TEMPLATE_OPTIONS:
            raise ApiError(
                "unsupported_parameter",
                f"of chat_template_kwargs only {', '.join(TEMPLATE_OPTIONS)} is served",
                "chat_template_kwargs",
            )
    chosen = ((name, options.flag(name)) for name in TEMPLATE_OPTIONS)
    return tuple((name, value) for name, value in chosen if value is not None)


def _message(item: object, param: str) -> Message:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    fields = Fields(item, MESSAGE, param)
    fields.allow(EMPTY_FIELDS)
    role = _role(fields, param)
    _refuse_tool_fields(fields)
    # An answer may have been empty, and comes back as it was.
    message: Message = {"role": role, "content": _content(fields, may_be_empty=role == "assistant")}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    return message


def _role(fields: Fields, param: str) -> str:
    role = fields.require("role")
    if not isinstance(role, str):
        raise wrong_type(fields.at("role"), "a string", role)
    if role not in ROLES:
        raise ApiError(
            "invalid_messages",
            f"role {quote(role)} is not served; use one of {', '.join(ROLES)}",
            param,
        )
    return ROLES[role]


def _refuse_tool_fields(fields: Fields) -> None:
    for name in EMPTY_FIELDS:
        if fields.get(name):
            raise ApiError(
                "unsupported_parameter", f"{fields.at(name)} is not served here", fields.at(name)
            )


def _content(fields: Fields, *, may_be_empty: bool) -> str:
    """The text of a message; a list of text parts is joined as it stands."""
    param = fields.at("content")
    value = fields.require("content")
    if isinstance(value, list):
        text = "".join(_part(part, f"{param}[{i}]") for i, part in enumerate(value))
    elif isinstance(value, str):
        text = check_text(value, param)
    else:
        raise wrong_type(param, "a string or a list of parts", value)
    if not text and not may_be_empty:
        raise ApiError("empty_input", f"{param} is empty", param)
    return text


def _part(part: object, param: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(param, "an object", part)
    kind = part.get("type")
    if kind in MEDIA:
        raise ApiError("media_url_not_allowed", "this server fetches no media", param)
    if kind != "text":
        raise ApiError("unsupported_parameter", f"{param}: only text parts are served", param)
    fields = Fields(part, TEXT_PART, param)
    fields.allow()
    fields.require("text")
    return fields.text("text") or ""
