"""Which sampling does a request ask for? The fields that completions and chat have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import RequestFault
from ridgeline.request import MAX_STOP_LENGTH, SamplingParams
from ridgeline.server.declared import BIAS
from ridgeline.server.errors import ApiError, from_fault, quote
from ridgeline.server.fields import Fields, check_text, wrong_type

MAX_TOKEN_ID = 1 << 31

# What a beam search cannot honour, and the values that ask for nothing. The model's own defaults
# for these are put aside.
BEAM_NEUTRAL: dict[str, tuple[float, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
}


def read_sampling(fields: Fields, defaults: Mapping[str, Any], **more: object) -> SamplingParams:
    """The request's own fields over the model's `defaults` over OpenAI's; `more` comes on top.

    Raises ApiError naming the field.
    """
    asked: dict[str, Any] = {
        "temperature": fields.number("temperature"),
        "top_p": fields.number("top_p"),
        "top_k": fields.integer("top_k"),
        "min_p": fields.number("min_p"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "logit_bias": _logit_bias(fields),
        "seed": fields.integer("seed"),
        "stop": _stop(fields),
        "stop_token_ids": _stop_token_ids(fields),
        "ignore_eos": fields.flag("ignore_eos"),
        "n": fields.integer("n"),
        "min_tokens": fields.integer("min_tokens"),
        "skip_special_tokens": fields.flag("skip_special_tokens"),
        "prompt_logprobs": fields.integer("prompt_logprobs"),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    merged = {**defaults, **given, **{k: v for k, v in more.items() if v is not None}}
    if "max_tokens" in more:
        merged["max_tokens"] = more["max_tokens"]  # None is a value here: to the context's end
    try:
        sampling = SamplingParams(**merged)
        return _with_beams(sampling, fields)
    except RequestFault as fault:
        raise from_fault(fault) from None


def _with_beams(sampling: SamplingParams, fields: Fields) -> SamplingParams:
    """`use_beam_search` with `beam_width` (or, as older clients have it, `best_of`) beams."""
    wanted = fields.flag("use_beam_search")
    width = fields.integer("beam_width")
    penalty = fields.number("length_penalty")
    early = fields.flag("early_stopping")
    if wanted is None:
        wanted = width is not None and width > 1
    elif not wanted and width is not None and width > 1:
        raise ApiError(
            "invalid_value",
            f"beam_width {width} is for a beam search, which use_beam_search false refuses",
            "beam_width",
        )
    if not wanted:
        if penalty not in (None, 1) or early:
            name = "early_stopping" if early else "length_penalty"
            raise ApiError("invalid_value", f"{name} needs use_beam_search", name)
        return sampling
    if width is not None and sampling.best_of not in (None, width):
        raise ApiError("invalid_value", "best_of cannot be combined with beam_width", "best_of")
    width = width or sampling.num_samples
    if width < 2:
        raise ApiError(
            "missing_required_parameter", "use_beam_search needs a beam_width above 1", "beam_width"
        )
    for name, neutral in BEAM_NEUTRAL.items():
        if fields.get(name) is not None and fields.get(name) not in neutral:
            raise ApiError("unsupported_parameter", f"{name} has no effect on beams", name)
    return sampling.replace(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        best_of=None,
        beam_width=width,
        length_penalty=1.0 if penalty is None else penalty,
        early_stopping=bool(early),
    )


def _stop(fields: Fields) -> tuple[str, ...] | None:
    value = fields.get("stop")
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong_type("stop", "a string or a list of strings", value)
    fields.check_count("stop", texts)
    for i, text in enumerate(texts):
        _check_stop_text(text, "stop" if isinstance(value, str) else f"stop[{i}]")
    return tuple(texts)


def _check_stop_text(text: object, param: str) -> None:
    if not isinstance(text, str):
        raise wrong_type(param, "a string", text)
    if not text:
        raise ApiError("empty_input", "a stop string must not be empty", param)
    if len(text) > MAX_STOP_LENGTH:
        raise ApiError(
            "limit_exceeded", f"a stop string has at most {MAX_STOP_LENGTH} characters", param
        )
    check_text(text, param)


def _stop_token_ids(fields: Fields) -> tuple[int, ...] | None:
    values = fields.items("stop_token_ids")
    if values is None:
        return None
    return tuple(token_id(value, f"stop_token_ids[{i}]") for i, value in enumerate(values))


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...] | None:
    bias = fields.get("logit_bias")
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise wrong_type("logit_bias", "an object", bias)
    fields.check_count("logit_bias", bias)
    values = Fields(bias, dict.fromkeys(bias, BIAS), "logit_bias")
    pairs: dict[int, float] = {}
    for name in bias:
        if not (name.isascii() and name.isdecimal() and len(name) < 11):
            raise ApiError(
                "invalid_token_id", f"logit_bias: {quote(name)} is not a token id", "logit_bias"
            )
        value = values.number(name)
        if name != str(int(name)):
            raise ApiError(
                "invalid_token_id",
                f"logit_bias: {quote(name)} is written {int(name)}",
                "logit_bias",
            )
        pairs[token_id(int(name), "logit_bias")] = 0.0 if value is None else value
    return tuple(pairs.items())


def token_id(value: object, param: str, vocab_size: int = MAX_TOKEN_ID) -> int:
    """`value` as a token id. Raises ApiError invalid_token_id for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError("invalid_token_id", f"{param} must be a token id (an integer)", param)
    if not 0 <= value < vocab_size:
        raise ApiError("invalid_token_id", f"{param} must be in 0..{vocab_size - 1}", param)
    return value


def read_salt(fields: Fields) -> str:
    """A client's own salt for the prefix cache; it narrows sharing further, never widens it."""
    return fields.text("cache_salt") or ""


def read_priority(fields: Fields) -> int:
    """Smaller is served sooner, under a policy that looks at it."""
    return fields.integer("priority") or 0
