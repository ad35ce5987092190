"""What do the reference pages say? Their tables, made from the parsers, the fields and the routes.

Run from the checkout: python -m tools.make_docs (`make docs`). A page is written by hand but for
its marked parts, `<!-- begin NAME -->` to `<!-- end -->`; NAME is one of PARTS.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct

from ridgeline.architectures import FAMILIES
from ridgeline.cli.main import COMMANDS, build_parser
from ridgeline.cli.parser import Parser
from ridgeline.declared import Declared, Field, declared
from ridgeline.lab.page import PAGES as LAB_PAGES
from ridgeline.lab.page import load
from ridgeline.request import Sampling
from ridgeline.server.app import make_routes
from ridgeline.server.bodies import (
    HARMLESS,
    UNSUPPORTED,
    Asking,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeText,
    Unsupported,
)
from ridgeline.server.errors import CODES, RETRY_AFTER_S
from tools import docs_metrics

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/http-api.md", "docs/configuration.md", "docs/models.md", "docs/lab.md")
WORDING = ("figures", "errors", "step", "formats")  # that compute no figure
MARK = re.compile(r"(<!-- begin (?P<name>[\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHARED = ("engine", "sampling", "machine")  # groups of flags that several commands have
DEFAULT = re.compile(r"(?: ?\(|; |^)default: (?P<value>[^()]+)\)?$")
Row = tuple[str, ...]


def table(head: Row, rows: Iterable[Row]) -> str:
    """Markdown, each cell on one line."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---------------------------------------------------------------------- models


def families() -> str:
    """Model types by the file that reads them, whose first lines say what it is."""
    files: dict[str, list[str]] = {}
    for model_type, where in FAMILIES.items():
        files.setdefault(where.partition(":")[0], []).append(model_type)
    rows = []
    for module, types in files.items():
        text = _first_paragraph(import_module(module).__doc__)
        question, _, answer = text.partition("? ")
        name = question.removeprefix("What is an ").removeprefix("What is a ")
        rows.append((name, ", ".join(f"`{one}`" for one in types), answer))
    return table(
        ("family", "`model_type`", "what it is"), sorted(rows, key=lambda row: row[0].lower())
    )


# ---------------------------------------------------------------------- the lab

LAB_BASE = ("lab.page", "lab.machine")


def lab_pages() -> str:
    """Each page, the modules that its figures come from, and the test that holds them."""
    rows = []
    for name, where in LAB_PAGES.items():
        page, known = load(name), _used_by_page(where)
        test = f"[test](../tests/lab/test_{name}.py)"
        rows.append((f"**{page.title}**: {page.idea}", ", ".join(sorted(known)), test))
    return table(("page", "computed by (`ridgeline.`)", "held by"), rows)


def _used_by_page(where: str) -> set[str]:
    """What a module of the lab imports, and what those of the lab that it imports do, but for what
    all pages choose from."""
    found = ast.walk(ast.parse((ROOT / (where.replace(".", "/") + ".py")).read_text("utf-8")))
    used = {one.module or "" for one in found if isinstance(one, ast.ImportFrom)}
    parts = {one.partition(".")[2] for one in used if one.startswith("ridgeline.")}
    known = {part for part in parts if part.partition(".")[0] not in ("lab", *WORDING)}
    shared = (part for part in parts if part.startswith("lab.") and part not in LAB_BASE)
    return known.union(*(_used_by_page(f"ridgeline.{part}") for part in shared))


# ---------------------------------------------------------------------- the HTTP API


def endpoints() -> str:
    service: Any = type("Routes", (), {"limits": None})  # the routes alone: none is called
    rows = []
    for route in make_routes(service):
        path = route.path.replace("{name:path}", "NAME")
        method = "POST" if "POST" in (route.methods or ()) else "GET"
        what = _first_paragraph(route.endpoint.__doc__)
        rows.append((f"`{method} {path}`", route.right, what))
    return table(("path", "right", "what it answers"), rows)


