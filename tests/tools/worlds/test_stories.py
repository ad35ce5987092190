"""Stories contain what was asked for, have their length, and keep simple rules of grammar."""

from __future__ import annotations

import random
import re

import pytest

from ridgeline.errors import InternalError
from ridgeline.evaluation.problems import Split
from tools import worlds
from tools.worlds import telling
from tools.worlds import words as w
from tools.worlds.casting import CLASSES, NOUNS, class_of
from tools.worlds.patterns import compile_one, sentence, with_articles

DRAWS = 1_500
SPLITS: tuple[Split, ...] = ("train", "test")


def texts() -> list[str]:
    rng = random.Random(21)
    asked = [worlds.problem("stories", rng, "train").answer for _ in range(DRAWS)]
    return asked + [worlds.document(rng, "train") for _ in range(DRAWS)]


@pytest.mark.parametrize("split", SPLITS)
def test_a_story_has_the_words_asked_for_and_its_length(split: Split) -> None:
    rng = random.Random(22)
    for _ in range(DRAWS):
        p = worlds.problem("stories", rng, split)
        request = p.messages[-1].content
        for word in p.words:
            assert re.search(rf"\b{word}\b", request), request
            assert re.search(rf"\b{word}\b", p.answer), (word, p.answer)
        assert 80 <= len(p.answer.split()) <= 220
        assert p.words or split == "train"


def test_every_word_of_every_class_can_be_asked_for() -> None:
    rng = random.Random(23)
    for words in CLASSES.values():
        for word in words:
            text = telling.story(rng, (word,), "train").text
            assert re.search(rf"\b{word}\b", text), word
    for name in (*w.GIRLS, *w.BOYS, *w.PETS):
        assert re.search(rf"\b{name}\b", telling.story(rng, (name,), "train").text)


@pytest.mark.parametrize("words", [("fox", "wolf", "bear", "dog"), ("girl", "Anna"), ("king",)])
def test_words_of_one_class_find_a_place_together(words: tuple[str, ...]) -> None:
    for seed in range(50):
        text = telling.story(random.Random(seed), words, "train").text
        assert all(re.search(rf"\b{word}\b", text) for word in words), text


def test_documents_of_the_splits_differ() -> None:
    rng = random.Random(24)
    train = {worlds.document(rng, "train") for _ in range(5_000)}
    test = {worlds.document(rng, "test") for _ in range(1_000)}
    assert not train & test
    assert len(train) == 5_000


def test_no_notation_is_left_and_marks_are_in_order() -> None:
    for text in texts():
        assert not re.search(r"[{}\[\]|<>~]", text), text
        assert not re.search(r"  |\n\n\n| [.,!?]|[.,!?][.,]", text), text
        assert text.count('"') % 2 == 0, text
        assert all(part[-1] in '.!?"' for part in text.split("\n\n")), text


def test_sentences_begin_with_a_capital() -> None:
    for text in texts():
        assert not re.search(r'(?:[a-z][.!]|\.") [a-z]', text), text
        assert not re.search(r"[a-z] (?:He|She|Then|They|At last|In the|The|It|There)\b", text), (
            text
        )
        assert all(part.lstrip('"')[0].isupper() for part in text.split("\n\n")), text


def test_articles_agree() -> None:
    for text in texts():
        for article, word in re.findall(r"\b([Aa]n?) (\w+)", text):
            starts_with_vowel_sound = word.startswith(("a", "e", "i", "o", "u", "hon", "hour"))
            starts_with_vowel_sound &= not word.startswith(("uni", "use", "one"))
            assert (article.lower() == "an") == starts_with_vowel_sound, (article, word)


def test_no_word_is_said_twice_in_a_row() -> None:
    for text in texts():
        twice = {word.lower() for word in re.findall(r"\b(\w+) \1\b", text)}
        assert twice <= {"had", "that"}, (twice, text)


def test_every_plot_is_told() -> None:
    rng = random.Random(25)
    plots = {telling.plan(rng, ())[0] for _ in range(500)}
    assert plots == set(telling.PLOTS)
    assert len(plots) >= 10


def test_the_vocabulary_is_rich() -> None:
    nouns = {word for name in NOUNS for word in CLASSES[name]}
    assert len(nouns) >= 200
    adjectives = {word for name in ("trait", "look", "land", "feeling") for word in CLASSES[name]}
    assert len(adjectives | {*w.SAD, *w.HAPPY}) >= 100
    assert len(set(w.PEOPLE_NAMES)) == len(w.PEOPLE_NAMES) >= 60
    assert len(w.PLACES) >= 40
    assert all(class_of(word) in CLASSES for word in nouns)


# ---------------------------------------------------------------------- patterns


def test_patterns_choose_and_nest() -> None:
    piece = compile_one("[{x}|b[c|<pool>]]!", {"pool": ("d",)})
    rng = random.Random(0)
    assert {piece(rng, {"x": "a"}) for _ in range(100)} == {"a!", "bc!", "bd!"}


@pytest.mark.parametrize("pattern", ["[a|b", "a]", "a|b"])
def test_patterns_with_odd_brackets_are_refused(pattern: str) -> None:
    with pytest.raises(InternalError, match="pattern"):
        compile_one(pattern, {})


def test_articles_and_capitals() -> None:
    assert with_articles("a~ owl, A~ honest fox, a~ unicorn, a~ useful one") == (
        "an owl, An honest fox, a unicorn, a useful one"
    )
    assert sentence('"one day," he said') == '"One day," he said'
    assert sentence("") == ""
