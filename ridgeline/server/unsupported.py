"""Which fields that clients know do we not serve? Refused by name, unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.server.errors import ApiError
from ridgeline.server.fields import Fields, wrong_type

Unsupported = Mapping[str, tuple[object, ...]]
ANYTHING = (None,)  # every value asks for nothing

# Field -> the values that ask for nothing. null counts as absent before we get here.
_BOTH: Unsupported = {
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structured_outputs": (),
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
COMPLETIONS: Unsupported = {**_BOTH, "suffix": ("",)}
CHAT: Unsupported = {
    **_BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # there are no tools to call
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "chat_template": (),
    "documents": (),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
    "best_of": (),
    "include_reasoning": ANYTHING,
    "thinking_token_budget": (),
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


def _asks_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    """Equal and of the same type, so that 0 is not taken for false."""
    return harmless is ANYTHING or any(value == v and type(value) is type(v) for v in harmless)


def refuse_unsupported(fields: Fields, unsupported: Unsupported) -> None:
    """Raises ApiError for a field that nobody knows, and for one that we know but do not serve."""
    fields.allow({*unsupported, *HARMLESS})
    for name, (kind, words) in HARMLESS.items():
        value = fields.get(name)
        if value is not None and not isinstance(value, kind):
            raise wrong_type(fields.at(name), words, value)
    for name, harmless in unsupported.items():
        value = fields.get(name)
        if value is not None and not _asks_nothing(value, harmless):
            raise ApiError(
                "unsupported_parameter",
                f"{fields.at(name)} is not served here; leave it out",
                fields.at(name),
            )