def _first_paragraph(text: str | None) -> str:
    return (text or "").strip().partition("\n\n")[0]


def body(fields_: Declared) -> Callable[[], str]:
    """The table of an object's fields, with those of the objects in it."""

    def made() -> str:
        return table(("field", "type", "bounds", "default", "meaning"), _field_rows(fields_))

    return made


def _field_rows(fields_: Declared, path: str = "") -> list[Row]:
    rows: list[Row] = []
    for name, field in fields_.items():
        default = "**required**" if field.required else field.default
        rows.append((f"`{path}{name}`", field.kind, _bounds(field), default, field.meaning))
        inner = "[]." if field.kind.startswith("list") or "or list" in field.kind else "."
        rows += _field_rows(field.fields or {}, path + name + inner)
    return rows


def _bounds(field: Field) -> str:
    if field.choices:
        return ", ".join(field.choices)
    if field.low is None and field.high is None:
        return ""
    words = {"number": "", "integer": "", "string": " characters"}.get(field.kind, " items")
    if field.high is None:
        return "not empty"  # the only such bound
    low = "at most" if field.low is None else f"{'above ' * field.above}{_shown(field.low)} to"
    return f"{low} {_shown(field.high)}{words}"


def _shown(bound: float) -> str:
    for power in (30, 31, 63):
        for value, words in ((1 << power, f"2^{power}"), ((1 << power) - 1, f"2^{power} - 1")):
            if abs(bound) == value:
                return words if bound > 0 else f"-{words}"
    return f"{bound:g}"


def without(kind: type[Struct], base: type[Struct]) -> Declared:
    """What a record has beyond one that it is made of, and what it has in other bounds."""
    known = declared(base)
    return {n: field for n, field in declared(kind).items() if known.get(n) != field}


def sampling() -> Declared:
    every = declared(Asking)
    return {name: every[name] for name in (*Sampling.__struct_fields__, "use_beam_search")}


def of_both() -> Declared:
    others = {*sampling(), *HARMLESS}
    return {name: field for name, field in declared(Asking).items() if name not in others}


def refused(fields_: Unsupported) -> Callable[[], str]:
    """Those that are refused whatever they hold, and those that may hold some value."""

    def made() -> str:
        never = ", ".join(f"`{name}`" for name, values in fields_.items() if not values)
        some = (f"`{name}` {_allowed(values)}" for name, values in fields_.items() if values)
        return f"Always: {never}.\n\nUnless it is: {', '.join(some)}.\n"

    return made


def _allowed(values: tuple[object, ...]) -> str:
    return " or ".join(f"`{json.dumps(value)}`" for value in values)


def harmless() -> str:
    names = (f"`{name}` ({field.kind})" for name, field in HARMLESS.items())
    return ", ".join(names) + ".\n"


def errors() -> str:
    rows = [
        (f"`{name}`", str(code.status), f"`{code.type}`", _retry(name), code.meaning)
        for name, code in CODES.items()
    ]
    return table(("code", "status", "type", "Retry-After, s", "meaning"), rows)


def _retry(code: str) -> str:
    return str(RETRY_AFTER_S.get(code, ""))


# ---------------------------------------------------------------------- the command line


def parsers() -> dict[str, Parser]:
    return {name: build_parser(name)[1][name] for name in COMMANDS}


def _groups(parser: Parser) -> dict[str, list[argparse.Action]]:
    """Its flags by the title of their group, help and MODEL left out."""
    found = {
        str(group.title): [
            action
            for action in group._group_actions
            if action.option_strings and action.dest not in ("help", "help_all")
            if action.help != argparse.SUPPRESS
        ]
        for group in parser._action_groups
    }
    return {title: actions for title, actions in found.items() if actions}


def _flag_rows(parser: Parser, actions: Sequence[argparse.Action]) -> dict[str, Row]:
    return {a.option_strings[-1]: _flag_row(a, a not in parser.expert) for a in actions}


