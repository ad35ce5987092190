"""What may the body of a request say? Its fields, each declared once, and how a body is read.

docs/http-api.md and /openapi.json are made of these records. A field that both kinds of answers
have and that goes to the engine belongs to `ridgeline.request.Sampling`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from ridgeline.declared import LIMIT, NOT_A_TOKEN, Declared, declared, made, says
from ridgeline.errors import RequestFault
from ridgeline.request import (
    FORMS,
    MAX_TOKEN_COUNT,
    MAX_TOKEN_ID,
    SCHEMA,
    TEMPERATURE,
    Choices,
    Samples,
    Sampling,
    Structure,
    TokenId,
    TopLogprobs,
    constraint,
)
from ridgeline.server.errors import ApiError, quote

MAX_PRIORITY = 1 << 31
MAX_TOOLS, MAX_TOOL_NAME = 512, 256
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it
MAX_EXACT_FLOAT = 1 << 53
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip
NO_EFFECT = "accepted, and without effect on the answer"

NoEffectText = Annotated[str, says(NO_EFFECT)] | None
NoEffectObject = Annotated[dict[str, Any], says(NO_EFFECT)] | None
OtherModel = Annotated[str, says("a name of the served model; it may be left out")]
SpecialTokens = Annotated[bool, says("begin as the tokenizer begins a text")]
TokenTexts = Annotated[bool, says("the text of each token too")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: (
        Annotated[bool, says("a last event with the usage, before [DONE]", default="false")] | None
    ) = None
    continuous_usage_stats: (
        Annotated[bool, says("the usage so far in every event", default="false")] | None
    ) = None
    include_obfuscation: Annotated[bool, says(NO_EFFECT, default="false")] | None = None

    @property
    def shows_usage(self) -> bool:
        return bool(self.include_usage or self.continuous_usage_stats)


CHOICE = "auto, none, required or object"  # kind of a field that may hold NamedTool
FORMAT = "object with a type"  # kind of a field that holds ResponseFormat


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: Annotated[dict[str, Any], says("the JSON schema", kind="object")]
    name: Annotated[str, says(NO_EFFECT)] | None = None
    description: Annotated[str, says(NO_EFFECT)] | None = None
    strict: Annotated[bool, says("without effect: answers always keep to the schema")] | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[
        str,
        says(
            "what the answer is",
            choices=("text", "json_object", "json_schema", "structural_tag"),
            example="text",
        ),
    ]
    json_schema: Annotated[JsonSchema, says("with the type json_schema")] | None = None
    structures: (
        Annotated[list[Structure], says("with the type structural_tag", kind="list of objects")]
        | None
    ) = None
    triggers: Annotated[list[str], says("with the type structural_tag")] | None = None

    @property
    def constraint(self) -> object:
        """As `structured_outputs` has it. Raises ApiError."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "structural_tag":
            tag = {"structures": self.structures, "triggers": self.triggers}
            return {"structural_tag": {k: v for k, v in tag.items() if v is not None}}
        place = "response_format.json_schema"
        if self.type != "json_schema":
            known = ", ".join(declared(ResponseFormat)["type"].choices)
            place = "response_format.type"
            raise ApiError("invalid_value", f"{place} must be one of {known}", place)
        if self.json_schema is None:
            code = "missing_required_parameter"
            raise ApiError(code, f"{place} is required with this type", place)
        return {"json": self.json_schema.schema}


