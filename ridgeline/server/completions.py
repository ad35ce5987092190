"""What does a body of POST /v1/completions ask for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.server.calls import (
    Call,
    Kind,
    read_stream,
    refuse_cost_unseen,
    refuse_too_many,
    refuse_unstreamable,
)
from ridgeline.server.declared import COMPLETION, DEFAULT_MAX_TOKENS
from ridgeline.server.errors import ApiError
from ridgeline.server.fields import Fields, check_text, wrong_type
from ridgeline.server.sampling_fields import (
    read_priority,
    read_salt,
    read_sampling,
    token_id,
)
from ridgeline.server.unsupported import COMPLETIONS, refuse_unsupported

Prompt = str | tuple[int, ...]


def read_completion(
    body: Mapping[str, object], defaults: Mapping[str, Any], vocab_size: int, max_sequences: int
) -> Call:
    """The call that a parsed body makes. Raises ApiError naming the field at fault."""
    fields = Fields(body, COMPLETION)
    refuse_unsupported(fields, COMPLETIONS)
    fields.require("model")
    model = fields.text("model")
    prompts = read_prompts(fields, vocab_size, max_sequences)
    echo = bool(fields.flag("echo"))
    logprobs = fields.integer("logprobs")
    max_tokens = fields.integer("max_tokens")
    if max_tokens == 0 and not echo:
        raise ApiError("invalid_value", "max_tokens must be at least 1 without echo", "max_tokens")
    stream = read_stream(fields)
    sampling = read_sampling(
        fields,
        defaults,
        best_of=fields.integer("best_of"),
        logprobs=logprobs,
        max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max(1, max_tokens),
        prompt_logprobs=logprobs if echo and fields.get("prompt_logprobs") is None else None,
    )
    refuse_too_many(len(prompts), sampling, max_sequences)
    if echo and logprobs is not None and fields.get("prompt_logprobs") is not None:
        raise ApiError(
            "invalid_value",
            "echo with logprobs has those of the prompt; leave prompt_logprobs out",
            "prompt_logprobs",
        )
    if not (echo and logprobs is not None):
        refuse_unstreamable(sampling, stream)
    elif stream is not None:
        raise ApiError("invalid_value", "echo with logprobs cannot be streamed", "stream")
    include_cost = bool(fields.flag("include_cost"))
    refuse_cost_unseen(stream, include_cost=include_cost)
    special = fields.flag("add_special_tokens")
    return Call(
        Kind.COMPLETION,
        model or "",
        prompts,
        None,
        sampling,
        {},
        stream=stream,
        top_logprobs=logprobs,
        echo=echo,
        drop_output=max_tokens == 0,
        add_special_tokens=True if special is None else special,
        return_token_ids=bool(fields.flag("return_token_ids")),
        cache_salt=read_salt(fields),
        priority=read_priority(fields),
        include_cost=include_cost,
    )


def read_prompts(fields: Fields, vocab_size: int, max_prompts: int) -> tuple[Prompt, ...]:
    """One prompt or many, as texts or token ids. Raises ApiError with the path of the fault."""
    value = fields.require("prompt")
    if isinstance(value, str):
        return (_text(value, "prompt"),)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, a list of strings or token ids", value)
    if not value:
        raise ApiError("empty_input", "prompt is empty", "prompt")
    if isinstance(value[0], (str, list)):
        if len(value) > max_prompts:
            raise ApiError(
                "limit_exceeded", f"prompt takes at most {max_prompts} prompts", "prompt"
            )
        return tuple(_one(item, f"prompt[{i}]", vocab_size) for i, item in enumerate(value))
    return (_ids(value, "prompt", vocab_size),)


def _one(item: object, param: str, vocab_size: int) -> Prompt:
    if isinstance(item, str):
        return _text(item, param)
    if isinstance(item, list):
        return _ids(item, param, vocab_size)
    raise wrong_type(param, "a string or a list of token ids", item)


def _text(text: str, param: str) -> str:
    if not text:
        raise ApiError("empty_input", f"{param} is empty", param)
    return check_text(text, param)


def _ids(values: list[object], param: str, vocab_size: int) -> tuple[int, ...]:
    if not values:
        raise ApiError("empty_input", f"{param} is empty", param)
    return tuple(token_id(value, f"{param}[{i}]", vocab_size) for i, value in enumerate(values))
