"""Which flags shape an answer? One per field of SamplingParams; the model's own wishes first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from ridgeline.cli.parser import Parser
from ridgeline.declared import declared
from ridgeline.errors import RequestFault
from ridgeline.request import SamplingParams

FIELDS = declared(SamplingParams)
HELP = {  # where a flag is given in another form than the field, or means less
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
    "stop": {"action": "append", "metavar": "TEXT"},
    "stop_token_ids": {"type": ids, "metavar": "IDS"},
    "logit_bias": {"action": "append", "type": bias, "metavar": "ID:VALUE"},
}


def _kind(name: str) -> Callable[[str], object]:
    return {"integer": int, "number": float}[FIELDS[name].kind]


def _options(name: str) -> dict[str, Any]:
    """Of a flag: a switch turns a field from its default."""
    if FIELDS[name].kind == "boolean":
        is_on = FIELDS[name].default == "true"
        return {"action": "store_false" if is_on else "store_true"}
    if name in _SPECIAL:
        return _SPECIAL[name]
    return {"type": _kind(name), "metavar": "N" if _kind(name) is int else "X"}


def _flag(name: str) -> str:
    if name == "skip_special_tokens":
        return "--show-special-tokens"
    is_on = FIELDS[name].kind == "boolean" and FIELDS[name].default == "true"
    return f"--{'no-' * is_on}{name.replace('_', '-')}"


def _dest(name: str) -> str:
    return f"sampling_{name}"


def add_sampling_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add the flags. What is not given is left to the model's generation_config.json."""
    group = parser.add_argument_group(
        "sampling", "What is not given here is taken from the model's generation_config.json."
    )
    for name, field in FIELDS.items():
        if name in without:
            continue
        group.add_argument(
            _flag(name),
            dest=_dest(name),
            default=argparse.SUPPRESS,
            help=HELP.get(name, field.meaning),
            **_options(name),
        )
        if name not in COMMON:
            parser.mark_expert(_flag(name))


def sampling_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given on the command line. RequestFault for one that
    no model could serve."""
    given = {name: getattr(args, _dest(name)) for name in FIELDS if hasattr(args, _dest(name))}
    SamplingParams(**{"max_tokens": None, **given})
    return given


def setting(text: str, allowed: Collection[str]) -> tuple[str, Any]:
    """(field, value) of "temperature=0.5", typed in a chat. RequestFault says what is allowed."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name not in allowed:
        raise RequestFault(f"write NAME=VALUE with NAME one of {', '.join(sorted(allowed))}")
    if value.lower() in ("", "none", "default"):
        return name, None
    try:
        return name, _kind(name)(value)
    except ValueError:
        raise RequestFault(f"{name}: {value!r} is not a number", param=name) from None
