"""Do templates and tokenizers in processes of their own answer as they would here, and does losing
such a process harm nobody?"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import decoders

from ridgeline import build
from ridgeline.config import EngineConfig
from ridgeline.demo import folder as bundled
from ridgeline.errors import ConfigError
from ridgeline.log import RateLimit
from ridgeline.server import text_client, text_process
from ridgeline.server.config import DEFAULT_BUILDER
from ridgeline.server.model import served_model
from ridgeline.server.text_client import TextClient, TextFault, Turns
from ridgeline.server.text_process import ForkServer, Worker, limited
from ridgeline.server.text_wire import (
    IDS,
    Encode,
    EncodeChat,
    Ids,
    Loaded,
    LoadFailed,
    LoadText,
    Refusal,
)
from ridgeline.text.chat import ChatTemplate, load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.bombs import (
    GROWTH,
    write_growing_decoder,
    write_template_bombs,
    write_tokenizer_bombs,
)
from tests.server.model_folder import write_model_folder
from tests.server.running import PATIENCE_S
from tests.server.test_early_text import READY, serve
from tests.text.vocabularies import ALL_WAYS, folder_for

MOST = 1 << 20
TEXTS = (
    "",
    "hello world",
    " two  spaces\n\ttab",
    "h\u00e9llo \u4e16\u754c \U0001f600 e\u0301",
    "x" * 3000,
)
CHAT = ({"role": "user", "content": "say <|end|> or </s> or <|im_end|>, please"},)


def chat(text: str) -> EncodeChat:
    return EncodeChat(({"role": "user", "content": text},), True, {}, MOST)


def run(folder: Path, test: Callable[[TextClient], Awaitable[None]], workers: int = 2) -> None:
    """`test` of a client whose model is in `folder`."""

    async def go() -> None:
        client = TextClient(workers)
        try:
            await client.load(folder)
            await client.ids(Encode(("a",), True, MOST), b"", "first")
            await test(client)
        finally:
            await client.close()

    asyncio.run(go())


async def ids(client: TextClient, question: Encode | EncodeChat) -> list[int]:
    return array(IDS, (await client.ids(question, b"", "id"))[0]).tolist()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


def pids(client: TextClient) -> list[int]:
    assert client.fork_server_pid is not None
    return children(client.fork_server_pid)


async def lose(
    client: TextClient, question: Encode | EncodeChat, how: int = signal.SIGABRT
) -> list[int]:
    """Ask, and end the worker that has the question."""
    for pid in pids(client):
        os.kill(pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(ids(client, question))
    await asyncio.sleep(0)
    for worker in client._workers:
        if worker.job is not None:
            os.kill(worker.pid, how)
    for pid in pids(client):
        os.kill(pid, signal.SIGCONT)
    return await asked


# ------------------------------------------------------------------ the same answers


def loaded_here(folder: Path, kind: type[Any] = Loaded) -> tuple[Any, ForkServer]:
    """As the fork server's process has it, over the wire's bytes."""
    fork_server = ForkServer(None)  # type: ignore[arg-type]
    loaded = fork_server._load(LoadText(str(folder)))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(loaded), type=kind), fork_server


# Each is of a kind with one that is not among them.
SELDOM = {
    ("gpt2", "tokenizer.json"),
    ("mistral", "tokenizer.model.v1"),
    ("llama2-32000", "ggml-vocab-llama-spm.gguf"),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(*pair, marks=pytest.mark.slow if pair in SELDOM else ()) for pair in ALL_WAYS],
)
def test_every_vocabulary_is_the_same_by_its_table(shared: Path, name: str, way: str) -> None:
    folder = folder_for(name, way)
    folder = folder / way if way.endswith(".gguf") else folder
    loaded, _ = loaded_here(folder)
    whole = load_tokenizer(folder)
    assert whole is not None
    served = served_model(serve("m").config, READY, loaded, folder)
    table = served.vocabulary
    assert table is not None
    assert served.has_chat_template == (load_chat_template(folder, whole) is not None)
    assert type(table) is not type(whole)
    assert table.special_ids == whole.special_ids
    everyone = range(-1, whole.vocab_size + 2)
    assert [*map(table.token_bytes, everyone)] == [*map(whole.token_bytes, everyone)]
    for text in TEXTS:
        found = whole.encode(text)
        assert table.decode(found) == whole.decode(found)


def test_answers_are_those_of_the_tokenizer_here(shared: Path) -> None:
    for folder in (bundled("chat"), shared / "tokenizers" / "minimind-6400"):
        tokenizer = load_tokenizer(folder)
        template = load_chat_template(folder, tokenizer)
        assert tokenizer is not None
        assert template is not None

        async def same(
            client: TextClient, tokenizer: Any = tokenizer, template: Any = template
        ) -> None:
            for special in (True, False):
                found = await client.ids(Encode(TEXTS, special, MOST), b"", "id")
                want = [tokenizer.encode(text, special) for text in TEXTS]
                assert [array(IDS, one).tolist() for one in found] == want
            question = EncodeChat(CHAT, False, {"enable_thinking": False}, MOST)
            want = template.encode_chat(CHAT, None, False, enable_thinking=False)
            assert await ids(client, question) == want

        run(folder, same)


def test_a_million_tokens_come_back(fake_model: Path) -> None:
    async def million(client: TextClient) -> None:
        assert await ids(client, Encode(("x" * 1_000_000,), False, MOST)) == [ord("x")] * 1_000_000

    run(fake_model, million)


# ------------------------------------------------------------------ losses


def test_a_worker_lost_while_idle_is_replaced(fake_model: Path) -> None:
    async def idle(client: TextClient) -> None:
        before = pids(client)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        want = await ids(client, chat("hello"))
        assert want == await ids(client, chat("hello"))
        while len(pids(client)) < len(before):
            await asyncio.sleep(0.01)
        assert not set(before) & set(pids(client))

    run(fake_model, idle)


def test_a_worker_lost_while_it_works_costs_its_request_alone(fake_model: Path) -> None:
    async def working(client: TextClient) -> None:
        with pytest.raises(TextFault, match="template needed more than 256 MiB") as caught:
            await lose(client, chat("hello"))
        assert (caught.value.code, caught.value.param) == ("invalid_messages", "messages")
        with pytest.raises(TextFault, match="tokenizer needed more") as caught:
            await lose(client, Encode(("hello",), True, MOST))
        assert (caught.value.code, caught.value.param) == ("invalid_value", "prompt")
        assert await ids(client, Encode(("hello",), False, MOST)) == [*b"hello"]

    run(fake_model, working)


def test_who_was_killed_by_somebody_else_is_done_again(fake_model: Path) -> None:
    async def working(client: TextClient) -> None:
        question = Encode(("hello",), False, MOST)
        assert await lose(client, question, signal.SIGKILL) == [*b"hello"]

    run(fake_model, working)


def test_a_worker_lost_while_it_writes_costs_its_request_alone(
    fake_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = text_client._Worker.data_received

    def kill(self: text_client._Worker, data: bytes) -> None:
        take(self, data)
        if self.job is not None:
            os.kill(self.pid, signal.SIGABRT)  # the rest is larger than a socket's buffer

    async def writing(client: TextClient) -> None:
        monkeypatch.setattr(text_client._Worker, "data_received", kill)
        with pytest.raises(TextFault, match="tokenizer"):
            await ids(client, Encode(("x" * 2_000_000,), False, 1 << 22))
        monkeypatch.undo()
        assert await ids(client, Encode(("hello",), False, MOST)) == [*b"hello"]

    run(fake_model, writing)


def test_a_lost_keeper_costs_nobody_his_request(fake_model: Path) -> None:
    async def keeperless(client: TextClient) -> None:
        first = client.fork_server_pid
        assert first is not None
        workers = pids(client)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        questions = [Encode((f"text {i}",), False, MOST) for i in range(5)]
        asked = [asyncio.ensure_future(ids(client, question)) for question in questions]
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        found = await asyncio.gather(*asked)
        assert found == [[*question.texts[0].encode()] for question in questions]
        assert client.fork_server_pid not in (first, None)
        while any(Path(f"/proc/{pid}").exists() for pid in (first, *workers)):
            await asyncio.sleep(0.01)  # until init has seen them

    run(fake_model, keeperless)


def test_three_hundred_losses_leave_nothing_behind(fake_model: Path) -> None:
    async def many(client: TextClient) -> None:
        fork_server = client.fork_server_pid
        while len(client._idle) < 2:
            await asyncio.sleep(0.01)
        processes, files = len(pids(client)), len(os.listdir("/proc/self/fd"))
        theirs = len(os.listdir(f"/proc/{fork_server}/fd"))
        for _ in range(300):
            with pytest.raises(TextFault):
                await lose(client, chat("hello"))
        assert client.fork_server_pid == fork_server

        def left() -> tuple[int, ...]:
            fds = os.listdir("/proc/self/fd"), os.listdir(f"/proc/{fork_server}/fd")
            return len(pids(client)), *map(len, fds)

        async with asyncio.timeout(PATIENCE_S):  # until the last worker has been replaced
            while left() != (processes, files, theirs):
                await asyncio.sleep(0.01)

    run(fake_model, many)


def test_nobody_is_given_to_a_worker_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that crashes ends its worker after the answer; who waits gets another one."""
    folder = write_template_bombs(tmp_path / "model")
    monkeypatch.setattr(text_client, "TRIES", 1)

    async def crowd(client: TextClient) -> None:
        plain = await ids(client, chat("hello"))
        for _ in range(5):
            asked = [chat("macro" if i % 3 else "hello") for i in range(12)]
            answers = await asyncio.gather(
                *(ids(client, one) for one in asked), return_exceptions=True
            )
            assert [a == plain for a in answers] == [i % 3 == 0 for i in range(12)]
            faults = [str(a) for i, a in enumerate(answers) if i % 3]
            assert all("RecursionError" in fault for fault in faults), faults

    run(folder, crowd)