class Asking(Sampling, frozen=True, kw_only=True):
    """What both kinds of answers may be asked for."""

    model: OtherModel = ""
    stream: Annotated[bool, says("answer as server-sent events, token by token")] = False
    stream_options: Annotated[StreamOptions, says("only with stream")] | None = None
    cache_salt: Annotated[
        str,
        says("share cached prompts only with requests of the same key and salt", lengths=(1, 128)),
    ] = ""
    priority: Annotated[
        int,
        says(
            "smaller is served sooner, under --policy priority", ge=-MAX_PRIORITY, le=MAX_PRIORITY
        ),
    ] = 0
    return_token_ids: Annotated[bool, says("token ids of prompt and answer beside the text")] = (
        False
    )
    include_cost: Annotated[
        bool,
        says(
            "usage.cost: device seconds, operations, bytes and, with --price-per-hour, money; a "
            "stream needs stream_options.include_usage"
        ),
    ] = False
    temperature: Annotated[float, says(TEMPERATURE, ge=0, le=2)] = 1.0  # OpenAI's bounds
    use_beam_search: (
        Annotated[
            bool, says("beam search instead of sampling", default="true if beam_width is above 1")
        ]
        | None
    ) = None
    response_format: (
        Annotated[dict[str, Any], says("what the answer is, as OpenAI has it", kind=FORMAT)] | None
    ) = None
    guided_json: (
        Annotated[Any, says("older name of structured_outputs.json", kind=SCHEMA)] | None
    ) = None
    guided_regex: Annotated[str, says("older name of structured_outputs.regex")] | None = None
    guided_choice: Annotated[Choices, says("older name of structured_outputs.choice")] | None = None
    guided_grammar: Annotated[str, says("older name of structured_outputs.grammar")] | None = None
    user: NoEffectText = None
    metadata: NoEffectObject = None
    store: Annotated[bool, says(NO_EFFECT)] | None = None
    safety_identifier: NoEffectText = None
    prompt_cache_key: NoEffectText = None
    prompt_cache_retention: NoEffectText = None
    prompt_cache_options: NoEffectObject = None
    request_id: NoEffectText = None


class CompletionBody(Asking, frozen=True, kw_only=True):
    prompt: Annotated[
        Any,
        says(
            "what the answer continues; several prompts get n answers each",
            kind="string, list of strings, list of token ids, or list of such lists",
            example="Once upon a time",
        ),
    ]
    max_tokens: Annotated[
        int,
        says(
            "most tokens of the answer; 0 for the log-probabilities of the prompt alone",
            ge=0,
            le=MAX_TOKEN_COUNT,
            example=DEFAULT_MAX_TOKENS,
        ),
    ] = DEFAULT_MAX_TOKENS
    best_of: Samples | None = None
    logprobs: TopLogprobs | None = None
    echo: Annotated[
        bool, says("the prompt before the answer; with logprobs those of the prompt too")
    ] = False
    add_special_tokens: SpecialTokens = True


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[str, says(choices=("text",))]
    text: Annotated[str, says("text of this part; parts are joined as they stand")]


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, says("the tool's name", lengths=(1, MAX_TOOL_NAME))]
    arguments: Annotated[
        Any, says("a JSON object, as text or as it is", kind="object or string", example="{}")
    ] = None


class EarlierCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: CalledFunction
    id: Annotated[str, says("as the answer gave it")] | None = None
    type: Annotated[str, says(choices=("function",))] = "function"
    index: Annotated[int, says(NO_EFFECT)] | None = None


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, says("what the model calls it by", lengths=(1, MAX_TOOL_NAME))]
    description: Annotated[str, says("what it does, for the model")] | None = None
    parameters: Annotated[dict[str, Any], says("JSON schema of its arguments")] | None = None
    strict: (
        Annotated[
            bool,
            says("without effect: calls are held to the schemas where tool_choice forces them"),
        ]
        | None
    ) = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[str, says(choices=("function",))]
    function: Function


class ToolName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, says("the tool's name", lengths=(1, MAX_TOOL_NAME))]


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Annotated[str, says(choices=("function",))]
    function: ToolName


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Annotated[str, says("who says it; developer is system", choices=tuple(ROLES))]
    content: Annotated[
        Any,
        says(
            "text",
            kind="string or list of parts",
            fields=TextPart,
            example="What is 12 + 30?",
        ),
    ] = None
    name: Annotated[str, says("handed to the chat template", lengths=(None, 64))] | None = None
    tool_calls: (
        Annotated[
            list[Any],
            says("what the assistant called", kind="list of objects", fields=EarlierCall),
        ]
        | None
    ) = None
    tool_call_id: Annotated[str, says("of a tool: which call it answers")] | None = None
    reasoning_content: (
        Annotated[str, says("of the assistant: handed to the chat template")] | None
    ) = None


Messages = Annotated[
    list[Any],
    says("the conversation so far", lengths=(1, None), kind="list of objects", fields=Message),
]
BeginsAnswer = Annotated[
    bool,
    says("end the prompt where the assistant begins", default="true, unless it goes on with one"),
]
OfTemplate = Annotated[
    dict[str, Any], says("handed to the chat template, as enable_thinking", kind="object")
]
Continues = Annotated[bool, says("the answer goes on with the text of the last message")]
Tools = Annotated[
    list[Any],
    says("what the model may call", lengths=(None, MAX_TOOLS), kind="list of objects", fields=Tool),
]


