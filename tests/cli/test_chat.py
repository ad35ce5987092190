"""Does `ridgeline chat` remember, obey its commands and survive what goes wrong?"""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from ridgeline import LLM, SamplingParams
from ridgeline.cli.chat import Wrapped
from tests.cli.conftest import Cli

RANDOM = ("--load-format", "random", "--num-blocks", "200", "--max-tokens", 6, "--ignore-eos")
Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def talk(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Run a chat with these lines on standard input."""

    def run(lines: str, *argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        return cli("chat", *argv)

    return run


def saved(path: Path) -> list[tuple[str, str]]:
    messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
    return [(message["role"], message["content"]) for message in messages]


def test_the_conversation_is_remembered(chatty: Path, talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    code, out, err = talk(
        f"hello\n\nand you?\n/save {file}\n/exit\nnot read\n",
        *(chatty, *RANDOM, "--seed", 3, "--system", "be brief"),
    )
    said = saved(file)
    assert code == 0
    assert [role for role, _ in said] == ["system", "user", "assistant", "user", "assistant"]
    assert [text for role, text in said if role != "assistant"] == ["be brief", "hello", "and you?"]
    assert out == "".join(text + "\n" for role, text in said if role == "assistant")
    assert err.count("[6 tokens, first token after ") == 2
    assert err.count(", ended by length]") == 2
    assert "GB/s" not in err


def test_the_history_is_part_of_the_prompt(chatty: Path, talk: Talk, tmp_path: Path) -> None:
    """The second answer equals one call with the whole conversation."""
    file = tmp_path / "talk.json"
    talk(f"a\nb\n/save {file}\n", chatty, *RANDOM, "--temperature", 0)
    said = saved(file)
    llm = LLM(str(chatty), load_format="random", num_blocks=200)
    asked = [{"role": role, "content": text} for role, text in said[:3]]
    sampling = llm.sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    assert llm.chat(asked, sampling).text == said[3][1]


def test_reset_and_system_forget(chatty: Path, talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk(f"a\n/reset\n/save {file}\n", chatty, *RANDOM)
    assert saved(file) == []
    talk(f"a\n/system you are a cat\n/save {file}\n", chatty, *RANDOM)
    assert saved(file) == [("system", "you are a cat")]


def test_set_changes_the_answers(chatty: Path, talk: Talk) -> None:
    _, _out, err = talk(
        "/set temperature=0\n/set max_tokens=3\n/set\nhi\n/set top_p=7\n/set colour=1\n/set\n",
        *(chatty, *RANDOM),
    )
    shown = [line for line in err.splitlines() if line.startswith("max_tokens=")]
    assert shown[0].startswith("max_tokens=3  min_tokens=0  temperature=0.0")
    assert shown[1] == shown[0]  # a refused value changes nothing
    assert "[3 tokens" in err
    assert "top_p must be between" in err
    assert "NAME one of" in err
    _, _, err = talk("/set max_tokens=none\n/set\n", chatty, *RANDOM)
    assert "max_tokens=None" in err


def test_help_and_unknown_commands(chatty: Path, talk: Talk) -> None:
    _, out, err = talk("/help\n/halp\n/save\n/save /no/such/folder/x\n", chatty, *RANDOM)
    assert out == ""
    assert "/set NAME=VALUE" in err
    assert "no command /halp" in err
    assert "/save needs a file name" in err
    assert "/save /no/such/folder/x: No such file" in err


def test_a_question_too_long_is_refused_and_the_chat_goes_on(
    chatty: Path, talk: Talk, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    code, _out, err = talk(f"{'x' * 600}\nhi\n/save {file}\n", chatty, *RANDOM)
    assert code == 0
    assert "serves at most 512" in err
    assert [text for role, text in saved(file) if role == "user"] == ["hi"]


def test_without_template_it_says_how(plain: Path, bare: Path, talk: Talk) -> None:
    code, _, err = talk("hi\n", plain, *RANDOM)
    assert code == 2
    assert "--plain" in err.splitlines()[-1]
    code, _, err = talk("hi\n", plain, *RANDOM, "--plain", "--system", "x")
    assert code == 2
    assert "--system" in err.splitlines()[-1]
    code, _, err = talk("hi\n", bare, *RANDOM, "--plain")
    assert code == 2
    assert "no tokenizer" in err.splitlines()[-1]


def test_plain_mode_continues_the_text(plain: Path, talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    code, out, err = talk(
        f"once\n more\n/save {file}\n/system x\n", *(plain, *RANDOM, "--plain", "--seed", 1)
    )
    first, second = out.splitlines()
    assert code == 0
    assert json.loads(file.read_text())["text"] == f"once{first} more{second}"
    assert "/system needs a chat template" in err


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    chatty: Path, talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    step = LLM._step

    def counted(self: LLM) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            signal.raise_signal(signal.SIGINT)
        step(self)

    monkeypatch.setattr(LLM, "_step", counted)
    file = tmp_path / "talk.json"
    code, _out, err = talk(
        f"a\nb\n/save {file}\n",
        *(chatty, *RANDOM, "--max-tokens", 60, "--seed", 1),
    )
    assert code == 0
    assert err.count("ended by abort]") == 1
    assert "[60 tokens" in err
    assert [role for role, _ in saved(file)] == ["user", "assistant", "user", "assistant"]


def test_regenerate_asks_the_last_message_again(chatty: Path, talk: Talk, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    lines = f"/regenerate\na\nb\n/save {first}\n/regenerate\n/save {second}\n/reset\n/regenerate\n"
    _, _, err = talk(lines, chatty, *RANDOM, "--temperature", 1)
    before, after = saved(first), saved(second)
    assert err.count("no answer yet") == 2
    assert before[:3] == after[:3]
    assert len(before) == len(after) == 4
    assert before[3] != after[3]
    _, out, err = talk("a\n/regenerate\n", chatty, *RANDOM, "--seed", 3)
    assert out.splitlines()[0] == out.splitlines()[1]
    assert "/set seed=none draws others" in err


def test_regenerate_in_plain_mode(plain: Path, talk: Talk, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = f"once\n more\n/regenerate\n/save {file}\n"
    _, out, err = talk(lines, plain, *RANDOM, "--plain", "--temperature", 0)
    first, _, again = out.splitlines()
    assert json.loads(file.read_text())["text"] == f"once{first} more{again}"
    assert "/set temperature=0.8 draws others" in err


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\\\n two\nthree\n", ["one\n two", "three"]),
        ('"""\nfirst\n\nlast\n"""\nnext\n', ["first\n\nlast", "next"]),
        ('"""a\nb"""\n', ["a\nb"]),
        ('"""a"""\n', ["a"]),
        ('"""a\nb', ["a\nb"]),
        ("a\\", ["a"]),
    ],
)
def test_messages_of_several_lines(
    typed: str, messages: list[str], chatty: Path, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answer = LLM.chat_stream

    def heard(self: LLM, messages: list[dict[str, str]], sampling: SamplingParams) -> Any:
        asked.append(messages[-1]["content"])
        return answer(self, messages, sampling)

    monkeypatch.setattr(LLM, "chat_stream", heard)
    talk(typed, chatty, *RANDOM)
    assert asked == messages


def on_screen(text: str, columns: int) -> list[str]:
    """What a terminal shows of it: printable letters, newlines, and words that are taken back."""
    rows = [""]
    for part in re.split(r"(\n|\033\[\d+D\033\[K)", text):
        if part == "\n":
            rows.append("")
        elif part.startswith("\033"):
            rows[-1] = rows[-1][: -int(part[2 : part.index("D")])]
        else:
            rows[-1] += part
            assert cell_len(rows[-1]) <= columns
    return rows


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_break_between_words_however_the_text_comes(size: int) -> None:
    text = "the quick brown foxes jump\nover it and incomprehensibilities\nend \u4f60\u597d" * 3
    wrapped = Wrapped(lambda: 21)
    shown = "".join(wrapped.take(text[i : i + size]) for i in range(0, len(text), size))
    rows = on_screen(shown, 21)
    assert rows[:5] == [
        "the quick brown ",
        "foxes jump",
        "over it and ",
        "incomprehensibilitie",
        "s",
    ]
    assert "".join(text.split()) == "".join("".join(rows).split())


def test_lines_of_code_stay_as_they_are() -> None:
    code = "```python\nprint('a long line that nobody wants to see broken')\n```\n"
    assert Wrapped(lambda: 20).take(code) == code
    assert Wrapped(lambda: 20).take(f"{code}some words that are wrapped").count("\n") == 4
