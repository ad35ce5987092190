"""Stop strings are found wherever the text is cut, and no part of one is ever shown."""

from __future__ import annotations

import random

import pytest

from ridgeline.text.assemble import Shown, StopFinder


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop string that is complete first; the longest of those complete together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    finder, shown = StopFinder(stops), []
    for piece in pieces:
        step = finder.feed(piece)
        shown.append(step.text)
        if step.stop is not None:
            return shown, step.stop
    return [*shown, finder.flush()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stop"),
    [
        (["hello"], [], ["hello", ""], None),
        (["a\n", "\nb"], ["\n\n"], ["a", ""], "\n\n"),
        (["ab", "cd"], ["bc"], ["a", ""], "bc"),
        (["ab", "xd"], ["bc"], ["a", "bxd", ""], None),
        (["ab"], ["bc"], ["a", "b"], None),
        (["STOP"], ["STOP"], [""], "STOP"),
        (["abcd"], ["abcd", "bc"], ["a"], "bc"),
        (["a", "b", "c", "d"], ["abcd", "bc"], ["", "", "a"], "bc"),
        (["xabc"], ["bc", "abc"], ["x"], "abc"),
        (["aab", "aac"], ["aac"], ["", "aab"], "aac"),
        (["aaab"], ["aab"], ["a"], "aab"),
        (["aabaaab", "aaaa"], ["aabaaaa"], ["aaba"], "aabaaaa"),  # falls back by steps
        (["", "x", ""], ["y"], ["", "x", "", ""], None),
    ],
)
def test_cases(pieces: list[str], stops: list[str], shown: list[str], stop: str | None) -> None:
    assert run(pieces, stops)[1] == stop
    assert "".join(run(pieces, stops)[0]) == "".join(shown)
    if stop is None:
        assert run(pieces, stops)[0] == shown


def test_any_cut_gives_the_same_and_shows_no_part_of_a_stop_string() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    stopped = 0
    for _ in range(2000):
        letters = "ab" if rng.random() < 0.7 else "abc\n"
        text = "".join(rng.choices(letters, k=rng.randint(0, 20)))
        stops = [
            "".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))
        ]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        want, stop = reference(text, stops)
        shown, found = run(pieces, stops)
        assert ("".join(shown), found) == (want, stop), (text, stops, pieces)
        stopped += stop is not None
        seen = ""
        for piece in shown:
            seen += piece
            assert want.startswith(seen)
    assert 200 < stopped < 1990


def test_as_little_as_possible_is_held_back() -> None:
    finder = StopFinder(["aab"])
    assert [finder.feed(char).text for char in "aaaac"] == ["", "", "a", "a", "aac"]


def test_without_stop_strings_the_text_goes_through() -> None:
    finder = StopFinder([])
    assert finder.feed("x") == Shown("x")
    assert finder.flush() == ""


def test_flushing_forgets() -> None:
    finder = StopFinder(["ab"])
    assert finder.feed("a") == Shown("")
    assert finder.flush() == "a"
    assert finder.feed("b") == Shown("b")