class ChatBody(Asking, frozen=True, kw_only=True):
    messages: Messages
    tools: Tools | None = None
    tool_choice: (
        Annotated[
            Any,
            says(
                "whether to call tools: auto as the model likes, none not at all, required at "
                "least once, or the function to call",
                kind=CHOICE,
                fields=NamedTool,
                default="auto",
                example="auto",
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: Annotated[bool, says("false: one call at most")] = True
    reasoning_effort: (
        Annotated[
            str,
            says(
                "handed to the chat template; none also as enable_thinking: false",
                lengths=(1, 32),
                default="the template's own",
            ),
        ]
        | None
    ) = None
    include_reasoning: Annotated[bool, says("show the reasoning of a model that reasons")] = True
    add_generation_prompt: BeginsAnswer | None = None
    continue_final_message: Continues = False
    chat_template_kwargs: OfTemplate | None = None
    max_completion_tokens: (
        Annotated[
            int,
            says(
                "most tokens of the answer",
                ge=0,
                le=MAX_TOKEN_COUNT,
                default="to the end of the context",
            ),
        ]
        | None
    ) = None
    max_tokens: (
        Annotated[
            int,
            says(
                "older name of max_completion_tokens",
                ge=0,
                le=MAX_TOKEN_COUNT,
                default="max_completion_tokens",
            ),
        ]
        | None
    ) = None
    logprobs: Annotated[bool, says("log-probability of each token of the answer")] = False
    top_logprobs: Annotated[
        int, says("and of the k likeliest beside it; needs logprobs", ge=0, le=20, over=LIMIT)
    ] = 0


class TokenizeText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt: Annotated[str, says("the text")]
    model: OtherModel = ""
    add_special_tokens: SpecialTokens = True
    return_token_strs: TokenTexts = False


class TokenizeChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: BeginsAnswer | None = None
    continue_final_message: Continues = False
    chat_template_kwargs: OfTemplate | None = None
    model: OtherModel = ""
    return_token_strs: TokenTexts = False


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenId], says(lengths=(1, None))]
    model: OtherModel = ""


HARMLESS: Declared = {
    name: field for name, field in declared(Asking).items() if field.meaning == NO_EFFECT
}

# Records, beside those of bodies, in which an unknown field is ignored. In others, what it asks for
# would be missed in the answer.
OPEN = (
    NamedTool,
    ToolName,
    StreamOptions,
    Message,
    TextPart,
    EarlierCall,
    CalledFunction,
    Tool,
    Function,
)

# ---------------------------------------------------------------------- what is not served

Unsupported = Mapping[str, tuple[object, ...]]
NOTHING: tuple[object, ...] = ([], {}, "", False, 0, 0.0)

# Field -> the values that ask for nothing. null counts as absent before we get here.
_BOTH: Unsupported = {
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": (),
    "vllm_xargs": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "service_tier": ("auto", "default"),
}
UNSUPPORTED: Mapping[type[msgspec.Struct], Unsupported] = {
    CompletionBody: {**_BOTH, "suffix": ("",)},
    ChatBody: {
        **_BOTH,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": (),
        "web_search_options": (),
        "moderation": (),
        "chat_template": (),
        "documents": (),
        "add_special_tokens": (False,),
        "echo": (False,),
        "best_of": (),
        "thinking_token_budget": (),
    },
    # Of an assistant's earlier message, as clients send it back.
    Message: dict.fromkeys(("function_call", "audio", "refusal", "annotations"), NOTHING),
}


def _asks_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    """Equal and of the same type, so that 0 is not taken for false."""
    return any(value == v and type(value) is type(v) for v in harmless)


# ---------------------------------------------------------------------- how a body is read

B = TypeVar("B", bound=msgspec.Struct)
_BIAS = re.compile(r"logit_bias\[(\d+)\]\[\d\]")


def read(body: Mapping[str, object], kind: type[B], path: str = "") -> B:
    """The record of a parsed object that stands at `path` of a body; null counts as absent, as the
    field's clients send it. What it says beside that was looked at before (ignored_fields.py).
    Raises ApiError naming the field at fault."""
    fields, unsupported = declared(kind), UNSUPPORTED.get(kind, {})
    for name, harmless in unsupported.items():
        value = body.get(name)
        if value is not None and not _asks_nothing(value, harmless):
            place = f"{path}.{name}".lstrip(".")
            raise ApiError(
                "unsupported_parameter", f"{place} is not served here; leave it out", place
            )
    given: dict[str, object] = {}
    try:
        for name, value in body.items():
            if value is not None and name in fields:
                given[name] = _FORMS[name](value) if name in _FORMS else _whole(value)
        record = made(kind, given, path)
    except RequestFault as fault:
        raise _at_its_place(fault, body, given) from None
    for name in given:
        check_texts(body[name], f"{path}.{name}".lstrip("."))
    return record


def _whole(value: object) -> object:
    """Some clients write every number with a point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT_FLOAT:
        return int(value)
    return value


def _at_its_place(
    fault: RequestFault, body: Mapping[str, object], given: Mapping[str, Any]
) -> ApiError:
    """The fault, named as the client wrote the field: it stands in another form in the record."""
    param = place = fault.param or ""
    message = str(fault)
    if bias := _BIAS.fullmatch(param):
        place = f"logit_bias.{given['logit_bias'][int(bias[1])][0]}"
    elif param == "stop[0]" and isinstance(body.get("stop"), str):
        place = "stop"
    if place != param:
        message = place + message.removeprefix(param)
    return ApiError(fault.code, message, place)


def _stop(value: object) -> object:
    """Some clients send an empty text for none."""
    if isinstance(value, str):
        return [value] if value else []
    return [text for text in value if text != ""] if isinstance(value, list) else value


def _biases(value: object) -> list[tuple[int, object]]:
    """Pairs in the order of their token ids."""
    if not isinstance(value, dict):
        raise wrong_type("logit_bias", "an object", value)
    pairs = [(_token_id_of(name), 0.0 if bias is None else bias) for name, bias in value.items()]
    return sorted(pairs, key=lambda pair: pair[0])


def _token_id_of(name: str) -> int:
    if not (name.isascii() and name.isdecimal() and len(name) < 11 and int(name) < MAX_TOKEN_ID):
        raise ApiError(NOT_A_TOKEN, f"logit_bias: {quote(name)} is not a token id", "logit_bias")
    if name != str(int(name)):
        message = f"logit_bias: {quote(name)} is written {int(name)}"
        raise ApiError(NOT_A_TOKEN, message, "logit_bias")
    return int(name)


def _constraint(value: object) -> str:
    if not isinstance(value, dict):
        raise wrong_type("structured_outputs", "an object", value)
    return constraint(value)


_FORMS: Mapping[str, Callable[[object], object]] = {
    "stop": _stop,
    "stop_token_ids": FORMS["stop_token_ids"],
    "logit_bias": _biases,
    "structured_outputs": _constraint,
}


def check_texts(value: object, param: str) -> None:
    """Raises ApiError for lone surrogates and NUL, which no tokenizer or log survives, in a text
    or a list of texts. In an object, which templates write as JSON, NUL may be."""
    if isinstance(value, str):
        check_text(value, param)
    elif isinstance(value, dict):
        _check_object(value, param)
    elif isinstance(value, (list, tuple)) and not (value and isinstance(value[0], int)):
        for index, text in enumerate(value):
            check_texts(text, f"{param}[{index}]")


def _check_object(value: object, param: str) -> None:
    if isinstance(value, str):
        check_unicode(value, param)
    elif isinstance(value, dict):
        for name, inner in value.items():
            check_unicode(name, param)
            _check_object(inner, f"{param}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_object(inner, f"{param}[{index}]")


def check_unicode(text: str, param: str) -> None:
    """Raises ApiError for lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as fault:
        message = f"{param} has a lone surrogate at character {fault.start}"
        raise ApiError("invalid_text", message, param) from None


def check_text(text: str, param: str) -> str:
    """`text` itself; see check_texts."""
    check_unicode(text, param)
    if "\0" in text:
        raise ApiError("invalid_text", f"{param} has a NUL character", param)
    return text


def wrong_type(param: str, wanted: str, value: object) -> ApiError:
    return ApiError("invalid_type", f"{param} must be {wanted}, not {kind_of(value)}", param)


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names: dict[type, str] = {
        bool: "a boolean", int: "a number", float: "a number", str: "a string",
        list: "a list", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), "null")
