"""Calls that are JSON objects with a name and arguments, alone or in a list, with or without a text
before them: Hermes and Qwen, Llama 3, and models that were told so in their prompt."""

from __future__ import annotations

from typing import ClassVar

from ridgeline.parsers.parser import SKIPPED, Broken, Kind, Parser, Reading, loaded

ARGUMENTS = ("arguments", "parameters")


class JSONCalls(Parser):
    """`{"name": NAME, "arguments": {...}}`: what the answer begins with, or what stands between
    tags. Without a tag only the name of an offered tool makes it a call."""

    begins: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    bare: ClassVar[str] = "{["
    ends: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    def section(self, begin: str) -> Reading[None]:
        while True:
            while (char := (yield from self.peek(SKIPPED + "[]"))) == "{":
                yield from read_object(self, is_sure=bool(begin))
            if not (begin and char):
                return
            yield from self.until((*self.ends, *self.begins))
            if self.found in self.ends:
                return


def read_object(parser: Parser, *, is_sure: bool) -> Reading[None]:
    """One call. `is_sure`: it is one, whatever its name and even without arguments. Raises Broken
    where it is none."""
    parser.take(1)
    name, held, has_begun, has_arguments = "", "", False, False
    while (yield from parser.peek(SKIPPED)) not in ("}", ""):
        key = yield from parser.text_value()
        yield from parser.expect(":")
        if key == "name" and not name:
            name = yield from parser.text_value()
            if not name or not (is_sure or name in parser.tools):
                raise Broken
        elif key in ARGUMENTS and not (has_arguments or held):
            is_object = (yield from parser.peek()) != '"'
            if name and not has_begun:
                parser.begin_call(name)
                has_begun = True
            if is_object and has_begun:
                yield from parser.value(Kind.ARGUMENTS)
                has_arguments = True
            else:
                held = yield from parser.value()
        else:
            yield from parser.value()
    is_closed = bool(parser.take(1))
    if not has_begun:
        if not (name and is_closed and (held or is_sure)):
            raise Broken
        parser.begin_call(name)
    if not has_arguments:
        parser.emit(Kind.ARGUMENTS, _unquoted(held) if held else "{}")


def _unquoted(arguments: str) -> str:
    """Some models write the object as a string of JSON."""
    found = loaded(arguments) if arguments.startswith('"') else None
    return found if isinstance(found, str) else arguments


class Hermes(JSONCalls):
    """Hermes, Qwen 2.5 and 3, Granite 4: each call between tags; lists of calls too."""

    begins: ClassVar[tuple[str, ...]] = (
        "<tool_call>", "<tool_calls>", "<TOOLCALL>", "<|tool_call|>", "<|function_call|>",
    )  # fmt: skip
    bare: ClassVar[str] = ""
    ends: ClassVar[tuple[str, ...]] = (
        "</tool_call>", "</tool_calls>", "</TOOLCALL>", "<|/tool_call|>", "<|message_sep|>",
    )  # fmt: skip
    signs: ClassVar[tuple[str, ...]] = begins


class Llama3JSON(JSONCalls):
    """Llama 3.1 to 3.3: the answer is the object, `parameters` are its arguments; several are
    parted by semicolons."""

    begins: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    ends: ClassVar[tuple[str, ...]] = ("<|eom_id|>", "<|eot_id|>")
    signs: ClassVar[tuple[str, ...]] = ("<|python_tag|>", "Environment: ipython")
