"""Calls that are written in tags, each parameter between its own: Qwen 3 Coder and GLM."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from ridgeline.parsers.parser import MAX_HEAD, Broken, Kind, Parser, Reading, loaded

TEXT = "string"
JSON_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: TEXT, list: "array", dict: "object",
}  # fmt: skip


class TaggedCalls(Parser):
    """A call is `call` NAME `name_end`, then for each parameter `key` KEY `key_end` (`value`) VALUE
    `value_end`, then `call_end`. Where `name_end` is empty, the name ends with the next tag. Calls
    may stand between tags `around` them. The tool's schema says which values are texts."""

    around: ClassVar[tuple[str, ...]] = ()
    call: ClassVar[str]
    name_end: ClassVar[str] = ""
    key: ClassVar[str]
    key_end: ClassVar[str]
    value_begin: ClassVar[str] = ""
    value_end: ClassVar[str]
    call_end: ClassVar[str]

    def section(self, begin: str) -> Reading[None]:
        if begin.startswith("</"):  # a model may leave out the tag that goes with it
            self._undo = self._undo if not self.num_calls else None
            return
        if begin != self.call:
            yield from self.until((self.call, *self.around))
        while self.found == self.call:
            yield from self._read_call()
            if begin == self.call:
                return
            yield from self.until((self.call, *self.around))

    def _read_call(self) -> Reading[None]:
        ends = (self.key, self.call_end)
        name = yield from self.until((self.name_end,) if self.name_end else ends, most=MAX_HEAD)
        if not name.strip():
            raise Broken
        self.begin_call(name.strip())
        if self.name_end:
            yield from self.until(ends)
        schemas = _properties(self.tools.get(name.strip(), {}))
        before = "{"
        while self.found == self.key:
            key = yield from self.until((self.key_end,))
            if self.value_begin:
                yield from self.until((self.value_begin,))
            text = yield from self.until((self.value_end,))
            value = _value(_unwrapped(text), schemas.get(key.strip(), {}))
            self.emit(Kind.ARGUMENTS, f"{before}{json.dumps(key.strip())}: {value}")
            before = ", "
            yield from self.until(ends)
        self.emit(Kind.ARGUMENTS, "{}" if before == "{" else "}")


class Qwen3Coder(TaggedCalls):
    """Qwen 3 Coder, Qwen 3.5, Nemotron 3, Seed-OSS."""

    around = ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>")
    call, name_end = "<function=", ">"
    key, key_end, value_end = "<parameter=", ">", "</parameter>"
    call_end = "</function>"
    begins = (call, *around)
    signs = ("<function=",)


class GLM(TaggedCalls):
    """GLM 4.5 to 4.7."""

    call, call_end = "<tool_call>", "</tool_call>"
    key, key_end = "<arg_key>", "</arg_key>"
    value_begin, value_end = "<arg_value>", "</arg_value>"
    begins = (call,)
    signs = (key,)


def _unwrapped(text: str) -> str:
    """Without the line breaks that stand next to the tags."""
    return text.removeprefix("\n").removesuffix("\n")


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _types(schema: object) -> Iterable[str]:
    """What a value may be, as far as the schema says it plainly."""
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    yield from kind if isinstance(kind, list) else [kind] if isinstance(kind, str) else []
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema[name] if isinstance(schema.get(name), list) else []:
            yield from _types(one)
    for one in schema["enum"] if isinstance(schema.get("enum"), list) else []:
        yield JSON_TYPES.get(type(one), "null")


def _value(text: str, schema: object) -> str:
    """The value as JSON. What may be a text is one, unless it is what else it may be."""
    types = set(_types(schema))
    if "boolean" in types and text in ("True", "False"):
        text = text.lower()
    with suppress(Broken, ValueError, RecursionError):
        found = loaded(text)
        kind = JSON_TYPES.get(type(found), "null")
        if kind in types or TEXT not in types:
            return json.dumps(found, ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)
