"""How is a story told, and how is one asked for?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random as Rng

from ridgeline.evaluation.problems import Problem, Split
from tools.worlds import more_plots, plots, scenery
from tools.worlds import words as w
from tools.worlds.casting import CLASSES, NOUNS, WEATHER, cast_fields, class_of
from tools.worlds.patterns import (
    Fields,
    Piece,
    Pools,
    compile_one,
    compiled,
    sentence,
    with_articles,
)
from tools.worlds.problem import asked, draw

MIN_WORDS, MAX_WORDS = 80, 220
POOLS: Pools = {
    "house": ("small house", "little hut", "cozy home", "tiny cottage", "house with a red roof"),
    "relative": ("grandmother", "grandfather", "uncle", "aunt", "mother", "father", "cousin"),
    "where": ("under the bed", "behind the door", "in every box", "under the table", "outside"),
    "odd": ("in the oven", "on the roof", "in the well", "under the carpet", "behind the house"),
    "bits": ("two feathers", "three round stones", "a few leaves", "some shells", "a few beads"),
    "scraps": ("a piece of cloth", "an empty box", "some old buttons", "a bit of wire"),
    "hidden": ("under a bush", "behind the fence", "in a hole", "under a pile of leaves"),
    "noise": ("Tap, tap, tap.", "Scratch, scratch.", "Bump, bump, bump.", "Creak, creak."),
    "slow": ("snail", "sleepy snail", "tired worm", "sack of potatoes"),
    "calm": ("quiet", "lovely", "famous", "old", "beautiful"),
    "weather": WEATHER,
    "color": w.COLORS,
    "animal": w.ANIMALS,
}

Beat = str | tuple[Piece, ...]  # a slot or "==", or the choices


def beats(text: str) -> tuple[Beat, ...]:
    return tuple(beat(part.strip().splitlines()) for part in text.strip().split("\n\n"))


def beat(lines: list[str]) -> Beat:
    if lines[0] in (*scenery.SLOTS, "=="):
        return lines[0]
    return compiled(["" if line == "-" else line for line in lines], POOLS)


PLOTS: dict[str, tuple[Beat, ...]] = {
    name: beats(plots.OPENING) + beats(text) + beats(more_plots.ENDING)
    for name, text in {
        "lost": plots.LOST,
        "skill": plots.SKILL,
        "journey": plots.JOURNEY,
        "lonely": plots.LONELY,
        "rescue": plots.RESCUE,
        "quarrel": more_plots.QUARREL,
        "gift": more_plots.GIFT,
        "noise": more_plots.NOISE,
        "race": more_plots.RACE,
        "mistake": more_plots.MISTAKE,
        "garden": more_plots.GARDEN,
        "storm": more_plots.STORM,
    }.items()
}
PLOT_NAMES = tuple(PLOTS)
WOVEN = {
    (name, slot): compiled(text.splitlines(), POOLS)
    for name, by_slot in scenery.WOVEN.items()
    for slot, text in by_slot.items()
}
NATURE = {word: compiled(text.splitlines(), POOLS) for word, text in scenery.NATURE.items()}
WEAVABLE = tuple(word for name in NOUNS for word in CLASSES[name])
WORD_CLASSES = (*NOUNS, "animal", "thing", "thing", "place", "look", "trait", "feeling", "joy")


def document(rng: Rng, split: Split) -> str:
    """A story that nobody asked for."""
    return story(rng, (), split).text


@dataclass(frozen=True, slots=True)
class Story:
    text: str
    hero: str
    kind: str


def story(rng: Rng, words: tuple[str, ...], split: Split) -> Story:
    """A story of 80 to 220 words that contains all of `words`; its cast belongs to `split`."""
    while True:
        plot, fields = draw(lambda: plan(rng, words), cast, split)
        text = told(rng, plot, fields, words)
        if MIN_WORDS <= len(text.split()) <= MAX_WORDS and not words_missing(text, words):
            return Story(text, fields["N"], fields["kind"])


def plan(rng: Rng, words: tuple[str, ...]) -> tuple[str, Fields]:
    plot = rng.choice(PLOT_NAMES)
    return plot, cast_fields(rng, words, w.BREAKABLE if plot == "mistake" else w.THINGS)


def cast(planned: tuple[str, Fields]) -> str:
    """What every telling of a plan contains."""
    plot, fields = planned
    return " ".join(("story", plot, *(fields[key] for key in ("N", "kind", "M", "mkind", "place"))))


def told(rng: Rng, plot: str, fields: Fields, words: tuple[str, ...]) -> str:
    parts = [part if isinstance(part, str) else rng.choice(part) for part in PLOTS[plot]]
    texts = [part if isinstance(part, str) else part(rng, fields) for part in parts]
    missing = words_missing(" ".join(texts), words)
    return laid_out(rng, texts, fields, missing)


def laid_out(rng: Rng, texts: Sequence[str], fields: Fields, missing: Sequence[str]) -> str:
    """The beats as paragraphs, with a sentence for each missing word in one of the slots."""
    slots = [text for text in texts if text in scenery.SLOTS]
    woven: dict[str, list[str]] = {slot: [] for slot in slots}
    extra = [] if missing or rng.random() < 0.6 else [rng.choice(WEAVABLE)]
    extra = words_missing(" ".join(texts), extra)
    for word in (*missing, *extra):
        slot = rng.choice(slots)
        woven[slot].append(weave(rng, word, slot, fields))
    paragraphs: list[list[str]] = [[]]
    for text in texts:
        if text == "==":
            paragraphs.append([])
        else:
            paragraphs[-1] += woven.get(text, [text] if text else [])
    return with_articles("\n\n".join([" ".join(map(sentence, lines)) for lines in paragraphs]))


def weave(rng: Rng, word: str, slot: str, fields: Fields) -> str:
    name = class_of(word)
    choices = NATURE[word] if name == "nature" else WOVEN[(WEAVES_AS.get(name, name), slot)]
    return rng.choice(choices)(rng, {**fields, "x": word}).strip()


WEAVES_AS = {"child": "person"}
NO_MARKS = str.maketrans('.,!?":;\n', "        ", "~")


def words_missing(text: str, words: Sequence[str]) -> list[str]:
    """Those of `words` that `text` does not contain as words of their own."""
    present = set(text.translate(NO_MARKS).split()) if words else set()
    return [word for word in words if word not in present]


# ---------------------------------------------------------------------- requests

LISTED = compiled(
    (
        "Write a story with the words: {commas}.",
        "Write a story with the words {ands}.",
        "Write a short story that uses the words {ands}.",
        "Write a short story with these words: {commas}.",
        "Tell me a story with the words {commas}.",
        "Please write a story that contains the words {ands}.",
        "write a story with the words {commas}",
        "Can you tell me a story with the words {ands}?",
    ),
    {},
)
ABOUT = compiled(
    (
        "Tell me a story about {nouns}.",
        "Write a story about {nouns}.",
        "Write a short story about {nouns}.",
        "Can you tell me a story about {nouns}?",
        "tell me a story about {nouns}",
        "I would like to hear a story about {nouns}.",
    ),
    {},
)
ANY = ("Tell me a story.", "Tell me a story!", "Write a story.", "tell me a story")
ANY_MORE = ("Can you tell me a story?", "Please tell me a short story.", "Write a short story.")
CALLED = compile_one("a~ {kind} named {name}", {})
MASS = frozenset((*w.MASS_FOODS, "grass", "rain"))
UNIQUE = frozenset(("sun", "moon", "sky", "wind"))


def stories(rng: Rng, split: Split) -> Problem:
    """A request for a story with given words, or, in training alone, for any story."""
    if split == "train" and rng.random() < 0.06:
        return asked("stories", rng.choice(ANY + ANY_MORE), story(rng, (), split).text)
    style = rng.random()
    make = listed_words if style < 0.6 else about_words if style < 0.85 else named_words
    words = draw(lambda: make(rng), content, split)
    fields = request_fields(words)
    question = with_articles(rng.choice(LISTED if style < 0.6 else ABOUT)(rng, fields))
    return asked("stories", question, story(rng, words, split).text, words)


def told_story(rng: Rng, split: Split) -> tuple[str, Story]:
    """A request for a story, and the story with its hero."""
    words = draw(lambda: about_words(rng), content, split)
    question = with_articles(rng.choice(ABOUT)(rng, request_fields(words)))
    return question, story(rng, words, split)


def content(words: tuple[str, ...]) -> str:
    return " ".join(("words", *sorted(words)))


def listed_words(rng: Rng) -> tuple[str, ...]:
    return distinct(rng, WORD_CLASSES, rng.choice((2, 3, 3, 3, 4)))


def about_words(rng: Rng) -> tuple[str, ...]:
    return distinct(rng, NOUNS, rng.choice((1, 2, 2, 3)))


def named_words(rng: Rng) -> tuple[str, ...]:
    kind = rng.choice((rng.choice(w.ANIMALS), rng.choice(("girl", "boy"))))
    names = w.GIRLS if kind == "girl" else w.BOYS if kind == "boy" else w.PETS
    return kind, rng.choice(names)


def distinct(rng: Rng, classes: Sequence[str], count: int) -> tuple[str, ...]:
    found: list[str] = []
    while len(found) < count:
        word = rng.choice(CLASSES[rng.choice(classes)])
        if word not in found:
            found.append(word)
    return tuple(found)


def request_fields(words: tuple[str, ...]) -> Fields:
    if class_of(words[-1]) == "name":
        nouns = f"a~ {words[0]} named {words[1]}"
    else:
        nouns = ands([with_article(word) for word in words])
    return {"commas": ", ".join(words), "ands": ands(words), "nouns": nouns}


def with_article(noun: str) -> str:
    if noun in MASS:
        return noun
    return f"the {noun}" if noun in UNIQUE else f"a~ {noun}"


def ands(items: Sequence[str]) -> str:
    return " and ".join((", ".join(items[:-1]), items[-1])) if len(items) > 1 else items[0]