def test_one_that_waits_is_not_begun_when_its_client_goes(fake_model: Path) -> None:
    async def gone(client: TextClient) -> None:
        for pid in pids(client):
            os.kill(pid, signal.SIGSTOP)
        first = asyncio.ensure_future(ids(client, Encode(("a",), False, MOST)))
        second = asyncio.ensure_future(ids(client, Encode(("b" * 9,), False, MOST)))
        await asyncio.sleep(0)
        second.cancel()
        for pid in pids(client):
            os.kill(pid, signal.SIGCONT)
        assert await first == [*b"a"]
        assert client._turns.take() is None
        assert await ids(client, Encode(("c",), False, MOST)) == [*b"c"]

    run(fake_model, gone)


def test_a_worker_that_gets_no_processor_is_killed(
    fake_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_client, "WALL_S", 0.2)

    async def stopped(client: TextClient) -> None:
        for pid in pids(client):
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TextFault, match="took more than 0 s on this text"):
            await ids(client, Encode(("a",), False, MOST))

    run(fake_model, stopped)


# ------------------------------------------------------------------ limits


def end_of(work: Callable[[], None]) -> int:
    """Of a process of its own that does this."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_limit_of_time_holds_whatever_runs() -> None:
    def long() -> None:
        with limited(0.05, 1 << 40):
            sum(range(1 << 27))  # in C: no Python code runs meanwhile

    assert end_of(long) == -signal.SIGPROF


def test_after_its_block_a_limit_is_gone() -> None:
    def fine() -> None:
        with limited(0.05, 1 << 40):
            pass
        sum(range(10_000_000))
        os._exit(0)

    assert end_of(fine) == 0


def test_a_text_that_grows_without_bounds_costs_its_request_alone(tmp_path: Path) -> None:
    async def growing(client: TextClient) -> None:
        with pytest.raises(TextFault, match="needed more than 256 MiB of memory"):
            await ids(client, Encode(("a", GROWTH), False, MOST))
        assert await ids(client, Encode(("hello",), False, MOST)) == [*b"hello"]

    run(write_tokenizer_bombs(tmp_path / "model"), growing)


def test_what_cannot_be_loaded_in_its_limits_is_refused(tmp_path: Path) -> None:
    async def nothing(client: TextClient) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match="at most 256 times"):
        run(write_growing_decoder(tmp_path / "model"), nothing)


def test_a_load_that_never_ends_is_given_up(
    fake_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_client, "LOAD_WALL_S", 0.0)
    with pytest.raises(ConfigError, match="take over 30 s of processor time"):
        asyncio.run(load(fake_model))


async def load(folder: Path) -> None:
    client = TextClient(1)
    try:
        await client.load(folder)
    finally:
        await client.close()


def with_decoder(folder: Path, decoder: decoders.Decoder) -> Path:
    path = write_model_folder(folder) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.decoder = decoder
    tokenizer.save(str(path))
    return folder


def test_what_only_the_tokenizer_can_decode_it_decodes_here(tmp_path: Path) -> None:
    folder = with_decoder(tmp_path / "model", decoders.WordPiece())
    loaded, _ = loaded_here(folder)
    served = served_model(serve("m").config, READY, loaded, folder)
    assert isinstance(served.vocabulary, Tokenizer)
    assert served.vocabulary.decode([*b"hi"]) == "h i"


def test_a_decoder_with_a_regular_expression_is_refused(tmp_path: Path) -> None:
    decoder = decoders.Replace(tokenizers.Regex(r"(b|b?b)+$"), "")
    loaded, _ = loaded_here(with_decoder(tmp_path / "model", decoder), LoadFailed)
    assert "regular expression" in loaded.message


# ------------------------------------------------------------------ whose turn it is


@pytest.fixture
def turns() -> Turns[str]:
    return Turns(3)


def test_tenants_take_turns(turns: Turns[str]) -> None:
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        turns.add(item[:1].encode(), item)
    taken = []
    while (found := turns.take()) is not None:
        taken.append(found[1])
        turns.done(found[0])
    assert taken == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_nobody_keeps_all_workers_busy(turns: Turns[str]) -> None:
    for i in range(9):
        turns.add(b"a", f"a{i}")
    assert [turns.take(), turns.take(), turns.take()] == [(b"a", "a0"), (b"a", "a1"), None]
    turns.add(b"b", "b0")
    assert turns.take() == (b"b", "b0")
    turns.done(b"a")
    assert turns.take() == (b"a", "a2")


def test_one_alone_has_one_worker_where_there_is_one() -> None:
    turns = Turns[str](1)
    turns.add(b"a", "a0")
    assert turns.take() == (b"a", "a0")


def test_a_worker_says_when_it_is_worn(fake_model: Path) -> None:
    tokenizer = load_tokenizer(fake_model)
    assert tokenizer is not None
    worker = Worker(tokenizer, None, lambda answer: None)
    assert isinstance(worker.answer(Encode(("a",), True, MOST)), Ids)
    assert not worker.is_worn
    ballast = bytearray(200 << 20)
    assert worker.is_worn
    del ballast


# ------------------------------------------------------------------ crashes


class Panic(BaseException):
    """What the tokenizers package raises when its own code panics."""


class Panicking:
    def encode_batch_fast(self, *args: object, **options: object) -> None:
        raise Panic("byte 3 is inside the client's words")


def test_a_panic_is_told_apart_from_a_refusal(
    fake_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the worker that met it is not asked again."""
    nobody: Any = None
    tokenizer = load_tokenizer(fake_model)
    assert tokenizer is not None
    template = load_chat_template(fake_model, tokenizer)
    worker = Worker(tokenizer, template, lambda answer: None)
    refused = worker.answer(Encode(("\ud800",), True, MOST))
    assert isinstance(refused, Refusal)
    assert (refused.crash, refused.code) == ("", "invalid_text")
    tokenizer._backend = Panicking()  # type: ignore[assignment]
    crashed = worker.answer(Encode(("a",), True, MOST))
    assert isinstance(crashed, Refusal)
    assert (crashed.crash, crashed.code) == ("Panic", "invalid_value")
    assert "words" not in crashed.message
    asked = msgspec.msgpack.encode(Encode(("a",), True, MOST))
    patches = {"read": lambda *_: asked, "frame_length": len, "write": lambda *_: None}
    for name, patch in patches.items():
        monkeypatch.setattr(text_process, name, patch)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        text_process.work(nobody, tokenizer, template)


