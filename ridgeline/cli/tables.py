"""How does a command show its answer: tables for a person, or JSON for a program?

A column says once what it is called, where its value comes from and how that is written; a list of
keys says once which values of a record JSON has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.cli.session import paper
from ridgeline.figures import fixed, percent, scaled

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Form = str | Callable[[Any], str]  # a format specification such as ".1f", or what writes the value
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """`value`: a field of the row such as "step_ms.p50" (of a mapping: a key), or what takes it
    from the row. None is written as "-", and words as they are."""

    heading: str
    value: str | Callable[[Any], Any]
    form: Form = ""
    right: bool = False

    def cell(self, row: Any) -> str:
        value = self.value(row) if callable(self.value) else _field(row, self.value)
        if value is None or isinstance(value, str):
            return UNKNOWN if value is None else value
        return self.form(value) if callable(self.form) else format(value, self.form)


def _field(row: Any, path: str) -> Any:
    for name in path.split("."):
        if row is None:
            return None
        row = row[name] if isinstance(row, Mapping) else getattr(row, name)
    return row


def plain(found: Any, keys: str) -> dict[str, Any]:
    """A record as JSON has it. Each key is a field or property of that name, "key=path" another one
    such as "op.name"; "x_ms" is the field "x_s" (or the path that ends so) in milliseconds."""
    made = {}
    for word in keys.split():
        key, _, path = word.partition("=")
        path = path or (f"{key[:-3]}_s" if key.endswith("_ms") else key)
        value = _field(found, path)
        in_ms = key.endswith("_ms") and path.endswith("_s") and value is not None
        made[key] = value * 1e3 if in_ms else _bare(value)
    return made


def _bare(value: Any) -> Any:
    """Mappings, lists and values."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {key: _bare(its) for key, its in value.items()}
    return [_bare(its) for its in value] if isinstance(value, list | tuple) else value


def places(count: int) -> Form:
    """So many digits after the point."""
    return lambda value: fixed(value, count)


def amount(unit: str) -> Form:
    """With the prefix that suits: "23.8 MB"."""
    return lambda value: scaled(value, unit)


def whole_percent(share: float) -> str:
    return percent(share, 0)


def table(
    rows: Iterable[Any], columns: Sequence[Column], title: str | None = None, **style: Any
) -> Table:
    """A row for each of `rows`; `style` is rich's."""
    from rich.table import Table

    made = Table(title=title, **style)
    for column in columns:
        made.add_column(column.heading, justify="right" if column.right else "left")
    for row in rows:
        made.add_row(*(column.cell(row) for column in columns))
    return made


def grid(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, **style: Any
) -> Table:
    """Cells that are words already: facts, each with its own unit."""
    columns = [Column(heading, _place(at)) for at, heading in enumerate(headings)]
    return table(rows, columns, title, **style)


def _place(at: int) -> Callable[[Sequence[str]], str]:
    """The cell there; empty where a row ends before."""
    return lambda row: row[at] if at < len(row) else ""


def bold(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="bold")


def unbroken(text: str, style: str = "") -> Text:
    """A line to copy, or somebody's own text: not broken between words."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True)


def answer(
    args: argparse.Namespace,
    as_json: Callable[[], Any],
    shown: Callable[[], Iterable[Table | Text | str]],
) -> None:
    """Print what a command found: with --json the record, else its tables and lines."""
    if args.json:
        print(json.dumps(as_json(), indent=2, ensure_ascii=False))
        return
    out = paper()
    for piece in shown():
        out.print(piece, soft_wrap=bool(getattr(piece, "no_wrap", False)))
