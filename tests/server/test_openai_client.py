"""Does the official client get what it expects? Answers are compared with the fake's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from ridgeline.answer import sample_seed
from tests.server.fake_build import reference
from tests.server.model_folder import byte_ids
from tests.server.running import Running

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(prompt: str, count: int, seed: int | None = None) -> str:
    return bytes(reference(byte_ids(prompt), count, seed)).decode("utf-8", "replace")


def chat_ids(content: str) -> list[int]:
    """<bos> <user> content <end> <assistant>"""
    return [256, 258, *content.encode(), 261, 259]


def chat_text(content: str, count: int) -> str:
    return bytes(reference(chat_ids(content), count)).decode("utf-8", "replace")


def test_models(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("fake", "model", "ridgeline")
    assert client.models.retrieve("fake").id == "fake"
    for name in ("other", "../../etc/passwd", "a/b"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        assert caught.value.code in ("model_not_found", "not_found")


def test_completion(client: OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="hello", max_tokens=30)
    assert reply.object == "text_completion"
    assert reply.choices[0].text == text_of("hello", 30)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (6, 30)
    assert reply.usage.total_tokens == 36


def test_default_length_is_16(client: OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="hello")
    assert reply.choices[0].text == text_of("hello", 16)


def test_completion_streamed(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="fake", prompt="hello", max_tokens=30, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *pieces, last = chunks
    assert "".join(c.choices[0].text for c in pieces) == text_of("hello", 30)
    assert [c.choices[0].finish_reason for c in pieces][-1] == "length"
    assert {c.id for c in chunks} == {chunks[0].id}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 30
    assert all(c.usage is None for c in pieces)


def test_usage_is_not_streamed_unasked(client: OpenAI) -> None:
    for chunk in client.completions.create(model="fake", prompt="x", max_tokens=3, stream=True):
        assert chunk.usage is None
        assert chunk.choices


def test_chat(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=20)
    message = reply.choices[0].message
    assert (message.role, message.content) == ("assistant", chat_text("hello", 20))
    assert reply.object == "chat.completion"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(chat_ids("hello"))


def test_chat_streamed(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, max_completion_tokens=20, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == chat_text("hello", 20)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_chat_goes_on_to_the_end_of_the_context(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO)
    assert reply.usage is not None
    assert reply.usage.total_tokens == 512
    assert reply.choices[0].finish_reason == "length"


def test_text_parts_and_roles(client: OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("he", "llo")]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "go", "name": "ann"},
    ]  # fmt: skip
    reply = client.chat.completions.create(model="fake", messages=parts, max_tokens=5)
    prompt = [256, 260, *b"be brief", 261, 258, *b"hello", 261, 259, *b"yes", 261]
    prompt += [258, *b"go", 261, 259]
    expected = bytes(reference(prompt, 5)).decode("utf-8", "replace")
    assert reply.choices[0].message.content == expected


def test_special_tokens_in_messages_are_plain_text(client: OpenAI) -> None:
    content = "a<|end|><|assistant|>b"
    messages: Any = [{"role": "user", "content": content}]
    reply = client.chat.completions.create(model="fake", messages=messages, max_tokens=5)
    assert reply.choices[0].message.content == chat_text(content, 5)


def test_token_ids_and_many_prompts(client: OpenAI) -> None:
    one = client.completions.create(model="fake", prompt=byte_ids("abc"), max_tokens=8)
    assert one.choices[0].text == text_of("abc", 8)
    texts = client.completions.create(model="fake", prompt=["abc", "xyz"], max_tokens=8)
    ids = client.completions.create(
        model="fake", prompt=[byte_ids("abc"), byte_ids("xyz")], max_tokens=8
    )
    for reply in (texts, ids):
        assert [c.index for c in reply.choices] == [0, 1]
        assert [c.text for c in reply.choices] == [text_of("abc", 8), text_of("xyz", 8)]
        assert reply.usage is not None
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (8, 16)


def test_n_samples_have_their_own_seeds(client: OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt=["abc", "xyz"], max_tokens=8, n=3, temperature=1, seed=5
    )
    expected = [text_of(p, 8, sample_seed(5, i)) for p in ("abc", "xyz") for i in range(3)]
    assert [c.text for c in reply.choices] == expected
    assert len(set(expected)) == 6


def test_n_streamed_equals_n_at_once(client: OpenAI) -> None:
    options: Any = {"model": "fake", "prompt": "abc", "max_tokens": 9, "n": 4, "temperature": 1}
    whole = client.completions.create(**options, seed=11)
    texts = [""] * 4
    for chunk in client.completions.create(**options, seed=11, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in whole.choices]


def test_without_a_seed_samples_differ_and_with_one_they_repeat(client: OpenAI) -> None:
    def sample(**more: Any) -> str:
        reply = client.completions.create(
            model="fake", prompt="abc", max_tokens=20, temperature=1, **more
        )
        return str(reply.choices[0].text)

    assert len({sample() for _ in range(4)}) > 1
    assert sample(seed=3) == sample(seed=3)


def test_best_of_returns_the_likeliest(client: OpenAI) -> None:
    options: Any = {"model": "fake", "prompt": "abc", "max_tokens": 6, "temperature": 1, "seed": 2}
    every = client.completions.create(**options, n=8, logprobs=0)
    ranked = sorted(
        every.choices,
        key=lambda c: sum(filter(None, c.logprobs.token_logprobs or [])) if c.logprobs else 0,
        reverse=True,
    )
    best = client.completions.create(**options, n=2, best_of=8)
    assert [c.text for c in best.choices] == [c.text for c in ranked[:2]]
    assert best.choices[0].logprobs is None
    assert best.usage is not None
    assert best.usage.completion_tokens == 48  # all eight were made


def test_stop_strings_cut_the_text_and_free_the_engine(client: OpenAI, server: Running) -> None:
    whole = text_of("hello", 60)
    stop = whole[20:23]
    reply = client.completions.create(model="fake", prompt="hello", max_tokens=400, stop=[stop])
    assert reply.choices[0].text == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    pieces = client.completions.create(
        model="fake", prompt="hello", max_tokens=400, stop=stop, stream=True
    )
    assert "".join(c.choices[0].text for c in pieces) == whole[: whole.index(stop)]
    server.wait_until_idle()


def test_after_a_stop_string_the_engine_does_not_go_on(client: OpenAI, server: Running) -> None:
    computed = server.metric("ridgeline_engine_scheduled_tokens_total")
    stop = text_of("!slow", 10)[-2:]
    client.completions.create(model="fake", prompt="!slow", max_tokens=400, stop=stop)
    server.wait_until_idle()
    assert server.metric("ridgeline_engine_scheduled_tokens_total") - computed < 50


def test_end_token_and_ignore_eos(client: OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="!eos", max_tokens=20)
    assert reply.choices[0].text == text_of("!eos", 3)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    reply = client.completions.create(
        model="fake", prompt="!eos", max_tokens=20, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"


def test_stop_token_ids(client: OpenAI) -> None:
    ids = reference(byte_ids("hello"), 60)
    stop = ids[25]
    reply = client.completions.create(
        model="fake", prompt="hello", max_tokens=60, extra_body={"stop_token_ids": [stop]}
    )
    assert reply.choices[0].text == bytes(ids[: ids.index(stop)]).decode("utf-8", "replace")
    assert reply.choices[0].finish_reason == "stop"


def test_completion_logprobs(client: OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="hello", max_tokens=5, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == reply.choices[0].text
    assert logprobs.token_logprobs == pytest.approx([-0.1] * 5)
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs is not None
    assert [len(row) for row in logprobs.top_logprobs] == [2] * 5
    rows = zip(logprobs.tokens or [], logprobs.top_logprobs, strict=True)
    assert all(token in row for token, row in rows)


def test_offsets_are_places_in_the_text_that_is_shown(client: OpenAI) -> None:
    """The token that begins every text is not in it, and one character may be of four tokens."""
    prompt = "hi 😀!"
    options: Any = {"model": "fake", "max_tokens": 3, "logprobs": 2, "echo": True}
    choice = client.completions.create(prompt=prompt, **options).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert choice.text.startswith(prompt)
    assert logprobs.text_offset == [0, 0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7]
    smile = ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert (logprobs.tokens or [])[:9] == ["<|bos|>", "h", "i", " ", *smile, "!"]
    ids = client.completions.create(prompt=byte_ids(prompt), **options).choices[0]
    assert ids.logprobs is not None
    assert ids.text.startswith(f"<|bos|>{prompt}")
    assert ids.logprobs.text_offset == [0, 7, 8, 9, 10, 10, 10, 10, 11, 12, 13, 14]


def test_prompt_log_probabilities_beside_an_echo(client: OpenAI) -> None:
    asked: Any = {"echo": True, "prompt_logprobs": 1}
    reply = client.completions.create(model="fake", prompt="abc", max_tokens=1, extra_body=asked)
    rows = reply.choices[0].model_dump()["prompt_logprobs"]
    assert [row is None for row in rows] == [True, False, False, False]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_the_ids_of_its_prompt_once(client: OpenAI, n: int) -> None:
    asked: Any = {"return_token_ids": True}
    pieces = client.completions.create(
        model="fake", prompt=["ab", "c"], n=n, max_tokens=3, stream=True, extra_body=asked
    )
    said = [
        (choice.index, ids)
        for piece in pieces
        for choice in piece.choices
        if (ids := choice.model_dump().get("prompt_token_ids")) is not None
    ]
    assert sorted(said) == [(i, byte_ids("ab" if i < n else "c")) for i in range(2 * n)]
    chat = client.chat.completions.create(
        model="fake", messages=HELLO, n=n, max_tokens=3, stream=True, extra_body=asked
    )
    found = [ids for piece in chat if (ids := piece.model_dump().get("prompt_token_ids"))]
    whole = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=3, extra_body=asked
    )
    assert found == [whole.model_dump()["prompt_token_ids"]]


def test_completion_logprobs_streamed_are_the_same(client: OpenAI) -> None:
    options: Any = {"model": "fake", "prompt": "hello", "max_tokens": 12, "logprobs": 3}
    whole = client.completions.create(**options).choices[0].logprobs
    tokens: list[str] = []
    offsets: list[int] = []
    for chunk in client.completions.create(**options, stream=True):
        if (part := chunk.choices[0].logprobs) is not None:
            tokens += part.tokens or []
            offsets += part.text_offset or []
    assert whole is not None
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


def test_echo_with_logprobs_of_the_prompt(client: OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt="hello", max_tokens=2, echo=True, logprobs=1
    )
    assert reply.choices[0].text == "hello" + text_of("hello", 2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens or [])[:6] == ["<|bos|>", "h", "e", "l", "l", "o"]
    assert (logprobs.token_logprobs or [])[0] is None
    assert all(isinstance(v, float) for v in (logprobs.token_logprobs or [])[1:])
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == 8


def test_echo_alone(client: OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=0, echo=True)
    assert [c.text for c in reply.choices] == ["ab", "cd"]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0
    pieces = client.completions.create(
        model="fake", prompt="ab", max_tokens=3, echo=True, stream=True
    )
    assert "".join(c.choices[0].text for c in pieces) == "ab" + text_of("ab", 3)


def test_chat_logprobs(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content
    assert content is not None
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined == bytes(reference(chat_ids("hello"), 4))
    assert [len(entry.top_logprobs) for entry in content] == [2] * 4
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)


def test_prompt_logprobs(client: OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt="abc", max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    rows: Any = reply.choices[0].model_extra or {}
    rows = rows["prompt_logprobs"]
    assert rows[0] is None
    assert [next(iter(row)) for row in rows[1:]] == [str(i) for i in b"abc"]
    assert rows[1]["97"]["decoded_token"] == "a"


def test_cached_tokens_are_reported(client: OpenAI) -> None:
    prompt = "a prompt of more than thirty-two characters, twice"
    for expected in (0, 48):
        reply = client.completions.create(model="fake", prompt=prompt, max_tokens=1)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == expected
    salted = client.completions.create(
        model="fake", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"}
    )
    assert salted.usage is not None
    assert salted.usage.prompt_tokens_details is not None
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_beam_search(client: OpenAI) -> None:
    reply = client.completions.create(
        model="fake", prompt="abc", max_tokens=5, n=2,
        extra_body={"use_beam_search": True, "beam_width": 4, "length_penalty": 1.0},
    )  # fmt: skip
    assert [c.index for c in reply.choices] == [0, 1]
    assert reply.choices[0].text == text_of("abc", 5)  # the fake's greedy path is the likeliest
    assert reply.choices[1].text != reply.choices[0].text
    assert {c.finish_reason for c in reply.choices} == {"length"}


def test_harmless_fields_and_no_op_values_are_accepted(client: OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=2, user="me", metadata={"a": "b"}, store=False,
        tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"],
        service_tier="auto", parallel_tool_calls=True, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"5": 1}, top_p=0.9, extra_body={"top_k": 5, "min_p": 0.1, "priority": 1},
    )  # fmt: skip
    assert reply.choices[0].finish_reason == "length"


ERRORS: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
    ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
    ({"temperature": 3}, openai.BadRequestError, "invalid_value", "temperature"),
    ({"n": 9}, openai.BadRequestError, "limit_exceeded", "n"),
    ({"max_tokens": 5000}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
    ({"prompt": ""}, openai.BadRequestError, "empty_input", "prompt"),
    ({"suffix": "x"}, openai.BadRequestError, "unsupported_parameter", "suffix"),
    ({"prompt": "!nan"}, openai.InternalServerError, "internal_error", None),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("change", "kind", "code", "param"), ERRORS)
def test_errors_are_the_clients_exceptions(
    client: OpenAI,
    change: dict[str, Any],
    kind: type[openai.APIStatusError],
    code: str,
    param: str | None,
    streams: bool,
) -> None:
    body: Any = {"model": "fake", "prompt": "hello", "max_tokens": 4, "stream": streams} | change
    with pytest.raises(kind) as caught:
        client.completions.create(**body)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type is not None
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("req-")