def test_a_template_that_crashes_is_told_apart_from_one_that_refuses(fake_model: Path) -> None:
    tokenizer = load_tokenizer(fake_model)
    for source, kind in (
        ("{{ raise_exception('no') }}", ""),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ):
        template = ChatTemplate({"default": source}, tokenizer, fake_model)
        worker = Worker(tokenizer, template, lambda answer: None)  # type: ignore[arg-type]
        answer = worker.answer(chat("hello"))
        assert isinstance(answer, Refusal)
        assert (answer.crash, answer.code) == (kind, "invalid_messages")


def test_a_crash_is_one_line_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    """However many there are in a second; a refusal is none."""
    caplog.handler.addFilter(limit := RateLimit(period_s=1000.0))

    async def meet(crash: str) -> None:
        client = TextClient(1)
        asking = asyncio.ensure_future(client.ids(chat("a"), b"t", f"req-{crash or 'refused'}"))
        await asyncio.sleep(0)
        _, job = client._turns.take() or pytest.fail("nobody asks")
        worker: Any = object()
        client.on_answer(worker, job, Refusal("why", None, "invalid_value", 0, crash))
        with pytest.raises(TextFault, match="why"):
            await asking

    with caplog.at_level(logging.INFO, "ridgeline"):
        for crash in ("", "Panic", "Panic", "Panic"):
            asyncio.run(meet(crash))
    caplog.handler.removeFilter(limit)
    (line,) = caplog.messages
    assert "crashed" in line
    assert "request_id=req-Panic" in line


# ------------------------------------------------------------------ the engine's process


def test_the_servers_engine_opens_no_file_of_the_text_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a tokenizer is read in the engine's process")

    monkeypatch.setattr(build, "load_tokenizer", never)
    monkeypatch.setattr(build, "load_chat_template", never)
    config = EngineConfig(model="demo:draft", device="cpu", num_blocks=16)
    module, _, function = DEFAULT_BUILDER.partition(":")
    assert module == build.__name__
    built = getattr(build, function)(config, lambda *_: None)
    assert built.tokenizer is None
    with pytest.raises(AssertionError, match="a tokenizer is read"):
        build.build(config)


def test_the_tokenizer_says_what_ends_an_answer_if_nothing_else_does(fake_model: Path) -> None:
    loaded, _ = loaded_here(fake_model)
    assert loaded.end_token_id == 257
    config = serve("m").config
    silent = msgspec.structs.replace(READY, end_token_ids=())
    assert served_model(config, silent, loaded, fake_model).ready.end_token_ids == (257,)
    spoken = msgspec.structs.replace(READY, end_token_ids=(2,))
    assert served_model(config, spoken, loaded, fake_model).ready.end_token_ids == (2,)
