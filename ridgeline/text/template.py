"""How is a chat template run so that it can neither reach out nor run away?

Templates come with the model, so they are not trusted: Jinja's immutable sandbox, no access to
anything but what is handed in, a budget of loop turns and seconds, and limits on the output and on
what one operation may make. These are cheap, not complete: a server also renders in a process that
may be killed. The names that templates may use are those of Transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ridgeline.clock import Clock, WallClock

MAX_OUTPUT_CHARS = 1_000_000
MAX_TURNS = 100_000
MAX_SECONDS = 2.0
MAX_NUMBER_BITS = 4096
PADS = ("center", "indent", "batch", "slice")  # filters that make as much as a number says
WIDTH = re.compile(r"%[-+ #0]*(\*|[0-9.]{7,})|\{[^{}]*:[^{}]*[0-9]{7,}")  # from a million on


class TemplateRefusal(Exception):
    """The template itself refused the conversation, or did more than it may."""


class _Budget:
    """How much a rendering has left; one per rendering."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turns = MAX_TURNS
        self._end = clock.now() + MAX_SECONDS

    def turn(self) -> None:
        self._turns -= 1
        if self._turns < 0:
            raise TemplateRefusal(f"the chat template took more than {MAX_TURNS} loop turns")
        if self._turns % 256 == 0 and self._clock.now() > self._end:
            raise TemplateRefusal(f"the chat template took more than {MAX_SECONDS:g} seconds")


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


class _Turns(Extension):
    """Counts the turns of loops and calls of macros against the rendering's budget.

    Templates reach it through a node that has no name in their language, so that they cannot
    put another in its place.
    """

    @staticmethod
    def turn() -> None:
        _BUDGET.get().turn()


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Generator(CodeGenerator):
    """Computes nothing while it compiles: a constant expression may be as large as any other."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _Generator

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Count every turn of a loop and every call of a macro."""
        tree = super()._parse(source, name, filename)
        repeated: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
            *tree.find_all(nodes.For),
            *tree.find_all(nodes.Macro),
            *tree.find_all(nodes.CallBlock),
        ]
        for node in repeated:
            turn = nodes.ExtensionAttribute(_Turns.identifier, "turn")
            call = nodes.Call(turn, [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_numbers(*args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped


def _check_binop(operator: str, left: Any, right: Any) -> None:
    """Refuse what would make a number or a text without bounds of two that have them."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        if operator == "**":
            too_large = abs(left) > 10_000 or abs(right) > 100
        else:
            bits = (int(n).bit_length() for n in (left, right) if isinstance(n, int))
            too_large = sum(bits) > MAX_NUMBER_BITS
    elif operator == "%":
        too_large = isinstance(left, str) and _check_widths(left)
    elif operator == "+":
        too_large = _length(left) + _length(right) > MAX_OUTPUT_CHARS
    else:
        too_large = operator == "**" or _length(left) * _length(right) > MAX_OUTPUT_CHARS
    if too_large:
        raise TemplateRefusal("the chat template multiplied into too large a value")


def _check_widths(form: str) -> bool:
    """False; TemplateRefusal for a format that pads to a million characters or more."""
    if WIDTH.search(form):
        raise TemplateRefusal("the chat template pads a text too far")
    return False


def _check_numbers(*values: object) -> None:
    if any(isinstance(value, int) and value > MAX_OUTPUT_CHARS for value in values):
        raise TemplateRefusal("the chat template pads a text too far")


def _bounded(pads: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(pads)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(*args, *kwargs.values())
        return pads(*args, **kwargs)

    return bounded


def _length(value: object) -> int:
    if isinstance(value, (str, list, tuple)):
        return max(1, len(value))
    return abs(value) if isinstance(value, int) else 1


class _Namespace(Namespace):
    """Jinja's namespace without the names that lead into Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateRefusal("the chat template uses an underscored name in a namespace")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this does not escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> str:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[_GenerationTag, _Turns, "jinja2.ext.loopcontrols"],
    )
    environment.filters |= {name: _bounded(environment.filters[name]) for name in PADS}
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]  # writes as much as it is told to
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
    )
    return environment


class Template:
    """One compiled template. Raises jinja2.TemplateError when the source is not one."""

    def __init__(self, source: str, clock: Clock | None = None) -> None:
        self.source = source
        self._clock = clock or WallClock()
        environment = _environment()
        self._compiled = environment.from_string(source)
        self._tree = environment.parse(source)

    def render(self, values: Mapping[str, object]) -> str:
        """The text. TemplateRefusal, or another exception of Jinja or Python, when refused."""
        token = _BUDGET.set(_Budget(self._clock))
        try:
            return self._render(values)
        finally:
            _BUDGET.reset(token)

    def _render(self, values: Mapping[str, object]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._compiled.generate(values):
            parts.append(part)
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise TemplateRefusal(
                    f"the rendered chat is longer than {MAX_OUTPUT_CHARS} characters"
                )
        return "".join(parts)

    def written_texts(self) -> set[str]:
        """Texts that the template itself writes, apart from those it looks for in messages."""
        written = {node.data for node in self._tree.find_all(nodes.TemplateData)}
        constants = [n for n in self._tree.find_all(nodes.Const) if isinstance(n.value, str)]
        return written | {node.value for node in constants}

    def searched_texts(self) -> set[str]:
        """Texts that the template compares with, or gives to a method: it acts on them."""
        places: list[nodes.Node] = list(self._tree.find_all(nodes.Compare))
        for call in self._tree.find_all(nodes.Call):
            places += call.args
        found: set[str] = set()
        for place in places:
            constants = [place] if isinstance(place, nodes.Const) else []
            constants += place.find_all(nodes.Const)
            found |= {node.value for node in constants if isinstance(node.value, str)}
        return found
