"""What may each field of a record hold, and what does somebody read who gave something else?

A record is a msgspec.Struct. Its annotations are the one place where a field's type, bounds and
meaning stand. The checks, the command's flags, the keys of its file of settings, the tables of
docs/http-api.md and docs/configuration.md, and /openapi.json are made of what `declared` reads from
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ridgeline.errors import ConfigError, RequestFault

R = TypeVar("R", bound=msgspec.Struct)

LIMIT = "limit_exceeded"  # the code of an error where a bound is a limit of ours
NOT_A_TOKEN = "invalid_token_id"

_ERROR = re.compile(r"(?P<what>.*?)(?: - at (?P<is_key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (?P<what>missing required|contains unknown) field `(?P<name>.*)`")
_LENGTH = re.compile(r"Expected `\w+` of length (?P<sign>[<>]=) \d+")
_TYPE = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<given>[^`]+)`")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_WANTED = {
    "int": "an integer", "float": "a number", "bool": "true or false", "str": "a string",
    "array": "a list", "object": "an object",
}  # fmt: skip
_GIVEN = _WANTED | {"int": "a number", "float": "a float", "bool": "a boolean"}


def says(
    meaning: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lengths: tuple[int | None, int | None] = (None, None),
    over: str | None = None,
    under: str | None = None,
    wrong: str | None = None,
    kind: str | None = None,
    default: str | None = None,
    choices: Collection[str] = (),
    fields: type[msgspec.Struct] | None = None,
    example: object = None,
    most: int | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    is_common: bool = False,
) -> msgspec.Meta:
    """The declaration of one field, beside its type. `over` and `under` are the codes of the errors
    for more or less than it may be, `wrong` that for another type. `kind`, `default`, `choices`,
    `fields` and `most` (items) are for readers, where the type does not say them (see Field). The
    command's flag has the field's name unless `flag` gives another, and `metavar` for its value."""
    extra = {
        "over": over, "under": under, "wrong": wrong, "kind": kind, "default": default,
        "choices": choices, "fields": fields, "example": example, "most": most,
        "flag": flag, "metavar": metavar, "is_common": is_common or None,
    }  # fmt: skip
    bounds: dict[str, Any] = {
        "ge": ge, "gt": gt, "le": le, "min_length": lengths[0], "max_length": lengths[1],
    }  # fmt: skip
    told = {name: value for name, value in extra.items() if value not in (None, ())}
    return msgspec.Meta(description=meaning or None, extra=told, **bounds)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record. `low` and `high` bound a number (`above`: `low` itself is out of
    bounds), the characters of a string, or the items of a list or object. `default` is in words,
    `unset` is what the record holds where nothing is given. `choices` are all that a value may be.
    `fields` are those of an object or of the objects in a list, whose type is
    `record`. `example` is for readers.
    `is_common`: the command's --help shows the flag. `over`, `under`, `wrong`, `flag` and
    `metavar`: see `says`."""

    kind: str
    meaning: str = ""
    low: float | None = None
    high: float | None = None
    over: str = "invalid_value"
    under: str = "invalid_value"
    wrong: str = ""
    default: str = ""
    required: bool = False
    above: bool = False
    choices: Collection[str] = ()
    fields: Mapping[str, Field] | None = None
    record: Any = None
    example: object = None
    items: tuple[Field, ...] = ()  # of a list, or each of a list of as many
    unset: object = None
    flag: str = ""
    metavar: str = ""
    is_common: bool = False


Declared = Mapping[str, Field]


@cache
def declared(record: type[msgspec.Struct]) -> Declared:
    """The fields of a record, by name, in their order."""
    found = inspect.type_info(record)
    rows = found.fields if isinstance(found, inspect.StructType) else ()
    return {row.name: _field(row.type, row.required, row.default) for row in rows}


