"""Is what `speculate` asks for taken apart as it is written, and refused with a way out?"""

from __future__ import annotations

import pytest

from ridgeline.errors import ConfigError
from ridgeline.formats import DRAFT_METHODS, AskedDrafts, read_speculate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", AskedDrafts("ngram")),
        ("ngram:4", AskedDrafts("ngram", "", 4)),
        ("suffix:16", AskedDrafts("suffix", "", 16)),
        ("early:8", AskedDrafts("early", "8")),
        ("early:8:3", AskedDrafts("early", "8", 3)),
        ("draft:folder/of-it", AskedDrafts("draft", "folder/of-it")),
        ("draft:demo:draft", AskedDrafts("draft", "demo:draft")),
        ("draft:demo:draft:5", AskedDrafts("draft", "demo:draft", 5)),
        ("draft:user/name@main:1", AskedDrafts("draft", "user/name@main", 1)),
        ("synthetic:0.7", AskedDrafts("synthetic", "0.7")),
        ("synthetic:0:2", AskedDrafts("synthetic", "0", 2)),
        ("synthetic:1", AskedDrafts("synthetic", "1")),
    ],
)
def test_what_is_asked_for(text: str, expected: AskedDrafts) -> None:
    assert read_speculate(text) == expected
    assert expected.line is DRAFT_METHODS[expected.method]


def test_off_asks_for_nothing() -> None:
    assert read_speculate("off") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "drafts",
            r"unknown speculate 'drafts'; choose auto, off, ngram\[:K\], .*draft:MODEL\[:K\]",
        ),
        ("", "unknown speculate"),
        ("auto:3", "takes no number"),
        ("ngram:0", "1 .. 16, not '0'; write ngram"),
        ("ngram:17", "1 .. 16"),
        ("ngram:x", "1 .. 16"),
        ("ngram:", r"lacks a number of drafts; write ngram\[:K\]"),
        ("draft", r"lacks MODEL; write draft:MODEL\[:K\]"),
        ("draft::4", "lacks MODEL"),
        ("draft:m:", "lacks a number of drafts"),
        ("draft:m:17", "1 .. 16"),
        ("early", "lacks N"),
        ("early:0", "no number of layers"),
        ("early:two", "no number of layers"),
        ("early:-1", "no number of layers"),
        ("synthetic:1.5", "lies in 0 .. 1"),
        ("synthetic:high", "lies in 0 .. 1"),
        ("synthetic:nan", "lies in 0 .. 1"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_speculate(text)


def test_synthetic_drafts_are_not_among_the_choices() -> None:
    with pytest.raises(ConfigError) as refused:
        read_speculate("none")
    assert "synthetic" not in str(refused.value)
