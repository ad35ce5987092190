"""How is an answer's text cut into reasoning, content and calls of tools while it comes in?

A parser reads the text as if it were all there: its methods are generators that stop where more is
needed. What it finds therefore depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # stops wherever it has to wait for text
SPACE = " \t\r\n"
SKIPPED = SPACE + ",;"  # between values
BEHIND = ",:}])" + SPACE  # what may stand behind a value that has no end of its own
BEGIN = '"{[('  # what ends it all the more
MAX_HEAD = 256  # characters of a tool's name and what stands around it


class Kind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # the text is the tool's name
    ARGUMENTS = "arguments"  # of the last call: more of its JSON text


class Piece(NamedTuple):
    kind: Kind
    text: str


class Tags(NamedTuple):
    """What stands before and behind reasoning."""

    begin: str
    end: str


class Broken(Exception):
    """What was read is no call after all, or the text has ended within one."""


class Parser:
    """The reader of one answer. Feed its text in pieces of any size, then call `finish`.

    A subclass says in `begins` which texts begin a call, in `bare` which characters do so at the
    very start of an answer, and in `section` how to read on behind one. Whatever turns out to be
    no call is content, as it stands. A call that the text leaves unfinished stays as it is.
    """

    begins: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = ""
    others: ClassVar[tuple[str, ...]] = ()  # further texts that may be special tokens
    signs: ClassVar[tuple[str, ...]] = ()  # a chat template with one of these is for this parser
    short_ids: ClassVar[bool] = False  # its templates take ids of nine letters and digits alone
    own_reasoning: ClassVar[bool] = False  # it tells reasoning apart itself

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        reasoning: Tags | None = None,
        *,
        is_reasoning: bool = False,
    ) -> None:
        """`tools`: the parameters' JSON schema by name; without any, no calls are looked for.
        `is_reasoning`: the prompt has begun the reasoning already."""
        self.tools = tools
        self.num_calls = 0
        self._reasoning = reasoning
        self._is_reasoning = is_reasoning
        self._buffer = ""
        self._at_end = False
        self._pieces: list[Piece] = []
        self._last: Kind | None = None
        self._space = ""  # at the end of what was emitted last
        self._strips = False  # white space is dropped until something else comes
        self.found = ""  # the end that `until` came to
        self._undo: list[str] | None = None  # what was read of a section that has no call yet
        self._reader = self.read()

    def feed(self, text: str) -> list[Piece]:
        """What is certain after `text`."""
        self._buffer += text
        return self._go_on()

    def finish(self) -> list[Piece]:
        """The rest, now that no more text will come."""
        self._at_end = True
        pieces = self._go_on()
        if self._space and not self.num_calls and self._last is Kind.CONTENT:
            pieces.append(Piece(Kind.CONTENT, self._space))
        self._space = ""
        return pieces

    def _go_on(self) -> list[Piece]:
        next(self._reader, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------------ for subclasses

    def section(self, begin: str) -> Reading[None]:
        """Read the calls behind `begin` ("" where `bare` stood). Raises Broken."""
        raise Broken
        yield

    def read(self) -> Reading[None]:
        """The whole answer."""
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self.tools and self.bare:
            yield from self._try(self._read_bare())
        begins = self.begins if self.tools else ()
        while begin := (yield from self.until(begins, Kind.CONTENT)):
            yield from self._try(self.section(begin), begin)

    def begin_call(self, name: str) -> None:
        """A call of this tool; its arguments come next. What was read until here is gone."""
        self.emit(Kind.CALL, name)
        self._undo = None

    def emit(self, kind: Kind, text: str) -> None:
        if kind is Kind.CALL:
            self.num_calls += 1
        elif not text:
            return
        if kind in (Kind.CONTENT, Kind.REASONING):
            text = self._spaced(kind, text)
        self._last = kind
        if text:
            self._pieces.append(Piece(kind, text))

    def _spaced(self, kind: Kind, text: str) -> str:
        """`text` without the white space around reasoning and calls. What stands at its end waits
        for what comes next."""
        if kind is not self._last:
            self._strips = kind is Kind.REASONING or self._last is not None
            self._space = ""
        if self._strips:
            text = text.lstrip(SPACE)
            self._strips = not text
        text = self._space + text
        shown = text.rstrip(SPACE)
        self._space = text[len(shown) :]
        return shown

    def until(self, ends: Iterable[str], kind: Kind | None = None, most: int = 0) -> Reading[str]:
        """Read up to the first of `ends` and past it. With `kind` the text is emitted and the end
        returned, "" where the text ends first. Without, the text is returned and the end kept in
        `found`; Broken where there is none, or not within `most` characters."""
        ends = tuple(ends)
        search, parts, left = _pattern(ends).search, list[str](), most
        while True:
            found = search(self._buffer)
            size = found.start() if found else len(self._buffer) - self._held(ends)
            is_long = bool(most) and size > left
            text = self.take(min(size, left) if most else size)
            left -= len(text)
            if kind is not None:
                self.emit(kind, text)
            else:
                parts.append(text)
            if found and not is_long:
                self.found = self.take(len(found[0]))
                return self.found if kind is not None else "".join(parts)
            if is_long or (self._at_end and kind is None):
                raise Broken
            if self._at_end:
                return ""
            yield

    def _held(self, ends: Collection[str]) -> int:
        """Characters at the end of the buffer that may be the beginning of one of `ends`."""
        if self._at_end or not ends:
            return 0
        tail = self._buffer[-max(map(len, ends)) + 1 :] if max(map(len, ends)) > 1 else ""
        for i in range(len(tail)):
            if any(end.startswith(tail[i:]) for end in ends):
                return len(tail) - i
        return 0

    def take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        if self._undo is not None and text:
            self._undo.append(text)
        return text

    def give_back(self, text: str) -> None:
        """`text` was read last, and is to be read again."""
        self._buffer = text + self._buffer
        if self._undo is not None:
            self._undo.append("".join(self._undo).removesuffix(text))
            del self._undo[:-1]

    def peek(self, skipped: str = SPACE) -> Reading[str]:
        """The next character that is none of `skipped`, which are read; "" at the end."""
        while True:
            self.take(len(self._buffer) - len(self._buffer.lstrip(skipped)))
            if self._buffer or self._at_end:
                return self._buffer[:1]
            yield

    def expect(self, char: str) -> Reading[None]:
        """Read this character, behind white space. Raises Broken."""
        if (yield from self.peek()) != char:
            raise Broken
        self.take(1)

    def value(self, kind: Kind | None = None, *, depth: int = 0, quotes: str = '"') -> Reading[str]:
        """Read one JSON value; with `kind` it is emitted as it comes, else returned. It is only
        looked at for where it ends: behind the bracket that closes the `depth` ones open already,
        if there are any. Raises Broken where the text ends before."""
        yield from self.peek()
        parts: list[str] = []
        count, quote, is_escaped, has_ended = 0, "", False, False
        while not has_ended:
            size = 0
            for char in self._buffer:
                if quote:
                    quote = quote if is_escaped or char != quote else ""
                    is_escaped = char == "\\" and not is_escaped
                    has_ended = not quote and not depth
                elif not depth and (char in BEHIND or (char in BEGIN and count + size)):
                    has_ended = True
                    break
                elif char in quotes:
                    quote = char
                elif char in "{[(":
                    depth += 1
                elif char in "}])":
                    depth -= 1
                    has_ended = not depth
                size += 1
                if has_ended:
                    break
            count += size
            text = self.take(size)
            if kind is None:
                parts.append(text)
            else:
                self.emit(kind, text)
            if not has_ended:
                if self._at_end:
                    raise Broken
                yield
        if not count:
            raise Broken
        return "".join(parts)

    def text_value(self) -> Reading[str]:
        """A JSON string. Raises Broken."""
        found = loaded((yield from self.value()))
        if not isinstance(found, str):
            raise Broken
        return found

    # ------------------------------------------------------------------

    def _try(self, section: Reading[None], begin: str = "") -> Reading[None]:
        """Read a section; it becomes content unless a call begins in it."""
        self._undo = [begin]
        with suppress(Broken):
            yield from section
        read, self._undo = self._undo, None
        if read is not None:
            self.emit(Kind.CONTENT, "".join(read))

    def _read_bare(self) -> Reading[None]:
        if (yield from self.peek()) not in tuple(self.bare):
            raise Broken
        yield from self.section("")

    def _read_reasoning(self, tags: Tags) -> Reading[None]:
        self._undo = []
        yield from self.peek()
        while tags.begin.startswith(self._buffer) and self._buffer != tags.begin:
            if self._at_end:
                break
            yield
        read, self._undo = "".join(self._undo), None
        if self._buffer.startswith(tags.begin):
            self.take(len(tags.begin))
        elif not self._is_reasoning:
            self.emit(Kind.CONTENT, read)
            return
        yield from self.until((tags.end,), Kind.REASONING)
        self._last = Kind.REASONING


def _pattern(ends: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, ends)) if ends else r"(?!)")


def loaded(text: str) -> Any:
    """A JSON value. Raises Broken."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Broken from None