def _field(kind: inspect.Type, required: bool = False, default: object = None) -> Field:
    node, words, extra = _unwrapped(kind)
    low, high, above = _bounds(node)
    shown = "" if default in (None, msgspec.NODEFAULT, (), frozenset()) else f"{default}".lower()
    is_list = isinstance(node, _LISTS)
    inner = (node.item_type,) if isinstance(node, _LISTS) else getattr(node, "item_types", ())
    fields = extra.get("fields") or (node.cls if isinstance(node, inspect.StructType) else None)
    return Field(
        extra.get("kind") or _kind(node),
        words,
        low,
        extra.get("most") if high is None else high,
        over=extra.get("over", LIMIT if is_list else "invalid_value"),
        under=extra.get("under", "empty_input" if is_list else "invalid_value"),
        wrong=extra.get("wrong", ""),
        default=extra.get("default", shown),
        required=required,
        above=above,
        choices=extra.get("choices", ()),
        fields=None if fields is None else declared(fields),
        record=fields,
        example=extra.get("example"),
        items=tuple(map(_field, inner)),
        unset=None if default is msgspec.NODEFAULT else default,
        flag=extra.get("flag", ""),
        metavar=extra.get("metavar", ""),
        is_common=extra.get("is_common", False),
    )


_LISTS = (inspect.ListType, inspect.VarTupleType, inspect.FrozenSetType)
_KINDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "boolean",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.DictType: "object",
    inspect.StructType: "object",
}


def _unwrapped(kind: inspect.Type) -> tuple[inspect.Type, str, dict[str, Any]]:
    """The type without None and without what is said beside it; its meaning; the rest of it."""
    words, extra = "", dict[str, Any]()
    while True:
        if isinstance(kind, inspect.Metadata):
            words = words or (kind.extra_json_schema or {}).get("description", "")
            extra = {**(kind.extra or {}), **extra}
            kind = kind.type
        elif isinstance(kind, inspect.UnionType):
            kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
        else:
            return kind, words, extra


def _bounds(node: inspect.Type) -> tuple[float | None, float | None, bool]:
    if isinstance(node, (inspect.IntType, inspect.FloatType)):
        return (node.ge if node.gt is None else node.gt), node.le, node.gt is not None
    if isinstance(node, (inspect.StrType, *_LISTS)):
        return node.min_length, node.max_length, False
    return None, None, False


def _kind(node: inspect.Type) -> str:
    if isinstance(node, _LISTS):
        inner = _kind(_unwrapped(node.item_type)[0])
        return "list of token ids" if inner == "integer" else f"list of {inner}s"
    return _KINDS.get(type(node), "")


# ---------------------------------------------------------------------- what is wrong


