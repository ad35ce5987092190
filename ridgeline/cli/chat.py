"""`ridgeline chat`: a conversation with the model in the terminal.

How a message is read and an answer shown: on a terminal lines break between words.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.cli.answer_stats import AnswerStats, add_stats_flag
from ridgeline.cli.flags import add_sampling_flags, sampling_changes, setting
from ridgeline.cli.parser import Parser
from ridgeline.cli.session import CtrlC, add_session_flags, note, open_llm
from ridgeline.errors import ConfigError, RequestFault

if TYPE_CHECKING:
    from ridgeline.answer import ChoiceDelta
    from ridgeline.llm import LLM


EXAMPLES = """Type a message and press Enter. Ctrl-C stops an answer, Ctrl-D or /exit ends the chat.
/help lists the commands. Messages may also be piped in, one per line. A line that ends in \\ goes
on in the next one, and lines between triple quotes (\"\"\") are one message.

A model without a chat template cannot chat; with --plain it continues your text instead: what you
type is added to the text so far, and the model writes on.

examples:
  ridgeline chat                                           with the bundled model
  ridgeline chat user/model --system "You answer in one sentence."
  ridgeline chat path/to/base-model --plain --temperature 0.8
  printf 'Hello\\nAnd why?\\n' | ridgeline chat path/to/model -q
"""

HELP = """/help                 this list
/regenerate           another answer to the last message
/reset                forget the conversation
/system TEXT          give the model its role, and forget the conversation
/set NAME=VALUE       such as temperature=0.5 or max_tokens=100; without value: the model's own
/save FILE            write the conversation as JSON
/exit                 leave (or Ctrl-D); Ctrl-C stops an answer
A line that ends in \\ goes on in the next one; lines between \"\"\" and \"\"\" are one message."""

NOT_IN_CHAT = ("n", "best_of", "beam_width", "length_penalty", "early_stopping", "logprobs")
SETTABLE = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def add_arguments(parser: Parser) -> None:
    parser.flag("--system TEXT", "the model's role, before the first message")
    parser.flag("--plain", "continue the text; for models without chat template")
    add_stats_flag(parser)
    add_session_flags(parser, without=("seed",))
    add_sampling_flags(parser, without=(*NOT_IN_CHAT, "prompt_logprobs"))


def run(args: argparse.Namespace) -> int:
    changes = sampling_changes(args)
    if args.plain and args.system is not None:
        raise ConfigError("--system needs a chat template; it cannot be used with --plain")
    seed = {"seed": changes["seed"]} if "seed" in changes else {}
    with open_llm(args, **seed) as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"{args.model} has no tokenizer, so there is no text to chat in")
        if not args.plain and not llm.has_chat_template:
            raise ConfigError(
                f"{args.model} has no chat template; use --plain to let it continue your text"
            )
        Chat(args, llm, changes).run()
    return 0


class Chat:
    """The conversation so far and the commands on it.

    `messages` is used with a chat template, `text` without one (--plain).
    """

    def __init__(self, args: argparse.Namespace, llm: LLM, changes: dict[str, Any]) -> None:
        self.args = args
        self.llm = llm
        self.changes: dict[str, Any] = {"max_tokens": None} | changes
        self.system: str | None = args.system
        self.messages: list[dict[str, str]] = []
        self.text = ""
        self.last: tuple[str, str, list[dict[str, str]]] | None = None  # message, what was before
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self.say(HELP),
            "/regenerate": lambda _: self.regenerate(),
            "/reset": lambda _: self.reset(),
            "/system": self.set_system,
            "/set": self.set,
            "/save": self.save,
        }
        llm.sampling(**self.changes)  # refuse a bad flag now, not at the first answer
        self.reset()

    def say(self, text: str) -> None:
        note(self.args, text)

    def run(self) -> None:
        """Until /exit or the end of the input."""
        if sys.stdin.isatty():
            self.say("/help lists the commands, Ctrl-D ends the chat.")
        for line in messages():
            if line in ("/exit", "/quit"):
                return
            try:
                self.take(line)
            except RequestFault as fault:
                self.say(f"ridgeline: {fault}")

    def take(self, line: str) -> None:
        """What the person says: a command or a message."""
        name, _, rest = line.partition(" ")
        if name in self.commands:
            self.commands[name](rest.strip())
        elif name.startswith("/") and name[1:].isalpha():
            self.say(f"no command {name}; /help lists them")
        elif line.strip():
            self.answer(line)

    # ------------------------------------------------------------------ commands

    def reset(self) -> None:
        self.text, self.last = "", None
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def set_system(self, text: str) -> None:
        if self.args.plain:
            raise RequestFault("/system needs a chat template")
        self.system = text or None
        self.reset()

    def set(self, text: str) -> None:
        if not text:
            chosen = self.llm.sampling(**self.changes)
            self.say("  ".join(f"{name}={getattr(chosen, name)}" for name in SETTABLE))
            return
        name, value = setting(text, SETTABLE)
        changes = dict(self.changes)
        if value is None and name != "max_tokens":
            changes.pop(name, None)
        else:
            changes[name] = value
        self.llm.sampling(**changes)  # raises RequestFault for a bad value
        self.changes = changes

    def save(self, name: str) -> None:
        if not name:
            raise RequestFault("/save needs a file name")
        what = {"text": self.text} if self.args.plain else {"messages": self.messages}
        try:
            Path(name).write_text(
                json.dumps(what, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise RequestFault(f"/save {name}: {error.strerror}") from None
        self.say(f"saved to {name}")

    def regenerate(self) -> None:
        if self.last is None:
            raise RequestFault("there is no answer yet that could be made again")
        sampling = self.llm.sampling(**self.changes)
        if sampling.is_greedy or sampling.seed is not None:
            way_out = "temperature=0.8" if sampling.is_greedy else "seed=none"
            self.say(f"with these settings each answer is the same; /set {way_out} draws others")
        line, self.text, self.messages = self.last
        self.answer(line)

    # ------------------------------------------------------------------ answers

    def answer(self, line: str) -> None:
        """Ask, show the answer as it comes, and remember what was said (also if stopped)."""
        sampling = self.llm.sampling(**self.changes)
        before = (line, self.text, self.messages)
        if self.args.plain:
            said = self.show(self.llm.stream(self.text + line, sampling))
            self.last = before
            self.text += line + said
            return
        asked = [*self.messages, {"role": "user", "content": line}]
        said = self.show(self.llm.chat_stream(asked, sampling))
        self.last = before
        self.messages = [*asked, {"role": "assistant", "content": said}]

    def show(self, pieces: Iterator[ChoiceDelta]) -> str:
        stats = AnswerStats(self.args, self.llm)
        said: list[str] = []
        write = writer()
        with CtrlC() as ctrl_c:
            for piece in ctrl_c.watch(pieces):
                stats.take(piece)
                said.append(piece.text)
                write(piece.text)
        write("\n")
        stats.show()
        return "".join(said)


# ---------------------------------------------------------------------- messages and the screen

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
