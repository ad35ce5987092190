"""What does a body of POST /v1/chat/completions ask for?"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import structs

from ridgeline.errors import RequestFault
from ridgeline.request import SamplingParams, check_together
from ridgeline.sampling.grammar import tools_constraint
from ridgeline.server.bodies import (
    ROLES,
    CalledFunction,
    ChatBody,
    EarlierCall,
    Function,
    Message,
    NamedTool,
    TextPart,
    TokenizeChat,
    Tool,
    ToolName,
    check_text,
    check_texts,
    read,
    wrong_type,
)
from ridgeline.server.chat_messages import CALLS
from ridgeline.server.errors import ApiError, from_fault, quote
from ridgeline.server.parsed_request import (
    CONSTRAINTS,
    OUR_NAME,
    Conversation,
    ParsedRequest,
    names_given,
    refuse_unservable,
    sampling_of,
)

TOOLS = ("tools", "functions", "tool_choice")
# Names of chat_template_kwargs that a template gets from other fields.
OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
THINKING = ("enable_thinking", "thinking")  # as Qwen's, GLM's and DeepSeek's templates call it
MEDIA = ("image_url", "video_url", "audio_url")


def read_chat(
    body: Mapping[str, object], defaults: Mapping[str, Any], max_sequences: int
) -> ParsedRequest:
    """The call that a parsed body makes. Raises ApiError naming the field at fault."""
    if body.get("tool_choice") == "none":  # they are there, and none may be called
        body = {name: value for name, value in body.items() if name not in TOOLS}
    asked = read(body, ChatBody)
    conversation = conversation_of(asked)
    tools, forced_end = _callable(asked, conversation.tools)
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
    constrained = CONSTRAINTS & given
    if forced_end:
        sampling = _forced(asked, conversation.tools, tools, sampling, constrained)
        constrained = frozenset({"tool_choice"})
    refuse_unservable(asked, sampling, 1, max_sequences)
    rename = {
        "prompt": "messages",
        "max_tokens": asked_as,
        **dict(zip(OUR_NAME, constrained, strict=False)),
    }
    return ParsedRequest(
        asked,
        (),
        conversation,
        sampling,
        rename,
        top_logprobs=logprobs,
        drop_output=max_tokens == 0,
        tools=tools,
        forced_end=forced_end,
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
    messages = tuple(_message(item, f"messages[{i}]") for i, item in enumerate(asked.messages))
    goes_on = asked.continue_final_message
    if goes_on and asked.add_generation_prompt:
        raise ApiError(
            "invalid_value",
            "continue_final_message cannot be combined with add_generation_prompt",
            "continue_final_message",
        )
    if goes_on and messages[-1].get("tool_calls"):
        raise ApiError(
            "invalid_messages",
            "continue_final_message needs a last message that ends with text",
            "continue_final_message",
        )
    begins = asked.add_generation_prompt
    return Conversation(
        messages,
        not goes_on if begins is None else begins,
        _template_options(asked),
        _tools(asked.tools or ()),
        goes_on,
    )


def _template_options(asked: ChatBody | TokenizeChat) -> dict[str, Any]:
    """What the chat template may use by name."""
    given = asked.chat_template_kwargs or {}
    if taken := sorted(OWN_NAMES.intersection(given)):
        place = f"chat_template_kwargs.{taken[0]}"
        raise ApiError("invalid_value", f"{place} has a field of its own: {taken[0]}", place)
    if not isinstance(asked, ChatBody):
        return dict(given)
    if asked.tool_choice not in (None, "auto"):  # the answer begins with the call
        given = {**dict.fromkeys(THINKING, False), **given}
    effort = asked.reasoning_effort
    if effort is None:
        return dict(given)
    thinks = effort != "none"
    return {"reasoning_effort": effort, **dict.fromkeys(THINKING, thinks), **given}


def _tools(given: Sequence[object]) -> tuple[dict[str, Any], ...]:
    """The tools as they were given, each looked at."""
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        param = f"tools[{i}]"
        if not isinstance(item, dict):
            raise wrong_type(param, "an object", item)
        tool = read(item, Tool, param)
        _check_function(tool.type, tool.function, param)
        found.append(item)
    return tuple(found)


def _check_function(kind: str, function: Function | CalledFunction | ToolName, param: str) -> None:
    if kind != "function":
        place = f"{param}.type"
        message = f"{place} {quote(kind)} is not served; use function"
        raise ApiError("unsupported_parameter", message, place)
    check_text(function.name, f"{param}.function.name")
    if isinstance(function, Function) and function.description is not None:
        check_text(function.description, f"{param}.function.description")


def _callable(
    asked: ChatBody, tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], str | None]:
    """The schema of the parameters of each tool that may be called, by name, and the end of an
    answer in which one must be: OpenAI's API calls that of a function asked for by name `stop`."""
    choice, name = asked.tool_choice, "tool_choice"
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    if choice is None or choice == "auto":
        return {tool: schema or {} for tool, schema in schemas.items()}, None
    if choice != "required" and not isinstance(choice, dict):
        message = f"{name} must be auto, none, required or a function"
        raise ApiError("invalid_value", message, name)
    if not tools:
        raise ApiError("invalid_value", f"{name} needs tools", name)
    # Without a schema a tool has no parameters; arguments are an object in any case.
    schemas = {
        tool: {"type": "object", **({"properties": {}, "additionalProperties": False}
               if schema is None else schema)}
        for tool, schema in schemas.items()
    }  # fmt: skip
    if choice == "required":
        return schemas, CALLS
    wanted = read(choice, NamedTool, name)
    _check_function(wanted.type, wanted.function, name)
    if (called := wanted.function.name) not in schemas:
        message = f"{name}: there is no tool {quote(called)}"
        raise ApiError("invalid_value", message, f"{name}.function.name")
    return {called: schemas[called]}, "stop"


