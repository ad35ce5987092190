"""Are the problems and texts of the package those that the grammars draw, and the test held out?"""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.evaluation import problems as module
from ridgeline.evaluation.problems import (
    STORY,
    TASKS,
    TEXT_FILES,
    Problem,
    Split,
    is_right,
    problems,
    read_problems,
    stories,
    texts,
)
from tools import make_problems, worlds

SPLITS: tuple[Split, ...] = ("train", "test")


def test_the_files_are_what_the_tool_writes(tmp_path: Path) -> None:
    """The beginning of each; all of it would take half a minute."""
    assert tuple(TASKS) == tuple(worlds.TASKS)
    first = problems("sort", 20, 0), problems("stories", 5, 0), stories(5, 0)
    drawn = (
        list(islice(make_problems.held_out("sort"), 20)),
        list(islice(make_problems.held_out("stories"), 5)),
        [one.answer for one in islice(make_problems.stories(), 5)],
    )
    assert first == drawn
    for split in SPLITS:
        assert list(texts(split)[:20]) == list(islice(make_problems.texts(split), 20))
    path = tmp_path / "written.jsonl.gz"
    make_problems.write(path, drawn[1])
    assert gzip.decompress(path.read_bytes()).count(b"\n") == 5
    assert list(read_problems(str(path))) == drawn[1]


@pytest.mark.slow
def test_the_files_are_all_that_the_tool_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_problems", str(tmp_path)])
    make_problems.main()
    for name in (module.PROBLEMS_FILE, *TEXT_FILES.values()):
        made, kept = ((top / name).read_bytes() for top in (tmp_path, module.DATA))
        assert gzip.decompress(made) == gzip.decompress(kept)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_its_problems_and_their_answers_are_right(task: str) -> None:
    found = problems(task, make_problems.NUM_PROBLEMS, 0)
    assert {one.task for one in found} == {task}
    assert all(is_right(one, one.answer) and not is_right(one, "Xyzzy.") for one in found)
    with pytest.raises(ConfigError, match=r"501 problems .* are too many; there are 500"):
        problems(task, make_problems.NUM_PROBLEMS + 1, 0)
    with pytest.raises(ConfigError, match="there is no task 'poetry'"):
        problems("poetry", 1, 0)


def test_no_text_for_calibration_is_asked_or_held_out() -> None:
    shown = {(one.messages, one.answer) for one in texts("train")}
    held = {(one.messages, one.answer) for one in texts("test")}
    asked = {(p.messages, p.answer) for task in (*TASKS, STORY) for p in problems(task, 500, 0)}
    assert not shown & (held | asked)


def test_a_text_is_a_story_or_a_question_with_its_answer() -> None:
    for split in SPLITS:
        kinds = {one.task for one in texts(split)}
        assert kinds == {STORY, *TASKS}
        told = [one for one in texts(split) if one.task == STORY]
        assert 0.15 < len(told) / len(texts(split)) < 0.25
        assert all(one == Problem(STORY, (), one.answer) for one in told)


def test_problems_follow_the_seed_alone() -> None:
    for task in TASKS:
        assert problems(task, 3, 1) == problems(task, 3, 1)
        assert problems(task, 3, 1) == problems(task, 5, 1)[:3]
        assert problems(task, 20, 1) != problems(task, 20, 2)
        assert {problem.task for problem in problems(task, 3, 1)} == {task}


def test_stories_are_held_out_ones_by_the_seed() -> None:
    assert stories(3, 1) == stories(5, 1)[:3]
    assert stories(5, 1) != stories(5, 2)
