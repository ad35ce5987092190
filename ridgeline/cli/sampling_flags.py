"""Which flags shape an answer? One per field of SamplingParams; the model's own wishes first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from typing import Any

from ridgeline.cli.parser import Parser
from ridgeline.errors import RequestFault
from ridgeline.request import SamplingParams
from ridgeline.server.declared import COMPLETION

_NAMES = [field.name for field in fields(SamplingParams) if field.name in COMPLETION]
HELP = {name: COMPLETION[name].meaning for name in _NAMES} | {
    "max_tokens": "most tokens of the answer",
    "top_k": "sample among the k likeliest tokens only; 0 is off",
    "logit_bias": "add VALUE to the logit of token ID; may be repeated",
    "seed": "the same seed gives the same answer (and the same random weights)",
    "stop": "end the answer before this text; may be repeated",
    "stop_token_ids": "token ids that end the answer, such as 13,198",
    "prompt_logprobs": "the same for the prompt's tokens (with --json)",
    "beam_width": "beam search with that many beams instead of sampling",
    "skip_special_tokens": "show special tokens in the text",
}


COMMON = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "n", "logprobs")


def ids(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3"."""
    try:
        found = tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write 1,2,3")
    return found


def bias(text: str) -> tuple[int, float]:
    """(token id, value) of "13:-2.5"."""
    token_id, _, value = text.partition(":")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:VALUE, such as 13:-2.5") from None


_SPECIAL: dict[str, dict[str, Any]] = {
    "ignore_eos": {"action": "store_true"},
    "early_stopping": {"action": "store_true"},
    "skip_special_tokens": {"action": "store_false"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"type": ids, "metavar": "IDS"},
    "logit_bias": {"action": "append", "type": bias, "metavar": "ID:VALUE"},
}


def _kind(field: Field[Any]) -> Callable[[str], object]:
    return {"int": int, "float": float}[str(field.type).partition(" ")[0]]


def _flag(name: str) -> str:
    if name == "skip_special_tokens":
        return "--show-special-tokens"
    return "--" + name.replace("_", "-")


def _dest(name: str) -> str:
    return f"sampling_{name}"


def add_sampling_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add the flags. What is not given is left to the model's generation_config.json."""
    group = parser.add_argument_group(
        "sampling", "What is not given here is taken from the model's generation_config.json."
    )
    for field in fields(SamplingParams):
        if field.name in without:
            continue
        options = _SPECIAL.get(field.name) or {
            "type": _kind(field),
            "metavar": "N" if _kind(field) is int else "X",
        }
        group.add_argument(
            _flag(field.name),
            dest=_dest(field.name),
            default=argparse.SUPPRESS,
            help=HELP[field.name],
            **options,
        )
        if field.name not in COMMON:
            parser.mark_expert(_flag(field.name))


def sampling_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given on the command line. RequestFault for one that
    no model could serve."""
    given = {
        field.name: getattr(args, _dest(field.name))
        for field in fields(SamplingParams)
        if hasattr(args, _dest(field.name))
    }
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    SamplingParams(**{"max_tokens": None, **given})
    return given


def setting(text: str, allowed: Collection[str]) -> tuple[str, Any]:
    """(field, value) of "temperature=0.5", typed in a chat. RequestFault says what is allowed."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name not in allowed:
        raise RequestFault(f"write NAME=VALUE with NAME one of {', '.join(sorted(allowed))}")
    if value.lower() in ("", "none", "default"):
        return name, None
    field = next(field for field in fields(SamplingParams) if field.name == name)
    try:
        return name, _kind(field)(value)
    except ValueError:
        raise RequestFault(f"{name}: {value!r} is not a number", param=name) from None
