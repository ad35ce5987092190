"""Do tools and reasoning work with the official client, streamed and whole? The fake model says
what its prompt tells it to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec import structs
from openai import OpenAI

from tests.parsers.answers import ANSWERS, TOOLS, found_in, made, read
from tests.server.model_folder import write_model_folder
from tests.server.running import FAKE, Running, fake_config, running

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '' if loop.last and m.content.endswith('...') else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '<think>\n' if enable_thinking else '' }}{{ reasoning_effort or '' }}{% endif %}"
    "{# </think> #}"
)
OFFERED: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in TOOLS.items()
]
LONG = {"max_model_len": 4096}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("tools") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tool_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(fake_config(folder, engine=LONG), tmp_path_factory.mktemp("log")) as found:
        yield found


@pytest.fixture(scope="module")
def client(tool_server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as made_:
        yield made_


def say(text: str) -> Any:
    return [{"role": "user", "content": f"!say {text}"}]


def ask(client: OpenAI, messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="fake", messages=messages, **fields)


def streamed(client: OpenAI, messages: Any, **fields: Any) -> tuple[Any, list[Any]]:
    """The message as the client's own accumulator puts it together, and all chunks."""
    with client.chat.completions.stream(model="fake", messages=messages, **fields) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        return stream.get_final_completion().choices[0], chunks


HERMES = [name for name, (parser, _, _) in ANSWERS.items() if parser == "hermes"]


@pytest.mark.parametrize("name", HERMES)
def test_calls_whole_and_streamed(client: OpenAI, name: str) -> None:
    _, text, _ = ANSWERS[name]
    expected = found_in(read(made("hermes"), [text]))
    whole = ask(client, say(text), tools=OFFERED).choices[0]
    other, _ = streamed(client, say(text), tools=OFFERED)
    for choice in (whole, other):
        assert (choice.message.content or "") == expected.content
        calls = choice.message.tool_calls or []
        assert [c.function.name for c in calls] == [name for name, _ in expected.calls]
        for call, (_, arguments) in zip(calls, expected.calls, strict=True):
            found = call.function.arguments
            assert (found if isinstance(arguments, str) else json.loads(found)) == arguments
        assert len({call.id for call in calls}) == len(calls)
        assert choice.finish_reason == ("tool_calls" if expected.calls else "stop")


def test_arguments_come_bit_by_bit(client: OpenAI) -> None:
    text = CALL.replace("Paris", "x" * 60)
    _, chunks = streamed(client, say(text), tools=OFFERED)
    deltas = [d for c in chunks for d in (c.choices[0].delta.tool_calls or [])]
    assert [d.function.name for d in deltas if d.function.name] == ["get_weather"]
    assert sum(bool(d.function.arguments) for d in deltas) > 3
    assert {d.index for d in deltas} == {0}


def test_one_call_at_most(client: OpenAI) -> None:
    for choice in (
        ask(client, say(CALL + CALL), tools=OFFERED, parallel_tool_calls=False).choices[0],
        streamed(client, say(CALL + CALL), tools=OFFERED, parallel_tool_calls=False)[0],
    ):
        assert len(choice.message.tool_calls) == 1
    assert len(ask(client, say(CALL + CALL), tools=OFFERED).choices[0].message.tool_calls) == 2


def test_no_tools_no_calls(client: OpenAI) -> None:
    for fields in ({}, {"tools": OFFERED, "tool_choice": "none"}):
        choice = ask(client, say(CALL), **fields).choices[0]
        assert choice.message.content == CALL
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def prompt_of(server: Running, messages: Any, **fields: Any) -> str:
    """What the template makes of a conversation."""
    with server.http as http:
        ids = http.post("/tokenize", json={"messages": messages} | fields).json()["tokens"]
        return str(http.post("/detokenize", json={"tokens": ids}).json()["prompt"])


def test_a_conversation_with_calls(tool_server: Running) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    text = prompt_of(tool_server, messages, tools=OFFERED[:1])
    assert text == (
        f"<|bos|><|system|>{json.dumps(OFFERED[:1])}<|end|><|user|>weather?<|end|><|assistant|>"
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call><|end|>'
        "<|tool|>rain<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": OFFERED, "tool_choice": "sometimes"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, fields: Any, place: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, say("x"), extra_body=fields)
    assert caught.value.param == place


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "12", '{"a": "\\ud800"}'])
def test_broken_calls_in_the_history_are_named(client: OpenAI, arguments: str) -> None:
    function = {"name": "f", "arguments": arguments}
    messages: Any = [
        *say("x"),
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages)
    assert str(caught.value.param).startswith("messages[1].tool_calls[0].function.arguments")


# ---------------------------------------------------------------------- forced calls

TIME = {"name": "get_time", "arguments": {"a": "b" * 60}}


