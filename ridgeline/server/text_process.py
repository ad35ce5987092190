"""How do a model's chat template and tokenizer run where they can be killed?
`python -m ridgeline.server.text_process`.

The fork server loads both once, within limits, has one thread, and forks workers from then on: a
worker costs milliseconds and little memory, so that losing one matters to nobody but the request
that it worked on. The kernel holds a worker to its limits of processor time and memory, whatever
code runs; the HTTP process has a deadline besides, in case a worker gets no processor. A worker
ends with the fork server, the fork server with the HTTP process.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import structs

from ridgeline.child import die_with_parent, harden
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.frames import HEADER, frame, frame_length, read_exactly
from ridgeline.parsers import NONE, find_reasoning
from ridgeline.sampling.grammar import GrammarCompiler
from ridgeline.server.text_wire import (
    ENCODE_BYTES_PER_BYTE,
    ENCODE_S,
    ENCODE_S_PER_BYTE,
    GRAMMAR_S,
    IDS,
    LOAD_BYTES,
    LOAD_BYTES_PER_BYTE,
    LOAD_S,
    MAX_IDS,
    RETAINED_BYTES,
    TEMPLATE_S,
    WORK_BYTES,
    Answer,
    CheckGrammar,
    Command,
    Done,
    Encode,
    EncodeChat,
    Ended,
    Fork,
    Forked,
    Ids,
    Loaded,
    LoadFailed,
    LoadText,
    Question,
    Refusal,
    Stage,
    VocabularyTable,
)
from ridgeline.text.chat import MARK, ChatTemplate, load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from ridgeline.text.vocabulary import tables_of

CHARACTERS_PER_TOKEN = 4  # about what text has; only texts with more are looked at in parts
BROKEN = "invalid_value"
CUT_TOKENS = 64  # a cut may change the tokens around it
STDERR = 2
PAGE_BYTES = resource.getpagesize()

_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)


def address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * PAGE_BYTES


@contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Not more than this of processor time and, in all, of address space: over the one the kernel
    kills us (SIGPROF), over the other an allocation fails, which in native code is an abort."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    given = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([memory, *given]), before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def read(sock: socket.socket, length: int) -> bytes:
    """Exactly so much. The process ends when the other side is gone."""
    try:
        return read_exactly(sock, length)
    except EOFError:
        os._exit(0)


def write(sock: socket.socket, message: Answer | Done) -> None:
    try:
        sock.sendall(frame(message))
    except OSError:
        os._exit(0)


# ---------------------------------------------------------------------------- a worker


class Worker:
    """Answers questions with this tokenizer and template."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, tell: Callable[[Answer], None]
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._tell = tell
        self._own_bytes = address_space()
        self._place = 0
        self._in_template = False
        self._compiler: GrammarCompiler | None = None

    @property
    def is_worn(self) -> bool:
        """It holds on to so much memory that a new one is better."""
        return address_space() > self._own_bytes + RETAINED_BYTES

    def answer(self, question: Question) -> Ids | Refusal:
        self._place, self._in_template = 0, isinstance(question, EncodeChat)
        try:
            if isinstance(question, CheckGrammar):
                self._check_grammar(question)
                return _ids([])
            if isinstance(question, EncodeChat):
                return _ids([self._chat(question)])
            found = []
            for self._place, text in enumerate(question.texts):
                found.append(self._text(text, question))
            return _ids(found)
        except RequestFault as fault:
            return Refusal(str(fault), fault.param, fault.code, self._place, _kind(fault.__cause__))
        except BaseException as fault:  # a panic of the tokenizers package is no Exception
            what = "constraint" if isinstance(question, CheckGrammar) else "text"
            reason = f"the {what} could not be read ({_kind(fault)})"
            return Refusal(reason, None, BROKEN, self._place, _kind(fault))

    def _check_grammar(self, question: CheckGrammar) -> None:
        with limited(GRAMMAR_S, self._own_bytes + WORK_BYTES):
            if self._compiler is None:
                ends = frozenset(question.end_token_ids)
                self._compiler = self._tokenizer.grammar_compiler(question.vocab_size, ends)
            self._compiler.compile(question.constraint)

    def _text(self, text: str, question: Encode) -> list[int]:
        self._refuse_too_long(text, question.max_tokens, "prompt")
        with self._limits_of(text):
            return self._tokenizer.encode(text, question.add_special_tokens)

    def _chat(self, question: EncodeChat) -> list[int]:
        template = self._template
        if template is None:
            raise RequestFault("this model has no chat template", param="messages")
        words = "".join(m["content"] for m in question.messages if m["role"] == "user").strip()
        self._refuse_too_long(words, question.max_tokens, "messages")
        self._stage(is_template=True)
        with limited(TEMPLATE_S, self._own_bytes + WORK_BYTES):
            messages, tools = template.with_tools(question.messages, question.tools)
            if question.continue_final_message:
                written = template.write_unended(messages, tools or None, **question.options)
            else:
                begins = question.add_generation_prompt
                written = template.write(messages, tools or None, begins, **question.options)
        self._stage(is_template=False)
        with self._limits_of(written.text):
            return template.encode(written)

    def _refuse_too_long(self, text: str, max_tokens: int, param: str) -> None:
        """Raises RequestFault when a long text is over `max_tokens` already at its beginning.

        Megabytes of text for a context of kilobytes would otherwise take seconds. The tokens of a
        beginning differ from those of the whole only near the cut.
        """
        length = CHARACTERS_PER_TOKEN * max_tokens
        while length < len(text):
            self._stage(is_template=False)
            start = text[:length]
            with self._limits_of(start):
                count = len(self._tokenizer.encode(start, add_special_tokens=False))
            if count > max_tokens + CUT_TOKENS:
                raise RequestFault(
                    f"the prompt has more than the {max_tokens} tokens that can be served; "
                    "shorten it",
                    param=param,
                    code="context_length_exceeded",
                )
            length *= 2

    def _stage(self, *, is_template: bool) -> None:
        if is_template != self._in_template:
            self._in_template = is_template
            self._tell(Stage(is_template))

    def _limits_of(self, text: str) -> AbstractContextManager[None]:
        size = len(text.encode("utf-8", "surrogatepass"))
        memory = self._own_bytes + WORK_BYTES + ENCODE_BYTES_PER_BYTE * size
        return limited(ENCODE_S + ENCODE_S_PER_BYTE * size, memory)


