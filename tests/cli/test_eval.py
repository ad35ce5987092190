"""Does `ridgeline eval` score, explain and refuse as its help says?"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli import eval as command
from ridgeline.cli.main import parse
from ridgeline.errors import ConfigError
from ridgeline.evaluation.intervals import Row
from ridgeline.evaluation.problems import TASKS
from ridgeline.evaluation.run import PERPLEXITY, all_tasks
from tests.cli.conftest import Cli

RANDOM = ("--load-format", "random", "--num-blocks", "200", "-q", "--num", 2)
EXACT = ("arithmetic", "lookup", "records", "copy", "sort", "json")


def evaluated(cli: Cli, folder: Path, *argv: object) -> dict[str, Any]:
    code, out, err = cli("eval", folder, *RANDOM, "--json", *argv)
    assert (code, err) == (0, "")
    return dict(json.loads(out))


def check_row(row: dict[str, Any]) -> None:
    assert list(row) == ["task", "metric", "value", "n", "low", "high"]
    assert row["n"] > 0
    if row["low"] is not None:
        assert row["low"] <= row["value"] <= row["high"]


def test_every_task_has_its_row(cli: Cli, chatty: Path) -> None:
    found = evaluated(cli, chatty)
    rows = {(row["task"], row["metric"]): row for row in found["rows"]}
    for row in rows.values():
        check_row(row)
    scored = set(TASKS) - {task for task, n in found["skipped"].items() if n == 2}
    wanted = {(task, "exact_match") for task in EXACT} | {("stories", "words"), ("chat", "accept")}
    assert {key for key in rows if key[0] in TASKS} == {w for w in wanted if w[0] in scored}
    for task in scored:
        ((key, row),) = [item for item in rows.items() if item[0][0] == task]
        assert row["n"] == 2 - found["skipped"].get(task, 0), key
    # Random weights over 261 tokens are hardly better than drafting, in any unit.
    assert rows["held-out stories", "perplexity"]["value"] > 100
    assert ("held-out stories", "byte_perplexity") in rows
    assert (found["model"], found["draft"], found["num"], found["seed"]) == (
        chatty.name,
        None,
        2,
        0,
    )


def test_the_same_command_gives_the_same_rows(cli: Cli, plain: Path) -> None:
    argv = ("--task", "arithmetic", "--task", "copy,perplexity", "--seed", 4)
    first, second = (evaluated(cli, plain, *argv) for _ in range(2))
    assert first["rows"] == second["rows"]
    assert [row["task"] for row in first["rows"]] == [
        *("arithmetic", "copy", "held-out stories", "held-out stories")
    ]


def test_a_draft_gets_two_rows_for_each_task(cli: Cli, chatty: Path) -> None:
    found = evaluated(cli, chatty, "--task", "arithmetic,copy", "--draft", chatty)
    rows = {(row["task"], row["metric"]): row for row in found["rows"]}
    for row in rows.values():
        check_row(row)
    for task in ("arithmetic", "copy"):
        # The same random weights: the draft always drafts right.
        assert rows[task, "draft_agreement"]["value"] == 1.0
        assert 1.0 < rows[task, "accepted_length_k4"]["value"] <= 5.0
    assert len(rows) == 6
    assert found["draft"] == str(chatty)


def test_a_draft_without_answers_to_draft_is_said(cli: Cli, chatty: Path) -> None:
    argv = ("--load-format", "random", "--num-blocks", 200, "--num", 2, "--task", "perplexity")
    code, out, err = cli("eval", chatty, *argv, "--draft", chatty, "--json")
    assert code == 0
    assert {row["task"] for row in json.loads(out)["rows"]} == {"held-out stories"}
    assert "no answers to draft" in err


@pytest.mark.parametrize("packed", [False, True])
def test_perplexity_of_a_file(cli: Cli, plain: Path, tmp_path: Path, packed: bool) -> None:
    text = "It was a dark night. " * 60
    file = tmp_path / "night.txt"
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = evaluated(cli, plain, "--task", "copy", "--data", file)
    rows = {row["metric"]: row for row in found["rows"] if row["task"] == "night.txt"}
    assert set(rows) == {"perplexity", "byte_perplexity"}
    assert rows["perplexity"]["n"] == rows["byte_perplexity"]["n"] == len(text)


def test_the_table_and_what_is_said(cli: Cli, chatty: Path) -> None:
    argv = ("--load-format", "random", "--num-blocks", 200, "--num", 3, "--task", "copy", "--show")
    code, out, err = cli("eval", chatty, *argv, 1)
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert ["task", "metric", "value", "95", "%", "interval", "n"] in lines
    assert lines[-1][:2] == ["copy", "exact_match"]
    assert lines[-1][-1] == "3"
    assert out.count("--- copy") == out.count("assistant:") == 1
    assert "3 questions: copy\n" in err


def test_shown_answers_are_in_the_json(cli: Cli, chatty: Path) -> None:
    found = evaluated(cli, chatty, "--task", "copy,sort", "--show", 2)
    assert [answer["task"] for answer in found["answers"]] == ["copy", "copy", "sort", "sort"]
    first = found["answers"][0]
    assert first["messages"][-1]["role"] == "user"
    assert first["expected"]


def test_what_does_not_fit_is_counted_and_said(cli: Cli, chatty: Path) -> None:
    argv = ("--load-format", "random", "--num-blocks", 200, "--num", 2, "--max-model-len", 16)
    code, out, err = cli("eval", chatty, *argv, "--task", "lookup,copy", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["skipped"] == {"lookup": 2, "copy": 2}
    assert found["rows"] == []
    assert "lookup: 2 of 2 left out, too long for the model's context" in err


def test_a_wrong_task_lists_the_tasks(cli: Cli, chatty: Path) -> None:
    code, out, err = cli("eval", chatty, *RANDOM, "--task", "arithmetics")
    assert (code, out) == (2, "")
    known = ", ".join(all_tasks())
    assert err == f"ridgeline: error: unknown --task 'arithmetics'; choose among {known}\n"
    assert all_tasks() == (*TASKS, PERPLEXITY)


def test_missing_files_and_tokenizers_are_explained(
    cli: Cli, chatty: Path, bare: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.txt"
    code, out, err = cli("eval", chatty, *RANDOM, "--data", missing)
    assert (code, out) == (2, "")
    assert f"{missing}: cannot be read (No such file or directory)" in err
    code, out, err = cli("eval", bare, *RANDOM)
    assert (code, out) == (2, "")
    assert "no tokenizer" in err


def test_defaults_and_repeated_tasks() -> None:
    assert command.read_wanted(parse(["eval", "m"])).tasks == all_tasks()
    args = parse(["eval", "m", "--task", "sort,copy", "--task", "sort"])
    assert command.read_wanted(args).tasks == ("sort", "copy")
    assert (args.num, args.seed, args.model) == (200, 0, "m")
    with pytest.raises(ConfigError, match="unknown task"):
        command.read_wanted(parse(["eval", "m", "--task", "x"]))


def test_figures_on_paper() -> None:
    assert command.number(0.97512) == "0.9751"
    assert command.number(123456.0) == "123,456"
    assert command.interval(Row("t", "m", 0.5, 4, 0.25, 0.75)) == "0.2500 - 0.7500"
    assert command.interval(Row("t", "m", 0.5, 1, None, None)) == "unknown"