def _forced(
    asked: ChatBody,
    given: Sequence[Mapping[str, Any]],
    tools: Mapping[str, Any],
    sampling: SamplingParams,
    constrained: Collection[str],
) -> SamplingParams:
    """The same, held to calls of `tools`. Raises ApiError for what goes against that."""
    if sampling.structured_outputs:
        name = min(constrained)
        message = f"{name} cannot be combined with a tool_choice that forces a call"
        raise ApiError("invalid_value", message, name)
    places = {tool["function"]["name"]: place for place, tool in enumerate(given)}
    is_list = asked.tool_choice == "required" and asked.parallel_tool_calls
    rows = [(places[name], name, schema) for name, schema in tools.items()]
    sampling = structs.replace(sampling, structured_outputs=tools_constraint(rows, is_list=is_list))
    try:
        check_together(sampling)
    except RequestFault as fault:
        raise from_fault(fault) from None
    return sampling


def _message(item: object, param: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    message = read(item, Message, param)
    if message.role not in ROLES:
        raise ApiError(
            "invalid_messages",
            f"role {quote(message.role)} is not served; use one of {', '.join(ROLES)}",
            param,
        )
    made: dict[str, Any] = {"role": ROLES[message.role], "content": ""}
    if message.content is not None:
        made["content"] = _content(message.content, f"{param}.content")
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    if message.tool_calls:
        made["tool_calls"] = [
            _earlier_call(call, f"{param}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    return made


def _earlier_call(item: object, param: str) -> dict[str, Any]:
    """A call in the history, its arguments as an object: most templates want them so."""
    if not isinstance(item, dict):
        raise wrong_type(param, "an object", item)
    call = read(item, EarlierCall, param)
    _check_function(call.type, call.function, param)
    place, arguments = f"{param}.function.arguments", call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise ApiError("invalid_messages", f"{place} is not JSON", place) from None
        check_texts(arguments, place)
    if not isinstance(arguments, dict | None):
        raise ApiError("invalid_messages", f"{place} is not a JSON object", place)
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"id": call.id, "type": "function", "function": function}


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
