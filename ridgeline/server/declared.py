"""Which fields may a body have: of what type, within which bounds, and what do they mean?

docs/http-api.md and /openapi.json are made of these tables, and command-line flags take their
meanings from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from msgspec import structs

from ridgeline.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

MAX_TOKEN_COUNT = 1 << 30
MAX_SALT_LENGTH = 128
MAX_NAME_LENGTH = 64
MAX_PRIORITY = 1 << 31
MAX_SEED = (1 << 63) - 1
DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI has it


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a JSON object. `low` and `high` bound a number (`above`: `low` itself is out of
    bounds), the characters of a string, or the items of a list or object. `over` is the code of the
    error for a number above `high`. `default` is in words, where it is none of SamplingParams.
    `choices` are all that a string may be. `fields` are those of an object or of the objects in a
    list. `example` is for readers."""

    kind: str
    meaning: str = ""
    low: float | None = None
    high: float | None = None
    over: str = "invalid_value"
    default: str = ""
    required: bool = False
    above: bool = False
    choices: Collection[str] = ()
    fields: Mapping[str, Field] | None = None
    example: object = None


Declared = Mapping[str, Field]
_DEFAULTS = {row.name: row.default for row in structs.fields(SamplingParams)}


def default_of(name: str, field: Field) -> str:
    """In words; empty where it is nothing."""
    value = _DEFAULTS.get(name)
    return field.default or ("" if value in (None, (), frozenset()) else f"{value}".lower())


def _number(low: float, high: float, meaning: str = "") -> Field:
    return Field("number", meaning, low, high)


def _integer(low: int, high: int, meaning: str, default: str = "") -> Field:
    return Field("integer", meaning, low, high, default=default)


def _count(low: int, high: int, meaning: str, default: str = "") -> Field:
    """One whose upper bound is a limit of this server."""
    return Field("integer", meaning, low, high, "limit_exceeded", default)


def _flag(meaning: str, default: str = "false") -> Field:
    return Field("boolean", meaning, default=default)


BIAS = _number(-100, 100)
SAMPLING: Declared = {
    "temperature": _number(
        0, 2, "0 always takes the likeliest token, 1 samples from the model's distribution"
    ),
    "top_p": Field(
        "number",
        "sample among the likeliest tokens that together have this probability",
        0,
        1,
        above=True,
    ),
    "top_k": _integer(-1, MAX_TOKEN_COUNT, "sample among the k likeliest tokens; 0 and -1 are off"),
    "min_p": _number(
        0, 1, "drop tokens less likely than this share of the likeliest one's probability"
    ),
    "repetition_penalty": _number(
        1 / MAX_REPETITION,
        MAX_REPETITION,
        "above 1 makes tokens that occurred less likely, multiplying",
    ),
    "presence_penalty": _number(-2, 2, "above 0 makes tokens of the answer less likely, once"),
    "frequency_penalty": _number(
        -2, 2, "above 0 makes tokens of the answer less likely, per occurrence"
    ),
    "logit_bias": Field(
        "object of numbers",
        "token id (a string of digits) to a number from -100 to 100 that is added to its logit",
        high=MAX_LOGIT_BIAS,
    ),
    "seed": _integer(
        -MAX_SEED - 1, MAX_SEED, "the same seed gives the same answer", "one from the request's id"
    ),
    "stop": Field(
        "string or list of strings",
        f"the answer ends before this text; each has at most {MAX_STOP_LENGTH} characters",
        high=MAX_STOP_STRINGS,
    ),
    "stop_token_ids": Field(
        "list of token ids", "token ids that end the answer", high=MAX_STOP_TOKEN_IDS
    ),
    "ignore_eos": _flag("go on after the model's own end token, up to the last token allowed"),
    "n": _count(1, MAX_N, "answers for each prompt"),
    "min_tokens": _integer(0, MAX_TOKEN_COUNT, "no end before that many tokens"),
    "skip_special_tokens": _flag("leave special tokens out of the text", "true"),
    "prompt_logprobs": _count(
        0, MAX_LOGPROBS, "log-probability of each prompt token, and of the k likeliest beside it"
    ),
    "use_beam_search": _flag("beam search instead of sampling", "true if beam_width is above 1"),
    "beam_width": _count(1, MAX_N, "how many beams", "best_of or n"),
    "length_penalty": _number(-10, 10, "beams are ranked by log-probability / length ** this"),
    "early_stopping": _flag("end the beam search as soon as enough beams are complete"),
}

