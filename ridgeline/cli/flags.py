"""Which flags fill a record? One per field, made of its declaration (`ridgeline.declared`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ridgeline import demo
from ridgeline.cli.parser import Parser
from ridgeline.cli.values import bias, byte_size, ids, json_schema, speculation
from ridgeline.config import EngineConfig
from ridgeline.declared import Declared, Field, declared
from ridgeline.errors import RequestFault
from ridgeline.request import SamplingParams

ENGINE = {name: field for name, field in declared(EngineConfig).items() if name != "model"}
SAMPLING = declared(SamplingParams)
# Where a flag of an answer has another form than the field, or means less.
SAMPLING_FORMS: dict[str, dict[str, Any]] = {
    "top_k": {"help": "sample among the k likeliest tokens only; 0 is off"},
    "logit_bias": {
        "action": "append",
        "type": bias,
        "metavar": "ID:VALUE",
        "help": "add VALUE to the logit of token ID; may be repeated",
    },
    "seed": {"help": "the same seed gives the same answer (and the same random weights)"},
    "stop": {
        "action": "append",
        "metavar": "TEXT",
        "help": "end the answer before this text; may be repeated",
    },
    "stop_token_ids": {
        "action": "store",
        "type": ids,
        "metavar": "IDS",
        "help": "token ids that end the answer, such as 13,198",
    },
    "prompt_logprobs": {"help": "the same for the prompt's tokens (with --json)"},
    "beam_width": {"help": "beam search with that many beams instead of sampling"},
    "structured_outputs": {
        "help": 'what the text must be, such as {"regex": "[0-9]+"}, {"choice": ["a", "b"]} or '
        '{"json": SCHEMA}'
    },
    "skip_special_tokens": {"help": "show special tokens in the text"},
}
MOST_IN_A_ROW = 4  # choices; more of them are told in the help


def add_fields(
    parser: Parser,
    group: argparse._ArgumentGroup,
    fields: Declared,
    prefix: str,
    *,
    metavars: Mapping[str, str] | None = None,
    forms: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Add a flag for each of `fields`; what is given lies at `prefix` and its name. `metavars`: of
    the values, by their kind, instead of the last word of each name; `forms`: what argparse shall
    do otherwise for some."""
    for name, field in fields.items():
        action = group.add_argument(
            _flag(name, field),
            dest=prefix + name,
            default=argparse.SUPPRESS,
            **_options(name, field, metavars or {}) | (forms or {}).get(name, {}),
        )
        if not field.is_common:
            parser.mark_expert(*action.option_strings)


def given(args: argparse.Namespace, fields: Declared, prefix: str) -> dict[str, Any]:
    """The values that were given for `fields`, by name."""
    return {name: getattr(args, prefix + name) for name in fields if hasattr(args, prefix + name)}


def _flag(name: str, field: Field) -> str:
    """A switch turns a field from its default."""
    return field.flag or f"--{'no-' * (field.unset is True)}{name.replace('_', '-')}"


def _options(name: str, field: Field, metavars: Mapping[str, str]) -> dict[str, Any]:
    if field.kind == "boolean":
        if field.unset:
            return {"action": "store_false", "help": f"do not {field.meaning}"}
        return {"action": "store_true", "help": field.meaning}
    last = name.rpartition("_")[2].upper()
    metavar = field.metavar or metavars.get(field.kind, last)
    if field.kind.startswith("list of"):
        words = f"{field.meaning}; may be repeated"
        return {"action": "append", "metavar": metavar, "help": words}
    choices = tuple(field.choices) or None
    is_long = choices is None or len(choices) > MOST_IN_A_ROW
    listed = f": {', '.join(choices)}" if choices and is_long else ""
    default = "" if field.unset is None else f" (default: {field.unset})"
    return {
        "type": _reader(name, field),
        "choices": choices,
        "metavar": metavar if is_long else None,
        "help": field.meaning + listed + default,
    }


def _reader(name: str, field: Field) -> Callable[[str], object]:
    if name.endswith("_bytes"):
        return byte_size
    if name == "speculate":
        return speculation
    if name == "replicas":
        return number_or_range
    return {"integer": int, "number": float}.get(field.kind, str)


def number_or_range(text: str) -> str:
    """N or MIN:MAX, which a file of settings may write as a number."""
    return text


def add_model(parser: Parser, *, takes_names: bool = False) -> None:
    """MODEL, which may be left out: then it is the bundled model for chats. `takes_names`: the
    command needs no weights, so a public model's name will do."""
    bundled = ", ".join(demo.PREFIX + name for name in demo.NAMES)
    named = "a public model's name (ridgeline inspect --list), " if takes_names else ""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=demo.DEFAULT,
        help=f"a folder, a .gguf file, {named}a hub id user/name[@revision], or a bundled model: "
        f"{bundled} (default: %(default)s)",
    )


def add_engine_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add MODEL and the engine's flags. What is not given stays with EngineConfig's default."""
    add_model(parser)
    fields = {name: field for name, field in ENGINE.items() if name not in without}
    add_fields(parser, parser.add_argument_group("engine"), fields, "engine_")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were given on the command line, `model` not among them."""
    return given(args, ENGINE, "engine_")


def add_sampling_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add the flags that shape an answer. What is not given is left to the model's
    generation_config.json, so no default is shown."""
    group = parser.add_argument_group(
        "sampling", "What is not given here is taken from the model's generation_config.json."
    )
    metavars = {"integer": "N", "number": "X"}
    forms = {name: {"help": field.meaning} for name, field in SAMPLING.items()}
    for name, form in SAMPLING_FORMS.items():
        forms[name] = forms[name] | form
    fields = {name: field for name, field in SAMPLING.items() if name not in without}
    add_fields(parser, group, fields, "sampling_", metavars=metavars, forms=forms)
    group.add_argument(
        "--json-schema",
        dest="sampling_structured_outputs",
        type=json_schema,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="the answer is JSON by the schema in this file",
    )


def sampling_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given on the command line. RequestFault for one that
    no model could serve."""
    changes = given(args, SAMPLING, "sampling_")
    SamplingParams(**{"max_tokens": None, **changes})
    return changes


def setting(text: str, allowed: Collection[str]) -> tuple[str, Any]:
    """(field, value) of "temperature=0.5", typed in a chat. RequestFault says what is allowed."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name not in allowed:
        raise RequestFault(f"write NAME=VALUE with NAME one of {', '.join(sorted(allowed))}")
    if value.lower() in ("", "none", "default"):
        return name, None
    try:
        return name, _reader(name, SAMPLING[name])(value)
    except ValueError:
        raise RequestFault(f"{name}: {value!r} is not a number", param=name) from None