def _flag_row(action: argparse.Action, is_common: bool) -> Row:
    """Common flags are bold."""
    words = (action.help or "") % {"default": _value(action.default), "prog": ""}
    found = DEFAULT.search(words)
    default = found["value"] if found else ""
    words = words[: found.start()] if found else words
    if not found and action.nargs != 0 and action.default != argparse.SUPPRESS:
        default = _value(action.default)
    choices = [_value(choice) for choice in action.choices or ()]
    if choices and not action.metavar:
        words = f"{words}; one of {', '.join(choices)}" if words else f"one of {', '.join(choices)}"
    flag = f"`{_signature(action)}`"
    return f"**{flag}**" if is_common else flag, default, words


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


def _signature(action: argparse.Action) -> str:
    flags = ", ".join(action.option_strings)
    if action.nargs == 0:
        return flags
    return f"{flags} {action.metavar or ('X' if action.choices else action.dest.upper())}"


def _shared_rows(every: Mapping[str, Parser], title: str) -> dict[str, Row]:
    """Flag -> row, of the group as the first command has it that has most of it."""
    first = max(every.values(), key=lambda parser: len(_groups(parser).get(title, [])))
    return _flag_rows(first, _groups(first).get(title, []))


FLAGS: Row = ("flag", "default", "meaning")


def shared_flags(title: str) -> Callable[[], str]:
    return lambda: table(FLAGS, _shared_rows(parsers(), title).values())


def commands() -> str:
    every = parsers()
    shared = {title: _shared_rows(every, title) for title in SHARED}
    return "\n".join(_command(name, parser, shared) for name, parser in every.items())


def _command(name: str, parser: Parser, shared: Mapping[str, Mapping[str, Row]]) -> str:
    own: list[Row] = []
    lines = [f"### ridgeline {name}\n\n{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.\n"]
    for title, actions in _groups(parser).items():
        common = shared.get(title, {})
        rows = _flag_rows(parser, actions)
        own += [row for flag, row in rows.items() if common.get(flag) != row]
        same = [flag for flag, row in rows.items() if common.get(flag) == row]
        if same:
            lines.append(_reference(title, same, common))
    if own:
        lines.insert(1, table(FLAGS, own))
    return "\n".join(lines)


def _reference(title: str, same: Sequence[str], common: Mapping[str, Row]) -> str:
    left = [f"`{flag}`" for flag in common if flag not in same]
    link = f"[{title} flags](#{title}-flags)"
    if not left:
        return f"All {link}.\n"
    if len(left) <= len(same):
        return f"All {link} but {', '.join(left)}.\n"
    return f"Of the {link}: {', '.join(f'`{flag}`' for flag in same)}.\n"


PARTS: dict[str, Callable[[], str]] = {
    "lab pages": lab_pages,
    "families": families,
    "endpoints": endpoints,
    "completion fields": body(without(CompletionBody, Asking)),
    "chat fields": body(without(ChatBody, Asking)),
    "call fields": body(of_both()),
    "sampling fields": body(sampling()),
    "tokenize fields": body(declared(TokenizeText)),
    "detokenize fields": body(declared(DetokenizeBody)),
    "refused by completions": refused(UNSUPPORTED[CompletionBody]),
    "refused by chat": refused(UNSUPPORTED[ChatBody]),
    "harmless fields": harmless,
    "error codes": errors,
    "commands": commands,
    **{f"{title} flags": shared_flags(title) for title in SHARED},
}


def made(page: str) -> str:
    """The page's text with its marked parts made anew."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return MARK.sub(lambda found: found[1] + PARTS[found["name"]]() + found[3], text)


def main() -> int:
    texts = {page: made(page) for page in PAGES} | {"docs/metrics.md": docs_metrics.page()}
    for page, text in texts.items():
        (ROOT / page).write_text(text, encoding="utf-8")
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
