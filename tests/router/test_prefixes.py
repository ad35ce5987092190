"""Does the table of prefixes say what a slow and simple one would, and learn from answers?"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ridgeline.router.prefixes import (
    ENTRY_BYTES,
    PIECE_CHARACTERS,
    Prefixes,
    Sent,
    names_of,
    pieces_found,
)

TEXT = "".join(chr(97 + n % 26) for n in range(5 * PIECE_CHARACTERS + 7))


def test_equal_beginnings_have_equal_names_and_what_follows_counts() -> None:
    whole = names_of(TEXT)
    assert len(whole) == 5
    assert names_of(TEXT[: 2 * PIECE_CHARACTERS + 3]) == whole[:2]
    changed = TEXT[:300] + "X" + TEXT[301:]
    assert names_of(changed)[0] == whole[0]
    assert not set(names_of(changed)[1:]) & set(whole)
    assert not set(names_of(TEXT, b"another key")) & set(whole)
    assert names_of(TEXT[:255]) == ()


def test_a_lone_surrogate_has_a_name_too() -> None:
    assert len(names_of("\ud800" * PIECE_CHARACTERS)) == 1


def test_how_many_pieces_an_answer_found() -> None:
    """2,560 characters in 640 tokens: a piece has 64 of them, and 64 may be missing."""
    assert pieces_found(2560, 640, 0) == 1
    assert pieces_found(2560, 640, 255) == 4
    assert pieces_found(2560, 640, 256) == 5
    assert pieces_found(2560, 640, 640) == 10


def test_one_miss_shows_that_all_older_prompts_are_gone() -> None:
    known = Prefixes(1 << 20)
    old, middle, new = names_of("a" * 600), names_of("b" * 600), names_of("c" * 600)
    for names in (old, middle, new):
        known.begun(known.send(names))
    again = known.send(middle)
    known.begun(again)
    known.found(again, 0)
    assert (known.held(old), known.held(middle), known.held(new)) == (0, 2, 2)


def test_a_prompt_that_has_not_been_read_yet_proves_nothing() -> None:
    """Two equal ones at once: the second finds nothing, and nothing was dropped."""
    known, names, other = Prefixes(1 << 20), names_of("a" * 600), names_of("b" * 600)
    known.begun(known.send(other))
    first, second = known.send(names), known.send(names)
    known.begun(first)
    known.begun(second)
    known.found(second, 0)
    assert (known.held(names), known.held(other)) == (2, 2)


class AgainstAList(RuleBasedStateMachine):
    """The model is a list of [name, number of its last prompt, sure], the oldest use first."""

    MOST = 9

    def __init__(self) -> None:
        super().__init__()
        self.known = Prefixes(self.MOST * ENTRY_BYTES)
        self.model: list[list[object]] = []
        self.sent: list[tuple[Sent, tuple[bytes, ...], list[int]]] = []
        self.count = 0

    def entry(self, name: bytes) -> list[object] | None:
        return next((one for one in self.model if one[0] == name), None)

    @rule(path=st.lists(st.sampled_from("xyz"), max_size=5))
    def send(self, path: list[str]) -> None:
        names = names_of("".join(letter * PIECE_CHARACTERS for letter in path))
        last_used: list[int] = []
        for name in names:
            one = self.entry(name)
            if one is None or not one[2]:
                break
            last_used.append(int(str(one[1])))
        self.count += 1
        for name in reversed(names):
            one = self.entry(name) or [name, 0, False]
            self.model = [other for other in self.model if other[0] != name]
            self.model.append([name, self.count, one[2]])
        self.model = self.model[-self.MOST :]
        sent = self.known.send(names)
        assert list(sent.last_used) == last_used
        self.sent.append((sent, names, last_used))

    @rule(which=st.integers(0, 30))
    def begun(self, which: int) -> None:
        if which < len(self.sent):
            sent, names, _ = self.sent[which]
            self.known.begun(sent)
            for one in self.model:
                one[2] = one[2] or one[0] in names

    @rule(which=st.integers(0, 30), num_found=st.integers(0, 5))
    def found(self, which: int, num_found: int) -> None:
        if which < len(self.sent):
            sent, _, last_used = self.sent[which]
            self.known.found(sent, num_found)
            if num_found < len(last_used):
                lost = last_used[num_found]
                self.model = [one for one in self.model if int(str(one[1])) > lost]

    @invariant()
    def agrees(self) -> None:
        assert len(self.known) == len(self.model) <= self.MOST
        for letter in "xyz":
            names = names_of(letter * 5 * PIECE_CHARACTERS)
            held = 0
            while held < len(names) and self.entry(names[held]) is not None:
                held += 1
            assert self.known.held(names) == held


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
