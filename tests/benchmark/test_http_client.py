"""Does the load generator time a server's tokens, and notice when the server fails?"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ridgeline.benchmark.http_client import ServerFault, endpoint, run_http, served_models
from ridgeline.benchmark.jobs import Job
from ridgeline.errors import ConfigError

Reply = Callable[[bytes, bytes], bytes]  # (head, body) -> the whole response
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@contextmanager
def server(reply: Reply) -> Iterator[str]:
    """A server on the loopback whose every answer is `reply`; gives its URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = self.rfile.readline()
                if not line:
                    return
                head += line
            lengths = [
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            ]
            self.wfile.write(reply(head, self.rfile.read(sum(lengths))))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def stream(count: int, *, usage: int | None = None, done: bool = True) -> bytes:
    body = b": comment\n\n" + event({"choices": [{"text": "x"}]}) * count
    if usage is not None:
        body += event({"choices": [], "usage": {"completion_tokens": usage}})
    return body + (b"data: [DONE]\n\n" if done else b"")


def chunked(body: bytes, size: int) -> bytes:
    """The body in chunks of `size` bytes, so that lines are cut anywhere."""
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return OK + b"transfer-encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"


def test_tokens_are_timed_and_the_request_is_right() -> None:
    seen: list[tuple[bytes, bytes]] = []

    def reply(head: bytes, body: bytes) -> bytes:
        seen.append((head, body))
        return OK + b"\r\n" + stream(3, usage=3)

    with server(reply) as url:
        target = endpoint(f"{url}/v1/", "tiny", api_key="secret")
        run, errors = run_http(target, [Job((5, 6), 3, temperature=0.5), Job((7,), 3)])
    assert errors == []
    assert (run.failed, run.num_tokens) == (0, 6)
    assert all(times.token_s == sorted(times.token_s) for times in run.jobs)
    assert all(times.ttft_s > 0 for times in run.jobs)
    head = seen[0][0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in head
    bodies = [json.loads(body) for _, body in seen]
    assert sorted(body["prompt"] for body in bodies) == [[5, 6], [7]]
    assert {body["model"] for body in bodies} == {"tiny"}
    assert all(body["stream"] and body["ignore_eos"] and body["max_tokens"] == 3 for body in bodies)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_may_cut_lines_anywhere(size: int) -> None:
    with server(lambda head, body: chunked(stream(4, usage=4), size)) as url:
        run, errors = run_http(endpoint(url, "m"), [Job((1,), 4)])
    assert (errors, run.num_tokens) == ([], 4)


@pytest.mark.parametrize(("events", "tokens"), [(2, 5), (5, 4)])
def test_usage_says_how_many_tokens_there_were(events: int, tokens: int) -> None:
    """An event may carry several tokens, and the last may carry none."""
    with server(lambda head, body: OK + b"\r\n" + stream(events, usage=tokens)) as url:
        run, _ = run_http(endpoint(url, "m"), [Job((1,), tokens)])
    assert run.num_tokens == tokens


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\n\r\nfull", "status 503: full"),
        (OK + b"\r\n" + stream(2, done=False), "before [DONE]"),
        (OK + b"\r\n" + event({"error": {"message": "engine died"}}), "engine died"),
        (OK + b"\r\n" + stream(0), "no tokens"),
        (b"SSH-2.0-x\r\n\r\n", "does not speak HTTP"),
        (OK + b"transfer-encoding: chunked\r\n\r\nff\r\ncut off", ""),
    ],
)
def test_failures_are_counted_and_told(response: bytes, why: str) -> None:
    with server(lambda head, body: response) as url:
        run, errors = run_http(endpoint(url, "m"), [Job((1,), 3), Job((2,), 3)])
    assert run.failed == 2
    assert run.num_tokens == 0
    assert all(why in error for error in errors)


def test_models_are_asked_for() -> None:
    answer = b'HTTP/1.1 200 OK\r\n\r\n{"data": [{"id": "tiny"}, {"id": "b"}]}'
    with server(lambda head, body: answer) as url:
        assert served_models(endpoint(url, "")) == ["tiny", "b"]
    with (
        server(lambda head, body: b"HTTP/1.1 200 OK\r\n\r\n[]") as url,
        pytest.raises(ServerFault, match="/v1/models"),
    ):
        served_models(endpoint(url, ""))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
def test_urls_that_are_no_server(url: str) -> None:
    with pytest.raises(ConfigError, match="http://127"):
        endpoint(url, "m")
