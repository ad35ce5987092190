"""Which fields that clients know do we not serve? Refused by name, unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ridgeline.server.errors import ApiError
from ridgeline.server.fields import Fields, wrong_type


def _is_in(*values: object) -> Callable[[object], bool]:
    """Equal and of the same type, so that 0 is not taken for false."""
    return lambda value: any(value == v and type(value) is type(v) for v in values)


def _never(value: object) -> bool:
    return False


def _anything(value: object) -> bool:
    return True


def _plain_format(value: object) -> bool:
    return value == {"type": "text"}


# Field -> whether this value asks for nothing. null counts as absent before we get here.
_BOTH: dict[str, Callable[[object], bool]] = {
    "response_format": _plain_format,
    "guided_json": _never,
    "guided_regex": _never,
    "guided_choice": _never,
    "guided_grammar": _never,
    "guided_decoding_backend": _never,
    "guided_whitespace_pattern": _never,
    "structured_outputs": _never,
    "include_stop_str_in_output": _is_in(False),
    "spaces_between_special_tokens": _is_in(True),
    "truncate_prompt_tokens": _never,
    "return_tokens_as_token_ids": _is_in(False),
    "allowed_token_ids": _never,
    "bad_words": _is_in([]),
    "logits_processors": _never,
    "vllm_xargs": _never,
    "kv_transfer_params": _never,
    "mm_processor_kwargs": _never,
    "prompt_embeds": _never,
    "service_tier": _is_in("auto", "default"),
}
COMPLETIONS: Mapping[str, Callable[[object], bool]] = _BOTH | {
    "suffix": _is_in(""),
}
CHAT: Mapping[str, Callable[[object], bool]] = _BOTH | {
    "tools": _is_in([]),
    "tool_choice": _is_in("none", "auto"),
    "parallel_tool_calls": _is_in(True, False),  # there are no tools to call
    "functions": _is_in([]),
    "function_call": _is_in("none", "auto"),
    "modalities": _is_in(["text"]),
    "audio": _never,
    "prediction": _never,
    "reasoning_effort": _never,
    "verbosity": _never,
    "web_search_options": _never,
    "moderation": _never,
    "chat_template": _never,
    "documents": _never,
    "continue_final_message": _is_in(False),
    "add_special_tokens": _is_in(False),
    "echo": _is_in(False),
    "best_of": _never,
    "include_reasoning": _anything,
    "thinking_token_budget": _never,
}

# Accepted and without effect on the answer.
HARMLESS: Mapping[str, tuple[type, str]] = {
    "user": (str, "a string"),
    "metadata": (dict, "an object"),
    "store": (bool, "true or false"),
    "safety_identifier": (str, "a string"),
    "prompt_cache_key": (str, "a string"),
    "prompt_cache_retention": (str, "a string"),
    "prompt_cache_options": (dict, "an object"),
    "request_id": (str, "a string"),
}


def refuse_unsupported(
    fields: Fields, known: Collection[str], unsupported: Mapping[str, Callable[[object], bool]]
) -> None:
    """Raises ApiError for a field that nobody knows, and for one that we know but do not serve."""
    fields.allow({*known, *unsupported, *HARMLESS})
    for name, (kind, words) in HARMLESS.items():
        value = fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise wrong_type(fields.at(name), words, value)
    for name, asks_nothing in unsupported.items():
        value = fields.get(name)
        if value is not None and name not in known and not asks_nothing(value):
            raise ApiError(
                "unsupported_parameter",
                f"{fields.at(name)} is not served here; leave it out",
                fields.at(name),
            )
