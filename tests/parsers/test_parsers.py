"""Is an answer read the same however it is cut, and as its makers mean it?"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.parsers import PARSERS, REASONING, find_parser, find_reasoning, parser_class
from ridgeline.parsers.parser import Kind, Tags
from ridgeline.text.chat import ChatTemplate
from ridgeline.text.tokenizer import load_tokenizer
from tests.conftest import find_shared
from tests.parsers.answers import ANSWERS, THINK, TOOLS, Found, found_in, made, read
from tests.server.model_folder import write_model_folder

MISTRAL = REASONING["mistral"]


@pytest.mark.parametrize("name", ANSWERS)
def test_published_answers(name: str) -> None:
    parser, text, expected = ANSWERS[name]
    assert found_in(read(made(parser), [text])) == expected


@pytest.mark.parametrize("tags", [None, THINK, MISTRAL])
@pytest.mark.parametrize("name", ANSWERS)
def test_cut_at_every_character(name: str, tags: Tags | None) -> None:
    parser, text, _ = ANSWERS[name]
    if tags is not None and not parser_class(parser).own_reasoning:
        text = f"{tags.begin}\nHm, {text} or\n\n{tags.end}\n\n{text}"
    whole = read(made(parser, reasoning=tags), [text])
    assert read(made(parser, reasoning=tags), list(text)) == whole
    for at in range(1, len(text)):
        assert read(made(parser, reasoning=tags), [text[:at], text[at:]]) == whole, text[:at]


@pytest.mark.parametrize("name", ANSWERS)
def test_without_tools_there_are_no_calls(name: str) -> None:
    parser, text, expected = ANSWERS[name]
    found = found_in(read(made(parser, tools={}), [text]))
    if parser != "harmony":  # whose format says for whom each message is
        assert found == Found(text)
    else:
        assert found.reasoning == expected.reasoning


@pytest.mark.parametrize(
    ("text", "is_reasoning", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, Found("Yes.", "Hm.")),
        ("\n<think>Hm.</think>Yes. ", False, Found("Yes. ", "Hm.")),
        ("Hm.\n</think>\n\nYes.", True, Found("Yes.", "Hm.")),
        ("<think>Hm.</think>Yes.", True, Found("Yes.", "Hm.")),
        ("<think>\n\n</think>\n\nYes.", False, Found("Yes.")),
        ("<think></think>\n\nYes.", False, Found("Yes.")),
        ("  Yes, <think> it is.\n", False, Found("  Yes, <think> it is.\n")),
        ("<think>Hm", False, Found("", "Hm")),
        ("<thi", False, Found("<thi")),
        ("", True, Found()),
        (" ", False, Found(" ")),
    ],
)
@pytest.mark.parametrize("tools", [{}, TOOLS])
def test_reasoning(text: str, is_reasoning: bool, expected: Found, tools: object) -> None:
    for pieces in ([text], list(text)):
        parser = made("hermes", tools=tools, reasoning=THINK, is_reasoning=is_reasoning)
        assert found_in(read(parser, pieces)) == expected


def test_a_call_is_told_before_its_end() -> None:
    parser = made("hermes")
    assert parser.feed('<tool_call>\n{"name": "get_weather"') == []
    first = parser.feed(', "arguments": {"city": "Pa')
    assert first == [(Kind.CALL, "get_weather"), (Kind.ARGUMENTS, '{"city": "Pa')]
    assert parser.feed('ris"}') == [(Kind.ARGUMENTS, 'ris"}')]


def test_the_beginning_of_a_tag_waits() -> None:
    parser = made("hermes")
    assert parser.feed("a <tool") == [(Kind.CONTENT, "a")]
    assert parser.feed("s") == [(Kind.CONTENT, " <tools")]


# ---------------------------------------------------------------------- texts of all kinds

TAGS = sorted(
    {tag for name in PARSERS for tag in (*parser_class(name).begins, *parser_class(name).others)}
    | {tag for tags in REASONING.values() for tag in tags or ()}
    | {"</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<arg_key>"}
    | {"</arg_key>", "<arg_value>", "</arg_value>", "```json", "</TOOLCALL>"}
)
WORDS = [
    *TAGS, *'{}[]()":,;=<>\\/ \n\'#', '{"name": "get_weather", "arguments": ', '{"city": "Paris"}',
    '"name"', '"arguments"', '"parameters"', "get_weather", "get_time(", "city=", "to=functions.",
    "analysis", "commentary", "function", "1e999", "-", "12", "true", "None", "é", "\ud800",
    "x" * 300,
]  # fmt: skip


def check(name: str, words: list[str], is_reasoning: bool, tags: Tags | None) -> None:
    """Whole, by characters and by words: the same, and no exception."""
    text = "".join(words)
    options = {"reasoning": tags, "is_reasoning": is_reasoning}
    whole = read(made(name, **options), [text])  # type: ignore[arg-type]
    assert read(made(name, **options), words) == whole, (name, text)  # type: ignore[arg-type]
    assert read(made(name, **options), list(text)) == whole, (name, text)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(st.sampled_from(WORDS), max_size=24),
    st.booleans(),
    st.sampled_from([None, THINK, MISTRAL]),
)
def test_any_text(name: str, words: list[str], is_reasoning: bool, tags: Tags | None) -> None:
    check(name, words, is_reasoning, tags)


@pytest.mark.slow
def test_a_million_texts() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"seed {seed}")
    names = sorted(PARSERS)
    for number in range(1_000_000):
        words = rng.choices(WORDS, k=rng.randrange(16))
        tags = rng.choice([None, THINK, MISTRAL])
        check(names[number % len(names)], words, rng.random() < 0.3, tags)


def test_long_answers_take_time_in_proportion() -> None:
    """A long answer in pieces of four characters, and whole."""
    text = "a < b " * 20_000
    body = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{text}"}}}}</tool_call>'
    for pieces in ([body], [body[i : i + 4] for i in range(0, len(body), 4)]):
        (call,) = found_in(read(made("hermes"), pieces)).calls
        assert call == ("get_weather", {"city": text})


# ---------------------------------------------------------------------- which parser


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    if (folder := find_shared()) is None:
        pytest.skip("needs the shared templates")
    path = folder / "tokenizers/chat-templates/chat_templates.json"
    expected = json.loads(path.read_text(encoding="utf-8"))["expected"]
    return {name: entry["template"] for name, entry in expected.items()}


def test_the_template_says_which(templates: dict[str, str]) -> None:
    found = {
        name: (find_parser([text]), find_reasoning([text])) for name, text in templates.items()
    }
    assert found == {
        "Qwen-Qwen2.5-7B-Instruct": ("hermes", "none"),
        "Qwen-Qwen3-0.6B": ("hermes", "think"),
        "Qwen-QwQ-32B": ("hermes", "think"),
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
        "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3", "think"),
        "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "none"),
        "microsoft-Phi-3.5-mini-instruct": ("json", "none"),
    }


CALLS: list[tuple[str, Any]] = [
    ("get_weather", {"city": 'Pa"ris\n<b>é', "days": 3, "detail": False, "where": {"a": [1, "x"]}}),
    ("get_weather", {"city": "12"}),
    ("get_time", {}),
]


def test_calls_that_a_template_writes(templates: dict[str, str], tmp_path: Path) -> None:
    """Rendered as history by the model's own template, read again as its answer."""
    tools: list[dict[str, object]] = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    calls = [
        {"id": f"call_{i:03}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(CALLS)
    ]
    conversation: list[dict[str, object]] = [
        {"role": "user", "content": "Q?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    for name, source in templates.items():
        template = ChatTemplate({"default": source}, tokenizer, Path(name))
        parser = template.choose_parser()
        text = template.render(*template.with_tools(conversation, tools), False)
        text = text[text.rindex("Q?") :]
        begins = [*parser_class(parser).begins, "[{"] if parser == "json" else made(parser).begins
        text = text[min(text.index(begin) for begin in begins if begin in text) :]
        for end in (
            "<|im_end|>\n",
            "<|eos|>",
            "<|end|>\n",
            "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ):
            text = text.removesuffix(end)
        found = read(made(parser), [text])
        assert found_in(found).calls == CALLS, name
        assert read(made(parser), list(text)) == found
        for at in range(1, len(text)):
            assert read(made(parser), [text[:at], text[at:]]) == found, (name, at)
