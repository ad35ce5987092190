"""Answers of models with calls of tools, as their makers' cards and templates show them, and what a
reader finds in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ridgeline.parsers import parser_class
from ridgeline.parsers.parser import Kind, Parser, Piece, Tags

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detail": {"type": ["boolean", "null"]},
            "where": {"anyOf": [{"type": "string"}, {"type": "object"}]},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
    },
    "get_time": {"type": "object", "properties": {}},
    "spotify.play": {},
}
THINK = Tags("<think>", "</think>")


@dataclass(frozen=True)
class Found:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)


def read(parser: Parser, pieces: Iterable[str]) -> list[Piece]:
    """What comes out, with neighbours of one kind joined."""
    found: list[Piece] = []
    for part in [*(parser.feed(text) for text in pieces), parser.finish()]:
        for piece in part:
            if found and found[-1].kind is piece.kind and piece.kind is not Kind.CALL:
                found[-1] = Piece(piece.kind, found[-1].text + piece.text)
            else:
                found.append(piece)
    return found


def found_in(pieces: Iterable[Piece]) -> Found:
    """The arguments as JSON, or as text where they are none."""
    texts = {Kind.CONTENT: "", Kind.REASONING: ""}
    calls: list[list[str]] = []
    for kind, text in pieces:
        if kind is Kind.CALL:
            calls.append([text, ""])
        elif kind is Kind.ARGUMENTS:
            calls[-1][1] += text
        else:
            texts[kind] += text
    return Found(
        texts[Kind.CONTENT], texts[Kind.REASONING], [(name, _json(text)) for name, text in calls]
    )


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def made(
    name: str, *, tools: Any = TOOLS, reasoning: Tags | None = None, is_reasoning: bool = False
) -> Parser:
    return parser_class(name)(tools, reasoning, is_reasoning=is_reasoning)


PARIS = ("get_weather", {"city": "Paris"})
TIME: tuple[str, Any] = ("get_time", {})
# Parser, answer, what is in it.
ANSWERS: dict[str, tuple[str, str, Found]] = {
    "hermes": (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        Found("Let me look.", calls=[PARIS, TIME]),
    ),
    "hermes, arguments first and as text": (
        "hermes",
        '<tool_call>{"arguments": "{\\"city\\": \\"Paris\\"}", "name": "get_weather"}</tool_call>',
        Found(calls=[PARIS]),
    ),
    "hermes, braces and tags in texts": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "}]\\"</tool_call>{\\\\"}}\n'
        "</tool_call>",
        Found(calls=[("get_weather", {"city": '}]"</tool_call>{\\'})]),
    ),
    "hermes, no end": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        Found(calls=[PARIS]),
    ),
    "hermes, no ends between": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}}\n'
        '<tool_call>\n{"name": "get_time"}\n</tool_call>',
        Found(calls=[PARIS, TIME]),
    ),
    "hermes, cut off": (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        Found(calls=[("get_weather", '{"city": "Par')]),
    ),
    "hermes, no JSON": (
        "hermes",
        "I write <tool_call> when I call and </tool_call> after it. ",
        Found("I write <tool_call> when I call and </tool_call> after it. "),
    ),
    "a list in tags": (
        "hermes",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_time", "arguments": {}}]</TOOLCALL> Wait.',
        Found("Wait.", calls=[PARIS, TIME]),
    ),
    "qwen3 coder": (
        "qwen3_coder",
        "Sure.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=detail>\nTrue\n</parameter>\n"
        '<parameter=where>\n{"a": [1]}\n</parameter>\n<parameter=unit>\n7\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        Found(
            "Sure.",
            calls=[
                (
                    "get_weather",
                    {"city": "Paris", "days": 3, "detail": True, "where": {"a": [1]}, "unit": "7"},
                ),
                TIME,
            ],
        ),
    ),
    "qwen3 coder, first tag missing": (
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nnull\n\n</parameter>\n</function>\n</tool_call>",
        Found(calls=[("get_weather", {"city": "null\n"})]),
    ),
    "glm": (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_time</tool_call>",
        Found(calls=[("get_weather", {"city": "Paris", "days": 3}), TIME]),
    ),
    "deepseek v3": (
        "deepseek_v3",
        "I see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"  # noqa: RUF001
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'  # noqa: RUF001
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```"  # noqa: RUF001
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        Found("I see.", calls=[PARIS, TIME]),
    ),
    "deepseek v3.1": (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"  # noqa: RUF001
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time'  # noqa: RUF001
        "<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        Found(calls=[PARIS, TIME]),
    ),
    "mistral, a list": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_time", "arguments": {}}]',
        Found(calls=[PARIS, TIME]),
    ),
    "mistral, names": (
        "mistral",
        'Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[CALL_ID]'
        "abcdefghi[ARGS]{}",
        Found("Well.", calls=[PARIS, TIME]),
    ),
    "mistral, nothing between": (
        "mistral",
        '[TOOL_CALLS]get_weather{"city": "Paris"}',
        Found(calls=[PARIS]),
    ),
    "llama 3": (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_time", "parameters": {}}',
        Found(calls=[PARIS, TIME]),
    ),
    "llama 3, tagged": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}'
        "<|eom_id|>",
        Found(calls=[PARIS]),
    ),
    "llama 3, an answer in JSON": (
        "llama3_json",
        ' {"name": "Bob", "parameters": [1, 2]}\n',
        Found(' {"name": "Bob", "parameters": [1, 2]}\n'),
    ),
    "pythonic": (
        "pythonic",
        "[get_weather(city='Paris', days=-3, detail=None, where={\"a\": (1, true)}), "
        'get_time(), spotify.play(x="a)]\\"")]',
        Found(
            calls=[
                (
                    "get_weather",
                    {"city": "Paris", "days": -3, "detail": None, "where": {"a": [1, True]}},
                ),
                TIME,
                ("spotify.play", {"x": 'a)]"'}),
            ]
        ),
    ),
    "pythonic, tagged": (
        "pythonic",
        'Fine: <|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Wait.',
        Found("Fine:Wait.", calls=[PARIS]),
    ),
    "pythonic, a list": ("pythonic", "[1, 2] are two.", Found("[1, 2] are two.")),
    "pythonic, no literals": (
        "pythonic",
        "[get_weather(city=print(1))]",
        Found("[get_weather(city=print(1))]"),
    ),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        Found("I will look.", "Need the weather.", [PARIS]),
    ),
    "harmony, recipient in the role": (
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        Found(calls=[PARIS]),
    ),
    "harmony, final": (
        "harmony",
        "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is 2.<|return|>",
        Found("It is 2.", "Simple."),
    ),
    "harmony, no format at all": ("harmony", "to be or not", Found("to be or not")),
    "json": (
        "json",
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        Found(calls=[PARIS]),
    ),
    "json, no tool of ours": (
        "json",
        '{"name": "rm", "arguments": {}}',
        Found('{"name": "rm", "arguments": {}}'),
    ),
}
