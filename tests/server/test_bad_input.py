"""Does every bad input get exactly its status, type, code and param, in the one body shape?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import Running

IRE = "invalid_request_error"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http as client:
        yield client


def expect(
    reply: httpx.Response, status: int, code: str, param: str | None = None, kind: str = IRE
) -> None:
    body = reply.json()
    assert list(body) == ["error"], body
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    got = (reply.status_code, body["error"]["type"], body["error"]["code"], body["error"]["param"])
    assert got == (status, kind, code, param), body
    message = body["error"]["message"]
    assert 0 < len(message) <= 500
    assert message.isprintable()
    for secret in ("/tmp", "Traceback", "0x7f", "site-packages", "object at"):
        assert secret not in message
    assert reply.headers["x-request-id"].startswith("req-")
    assert reply.headers["content-type"] == "application/json"


def message(content: object = "hi", **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


# ------------------------------------------------------------------ the body as bytes

RAW: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"prompt=hello",
    "truncated": b'{"model": "fake", "prompt": "he',
    "bad UTF-8": b'{"model": "fake", "prompt": "\xff\xfe"}',
    "trailing data": b'{"model": "fake", "prompt": "a"}{}',
    "byte order mark": b'\xef\xbb\xbf{"model": "fake", "prompt": "a"}',
    "NaN": b'{"model": "fake", "prompt": "a", "temperature": NaN}',
    "Infinity": b'{"model": "fake", "prompt": "a", "temperature": Infinity}',
    "1e999": b'{"model": "fake", "prompt": "a", "temperature": 1e999}',
    "duplicate key": b'{"model": "fake", "model": "fake", "prompt": "a"}',
    "too deep": b'{"model": "fake", "prompt": ' + b"[" * 64 + b"]" * 64 + b"}",
    "bracket bomb": b"[" * 500_000,
    "a list": b'[{"model": "fake"}]',
    "a string": b'"fake"',
    "null": b"null",
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", RAW.values(), ids=RAW.keys())
def test_json(http: httpx.Client, path: str, body: bytes) -> None:
    reply = http.post(path, content=body, headers={"content-type": "application/json"})
    expect(reply, 400, "invalid_json")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "multipart/form-data; boundary=x"},
    ],
)
def test_content_type(http: httpx.Client, headers: dict[str, str]) -> None:
    reply = http.post(COMPLETIONS, content=b'{"model": "fake", "prompt": "a"}', headers=headers)
    expect(reply, 415, "unsupported_media_type")


def test_content_type_with_a_charset_is_fine(http: httpx.Client) -> None:
    body = b'{"model": "fake", "prompt": "a", "max_tokens": 1}'
    for kind in ("application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"'):
        assert http.post(COMPLETIONS, content=body, headers={"content-type": kind}).is_success


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
def test_compressed(http: httpx.Client, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    expect(http.post(COMPLETIONS, content=b"{}", headers=headers), 415, "unsupported_encoding")


def test_too_large(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
    expect(http.post(COMPLETIONS, content=body, headers=headers), 413, "request_too_large")

    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b"x" * (64 << 10)

    expect(http.post(COMPLETIONS, content=chunks(), headers=headers), 413, "request_too_large")
    body = b'{"model": "fake", "prompt": "' + b"x" * (3 << 20) + b'"}'
    reply = http.post(COMPLETIONS, content=body, headers=headers)
    expect(reply, 400, "context_length_exceeded", "prompt")


def test_paths_and_methods(http: httpx.Client) -> None:
    for path in ("/v1", "/admin", "/v1/../metrics2", "/docs", "/%2e%2e/x"):
        expect(http.get(path), 404, "not_found")
    for method, path, allowed in (
        ("GET", COMPLETIONS, {"POST"}),
        ("DELETE", CHAT, {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("OPTIONS", CHAT, {"POST"}),
        ("PUT", "/health/live", {"GET", "HEAD"}),
    ):
        reply = http.request(method, path)
        expect(reply, 405, "method_not_allowed")
        assert set(reply.headers["allow"].replace(" ", "").split(",")) == allowed


def test_host(http: httpx.Client) -> None:
    for path in ("/v1/models", "/health/live", "/nothing"):
        expect(http.get(path, headers={"host": "evil.example"}), 421, "invalid_host")


# ------------------------------------------------------------------ the fields of completions

INTEGERS = ("max_tokens", "n", "best_of", "seed", "top_k", "min_tokens", "logprobs", "priority")
NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip

FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    *(({name: "many"}, "invalid_type", name) for name in (*INTEGERS, *NUMBERS)),
    *(({name: [1]}, "invalid_type", name) for name in (*INTEGERS, *NUMBERS)),
    *(({name: 1.5}, "invalid_value", name) for name in INTEGERS),
    *(({name: True}, "invalid_value", name) for name in (*INTEGERS, *NUMBERS)),
    *(({name: 10**30}, "limit_exceeded", name) for name in ("n", "best_of", "logprobs")),
    *(({name: 0}, "invalid_value", name) for name in ("n", "best_of")),
    *(({name: -1}, "invalid_value", name) for name in ("max_tokens", "min_tokens", "logprobs")),
    ({"seed": 1 << 63}, "invalid_value", "seed"),
    ({"temperature": -0.1}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_p": 1.01}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    ({"frequency_penalty": -2.5}, "invalid_value", "frequency_penalty"),
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty"),
    ({"repetition_penalty": 1e-40}, "invalid_value", "repetition_penalty"),
    ({"n": 9}, "limit_exceeded", "n"),
    ({"best_of": 9}, "limit_exceeded", "best_of"),
    ({"n": 3, "best_of": 2}, "invalid_value", "best_of"),
    ({"n": 2, "best_of": 4, "stream": True}, "invalid_value", "best_of"),
    ({"logprobs": 21}, "limit_exceeded", "logprobs"),
    ({"prompt_logprobs": 21}, "limit_exceeded", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    ({"stop": ["a"] * 65}, "limit_exceeded", "stop"),
    ({"stop": "a" * 257}, "limit_exceeded", "stop"),
    ({"stop": ["ok", "a" * 257]}, "limit_exceeded", "stop[1]"),
    ({"stop": 5}, "invalid_type", "stop"),
    ({"stop": ["a", 5]}, "invalid_type", "stop[1]"),
    ({"stop": "\ud800"}, "invalid_text", "stop"),
    ({"stop_token_ids": [-1]}, "invalid_token_id", "stop_token_ids[0]"),
    ({"stop_token_ids": [1.0]}, "invalid_token_id", "stop_token_ids[0]"),
    ({"stop_token_ids": [264]}, "invalid_token_id", "stop_token_ids"),
    ({"stop_token_ids": [1] * 1025}, "limit_exceeded", "stop_token_ids"),
    ({"stop_token_ids": 7}, "invalid_type", "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "limit_exceeded", "logit_bias"),
    ({"logit_bias": {"a": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"264": 1}}, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias.5"),
    ({"logit_bias": {"5": "x"}}, "invalid_type", "logit_bias.5"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 8}, "invalid_value", "min_tokens"),
    ({"stream": "yes"}, "invalid_type", "stream"),
    ({"stream_options": {}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": []}, "invalid_type", "stream_options"),
    ({"echo": 1}, "invalid_type", "echo"),
    ({"ignore_eos": "no"}, "invalid_type", "ignore_eos"),
    ({"cache_salt": "s" * 129}, "invalid_value", "cache_salt"),
    ({"cache_salt": ""}, "invalid_value", "cache_salt"),
    ({"cache_salt": 5}, "invalid_type", "cache_salt"),
    ({"priority": 1 << 40}, "invalid_value", "priority"),
    ({"prompt": None}, "missing_required_parameter", "prompt"),
    ({"prompt": ""}, "empty_input", "prompt"),
    ({"prompt": []}, "empty_input", "prompt"),
    ({"prompt": [[]]}, "empty_input", "prompt[0]"),
    ({"prompt": ["a", ""]}, "empty_input", "prompt[1]"),
    ({"prompt": 5}, "invalid_type", "prompt"),
    ({"prompt": {"a": 1}}, "invalid_type", "prompt"),
    ({"prompt": ["a", 5]}, "invalid_type", "prompt[1]"),
    ({"prompt": ["a"] * 513}, "limit_exceeded", "prompt"),
    ({"prompt": "a\0b"}, "invalid_text", "prompt"),
    ({"prompt": "\udc80"}, "invalid_text", "prompt"),
    ({"prompt": ["a", "\ud800"]}, "invalid_text", "prompt[1]"),
    ({"prompt": [1, -1]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, 264]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, 2.0]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, True]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, "a"]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [1, None]}, "invalid_token_id", "prompt[1]"),
    ({"prompt": [[1], [2, 10**40]]}, "invalid_token_id", "prompt[1][1]"),
    ({"prompt": "a" * 512}, "context_length_exceeded", "prompt"),
    ({"prompt": ["a", "a" * 512]}, "context_length_exceeded", "prompt[1]"),
    ({"prompt": ["a", "a" * 50_000]}, "context_length_exceeded", "prompt[1]"),
    ({"prompt": ["a", "b"], "max_tokens": 1000}, "context_length_exceeded", "max_tokens"),
    ({"prompt": "a" * 500, "max_tokens": 100}, "context_length_exceeded", "max_tokens"),
    ({"max_tokens": 10**9}, "context_length_exceeded", "max_tokens"),
    ({"max_tokens": 10**30}, "invalid_value", "max_tokens"),
    ({"model": 5}, "invalid_type", "model"),
    ({"suffix": "x"}, "unsupported_parameter", "suffix"),
    ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    ({"response_format": {"type": "yaml"}}, "invalid_value", "response_format.type"),
    ({"guided_json": 3}, "invalid_type", "guided_json"),
    ({"guided_choice": ["a", 1]}, "invalid_type", "guided_choice[1]"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "invalid_value", "guided_choice"),
    ({"structured_outputs": {"regx": "a"}}, "unknown_parameter", "structured_outputs.regx"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "invalid_value", "min_tokens"),
    ({"prompt_embeds": "AAAA"}, "unsupported_parameter", "prompt_embeds"),
    ({"service_tier": "flex"}, "unsupported_parameter", "service_tier"),
    ({"length_penalty": 2}, "invalid_value", "length_penalty"),
    ({"use_beam_search": True}, "missing_required_parameter", "beam_width"),
    ({"use_beam_search": True, "beam_width": 9}, "limit_exceeded", "beam_width"),
    ({"beam_width": 2, "n": 3}, "invalid_value", "n"),
    ({"beam_width": 2, "stream": True}, "invalid_value", "stream"),
    ({"beam_width": 2, "temperature": 0.5}, "unsupported_parameter", "temperature"),
    ({"beam_width": 2, "stop": "x"}, "unsupported_parameter", "stop"),
    ({"beam_width": 2, "best_of": 4}, "invalid_value", "best_of"),
    ({"use_beam_search": False, "beam_width": 3}, "invalid_value", "beam_width"),
    ({"prompt": ["a"] * 100, "n": 8}, "limit_exceeded", "prompt"),
    ({"prompt": ["a"] * 100, "best_of": 8}, "limit_exceeded", "prompt"),
    ({"prompt": ["a"] * 100, "beam_width": 8}, "limit_exceeded", "prompt"),
    ({"stream": True, "include_cost": True}, "invalid_value", "include_cost"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 1}, "invalid_value", "prompt_logprobs"),
    ({"logit_bias": {"5": 1, "05": 2}}, "invalid_token_id", "logit_bias"),
    ({"metadata": 5}, "invalid_type", "metadata"),
    ({"user": 5}, "invalid_type", "user"),
    ({"store": "yes"}, "invalid_type", "store"),
]


@pytest.mark.parametrize(("change", "code", "param"), FIELDS, ids=lambda v: str(v)[:50])
def test_completion_fields(
    http: httpx.Client, change: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"model": "fake", "prompt": "hello"} | change
    reply = http.post(COMPLETIONS, content=json.dumps(body), headers=JSON)
    expect(reply, 400, code, param)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("name", ["other", "../../etc/passwd", "fake\n", "x" * 5000])
def test_unknown_models(http: httpx.Client, name: str) -> None:
    reply = http.post(COMPLETIONS, json={"model": name, "prompt": "a"})
    expect(reply, 404, "model_not_found", "model")
    assert "x" * 65 not in reply.text


def test_fields_are_judged_before_anything_runs(http: httpx.Client) -> None:
    """A stream too gets its status before the first byte."""
    body = {"model": "fake", "prompt": "a" * 600, "stream": True}
    expect(http.post(COMPLETIONS, json=body), 400, "context_length_exceeded", "prompt")


# ------------------------------------------------------------------ the fields of chat

CHAT_FIELDS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "empty_input", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
    ({"messages": [{}]}, "missing_required_parameter", "messages[0].role"),
    ({"messages": [message(5)]}, "invalid_type", "messages[0].content"),
    ({"messages": [message("a\0")]}, "invalid_text", "messages[0].content"),
    ({"messages": [message(), message("\ud83d")]}, "invalid_text", "messages[1].content"),
    ({"messages": [message(["x"])]}, "invalid_type", "messages[0].content[0]"),
    ({"messages": [{"role": "king", "content": "a"}]}, "invalid_messages", "messages[0]"),
    ({"messages": [{"role": 5, "content": "a"}]}, "invalid_type", "messages[0].role"),
    (
        {"messages": [message(), {"role": "system", "content": "late"}]},
        "invalid_messages",
        "messages",
    ),
    (
        {"messages": [message([{"type": "image_url", "image_url": {"url": "http://a/b"}}])]},
        "media_url_not_allowed",
        "messages[0].content[0]",
    ),
    (
        {"messages": [message([{"type": "input_audio", "input_audio": {}}])]},
        "unsupported_parameter",
        "messages[0].content[0]",
    ),
    (
        {"messages": [message(function_call={"name": "x"})]},
        "unsupported_parameter",
        "messages[0].function_call",
    ),
    ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "limit_exceeded", "top_logprobs"),
    ({"logprobs": 5}, "invalid_type", "logprobs"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_completion_tokens"),
    ({"max_completion_tokens": 5000}, "context_length_exceeded", "max_completion_tokens"),
    ({"max_tokens": 5000}, "context_length_exceeded", "max_tokens"),
    ({"messages": [message("a" * 600)]}, "context_length_exceeded", "messages"),
    ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"functions": [{}]}, "unsupported_parameter", "functions"),
    (
        {"response_format": {"type": "json_schema"}},
        "missing_required_parameter",
        "response_format.json_schema",
    ),
    ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
    ({"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
    ({"prediction": {}}, "unsupported_parameter", "prediction"),
    ({"reasoning_effort": 3}, "invalid_type", "reasoning_effort"),
    ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    ({"chat_template_kwargs": {"tools": 1}}, "invalid_value", "chat_template_kwargs.tools"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"echo": True}, "unsupported_parameter", "echo"),
    ({"n": 9}, "limit_exceeded", "n"),
    ({"parallel_tool_calls": "no"}, "invalid_type", "parallel_tool_calls"),
    ({"stream": True, "include_cost": True}, "invalid_value", "include_cost"),
]


@pytest.mark.parametrize(("change", "code", "param"), CHAT_FIELDS, ids=lambda v: str(v)[:50])
def test_chat_fields(
    http: httpx.Client, change: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"model": "fake", "messages": [message()]} | change
    reply = http.post(CHAT, content=json.dumps(body), headers=JSON)
    expect(reply, 400, code, param)


def test_an_empty_answer_may_be_sent_back(http: httpx.Client) -> None:
    turns = [message(), {"role": "assistant", "content": ""}, message("go on")]
    reply = http.post(CHAT, json={"model": "fake", "messages": turns, "max_tokens": 2})
    assert reply.status_code == 200, reply.text


# ------------------------------------------------------------------ the two routes beside


def test_tokenize_and_back(http: httpx.Client) -> None:
    reply = http.post("/tokenize", json={"prompt": "h\u00e9", "return_token_strs": True}).json()
    assert reply["tokens"] == [256, 104, 0xC3, 0xA9]
    assert (reply["count"], reply["max_model_len"]) == (4, 512)
    assert reply["token_strs"][:2] == ["<|bos|>", "h"]
    bare = http.post("/tokenize", json={"prompt": "h", "add_special_tokens": False}).json()
    assert bare["tokens"] == [104]
    chat = http.post("/tokenize", json={"messages": [message("<|end|>")]}).json()
    assert chat["tokens"] == [256, 258, *b"<|end|>", 261, 259]
    back = http.post("/detokenize", json={"tokens": [256, 104, 0xC3, 0xA9]}).json()
    assert back == {"prompt": "<|bos|>h\u00e9"}


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": 5}, "invalid_type", "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "invalid_text", "prompt"),
        ("/tokenize", {"messages": []}, "empty_input", "messages"),
        ("/detokenize", {}, "missing_required_parameter", "tokens"),
        ("/detokenize", {"tokens": []}, "empty_input", "tokens"),
        ("/detokenize", {"tokens": [264]}, "invalid_token_id", "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "invalid_type", "tokens"),
        ("/detokenize", {"tokens": [104] * 513}, "context_length_exceeded", "tokens"),
    ],
)
def test_tokenize_fields(
    http: httpx.Client, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    reply = http.post(path, content=json.dumps(body), headers=JSON)
    expect(reply, 400, code, param)


def test_client_ids_are_kept(http: httpx.Client, server: Running) -> None:
    """And the server has its own for each request, by which two of one client are told apart."""
    body = {"model": "fake", "prompt": "a", "max_tokens": 1}
    for given, kept in (("mine-7/a", True), ("x" * 129, False), ("a b", False), ("", False)):
        reply = http.post(COMPLETIONS, json=body, headers={"x-request-id": given})
        assert reply.status_code == 200
        assert (reply.headers["x-request-id"] == given) == kept
    refused = http.post(COMPLETIONS, json={"prompt": 5}, headers={"x-request-id": "mine"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine")


def test_the_server_is_as_it_was(http: httpx.Client, server: Running) -> None:
    """After all of the above: nothing is left, and good requests are served."""
    server.wait_until_idle()
    assert server.metric("ridgeline_http_held_body_bytes") == 0
    assert http.post(COMPLETIONS, json={"model": "fake", "prompt": "a"}).status_code == 200
    assert "Traceback" not in server.log.read_text()
