"""What does a body of POST /v1/chat/completions ask for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.server.bodies import (
    ROLES,
    ChatBody,
    Message,
    TemplateOptions,
    TextPart,
    TokenizeChat,
    check_text,
    read,
    wrong_type,
)
from ridgeline.server.errors import ApiError, quote
from ridgeline.server.parsed_request import (
    CONSTRAINTS,
    OUR_NAME,
    Conversation,
    ParsedRequest,
    names_given,
    refuse_unservable,
    sampling_of,
)

TOOLS = ("tools", "functions")
MEDIA = ("image_url", "video_url", "audio_url")


def read_chat(
    body: Mapping[str, object], defaults: Mapping[str, Any], max_sequences: int
) -> ParsedRequest:
    """The call that a parsed body makes. Raises ApiError naming the field at fault."""
    if body.get("tool_choice") == "none":  # they are there, and none may be called
        body = {name: value for name, value in body.items() if name not in TOOLS}
    asked = read(body, ChatBody)
    conversation = conversation_of(asked)
    max_tokens, asked_as = _max_tokens(asked)
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError("invalid_value", "top_logprobs needs logprobs: true", "top_logprobs")
    logprobs = asked.top_logprobs if asked.logprobs else None
    given = names_given(body)
    sampling = sampling_of(
        asked,
        given,
        {
            **defaults,
            "logprobs": logprobs,
            "max_tokens": max_tokens if max_tokens is None else max(1, max_tokens),
        },
    )
    refuse_unservable(asked, sampling, 1, max_sequences)
    constrained = zip(OUR_NAME, CONSTRAINTS & given, strict=False)
    rename = {"prompt": "messages", "max_tokens": asked_as, **dict(constrained)}
    return ParsedRequest(
        asked,
        (),
        conversation,
        sampling,
        rename,
        top_logprobs=logprobs,
        drop_output=max_tokens == 0,
    )


def _max_tokens(asked: ChatBody) -> tuple[int | None, str]:
    """How many, and by which name: the newer one counts, two that differ are a mistake."""
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            "invalid_value", "max_tokens and max_completion_tokens differ", "max_completion_tokens"
        )
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


def conversation_of(asked: ChatBody | TokenizeChat) -> Conversation:
    """The messages and how to render them. Raises ApiError with the message's place."""
    return Conversation(
        tuple(_message(item, f"messages[{i}]") for i, item in enumerate(asked.messages)),
        asked.add_generation_prompt,
        _template_options(asked.chat_template_kwargs or {}),
    )


def _template_options(given: Mapping[str, object]) -> tuple[tuple[str, bool], ...]:
    served = TemplateOptions.__struct_fields__
    if not set(served).issuperset(given):
        raise ApiError(
            "unsupported_parameter",
            f"of chat_template_kwargs only {', '.join(served)} is served",
            "chat_template_kwargs",
        )
    options = read(given, TemplateOptions, "chat_template_kwargs")
    chosen = ((name, getattr(options, name)) for name in served)
    return tuple((name, value) for name, value in chosen if value is not None)


def _message(item: object, param: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    message = read(item, Message, param)
    if message.role not in ROLES:
        raise ApiError(
            "invalid_messages",
            f"role {quote(message.role)} is not served; use one of {', '.join(ROLES)}",
            param,
        )
    text = "" if message.content is None else _content(message.content, f"{param}.content")
    name = {} if message.name is None else {"name": message.name}
    return {"role": ROLES[message.role], "content": text, **name}


def _content(value: object, param: str) -> str:
    """The text of a message; a list of text parts is joined as it stands."""
    if isinstance(value, list):
        return "".join(_part(part, f"{param}[{i}]") for i, part in enumerate(value))
    if isinstance(value, str):
        return check_text(value, param)
    raise wrong_type(param, "a string or a list of parts", value)


def _part(part: object, param: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(param, "an object", part)
    kind = part.get("type")
    if kind in MEDIA:
        raise ApiError("media_url_not_allowed", "this server fetches no media", param)
    if kind != "text":
        raise ApiError("unsupported_parameter", f"{param}: only text parts are served", param)
    return read(part, TextPart, param).text