@pytest.fixture(scope="module")
def forcing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A model that says what it is told to, and is taken for one that keeps to grammars. Its
    answers begin within reasoning where the template is asked for that."""
    config = fake_config(folder, engine=LONG)
    config = structs.replace(config, builder=f"{FAKE}_with_grammars")
    with (
        running(config, tmp_path_factory.mktemp("forcing")) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made_,
    ):
        yield made_


@pytest.mark.parametrize("is_named", [False, True])
def test_forced_calls_are_read(forcing: OpenAI, is_named: bool) -> None:
    calls = [TIME] if is_named else [TIME, TIME]
    text = json.dumps(TIME if is_named else calls)
    fields: Any = {"tools": OFFERED, "tool_choice": "required"}
    if is_named:
        fields["tool_choice"] = {"type": "function", "function": {"name": "get_time"}}
    whole = ask(forcing, say(text), **fields).choices[0]
    other, chunks = streamed(forcing, say(text), **fields)
    for choice in (whole, other):
        assert [c.function.name for c in choice.message.tool_calls] == ["get_time"] * len(calls)
        for call in choice.message.tool_calls:
            assert json.loads(call.function.arguments) == TIME["arguments"]
        assert not choice.message.content
        assert choice.finish_reason == ("stop" if is_named else "tool_calls")
    deltas = [d for c in chunks for d in (c.choices[0].delta.tool_calls or [])]
    assert len(deltas) > len(calls)
    short = ask(forcing, say(text), max_tokens=40, **fields).choices[0]
    assert short.finish_reason == "length"
    assert json.dumps(TIME["arguments"]).startswith(short.message.tool_calls[0].function.arguments)


BAD = {"type": "object", "properties": {"x": {"not": {}}}}


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"tools": []}, "invalid_value", "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nothing"}}},
            "invalid_value",
            "tool_choice.function.name",
            "nothing",
        ),
        (
            {"tool_choice": {"type": "custom", "function": {"name": "f"}}},
            "unsupported_parameter",
            "tool_choice.type",
            "custom",
        ),
        (
            {"response_format": {"type": "json_object"}},
            "invalid_value",
            "response_format",
            "tool_choice",
        ),
        ({"extra_body": {"min_tokens": 2}}, "invalid_value", "min_tokens", "grammar"),
        (
            {
                "tools": [
                    *OFFERED[:2],
                    {"type": "function", "function": {"name": "odd", "parameters": BAD}},
                ]
            },
            "unsupported_schema",
            "tools[2].function.parameters",
            "'odd'",
        ),
    ],
)
def test_what_cannot_be_forced_is_named(
    forcing: OpenAI, fields: dict[str, Any], code: str, param: str, words: str
) -> None:
    asked = {"tools": OFFERED, "tool_choice": "required", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(forcing, say("x"), **asked)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert words in str(caught.value)


def test_a_model_without_grammars_forces_nothing(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, say("x"), tools=OFFERED, tool_choice="required")
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tool_choice")


# ---------------------------------------------------------------------- reasoning


@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning(client: OpenAI, is_open: bool) -> None:
    text = ("" if is_open else "<think>\n") + f"Hm, Paris.\n</think>\n\nI look.{CALL}"
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": is_open}}
    whole = ask(client, say(text), tools=OFFERED, extra_body=options).choices[0].message
    other, _ = streamed(client, say(text), tools=OFFERED, extra_body=options)
    for message in (whole, other.message):
        assert message.reasoning_content == "Hm, Paris."
        assert message.content == "I look."
        assert message.tool_calls[0].function.name == "get_weather"
    options |= {"include_reasoning": False}
    message = ask(client, say(text), tools=OFFERED, extra_body=options).choices[0].message
    assert not hasattr(message, "reasoning_content")
    assert message.content == "I look."


def test_reasoning_that_never_ends(client: OpenAI) -> None:
    choice = ask(client, say("<think>Hm, hm, hm"), max_tokens=12).choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == (None, "Hm, h")
    assert choice.finish_reason == "length"


def test_effort_and_options_reach_the_template(tool_server: Running, client: OpenAI) -> None:
    usage = [
        ask(client, say("x"), **fields).usage.prompt_tokens
        for fields in (
            {},
            {"extra_body": {"reasoning_effort": "none"}},
            {"extra_body": {"reasoning_effort": "low"}},
            {"extra_body": {"chat_template_kwargs": {"reasoning_effort": "12345"}}},
        )
    ]
    assert [one - usage[0] for one in usage] == [0, 4, len("<think>\nlow"), 5]


def test_the_last_message_goes_on(tool_server: Running, client: OpenAI) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    fields = {"continue_final_message": True}
    text = prompt_of(tool_server, messages, **fields)
    assert text == "<|bos|><|user|>a<|end|><|assistant|>b "
    messages = [*say("so</think>it is"), {"role": "assistant", "content": "<think>I think "}]
    message = ask(client, messages, extra_body=fields).choices[0].message
    assert (message.reasoning_content, message.content) == ("so", "it is")


# ---------------------------------------------------------------------- flags


def test_flags(folder: Path, tmp_path: Path) -> None:
    """Another template, whose words say nothing of tools, and what reads the answers."""
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    )
    config = fake_config(folder, engine=LONG, chat_template=str(own), reasoning_parser="mistral")
    with running(config, tmp_path) as server:
        text = prompt_of(server, say("x"), tools=OFFERED[:1])
        assert text.startswith("<|user|>You may call tools.")
        assert json.dumps(OFFERED[0]["function"]) in text
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = '[THINK]Hm.[/THINK][{"name": "get_time", "arguments": {}}]'
            message = ask(client, say(answer), tools=OFFERED).choices[0].message
            assert message.reasoning_content == "Hm."
            assert message.tool_calls[0].function.name == "get_time"