def made(kind: type[R], values: Mapping[str, object], path: str = "") -> R:
    """The record of `values`, which stand at `path` of something larger. RequestFault begins with
    the place of what is wrong and names the limit."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _fault_of(error, declared(kind), path) from None
    except UnicodeEncodeError:
        raise _fault(*_unreadable(values, path), "invalid_text") from None


def _unreadable(values: Mapping[str, object], path: str) -> tuple[str, str]:
    """The place of a name or a text that is no Unicode, where none may be."""
    for name, value in values.items():
        place = f"{path}.{name}".lstrip(".")
        if isinstance(value, dict):
            found = _unreadable(value, place)
            if found[0] != place:
                return found
        for text in (name, value):
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
                return _shown(place), "has a lone surrogate"
    return path, "has a lone surrogate in it"


def _fault_of(error: msgspec.ValidationError, fields: Declared, path: str) -> RequestFault:
    found = _ERROR.fullmatch(str(error))
    what, inner = (found["what"], found["path"] or "") if found else (str(error), "")
    if named := _NAMED.fullmatch(what):
        place = (path + inner + "." + named["name"]).lstrip(".")
        if named["what"] == "contains unknown":
            return unknown_field(place, named["name"])
        return _fault(place, "is required", "missing_required_parameter")
    place = (path + inner).lstrip(".")
    message, code = _wrong(what, _at(fields, inner))
    return _fault(place, message, code)


def unknown_field(place: str, name: str) -> RequestFault:
    shown = _shown(name)
    place = place.removesuffix(name) + shown
    return RequestFault(f"unknown field {shown[:64]!r}", param=place, code="unknown_parameter")


def _shown(name: str) -> str:
    """A name fit to stand in an error: harmless characters only."""
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in name)


def _fault(place: str, message: str, code: str) -> RequestFault:
    return RequestFault(f"{place} {message}", param=place, code=code)


def _at(fields: Declared, path: str) -> Field:
    """The declaration of the place `.name[3].inner` in a record of `fields`."""
    field = Field("")
    for step in _STEP.finditer(path):
        if step["name"] is None:
            at = int(step["index"]) if step["index"].isdecimal() else 0
            field = field.items[min(at, len(field.items) - 1)] if field.items else Field("")
        else:
            field = (fields or {}).get(step["name"], Field(""))
        fields = field.fields or {}
    return field


def _wrong(what: str, field: Field) -> tuple[str, str]:
    """What msgspec found, in our words, and the code of the error."""
    if length := _LENGTH.fullmatch(what):
        return _wrong_length(length["sign"] == "<=", field)
    if kinds := _TYPE.fullmatch(what):
        words = [_WANTED.get(word, word) for word in kinds["wanted"].split(" | ") if word != "null"]
        wanted = f"a {field.kind}" if " or list" in field.kind else " or ".join(words)
        given = kinds["given"]
        is_number = field.kind in ("integer", "number") and given in ("bool", "float")
        code = field.wrong or ("invalid_value" if is_number else "invalid_type")
        return f"must be {wanted}, not {_GIVEN.get(given, given)}", code
    if field.low is None and field.high is None:
        return f"is not what it may be: {what}", "invalid_value"
    low, high = (b if isinstance(b, int) else f"{b:g}" for b in (field.low or 0, field.high or 0))
    code = field.wrong or (field.over if "<" in what else "invalid_value")
    if field.above and ">" in what:
        return f"must be above {low}", code
    return f"must be between {low} and {high}", code


def _wrong_length(is_over: bool, field: Field) -> tuple[str, str]:
    if not is_over:
        return "must not be empty", field.under
    if not field.items:
        return f"is longer than {field.high:g} characters", field.over
    return f"takes at most {field.high:g} items", field.over


# ---------------------------------------------------------------------- what is wrong in a setting

_SETTINGS: dict[str, tuple[Any, str]] = {
    "string": (str, "a text"),
    "boolean": (bool, "True or False"),
    "integer": (Integral, "a whole number"),
    "number": (Real, "a number"),
}


def check_fields(record: msgspec.Struct) -> None:
    """What can be said of each setting by itself: ConfigError names the first one that is not what
    it is declared to be. A field that is unset without a value may be None. Names that stand in a
    table are for whoever looks them up there: an engine may bring its own."""
    for name, field in declared(type(record)).items():
        value = getattr(record, name)
        is_left = value is None and field.unset is None and not field.required
        if field.kind in _SETTINGS and not is_left:
            _check_setting(name, value, field)


def _check_setting(name: str, value: Any, field: Field) -> None:
    kind, words = _SETTINGS[field.kind]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}; it must be {words}")
    if isinstance(field.choices, tuple) and value not in (field.choices or (value,)):
        known = list(map(str, field.choices))
        few = " or ".join(known) if len(known) == 2 else f"one of {', '.join(known)}"
        if kind is str:
            raise ConfigError(f"unknown {name} {value!r}; choose {few}")
        raise ConfigError(f"{name} is {value}; it must be {few}")
    if kind in (str, bool):
        return
    low: float = -math.inf if field.low is None else field.low
    high = math.inf if field.high is None else field.high
    if not low <= value <= high or (field.above and value == low):  # nan is in no range
        raise ConfigError(f"{name} is {value}; it must be {_range(field)}")


def _range(field: Field) -> str:
    low, high = (b if isinstance(b, int) else f"{b or 0:g}" for b in (field.low, field.high))
    if field.above:
        return f"above {low}" + ("" if field.high is None else f" and at most {high}")
    return f"at least {low}" if field.high is None else f"from {low} to {high}"
