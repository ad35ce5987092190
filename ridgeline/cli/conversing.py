"""How does a chat read messages and show answers? On a terminal lines break between words."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

BLOCK = '"""'  # around a message of several lines
CODE = "```"  # lines between two of these stay as they are: they are copied from the screen
TAB = 8  # columns


def messages() -> Iterator[str]:
    """What the person types, or the lines of a pipe. A line that ends in a backslash goes on in the
    next one; lines between triple quotes are one message."""
    is_typed = sys.stdin.isatty()
    if is_typed and sys.stdout.isatty():
        import readline  # noqa: F401  gives input() history and editing
    while True:
        try:
            yield _message()
        except EOFError:
            if is_typed:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not is_typed:
                raise
            print("\n(Ctrl-D ends the chat)", file=sys.stderr)


def _message() -> str:
    """EOFError where there is none; a message that the end of the input cuts off counts."""
    line = _line("> ")
    in_block = line.lstrip().startswith(BLOCK)
    if in_block:
        line = line.lstrip().removeprefix(BLOCK)
    said = []
    with suppress(EOFError):
        while not line.rstrip().endswith(BLOCK) if in_block else line.endswith("\\"):
            said.append(line if in_block else line[:-1])
            line = ""
            line = _line(". ")
    last = line.rstrip().removesuffix(BLOCK) if in_block else line
    return "\n".join([*said, last]).strip("\n")


def _line(prompt: str) -> str:
    """Without its end. The prompt is for a person, so it never gets into a file."""
    if sys.stdin.isatty():
        if sys.stdout.isatty():
            return input(prompt)
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def writer() -> Callable[[str], None]:
    """Shows the pieces of one answer as they come: wrapped on a terminal, else as they are."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        wrapped = Wrapped(lambda: shutil.get_terminal_size().columns)
        return lambda text: _show(wrapped.take(text))
    return _show


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class Wrapped:
    """Turns pieces of text into what a terminal needs. Each piece is shown at once; a word that
    turns out too long for its line is taken back and put on the next one."""

    def __init__(self, columns: Callable[[], int]) -> None:
        from rich.cells import get_character_cell_size

        self._cells: Callable[[str], int] = get_character_cell_size
        self._columns = columns
        self._width = 0
        self._column = 0
        self._word = ""  # since the last place where the line may break
        self._head = ""  # of the line, as far as it tells that code begins or ends
        self._in_code = False

    def take(self, text: str) -> str:
        # Terminals wait at the last column for what comes next, and count back differently there.
        self._width = max(2, self._columns() - 1)
        return "".join([self._next(char) for char in text])

    def _next(self, char: str) -> str:
        if char == "\n":
            self._in_code ^= self._head == CODE
            self._head = ""
            return self._break()
        if len(self._head) < len(CODE):
            self._head = (self._head + char).lstrip()
        if self._in_code:
            return char
        return self._space(char) if char.isspace() else self._letter(char)

    def _break(self) -> str:
        self._column, self._word = 0, ""
        return "\n"

    def _space(self, char: str) -> str:
        size = TAB - self._column % TAB if char == "\t" else 1
        if self._column + size > self._width:
            return self._break()
        self._column, self._word = self._column + size, ""
        return " " * size

    def _letter(self, char: str) -> str:
        size, before = self._cells(char), ""
        if self._column + size > self._width:
            before = self._move_word()
        self._column += size
        self._word = "" if size > 1 else self._word + char  # lines of wide letters break anywhere
        return before + char

    def _move_word(self) -> str:
        """To the next line, unless it fills this one."""
        word, length = self._word, sum(map(self._cells, self._word))
        if length in (0, self._column):
            return self._break()
        self._column = length
        return f"\033[{length}D\033[K\n{word}"
