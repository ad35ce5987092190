"""Start, drain, death and rebirth, with real processes and real signals."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from ridgeline.server import lifecycle
from tests.server.fake_build import reference
from tests.server.model_folder import byte_ids
from tests.server.running import PATIENCE_S, Running, fake_config, launch, running, until

FOREVER = {"drain_s": 1000.0}


@contextmanager
def serving(
    folder: Path, model: Path, limits: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None, wait: bool = True,
) -> Iterator[Running]:  # fmt: skip
    with running(fake_config(model, limits, engine), folder, wait=wait) as started:
        yield started


class Asking:
    """One request in a thread: its status, its events, its end."""

    def __init__(self, server: Running, prompt: str, stream: bool = True, **more: Any) -> None:
        self.status = 0
        self.text = ""
        self.headers: httpx.Headers = httpx.Headers()
        self.first = threading.Event()
        self._server = server
        self._body = {"model": "fake", "prompt": prompt, "max_tokens": 100, "stream": stream} | more
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                self._server.http as http,
                http.stream("POST", "/v1/completions", json=self._body) as reply,
            ):
                self.status, self.headers = reply.status_code, reply.headers
                for part in reply.iter_text():
                    self.text += part
                    self.first.set()
        except httpx.HTTPError as fault:
            self.text += f" {type(fault).__name__}"
        self.first.set()

    def wait(self) -> Asking:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self

    @property
    def error(self) -> str:
        """Code of the error, as body or as last event; no [DONE] may follow an event."""
        assert "[DONE]" not in self.text
        last = self.text.strip().rpartition("\n")[2].removeprefix("data: ")
        return str(json.loads(last)["error"]["code"])

    @property
    def answer(self) -> str:
        """Text of a stream that ended well."""
        events = [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]", self.text
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def reference_text(prompt: str, count: int = 100) -> str:
    return bytes(reference(byte_ids(prompt), count)).decode("utf-8", "replace")


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


# ------------------------------------------------------------------ start


def test_while_it_starts(fake_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, fake_model, engine={"attention_backend": "slow"}, wait=False) as server:
        with server.http as http:
            assert http.get("/health/live").status_code == 200
            for reply in (
                http.get("/health/ready"),
                http.get("/v1/models"),
                http.post("/v1/completions", json={"model": "fake", "prompt": "a"}),
            ):
                assert reply.status_code == 503
                assert reply.json()["error"]["code"] == "starting"
                assert int(reply.headers["retry-after"]) > 0
            assert http.get("/metrics").status_code == 200
        server.wait_until_ready()


def test_more_files_may_be_open_than_before(fake_model: Path, tmp_path: Path) -> None:
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"max_connections": min(soft, hard) - lifecycle.NUM_OWN_FILES}
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with serving(tmp_path, fake_model, limits) as server:
            files = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert files == (min(soft, hard), hard)
    assert "raised the limit of open files before=200" in server.log.read_text()


def failed_start(config: Any, folder: Path) -> tuple[int, str]:
    process = launch(config, folder)
    code = process.wait(PATIENCE_S)
    assert process.stdout is not None
    process.stdout.close()
    return code, (folder / "server.log").read_text()


def test_a_model_that_cannot_be_had(fake_model: Path, tmp_path: Path) -> None:
    code, log = failed_start(
        fake_config(fake_model, engine={"attention_backend": "refuse"}), tmp_path
    )
    assert (code, "ConfigError: this model cannot be had" in log) == (2, True)
    assert "restarting" not in log


def test_an_engine_that_dies_at_every_start(fake_model: Path, tmp_path: Path) -> None:
    limits = {"max_engine_restarts": 1}
    code, log = failed_start(
        fake_config(fake_model, limits, {"attention_backend": "crash"}), tmp_path
    )
    assert code == 70
    assert log.count("restarting the engine") == 1


def test_a_taken_port(fake_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = fake_config(fake_model)
        config = type(config)(
            engine=config.engine, builder=config.builder, port=taken.getsockname()[1]
        )
        code, log = failed_start(config, tmp_path)
    assert (code, "choose another port" in log) == (2, True)


def test_a_number_that_cannot_be(fake_model: Path, tmp_path: Path) -> None:
    config = fake_config(fake_model)
    code, log = failed_start(
        replace(config, engine=replace(config.engine, max_num_seqs=0)), tmp_path
    )
    assert (code, "max_num_seqs is 0; it must be at least 1" in log) == (2, True)
    assert "listening" not in log


def test_a_tokenizer_that_is_not_there(fake_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, problem in (("nowhere", "not found"), ("empty", "holds no tokenizer")):
        config = fake_config(fake_model, engine={"tokenizer": str(tmp_path / name)})
        code, log = failed_start(config, tmp_path)
        assert (code, f"{name}': {problem}" in log) == (2, True)
        assert "listening" not in log


def test_a_port_that_cannot_be(fake_model: Path, tmp_path: Path) -> None:
    code, log = failed_start(replace(fake_config(fake_model), port=99999), tmp_path)
    assert (code, "port is 99999; it must be from 0 to 65535" in log) == (2, True)
    assert "listening" not in log


def test_the_network_without_a_key(fake_model: Path, tmp_path: Path) -> None:
    config = fake_config(fake_model, host="0.0.0.0")
    code, log = failed_start(config, tmp_path)
    assert (code, "no API key is set" in log) == (2, True)


# ------------------------------------------------------------------ the end


def test_drain_lets_streams_finish(fake_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, fake_model, FOREVER) as server:
        engine = server.engine_pid
        asking = [Asking(server, "!slow") for _ in range(5)]
        whole = Asking(server, "!slow", stream=False)
        for one in asking:
            one.first.wait(PATIENCE_S)
        until(lambda: server.metric("ridgeline_sequences_running") == 6, "all to run")
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not server.is_ready(), "readiness to go")
        with server.http as http:
            assert http.get("/health/ready").json()["error"]["code"] == "shutting_down"
            refused = http.post("/v1/completions", json={"model": "fake", "prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["connection"] == "close"
            assert http.get("/health/live").status_code == 200
        for one in asking:
            assert one.wait().answer == reference_text("!slow")
        assert whole.wait().status == 200
        assert server.process.wait(PATIENCE_S) == 0
        until(partial(gone, engine), "the engine to go")


def test_the_drain_deadline_ends_streams_with_an_error(fake_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, fake_model, {"drain_s": 0.3}) as server:
        streaming = Asking(server, "!slow", max_tokens=500)
        whole = Asking(server, "!slow", stream=False, max_tokens=500)
        streaming.first.wait(PATIENCE_S)
        until(lambda: server.metric("ridgeline_sequences_running") == 2, "both to run")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert streaming.wait().error == "shutting_down"
        assert streaming.status == 200
        assert whole.wait().error == "shutting_down"
        assert whole.status == 503


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(
    fake_model: Path, tmp_path: Path, name: signal.Signals
) -> None:
    with serving(tmp_path, fake_model, FOREVER) as server:
        engine = server.engine_pid
        streaming = Asking(server, "!hang")
        until(lambda: server.metric("ridgeline_requests_total") == 1, "it to be admitted")
        server.process.send_signal(name)
        until(lambda: not server.is_ready(), "readiness to go")
        server.process.send_signal(name)
        assert server.process.wait(PATIENCE_S) == 128 + name
        until(partial(gone, engine), "the engine to go")
        assert streaming.wait().status == 0


def test_an_idle_server_ends_at_once_and_cleanly(fake_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, fake_model, FOREVER) as server:
        assert server.stop() == 0
        log = server.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log


# ------------------------------------------------------------------ death


@pytest.fixture(scope="module")
def mortal(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its engine dies of each test, and is there again after it."""
    folder = tmp_path_factory.mktemp("mortal")
    with serving(folder, fake_model, {"max_engine_restarts": 10}) as server:
        yield server