def _kind(fault: BaseException | None) -> str:
    """Its words may be the client's."""
    return "" if fault is None else type(fault).__name__


def _ids(found: list[list[int]]) -> Ids:
    if sum(map(len, found)) > MAX_IDS:
        raise RequestFault(
            f"the text has more than {MAX_IDS} tokens; shorten it", code="limit_exceeded"
        )
    return Ids(tuple(array(IDS, ids).tobytes() for ids in found))


def work(sock: socket.socket, tokenizer: Tokenizer, template: ChatTemplate | None) -> NoReturn:
    """Answer until the other side closes, or this process is better replaced."""
    worker = Worker(tokenizer, template, lambda answer: write(sock, answer))
    while True:
        question = _QUESTIONS.decode(read(sock, frame_length(read(sock, HEADER.size))))
        answer = worker.answer(question)
        crashed = isinstance(answer, Refusal) and bool(answer.crash)  # it may be in any state
        answer = structs.replace(answer, is_last=crashed or worker.is_worn)
        write(sock, answer)
        if answer.is_last:
            os._exit(0)


# ---------------------------------------------------------------------------- the fork server


class ForkServer:
    """Obeys one command after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None

    def run(self) -> NoReturn:
        while True:
            command, fd = self._take()
            done: Done
            if isinstance(command, LoadText):
                done = self._load(command)
            elif isinstance(command, Fork):
                done = Forked(self._fork(socket.socket(fileno=fd)))
            else:
                done = Ended(_end(command.pid))
            write(self._sock, done)

    def _take(self) -> tuple[Command, int | None]:
        header, fds, _, _ = socket.recv_fds(self._sock, HEADER.size, 1)
        header += read(self._sock, HEADER.size - len(header))
        return _COMMANDS.decode(read(self._sock, frame_length(header))), fds[0] if fds else None

    def _load(self, command: LoadText) -> Loaded | LoadFailed:
        folder = Path(command.folder)
        size = LOAD_BYTES_PER_BYTE * _size_of(folder)
        stderr = _silence()
        try:
            with limited(LOAD_S, address_space() + LOAD_BYTES + size):
                return self._read(folder, command)
        except ConfigError as fault:
            return LoadFailed(str(fault))
        except MemoryError:
            return LoadFailed(f"{folder}: tokenizer and chat template need too much memory")
        except BaseException as fault:  # a panic of the tokenizers package is no Exception
            why = " ".join(str(fault).split())[:200] or type(fault).__name__
            return LoadFailed(f"{folder}: its tokenizer is unusable ({why})")
        finally:
            os.dup2(stderr, STDERR)
            os.close(stderr)

    def _read(self, folder: Path, command: LoadText) -> Loaded:
        tokenizer = self._tokenizer = load_tokenizer(folder)
        own = None if command.chat_template is None else Path(command.chat_template)
        template = self._template = load_chat_template(folder, tokenizer, own)
        if tokenizer is None:
            return Loaded(template is not None, None)
        tokenizer.encode_marked("a", MARK)  # what is made at first use, workers then share
        parsers = (NONE, NONE)
        if template is not None:
            name = template.choose_parser(command.tool_parser)
            parsers = name, find_reasoning(template.sources)
        rule, size = None, tokenizer.vocab_size
        tables: tuple[tuple[bytes, bytes], ...] = ()
        if tokenizer.pieces is not None:
            rule, tables = tokenizer.pieces.rule, tables_of(tokenizer.pieces, size)
        elif tokenizer.decodes_by_regex:
            raise ConfigError(f"{folder}: its decoder has a regular expression; that is not served")
        else:  # the HTTP process will do that; what cannot be done fails here
            deque(map(tokenizer.token_bytes, range(size)), 0)
        table = VocabularyTable(tuple(tokenizer.special_ids), rule, tables)
        gc.collect()
        gc.freeze()  # so that workers leave the pages of all this alone
        return Loaded(template is not None, table, tokenizer.eos_token_id, *parsers)

    def _fork(self, sock: socket.socket) -> int:
        fork_server, pid = os.getpid(), os.fork()
        if pid:
            sock.close()
            return pid
        die_with_parent()
        if os.getppid() != fork_server or self._tokenizer is None:
            os._exit(1)
        self._sock.close()
        os.close(_silence())
        try:
            work(sock, self._tokenizer, self._template)
        finally:
            os._exit(1)


def _silence() -> int:
    """Native code that ends here says so in a page about its stack and the client's text: let
    nobody hear it. What standard error was."""
    before = os.dup(STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDERR)
    os.close(nowhere)
    return before


def _size_of(folder: Path) -> int:
    """Bytes of the files that may be read."""
    if folder.is_file():
        return folder.stat().st_size
    return sum(path.stat().st_size for path in folder.glob("*[a-z].[jm]*") if path.is_file())


def _end(pid: int) -> int:
    try:
        os.kill(pid, signal.SIGKILL)  # our child, not yet waited for: the id is nobody else's
    except ProcessLookupError:
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="ridgeline.server.text_process")
    parser.add_argument("--fd", type=int, required=True, help="our end of the socket pair")
    options = parser.parse_args()
    die_with_parent()
    harden()
    os.set_inheritable(options.fd, False)
    ForkServer(socket.socket(fileno=options.fd)).run()


if __name__ == "__main__":
    main()
