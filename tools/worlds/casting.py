"""Who and what is a story about? The cast is drawn, or taken from the words asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random as Rng

from tools.worlds import words as w
from tools.worlds.scenery import NATURE

CLASSES: dict[str, tuple[str, ...]] = {
    "animal": w.ANIMALS,
    "person": w.PEOPLE,
    "thing": w.THINGS,
    "place": w.PLACES,
    "food": w.FOODS,
    "mass food": w.MASS_FOODS,
    "furniture": w.FURNITURE,
    "nature": tuple(NATURE),
    "feeling": w.FEELINGS,
    "trait": w.TRAITS,
    "look": w.LOOKS,
    "land": w.LANDS,
    "joy": w.JOYS,
}
CLASS_OF = {word: name for name in reversed(CLASSES) for word in CLASSES[name]}
NOUNS = ("animal", "person", "thing", "place", "food", "mass food", "furniture", "nature")
HERO_PEOPLE = ("girl", "boy", *w.WORKERS, "princess", "prince", "witch", "wizard", "fairy")
OBSTACLES = (
    ("a deep river without a bridge", "knew where the water was low", "were on the other side"),
    ("a high stone wall", "knew of a small hole in the wall", "were on the other side"),
    ("a fork in the road", "knew which road was the right one", "were back on the right road"),
    ("a fallen tree that blocked the road", "knew a way around it", "stood behind the tree"),
    ("a dark tunnel", "had a lantern", "saw the light at the other end"),
    ("a field of deep mud", "knew where the ground was dry", "had left the mud behind them"),
    ("a locked gate", "knew where the key was", "were through the gate"),
)
TRAPS = ("had fallen into a deep hole", "was stuck in the mud", "was caught in an old net")
TRAPS_MORE = ("had fallen into a ditch", "could not get out of a well", "was caught in the thorns")
FEARS = ("the dark", "the night", "shadows", "strange noises")
WEATHER = ("sunny", "cold", "windy", "rainy", "warm", "foggy", "bright", "cool", "gray", "fine")
TIMES = ("morning", "morning", "afternoon", "day", "evening")
MEALS = ("berries", "nuts", "mushrooms", "herbs", "firewood", "flowers")
SHE = {"he": "she", "him": "her", "his": "her", "himself": "herself"}
HE = {"he": "he", "him": "him", "his": "his", "himself": "himself"}


@dataclass(slots=True)
class Wanted:
    """Asked words by class, taken from as roles are filled."""

    by_class: dict[str, list[str]] = field(default_factory=dict)

    def take(self, name: str, fits: tuple[str, ...] | None = None) -> str | None:
        found = self.by_class.get(name)
        if not found or (fits is not None and found[0] not in fits):
            return None
        return found.pop(0)


def wanted(words: tuple[str, ...]) -> Wanted:
    by_class: dict[str, list[str]] = {}
    for word in words:
        by_class.setdefault(class_of(word), []).append(word)
    return Wanted(by_class)


def class_of(word: str) -> str:
    return CLASS_OF.get(word) or ("name" if word[:1].isupper() else "child")


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    kind: str
    is_female: bool


def person(rng: Rng, want: Wanted, *, hero: bool, taken: Person | None = None) -> Person:
    """A hero or friend with a name of its own and a kind that `taken` does not have."""
    kind = want.take("child") or want.take("animal") or want.take("person", fitting(hero))
    kind = kind or drawn_kind(rng, hero)
    while taken is not None and kind == taken.kind:
        kind = drawn_kind(rng, hero)
    name = want.take("name")
    is_female = gender(rng, kind, name)
    name = name or drawn_name(rng, kind, is_female)
    while taken is not None and name == taken.name:
        name = drawn_name(rng, kind, is_female)
    return Person(name, kind, is_female)


def fitting(hero: bool) -> tuple[str, ...]:
    return HERO_PEOPLE if hero else w.PEOPLE


def drawn_kind(rng: Rng, hero: bool) -> str:
    chance = rng.random()
    if chance < 0.6:
        return rng.choice(w.ANIMALS)
    if hero and chance < 0.85:
        return rng.choice(("girl", "boy"))
    return rng.choice(fitting(hero))


FEMALE_KINDS = frozenset((*w.WOMEN, "girl", "cow", "hen"))
MALE_KINDS = frozenset((*w.MEN, "boy", "rooster"))


def gender(rng: Rng, kind: str, name: str | None) -> bool:
    if kind in FEMALE_KINDS or kind in MALE_KINDS:
        return kind in FEMALE_KINDS
    if name in w.PEOPLE_NAMES:
        return name in w.GIRLS
    return rng.random() < 0.5


def drawn_name(rng: Rng, kind: str, is_female: bool) -> str:
    if class_of(kind) == "animal" and rng.random() < 0.7:
        return rng.choice(w.PETS)
    return rng.choice(w.GIRLS if is_female else w.BOYS)


def cast_fields(rng: Rng, words: tuple[str, ...], things: tuple[str, ...]) -> dict[str, str]:
    """The fields of all patterns; `words` fill what roles they can, in random places."""
    want = wanted(words)
    hero = person(rng, want, hero=True)
    friend = person(rng, want, hero=False, taken=hero)
    place, place2 = two(rng, want, "place", w.PLACES)
    thing = want.take("thing", things) or rng.choice(things)
    act1, act2 = rng.sample(w.JOYS, 2)
    obstacle, knew, crossed = rng.choice(OBSTACLES)
    look = want.take("look") or rng.choice(w.LOOKS)
    trait, mtrait = two(rng, want, "trait", w.TRAITS)
    fields = {
        **{"N": hero.name, "kind": hero.kind, "M": friend.name, "mkind": friend.kind},
        **pronouns(hero, ""),
        **pronouns(friend, "m"),
        **{"place": place, "place2": place2, "trait": trait, "mtrait": mtrait},
        **{"act1": act1, "act2": act2},
        "in_place": f"{w.PREPOSITION[place]} the {place}",
        "in_place2": f"{w.PREPOSITION[place2]} the {place2}",
        "land": want.take("land") or land_look(rng, place),
        **{"thing": thing, "look": look},
        **{"obstacle": obstacle, "knew": knew, "crossed": crossed},
        "thing2": other(rng, w.THINGS, (thing,)),
        "third": other(rng, w.ANIMALS, (hero.kind, friend.kind)),
        "skill": want.take("joy", w.SKILLS) or rng.choice(w.SKILLS),
        "sad": want.take("feeling", w.SAD) or rng.choice(w.SAD),
        "happy": want.take("feeling", w.HAPPY) or rng.choice(w.HAPPY),
        "day": f"one {rng.choice(WEATHER)} {rng.choice(TIMES)}",
        "weak": rng.choice(("small", "young", "weak")),
        "fear": rng.choice(FEARS),
        "food": rng.choice(MEALS),
        "trapped": rng.choice(TRAPS + TRAPS_MORE),
    }
    for key in ("he", "his", "mhe", "mhis", "day", "in_place", "in_place2"):
        fields[key[0].upper() + key[1:]] = fields[key][0].upper() + fields[key][1:]
    return fields


def pronouns(who: Person, prefix: str) -> dict[str, str]:
    return {prefix + key: value for key, value in (SHE if who.is_female else HE).items()}


def two(rng: Rng, want: Wanted, name: str, pool: tuple[str, ...]) -> tuple[str, str]:
    first = want.take(name) or rng.choice(pool)
    second = want.take(name)
    return first, second or other(rng, pool, (first,))


def land_look(rng: Rng, place: str) -> str:
    return rng.choice(w.BUILT_LOOKS if place in w.BUILT else w.WILD_LOOKS)


def other(rng: Rng, pool: tuple[str, ...], taken: tuple[str, ...]) -> str:
    while True:
        found = rng.choice(pool)
        if found not in taken:
            return found
