"""Calls that are a head with the tool's name and then the arguments as JSON: DeepSeek, Kimi
and Mistral."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ridgeline.parsers.json_calls import read_object
from ridgeline.parsers.parser import MAX_HEAD, SKIPPED, Broken, Kind, Parser, Reading


def read_arguments(parser: Parser, name: str) -> Reading[None]:
    """A JSON object comes next. Raises Broken where there is none."""
    if not name or (yield from parser.peek()) != "{":
        raise Broken
    parser.begin_call(name)
    yield from parser.value(Kind.ARGUMENTS)


class HeadedCalls(Parser):
    """`begins` are what stands before all calls and before each; a name, `separator` and the
    arguments follow, then one of the `ends`: of one call and of all."""

    separator: ClassVar[str]
    ends: ClassVar[Sequence[str]]

    def section(self, begin: str) -> Reading[None]:
        calls, call = self.begins
        if begin == calls:
            yield from self.until((call, self.ends[1]))
        while self.found == call:
            head = yield from self.until((self.separator,), most=MAX_HEAD)
            yield from self._read_arguments(head.strip())
            yield from self.until((call, self.ends[1]))

    def _read_arguments(self, head: str) -> Reading[None]:
        yield from read_arguments(self, head)


def _of_deepseek(*names: str) -> tuple[str, ...]:
    return tuple(f"<\uff5ctool\u2581{name}\uff5c>" for name in names)


class DeepSeekV3(HeadedCalls):
    """V3 and R1: the kind, the name and a fenced block; V3.1: the name and the object."""

    begins = _of_deepseek("calls\u2581begin", "call\u2581begin")
    separator, *ends = _of_deepseek("sep", "call\u2581end", "calls\u2581end")
    others = (separator, *ends)
    signs = begins

    def _read_arguments(self, head: str) -> Reading[None]:
        if head == "function":
            head = (yield from self.until(("```json",), most=MAX_HEAD)).strip()
        yield from read_arguments(self, head)


class KimiK2(HeadedCalls):
    """The name is `functions.NAME:0`, with the number of the call."""

    begins = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    separator = "<|tool_call_argument_begin|>"
    ends = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    others = (separator, *ends)
    signs = begins

    def _read_arguments(self, head: str) -> Reading[None]:
        yield from read_arguments(self, head.removeprefix("functions.").rpartition(":")[0] or head)


class Mistral(Parser):
    """The older form is a list of objects, the newer one a name and its arguments."""

    begins: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    others: ClassVar[tuple[str, ...]] = ("[ARGS]", "[CALL_ID]")
    short_ids: ClassVar[bool] = True
    signs: ClassVar[tuple[str, ...]] = begins

    def section(self, begin: str) -> Reading[None]:
        while (char := (yield from self.peek(SKIPPED + "[]"))) == "{":
            yield from read_object(self, is_sure=True)
        if char and self._undo is not None:
            name = yield from self.until(("[ARGS]", "[CALL_ID]", "{"), most=MAX_HEAD)
            if self.found == "[CALL_ID]":
                yield from self.until(("[ARGS]",), most=MAX_HEAD)
            if self.found == "{":
                self.give_back("{")
            yield from read_arguments(self, name.strip())
