"""What do clients send that asks for nothing, and is it taken? With --strict-fields it is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from tests.server.running import Running, fake_config, running, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}
HEADER = "x-ignored-fields"

# A change of a chat or a completion -> the fields that the header names.
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"bogus": 1}, "bogus"),
    ({"__proto__": {"a": 1}}, "__proto__"),
    ({"a,b\r\nx: y": 1}, "a?b??x: y"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"messages": [USER | {"extra": 1}, USER | {"extra": 2, "id": 5}]},
     "messages[].extra, messages[].id"),
    ({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
     "messages[].content[].cache_control"),
    ({"prompt": "x"}, "prompt"),
]  # fmt: skip
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"metadata": {"a": "b"}, "store": True, "user": "u"}, "metadata, store, user"),
    ({"store": False, "metadata": {}}, ""),
    ({"priority": 5}, "priority"),
    ({"priority": 0}, ""),
]
HARMLESS: list[dict[str, Any]] = [
    {"model": None},
    {"model": ""},
    {"stop": ""},
    {"stop": ["", "x"]},
    {"stop": [f"<{i}>" for i in range(64)]},
    {"messages": [{"role": "system", "content": ""}, USER]},
    {"messages": [USER | {"content": None}]},
    {"messages": [USER | {"content": []}]},
    {"messages": [{"role": "user"}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"functions": [{"name": "f"}], "tool_choice": "none"},
]


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(fake_config(fake_model), tmp_path_factory.mktemp("tolerant")) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http as client:
        yield client


def chat(change: dict[str, Any]) -> dict[str, Any]:
    return {"model": "fake", "messages": [USER], "max_tokens": 2} | change


@pytest.mark.parametrize(("change", "named"), UNKNOWN + WITHOUT_EFFECT, ids=str)
def test_what_has_no_effect_is_taken_and_named(
    http: httpx.Client, change: dict[str, Any], named: str
) -> None:
    reply = http.post(CHAT, json=chat(change))
    assert reply.status_code == 200, reply.text
    assert reply.headers.get(HEADER, "") == named


@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_what_asks_for_nothing_is_taken(http: httpx.Client, change: dict[str, Any]) -> None:
    reply = http.post(CHAT, json=chat(change))
    assert reply.status_code == 200, reply.text
    assert HEADER not in reply.headers
    assert reply.json()["model"] == "fake"


def test_an_unserved_field_is_refused_beside_an_unknown_one(http: httpx.Client) -> None:
    reply = http.post(CHAT, json=chat({"bogus": 1, "prediction": {"type": "content"}}))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prediction"
    assert reply.headers[HEADER] == "bogus"


def test_beside_answers(http: httpx.Client) -> None:
    reply = http.post("/tokenize", json={"prompt": "a", "x": 1})
    assert (reply.status_code, reply.headers[HEADER]) == (200, "x")
    reply = http.post("/tokenize", json={"messages": [USER | {"x": 1}]})
    assert (reply.status_code, reply.headers[HEADER]) == (200, "messages[].x")
    reply = http.post("/detokenize", json={"tokens": [104], "x": 1})
    assert (reply.status_code, reply.headers[HEADER]) == (200, "x")


def test_the_log_names_a_field_once(http: httpx.Client, server: Running) -> None:
    def is_told() -> bool:
        assert http.post(CHAT, json=chat({"once_only": 1})).status_code == 200
        return "once_only" in server.log.read_text()

    until(is_told, "a line of the log with the field")
    for _ in range(3):
        is_told()
    assert server.log.read_text().count("once_only") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_is_asked_for(http: httpx.Client, stream: bool) -> None:
    """The prompt alone, as those ask who score it."""
    body = {"prompt": "hello", "max_tokens": 0, "stream": stream}
    reply = http.post(COMPLETIONS, json=body | ({} if stream else {"prompt_logprobs": 1}))
    assert reply.status_code == 200, reply.text
    if stream:
        return
    answer = reply.json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    scored = http.post(CHAT, json=chat({"max_tokens": 0, "prompt_logprobs": 1})).json()
    (choice,) = scored["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert len(scored["prompt_logprobs"]) == scored["usage"]["prompt_tokens"]


def test_several_names_for_one_model(fake_model: Path, tmp_path: Path) -> None:
    config = fake_config(fake_model, engine={"policy": "priority"}, strict_fields=True)
    config = structs.replace(config, served_model_name="one, two")
    with running(config, tmp_path) as server, server.http as http:
        names = [card["id"] for card in http.get("/v1/models").json()["data"]]
        assert names == ["one", "two"]
        for name, shown in ((None, "one"), ("one", "one"), ("two", "two")):
            reply = http.post(CHAT, json=chat({"model": name, "priority": 5}))
            assert reply.json()["model"] == shown
            assert HEADER not in reply.headers  # the priority is heeded
        reply = http.post(CHAT, json=chat({"model": "three"}))
        assert reply.status_code == 404
        assert "'one' and 'two'" in reply.json()["error"]["message"]
        for change, named in UNKNOWN:
            refused = http.post(CHAT, json=chat({"model": "one"} | change))
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "unknown_parameter"), named
        assert http.post("/tokenize", json={"prompt": "a", "x": 1}).status_code == 400
