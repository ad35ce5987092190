"""Does the router send each request where it should, once, and pass on what comes? Scripted
backends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.router import backend as backend_module
from ridgeline.router.prefixes import names_of
from tests.server.fake_backend import (
    STREAM_HEAD,
    FakeBackend,
    Parts,
    Script,
    answer,
    chunk,
    events,
    json_answer,
    refusal,
    routing,
    usage,
)
from tests.server.running import until


def says(*parts: bytes) -> Script:
    return lambda body: iter(parts)


def fine(body: dict[str, Any]) -> Parts:
    return events("a", "b") if body.get("stream") else iter((json_answer({"text": "fine"}),))


LOAD = {"running": 0, "waiting": 0, "wait_s": 0, "prompt_tokens_per_s": 1000, "step_s": 0.01}


# ---------------------------------------------------------------------- what passes through


def test_bodies_headers_and_ids_pass_both_ways() -> None:
    reply = answer(b'{"odd":  1}', "200 OK", "X-Request-Id: theirs", "X-Other: kept")
    with routing(fake := FakeBackend(says(reply))) as routed:
        raw = b'{"model": "m",  "prompt": "\xc3\xa4", "unknown": [1]}'
        got = routed.http.post(
            "/v1/completions?x=1",
            content=raw,
            headers={
                "content-type": "application/json",
                "authorization": "Bearer key",
                "x-a": "1",
            },
        )
        assert (got.status_code, got.content) == (200, b'{"odd":  1}')
        assert got.headers.get_list("x-request-id") == ["theirs"]
        assert got.headers["x-other"] == "kept"
        (head,) = fake.heads
        assert head.startswith("POST /v1/completions?x=1 HTTP/1.1")
        assert "authorization: Bearer key" in head
        assert "x-a: 1" in head
        assert f"host: {fake.url[7:]}" in head
        assert fake.seen == [json.loads(raw)]


def test_events_come_when_they_are_sent() -> None:
    """The second is written only after the client has read the first."""
    has_read = threading.Event()

    def script(body: dict[str, Any]) -> Parts:
        yield STREAM_HEAD + chunk(b"data: 1\n\n")
        assert has_read.wait(20)
        yield chunk(b"data: 2\n\n") + b"0\r\n\r\n"

    with routing(FakeBackend(script)) as routed:
        body = {"model": "m", "prompt": "x", "stream": True}
        with routed.http.stream("POST", "/v1/chat/completions", json=body) as got:
            pieces = got.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            has_read.set()
            assert b"".join(pieces) == b"data: 2\n\n"


def test_what_ends_with_its_connection_passes_through() -> None:
    old = b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it"
    with routing(FakeBackend(says(old, b""))) as routed:
        assert routed.ask().text == "all of it"


def test_an_error_of_the_request_is_passed_on_at_once() -> None:
    bad = FakeBackend(says(refusal("invalid_value", "400 Bad Request")))
    with routing(bad, FakeBackend(says(refusal("invalid_value", "400 Bad Request")))) as routed:
        got = routed.ask()
        assert got.status_code == 400
        assert got.json()["error"]["code"] == "invalid_value"
        assert len(routed.service.backends) == 2
        assert not routed.service.backends[0].breaker.is_open


def test_a_client_that_leaves_takes_its_request_along() -> None:
    def endless(body: dict[str, Any]) -> Parts:
        yield STREAM_HEAD
        while True:
            yield chunk(b"data: more\n\n" * 100)

    with routing(fake := FakeBackend(endless)) as routed:
        body = {"model": "m", "prompt": "x", "stream": True}
        with routed.http.stream("POST", "/v1/completions", json=body) as got:
            next(got.iter_raw())
        until(lambda: fake.num_gone == 1, "the backend to see that its client is gone")
        until(lambda: not routed.backend(fake).open, "nothing to be open")


# ---------------------------------------------------------------------- retries


REFUSALS = {
    "overloaded": refusal("overloaded", "503 Service Unavailable", "retry-after: 1"),
    "engine": refusal("engine_unavailable"),
    "rate": refusal("rate_limit_exceeded", "429 Too Many Requests", "retry-after: 1"),
    "draining": refusal("shutting_down"),
    "foreign": answer(b"busy", "503 Service Unavailable", kind="text/plain"),
    "closed": b"",
    "garbage": b"SSH-2.0-OpenSSH\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_another_is_asked_while_nothing_was_passed_on(what: str) -> None:
    bad = FakeBackend(says(REFUSALS[what], b""), load=LOAD)
    good = FakeBackend(fine, load=LOAD | {"running": 5})
    with routing(bad, good) as routed:
        assert routed.ask().json() == {"text": "fine"}
        assert len(bad.seen) == len(good.seen) == 1
        page = routed.http.get("/metrics").text
        assert 'ridgeline_router_retries_total{reason="' in page


def test_a_refusal_without_a_time_to_wait_is_final() -> None:
    bad = FakeBackend(says(refusal("quota", "429 Too Many Requests")), load=LOAD)
    with routing(bad, FakeBackend(fine, load=LOAD | {"running": 5})) as routed:
        assert routed.ask().status_code == 429


def test_the_last_refusal_is_what_the_client_reads() -> None:
    busy = says(REFUSALS["overloaded"])
    with routing(one := FakeBackend(busy), two := FakeBackend(busy)) as routed:
        got = routed.ask()
        assert (got.status_code, got.headers["retry-after"]) == (503, "1")
        assert got.json()["error"]["code"] == "overloaded"
        assert len(one.seen) == len(two.seen) == 1


def test_a_request_that_ends_its_servers_does_not_end_all() -> None:
    fakes = [FakeBackend(says(b"")) for _ in range(4)]
    with routing(*fakes) as routed:
        assert routed.ask().json()["error"]["code"] == "engine_unavailable"
        assert sum(len(fake.seen) for fake in fakes) == 2


def test_retries_are_few_beside_requests() -> None:
    """Ten to begin with, and one for ten requests."""
    busy = FakeBackend(says(REFUSALS["overloaded"]), load=LOAD)
    with routing(busy, good := FakeBackend(fine, load=LOAD | {"running": 5})) as routed:
        found = [routed.ask().status_code for _ in range(30)]
        assert found[:10] == [200] * 10
        assert found.count(200) == len(good.seen) == 12


def test_after_the_first_byte_nothing_is_tried_again() -> None:
    def breaks(body: dict[str, Any]) -> Parts:
        if body.get("stream"):
            yield STREAM_HEAD + chunk(b"data: 1\n\n")
        else:
            yield b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
        yield b""

    with routing(FakeBackend(breaks), FakeBackend(breaks)) as routed:
        text = routed.ask(stream=True).text
        assert text.startswith("data: 1\n\n")
        assert "engine_unavailable" in text
        assert "[DONE]" not in text
        with pytest.raises(httpx.TransportError):
            routed.ask()


# ---------------------------------------------------------------------- where it goes


def test_a_backend_that_fails_gets_one_request_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "FIRST_PAUSE_S", 0.3)
    down = {"is": True}

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        yield b"" if down["is"] else json_answer({"text": "back"})

    bad = FakeBackend(script, load=LOAD)
    with routing(bad, FakeBackend(fine, load=LOAD | {"running": 5})) as routed:
        for _ in range(20):
            assert routed.ask().json() == {"text": "fine"}
        assert 3 <= len(bad.seen) <= 5
        assert routed.backend(bad).breaker.num_opened >= 1
        down["is"] = False
        until(lambda: routed.ask().json() == {"text": "back"}, "the first to be tried again")
        assert not routed.backend(bad).breaker.is_open


def test_equal_beginnings_go_to_one_until_its_answers_say_that_it_forgot() -> None:
    cached = {"share": 1.0}

    def script(body: dict[str, Any]) -> Parts:
        yield json_answer(usage(1000, int(1000 * cached["share"])))

    fakes = [FakeBackend(script, load=LOAD) for _ in range(3)]
    with routing(*fakes, policy="first-token") as routed:
        for one in routed.service.backends:
            one.prefixes.begun(one.prefixes.send(names_of("long ago" * 64)))
        for n in range(8):
            routed.ask(prompt="x" * 4000 + str(n))
        assert sorted(len(fake.seen) for fake in fakes) == [0, 0, 8]
        holder = routed.backend(max(fakes, key=lambda fake: len(fake.seen)))
        assert len(holder.prefixes) == 15 + 2
        assert holder.characters_per_token == pytest.approx(4.0, rel=0.01)
        cached["share"] = 0.0
        routed.ask(prompt="x" * 4000)
        assert len(holder.prefixes) == 15, "these were used just now; what is older is gone"


def test_models_are_merged_and_lead_to_their_backends() -> None:
    one, two = FakeBackend(fine, "a/one"), FakeBackend(fine, "two")
    with routing(one, two) as routed:
        names = [card["id"] for card in routed.http.get("/v1/models").json()["data"]]
        assert names == ["a/one", "two"]
        assert routed.http.get("/v1/models/a/one").json()["id"] == "a/one"
        assert routed.ask(model="two").status_code == 200
        assert (len(one.seen), len(two.seen)) == (0, 1)
        assert routed.ask(model="three").json()["error"]["code"] == "model_not_found"
        assert routed.ask(model=None).json()["error"]["param"] == "model"


def test_a_backend_that_is_gone_is_left_out_until_it_is_back() -> None:
    gone, there = FakeBackend(fine), FakeBackend(fine)
    with routing(gone, there) as routed:
        gone.stop()
        assert all(routed.ask().json() == {"text": "fine"} for _ in range(6))
        until(lambda: not routed.backend(gone).is_up, "the loss to be seen")
        assert routed.http.get("/health/ready").status_code == 200
        there.stop()
        until(lambda: routed.http.get("/health/ready").status_code == 503, "nobody to be ready")
        assert "no connection" in routed.http.get("/health/ready").json()["error"]["message"]
        assert routed.ask().json()["error"]["code"] == "engine_unavailable"


def test_one_that_is_not_ready_says_why() -> None:
    locked = FakeBackend(fine, load=refusal("invalid_api_key", "401 Unauthorized"))
    with routing(locked, wait=False) as routed:

        def told() -> bool:
            text = routed.http.get("/health/ready").json()["error"]["message"]
            return "RIDGELINE_BACKEND_KEY" in text

        until(told, "the reason to be told")


# ---------------------------------------------------------------------- limits of the router


def test_limits_are_those_of_the_server() -> None:
    with routing(fake := FakeBackend(fine), limits={"max_body_bytes": 2000}) as routed:
        assert routed.ask(prompt="x" * 3000).json()["error"]["code"] == "request_too_large"
        assert routed.http.post("/v1/completions", content=b"{}").status_code == 415
        twice = b'{"model": "m", "model": "m"}'
        kind = {"content-type": "application/json"}
        got = routed.http.post("/v1/completions", content=twice, headers=kind)
        assert got.json()["error"]["code"] == "invalid_json"
        assert routed.http.get("/nothing").status_code == 404
        assert routed.http.get("/v1/completions").status_code == 404
        assert not fake.seen


def test_who_drains_takes_nothing_new() -> None:
    with routing(FakeBackend(fine)) as routed:
        routed.service.drain()
        assert routed.http.get("/health/ready").status_code == 503
        assert routed.ask().json()["error"]["code"] == "shutting_down"
        assert routed.http.get("/health/live").status_code == 200


def test_open_answers_are_finished_and_what_is_left_at_the_end_is_told() -> None:
    go_on = threading.Event()

    def script(body: dict[str, Any]) -> Parts:
        yield STREAM_HEAD + chunk(b"data: 1\n\n")
        go_on.wait(20)
        if body["prompt"] == "finishes":
            yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        else:
            threading.Event().wait(20)

    with routing(FakeBackend(script)) as routed:
        body = {"model": "m", "stream": True}
        post = ("POST", "/v1/completions")
        with (
            routed.http.stream(*post, json=body | {"prompt": "finishes"}) as first,
            routed.http.stream(*post, json=body | {"prompt": "does not"}) as second,
        ):
            pieces = first.iter_raw(), second.iter_raw()
            assert [next(one) for one in pieces] == [b"data: 1\n\n"] * 2
            routed.service.drain()
            go_on.set()
            assert b"".join(pieces[0]) == b"data: [DONE]\n\n"
            until(lambda: routed.service.num_open == 1, "only the second to be open")
            routed.loop.call_soon_threadsafe(routed.service.fail_all, "shutting_down", "")
            assert b"shutting_down" in b"".join(pieces[1])
        until(lambda: not routed.service.num_open, "nothing to be open")


# ---------------------------------------------------------------------- slow ones


def test_a_backend_whose_first_token_is_far_too_late_is_left_in_peace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backend_module, "LATE_S", 0.1)
    monkeypatch.setattr(backend_module, "LATE_MULTIPLE", 0.0)
    go_on = threading.Event()

    def script(body: dict[str, Any]) -> Parts:
        yield STREAM_HEAD + chunk(b": still here\n\n")  # a comment is no token
        go_on.wait(20)
        yield chunk(b"data: 1\n\n") + b"0\r\n\r\n"

    slow = FakeBackend(script, load=LOAD)
    with routing(slow, other := FakeBackend(fine, load=LOAD | {"running": 5})) as routed:
        body = {"model": "m", "prompt": "x", "stream": True}
        with routed.http.stream("POST", "/v1/completions", json=body) as got:
            pieces = got.iter_raw()
            assert next(pieces) == b": still here\n\n"
            until(lambda: routed.backend(slow).breaker.is_open, "the breaker to open")
            assert routed.ask().json() == {"text": "fine"}
            go_on.set()
            assert b"".join(pieces) == b"data: 1\n\n", "its own answer is still waited for"
        assert len(other.seen) == 1
        assert not routed.backend(slow).breaker.is_open


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    def endless(body: dict[str, Any]) -> Parts:
        yield STREAM_HEAD
        while True:
            yield chunk(b"data: more\n\n" * 5000)

    with routing(fake := FakeBackend(endless), limits={"write_timeout_s": 0.3}) as routed:
        body = {"model": "m", "prompt": "x", "stream": True}
        with routed.http.stream("POST", "/v1/completions", json=body):
            until(lambda: fake.num_gone == 1, "the backend to be let go")
            assert not routed.backend(fake).open


def test_keys_of_the_router_are_asked_for_and_passed_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-alice name=alice\nkey-of-prometheus rights=metrics\n")
    with routing(fake := FakeBackend(fine), api_key_file=str(keys)) as routed:
        assert routed.ask().status_code == 401
        routed.http.headers["authorization"] = "Bearer key-of-prometheus"
        assert routed.ask().status_code == 403
        assert routed.http.get("/metrics").status_code == 200
        routed.http.headers["authorization"] = "Bearer key-of-alice"
        assert routed.http.get("/metrics").status_code == 403
        assert routed.ask().status_code == 200
        assert "Bearer key-of-alice" in fake.heads[0]