STREAM_OPTIONS: Declared = {
    "include_usage": _flag("a last event with the usage, before [DONE]"),
    "continuous_usage_stats": _flag("the usage so far in every event"),
    "include_obfuscation": _flag("accepted and without effect"),
}
MODEL = Field("string", "name of the served model, as /v1/models says it", low=1, required=True)
CALL: Declared = {
    "model": MODEL,
    "stream": _flag("answer as server-sent events, token by token"),
    "stream_options": Field("object", "only with stream", fields=STREAM_OPTIONS),
    "cache_salt": Field(
        "string",
        "share cached prompts only with requests of the same key and salt",
        low=1,
        high=MAX_SALT_LENGTH,
    ),
    "priority": _integer(
        -MAX_PRIORITY, MAX_PRIORITY, "smaller is served sooner, under --policy priority", "0"
    ),
    "return_token_ids": _flag("token ids of prompt and answer beside the text"),
    "include_cost": _flag(
        "usage.cost: device seconds, operations, bytes and, with --price-per-hour, money; a stream "
        "needs stream_options.include_usage"
    ),
}

ADD_SPECIAL_TOKENS = _flag("begin as the tokenizer begins a text", "true")
COMPLETION: Declared = {
    "prompt": Field(
        "string, list of strings, list of token ids, or list of such lists",
        "what the answer continues; several prompts get n answers each",
        required=True,
        example="Once upon a time",
    ),
    **CALL,
    "max_tokens": Field(
        "integer",
        "most tokens of the answer; 0 only with echo",
        0,
        MAX_TOKEN_COUNT,
        default=str(DEFAULT_MAX_TOKENS),
        example=DEFAULT_MAX_TOKENS,
    ),
    "best_of": _count(1, MAX_N, "make that many answers and give the n likeliest", "n"),
    "logprobs": _count(
        0, MAX_LOGPROBS, "log-probability of each token, and of the k likeliest beside it"
    ),
    "echo": _flag("the prompt before the answer; with logprobs those of the prompt too"),
    "add_special_tokens": ADD_SPECIAL_TOKENS,
    **SAMPLING,
}

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_PART: Declared = {
    "type": Field("string", required=True, choices=("text",)),
    "text": Field("string", "text of this part; parts are joined as they stand", required=True),
}
MESSAGE: Declared = {
    "role": Field("string", "who says it; developer is system", required=True, choices=ROLES),
    "content": Field(
        "string or list of parts",
        "text; it may be empty for an assistant only",
        required=True,
        example="What is 12 + 30?",
        fields=TEXT_PART,
    ),
    "name": Field("string", "handed to the chat template", high=MAX_NAME_LENGTH),
}
TEMPLATE_OPTIONS: Declared = {
    "enable_thinking": _flag("handed to the chat template", "the template's own"),
}
CONVERSATION: Declared = {
    "messages": Field(
        "list of objects", "the conversation so far", low=1, required=True, fields=MESSAGE
    ),
    "add_generation_prompt": _flag("end the prompt where the assistant begins", "true"),
    "chat_template_kwargs": Field(
        "object", "options of the chat template", fields=TEMPLATE_OPTIONS
    ),
}
CHAT: Declared = {
    **CONVERSATION,
    **CALL,
    "max_completion_tokens": _integer(
        1, MAX_TOKEN_COUNT, "most tokens of the answer", "to the end of the context"
    ),
    "max_tokens": _integer(
        1, MAX_TOKEN_COUNT, "older name of max_completion_tokens", "max_completion_tokens"
    ),
    "logprobs": _flag("log-probability of each token of the answer"),
    "top_logprobs": _count(
        0, MAX_LOGPROBS, "and of the k likeliest beside it; needs logprobs", "0"
    ),
    **SAMPLING,
}

OTHER_MODEL = Field("string", "name of the served model; it may be left out")
TOKEN_STRINGS = _flag("the text of each token too")
TOKENIZE_TEXT: Declared = {
    "prompt": Field("string", "the text", required=True),
    "model": OTHER_MODEL,
    "add_special_tokens": ADD_SPECIAL_TOKENS,
    "return_token_strs": TOKEN_STRINGS,
}
TOKENIZE_CHAT: Declared = {**CONVERSATION, "model": OTHER_MODEL, "return_token_strs": TOKEN_STRINGS}
DETOKENIZE: Declared = {
    "tokens": Field("list of token ids", low=1, required=True),
    "model": OTHER_MODEL,
}
