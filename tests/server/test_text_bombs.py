"""Does a model whose template or tokenizer is a bomb cost only the request that sets it off?"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.server import Limits
from tests.server.bombs import (
    GROWTH,
    SLOW,
    TEMPLATES,
    write_growing_decoder,
    write_template_bombs,
    write_tokenizer_bombs,
)
from tests.server.fake_build import reference
from tests.server.model_folder import byte_ids
from tests.server.running import PATIENCE_S, Running, fake_config, launch, running, until

ENGINE = {"max_model_len": 4096, "num_blocks": 2048}
PROMPT = "how are you"
WORKERS = Limits().tokenizer_processes


class Bystander:
    """Asks the same question, as another tenant, until the block ends; every answer is right."""

    def __init__(self, server: Running) -> None:
        self._server, self._done = server, threading.Event()
        self.answers: list[str] = []
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=self._server.url, transport=other, timeout=PATIENCE_S) as http:
            body = {"model": "fake", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
            while not self._done.is_set():
                reply = http.post("/v1/completions", json=body)
                self.answers.append(reply.json()["choices"][0]["text"])

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(PATIENCE_S)
        assert set(self.answers) == {bytes(reference(byte_ids(PROMPT), 5)).decode()}


def ask(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    with server.http as http:
        return http.post(path, json={"model": "fake"} | body)


def conversation(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


def number_of(server: Running) -> tuple[int, int]:
    """Processes of the server's tree, and open files of the HTTP process."""
    fork_server = server.child_pid("text_process")
    workers = Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()
    return len(workers), server.num_fds()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bombs")


@pytest.fixture(scope="module")
def templates(folder: Path) -> Iterator[Running]:
    model = write_template_bombs(folder / "templates")
    with running(fake_config(model, {}, ENGINE), folder) as started:
        yield started


def test_bombs_of_a_template_are_400s_and_nobody_else_notices(templates: Running) -> None:
    until(lambda: number_of(templates)[0] == WORKERS, "all workers")
    before = number_of(templates)
    mapped = Path(f"/proc/{templates.process.pid}/maps").read_text()
    assert "tokenizers" not in mapped  # the HTTP process has the table alone
    with Bystander(templates) as bystander, ThreadPoolExecutor(3) as pool:
        replies = [
            pool.submit(ask, templates, "/v1/chat/completions", conversation(name))
            for name in TEMPLATES
        ]
        errors = {n: r.result().json()["error"] for n, r in zip(TEMPLATES, replies, strict=True)}
    assert {(e["code"], e["param"]) for e in errors.values()} == {("invalid_messages", "messages")}
    print({name: error["message"] for name, error in errors.items()})
    assert "took more than" in errors["turns"]["message"]
    assert len(bystander.answers) > 3
    assert ask(templates, "/v1/chat/completions", conversation("hello")).status_code == 200
    until(lambda: number_of(templates)[0] == WORKERS, "all workers")
    until(lambda: number_of(templates) <= before, "no process and no file more than before")


def test_bombs_of_a_tokenizer_are_400s_and_nobody_else_notices(tmp_path: Path) -> None:
    model = write_tokenizer_bombs(tmp_path / "model")
    with running(fake_config(model, {}, ENGINE), tmp_path) as server, Bystander(server):
        for path, body, param in (
            ("/v1/completions", {"prompt": ["a", GROWTH], "max_tokens": 1}, "prompt"),
            ("/v1/completions", {"prompt": ["a", SLOW], "max_tokens": 1}, "prompt[1]"),
            ("/v1/chat/completions", conversation(GROWTH), "messages"),
            ("/v1/chat/completions", conversation(SLOW), "messages"),
            ("/tokenize", {"prompt": GROWTH}, "prompt"),
        ):
            error = ask(server, path, body).json()["error"]
            assert (error["code"], error["param"]) == ("invalid_value", param)
            assert "tokenizer" in error["message"]


def test_what_cannot_be_loaded_ends_the_start(tmp_path: Path) -> None:
    model = write_growing_decoder(tmp_path / "model")
    process = launch(fake_config(model), tmp_path)
    assert process.stdout is not None
    with process.stdout:
        assert process.wait(PATIENCE_S) == 2
    said = (tmp_path / "server.log").read_text().splitlines()
    assert [line for line in said if "ConfigError" in line] == [said[-1]]
    assert "at most 256 times" in said[-1]


def test_a_killed_server_leaves_no_process(templates: Running, tmp_path: Path) -> None:
    """The last test: it takes the server with it."""
    fork_server = templates.child_pid("text_process")
    workers = Path(f"/proc/{fork_server}/task/{fork_server}/children").read_text().split()
    assert workers
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(ask, templates, "/v1/chat/completions", conversation("turns"))
        os.kill(templates.process.pid, signal.SIGKILL)
        assert isinstance(busy.exception(), httpx.TransportError)
    templates.process.wait(PATIENCE_S)
    everyone = [Path(f"/proc/{pid}") for pid in (fork_server, *workers)]
    until(lambda: not any(map(Path.exists, everyone)), "no process left")