def test_the_engine_is_killed_and_comes_back(mortal: Running) -> None:
    first, deaths = mortal.engine_pid, mortal.metric("ridgeline_engine_restarts_total")
    streaming = Asking(mortal, "!slow", max_tokens=400)
    whole = Asking(mortal, "!slow", stream=False, max_tokens=400)
    streaming.first.wait(PATIENCE_S)
    until(lambda: mortal.metric("ridgeline_sequences_running") == 2, "both to run")
    os.kill(first, signal.SIGKILL)
    assert streaming.wait().error == "engine_unavailable"
    assert whole.wait().error == "engine_unavailable"
    assert whole.status == 503
    assert int(whole.headers["retry-after"]) > 0
    mortal.wait_until_ready()
    assert mortal.engine_pid != first
    assert mortal.metric("ridgeline_engine_restarts_total") == deaths + 1
    assert Asking(mortal, "hello").wait().answer == reference_text("hello")
    mortal.wait_until_idle()


def test_an_engine_that_dies_of_a_request(mortal: Running) -> None:
    """The request that kills it is not tried again; those after it are served."""
    poison = Asking(mortal, "!die", n=1)
    assert poison.wait().error == "engine_unavailable"
    mortal.wait_until_ready()
    assert Asking(mortal, "hello").wait().answer == reference_text("hello")


def test_too_many_deaths_end_the_server(fake_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, fake_model, {"max_engine_restarts": 1}) as server:
        for _ in range(2):
            server.wait_until_ready()
            Asking(server, "!die").wait()
        assert server.process.wait(PATIENCE_S) == 70


def test_the_engine_does_not_outlive_the_http_process(fake_model: Path, tmp_path: Path) -> None:
    for prompt in (None, "!slow", "!hang"):
        with serving(tmp_path, fake_model) as server:
            engine = server.engine_pid
            asking = Asking(server, prompt, max_tokens=500) if prompt else None
            if asking is not None:
                until(lambda: server.metric("ridgeline_requests_total") == 1, "its admission")
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(PATIENCE_S)
            until(partial(gone, engine), "the engine to go", 5)
            if asking is not None:
                asking.wait()


