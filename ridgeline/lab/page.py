"""What is a page of the lab: what may be set, what is answered, and in which words?

Python computes, the browser draws. A page is a module of `ridgeline.lab.pages` with a record of its
inputs, a record of what its drawing needs, and `answer`, which calls the parts of the engine that
know. Its drawing is `static/pages/NAME.js`, its text `static/pages/NAME.html`.

The drawing is `export function draw(h, answer, inputs, act, width)`: `h` is a template that makes
nodes, h`<svg ...>`; `act({batch: 8})` sets inputs; `width` is the room in pixels, to be taken for
the viewBox, so that texts keep their size. The drawing may use the colours of
`static/shell/style.css` by their meaning, scales and axes of "lab/svg.js", figures as
"lab/format.js" writes them, and components of Preact with hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import inspect

from ridgeline.declared import declared, made, unknown_field
from ridgeline.errors import ConfigError, RequestFault

T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

# The modules of all pages, in the order in which one may read them; each has PAGE.
PAGES = {
    "journey": "ridgeline.lab.pages.journey",
    "decode_from_scratch": "ridgeline.lab.pages.decode_from_scratch",
    "memory_wall": "ridgeline.lab.pages.memory_wall",
    "kv_growth": "ridgeline.lab.pages.kv_growth",
    "attention_variants": "ridgeline.lab.pages.attention_variants",
    "memory_hierarchy": "ridgeline.lab.pages.memory_hierarchy",
    "flash_attention": "ridgeline.lab.pages.flash_attention",
    "batching": "ridgeline.lab.pages.batching",
    "speculation": "ridgeline.lab.pages.speculation",
    "serving": "ridgeline.lab.pages.serving",
    "quantization": "ridgeline.lab.pages.quantization",
    "parallelism": "ridgeline.lab.pages.parallelism",
    "estimator": "ridgeline.lab.pages.estimator",
    "cost": "ridgeline.lab.pages.cost",
    "decision_tree": "ridgeline.lab.pages.decision_tree",
    "design_challenges": "ridgeline.lab.pages.design_challenges",
    "derivations": "ridgeline.lab.pages.derivations",
}


class Figure(msgspec.Struct, frozen=True):
    """A figure with its origin. `formula` has today's numbers in it; `where` is the function that
    computed the value, as "ridgeline.cost.roofline.step_cost"."""

    name: str
    value: float
    unit: str
    kind: Literal["ideal", "assumed", "calibrated", "measured"]
    formula: str
    where: str


class Table(msgspec.Struct, frozen=True):
    """The same as the drawing shows, in numbers."""

    title: str
    columns: list[str]
    rows: list[list[str | float]]


class Question(msgspec.Struct, frozen=True):
    """For the end of a page; `answer` is in its own numbers."""

    ask: str
    answer: str


class Guess(msgspec.Struct, frozen=True):
    """A question that the reader answers before he sees `value`."""

    ask: str
    unit: str
    value: float


class Answer(msgspec.Struct, Generic[T], frozen=True):
    """What a page shows for its inputs. `sentence` is the conclusion, with its figures."""

    sentence: str
    drawing: T
    figures: list[Figure] = []
    tables: list[Table] = []
    questions: list[Question] = []
    guess: Guess | None = None


class Preset(msgspec.Struct, frozen=True):
    """Inputs with a name; those that it leaves out have their defaults."""

    name: str
    inputs: Mapping[str, Any]


class Page(msgspec.Struct, frozen=True):
    """`inputs` is a Struct whose fields all have defaults, declared by `control`. A `long` answer
    is a generator that yields progress from 0 to 1 and at last the Answer, perhaps less whole ones
    before; it is closed when nobody waits for it any more. `needs_model`: it reads the bundled
    model."""

    name: str
    title: str
    idea: str
    group: str
    inputs: type[msgspec.Struct]
    answer: Callable[[Any], Answer[Any]] | Callable[[Any], Iterator[float | Answer[Any]]]
    long: bool = False
    needs_model: bool = False
    presets: tuple[Preset, ...] = ()


def control(
    label: str,
    meaning: str = "",
    *,
    ge: float | None = None,
    le: float | None = None,
    step: float | None = None,
    unit: str = "",
    scale: Literal["linear", "log", "powers"] = "linear",
    choices: Collection[str | int] = (),
    is_folded: bool = False,
    is_hidden: bool = False,
    length: int | None = None,
) -> msgspec.Meta:
    """The declaration of one input, beside its type. `is_folded`: under "more"; `is_hidden`: it is
    set in the drawing alone. A slider of "powers" stops at those of two. `length` is the most
    characters of a text."""
    extra: dict[str, Any] = {
        "choices": tuple(choices), "step": step, "unit": unit, "scale": scale,
        "is_folded": is_folded, "is_hidden": is_hidden,
    }  # fmt: skip
    bounds: dict[str, Any] = {"ge": ge, "le": le, "max_length": length}
    return msgspec.Meta(title=label, description=meaning or None, extra=extra, **bounds)


FOLDED = msgspec.Meta(extra={"is_folded": True})  # Annotated[Device, FOLDED]: under "more"


class Control(msgspec.Struct, frozen=True):
    """One input as the browser draws it."""

    name: str
    label: str
    meaning: str
    kind: str
    default: Any
    low: float | None
    high: float | None
    choices: list[str | int]
    step: float | None = None
    unit: str = ""
    scale: str = "linear"
    is_folded: bool = False
    is_hidden: bool = False


@cache
def controls(inputs: type[msgspec.Struct]) -> tuple[Control, ...]:
    """The inputs of a page in their order, from their declarations."""
    said = {field.name: field.type for field in _fields(inputs)}
    found = []
    for name, field in declared(inputs).items():
        label, extra = _beside(said[name])
        shown = {key: extra[key] for key in ("step", "unit", "scale") if extra.get(key)}
        is_folded, is_hidden = (bool(extra.get(key)) for key in ("is_folded", "is_hidden"))
        found.append(
            Control(
                name, label or name.replace("_", " "), field.meaning, field.kind, field.unset,
                field.low, field.high, list(field.choices),
                **shown, is_folded=is_folded, is_hidden=is_hidden,
            )
        )  # fmt: skip
    return tuple(found)


def _fields(record: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(record)
    return info.fields if isinstance(info, inspect.StructType) else ()


def _beside(kind: inspect.Type) -> tuple[str, dict[str, Any]]:
    """The label of a field and what `control` says beside it."""
    if not isinstance(kind, inspect.Metadata):
        return "", {}
    return (kind.extra_json_schema or {}).get("title", ""), kind.extra or {}


def read_inputs(page: Page, values: Mapping[str, object]) -> msgspec.Struct:
    """The inputs of a page, as `read_record`."""
    return read_record(page.inputs, values)


def read_record(record: type[R], values: Mapping[str, object]) -> R:
    """A record of controls. RequestFault names the field, its limit and the way out."""
    if unknown := values.keys() - {one.name for one in controls(record)}:
        raise unknown_field(min(unknown), min(unknown))
    inputs = made(record, values)
    for one in controls(record):
        value = getattr(inputs, one.name)
        if one.choices and value not in one.choices:
            known = ", ".join(map(str, one.choices))
            raise RequestFault(f"{one.name} is {value!r}; choose one of {known}", param=one.name)
    return inputs


def load(name: str) -> Page:
    """A page of PAGES. RequestFault names those that there are."""
    if name not in PAGES:
        raise RequestFault(f"there is no page {name!r}; there are {', '.join(PAGES)}", param="page")
    page: Page = import_module(PAGES[name]).PAGE
    return page


def answered(page: Page, inputs: msgspec.Struct) -> Answer[Any]:
    """The answer of a page, however long it takes."""
    found: Any = page.answer(inputs)
    if page.long:
        *_, found = found
    last: Answer[Any] = found
    return last


def answer_json(name: str, body: str) -> str:
    """The same from JSON to JSON, for a browser that runs Python: {"answer": ...} or {"error":
    ...}."""
    try:
        page = load(name)
        found = answered(page, read_inputs(page, msgspec.json.decode(body)))
        return msgspec.json.encode({"answer": found}).decode()
    except (RequestFault, ConfigError) as fault:
        return msgspec.json.encode({"error": {"message": str(fault)}}).decode()