def test_a_failed_step_fails_its_requests_only(mortal: Running) -> None:
    first, deaths = mortal.engine_pid, mortal.metric("ridgeline_engine_restarts_total")
    assert Asking(mortal, "!fault", stream=False).wait().error == "internal_error"
    assert Asking(mortal, "hello").wait().answer == reference_text("hello")
    assert mortal.engine_pid == first
    for _ in range(3):  # in a row: the device will not recover
        assert Asking(mortal, "!fault").wait().status in (500, 503)
    until(lambda: mortal.metric("ridgeline_engine_restarts_total") > deaths, "a new engine")
    mortal.wait_until_ready()
    assert Asking(mortal, "hello").wait().answer == reference_text("hello")
    assert mortal.engine_pid != first


# ------------------------------------------------------------------ slowness


def test_a_stuck_step_turns_readiness_and_is_killed(fake_model: Path, tmp_path: Path) -> None:
    limits = {"step_deadline_s": 0.5, "step_kill_s": 2.0}
    with serving(tmp_path, fake_model, limits) as server:
        first = server.engine_pid
        Asking(server, "a", max_tokens=1).wait()  # the first step may take 300 s
        stuck = Asking(server, "!hang")
        until(lambda: not server.is_ready(), "readiness to go")
        with server.http as http:
            assert http.get("/health/live").status_code == 200
        assert stuck.wait().error == "engine_unavailable"
        server.wait_until_ready()
        assert server.engine_pid != first
        assert "in submit" in server.log.read_text()  # where it was stuck


def test_a_stuck_step_is_told_before_anything_is_killed(fake_model: Path, tmp_path: Path) -> None:
    limits = {"step_deadline_s": 0.5, "step_kill_s": 1000.0, "drain_s": 0.1}
    with serving(tmp_path, fake_model, limits) as server:
        stuck = Asking(server, "!hang")
        until(lambda: not server.is_ready(), "readiness to go")
        assert server.metric("ridgeline_engine_up") == 1
        assert server.stop() == 0
        assert stuck.wait().error == "shutting_down"


def test_work_that_goes_on_is_healthy(fake_model: Path, tmp_path: Path) -> None:
    """Steps of 200 ms for longer than the deadline of 1 s: slow, not stuck."""
    with serving(tmp_path, fake_model, {"step_deadline_s": 1.0}) as server:
        asking = Asking(server, "!crawl", max_tokens=10)
        asking.first.wait(PATIENCE_S)
        while asking.text.count("data:") < 10:
            assert server.is_ready()
        assert asking.wait().answer == reference_text("!crawl", 10)


def test_waiting_too_long_in_the_queue(fake_model: Path, tmp_path: Path) -> None:
    limits = {"queue_timeout_s": 0.5, "max_queued_sequences": 2}
    with serving(tmp_path, fake_model, limits, {"max_num_seqs": 1}) as server:
        # So few steps that nothing is foretold: the fixed time holds.
        running_one = Asking(server, "!crawl", max_tokens=12)
        running_one.first.wait(PATIENCE_S)
        many = Asking(server, "b", stream=False, n=3).wait()
        assert (many.status, many.error) == (503, "overloaded")  # each of n has to find room
        waiting = [Asking(server, "b", stream=stream) for stream in (True, False)]
        until(lambda: server.metric("ridgeline_sequences_waiting") == 2, "two to wait")
        full = Asking(server, "c", stream=False).wait()
        assert (full.status, full.error) == (503, "overloaded")
        assert int(full.headers["retry-after"]) > 0
        for one in waiting:
            assert (one.wait().status, one.error) == (503, "queue_timeout")
            assert int(one.headers["retry-after"]) > 0
        assert running_one.wait().answer == reference_text("!crawl", 12)


def test_running_too_long(fake_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, fake_model, {"run_timeout_s": 1.0}) as server:
        whole = Asking(server, "!slow", stream=False, max_tokens=500)
        streaming = Asking(server, "!slow", max_tokens=500)
        assert (whole.wait().status, whole.error) == (504, "deadline_exceeded")
        assert (streaming.wait().status, streaming.error) == (200, "deadline_exceeded")
        assert server.wait_until_idle() < 5


def test_silent_streams_are_kept_alive(fake_model: Path, tmp_path: Path) -> None:
    engine = {"max_num_batched_tokens": 64}
    with serving(tmp_path, fake_model, {"keepalive_s": 0.3}, engine) as server:
        asking = Asking(server, "!crawl" + "x" * 440, max_tokens=3).wait()
        head, _, rest = asking.text.partition("data:")
        assert head.count(": keepalive\n\n") >= 1
        assert asking.answer == reference_text("!crawl" + "x" * 440, 3)
        assert "x" not in rest.partition("[DONE]")[2]
