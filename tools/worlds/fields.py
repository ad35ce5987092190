"""Which JSON object does a sentence fill?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random as Rng

from ridgeline.evaluation.problems import Problem, Split
from tools.worlds import inventing
from tools.worlds import words as w
from tools.worlds.patterns import with_articles
from tools.worlds.problem import asked, draw

Value = str | int | bool


@dataclass(frozen=True, slots=True)
class Field:
    """A key, how its value is drawn, and how a sentence says it of its subject."""

    key: str
    drawn: Callable[[Rng], Value]
    said: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    field: Field
    value: Value


@dataclass(frozen=True, slots=True)
class Form:
    """What is known about one subject: `subject` names it, `rest` are its other fields."""

    subject: Field
    rest: tuple[Field, ...]
    opening: str  # the subject at the start of the first sentence


MONTHS = w.each(
    "January February March April May June July August September October November December"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PERSON = Form(
    Field("name", inventing.name, ()),
    (
        Field("age", lambda rng: rng.randrange(3, 100), ("is {} years old",)),
        Field("city", lambda rng: rng.choice(w.CITIES), ("lives in {}", "has a flat in {}")),
        Field("job", lambda rng: rng.choice(w.JOBS), ("works as a~ {}", "has a job as a~ {}")),
        Field("pet", lambda rng: rng.choice(w.HOUSE_PETS), ("has a~ {}", "keeps a~ {}")),
        Field("color", lambda rng: rng.choice(w.COLORS), ("likes the color {}", "wears {}")),
        Field("food", lambda rng: rng.choice(w.MASS_FOODS), ("likes to eat {}", "loves {}")),
        Field("hobby", lambda rng: rng.choice(w.HOBBIES), ("enjoys {}", "has a passion for {}")),
        Field("birthday", lambda rng: rng.choice(MONTHS), ("was born in {}",)),
        Field("siblings", lambda rng: rng.randrange(2, 9), ("has {} siblings",)),
        Field("student", lambda rng: rng.random() < 0.5, ("is{} a student",)),
    ),
    "{}",
)
ITEM = Form(
    Field("item", lambda rng: rng.choice(w.THINGS), ()),
    (
        Field("color", lambda rng: rng.choice(w.COLORS), ("is {}", "comes in {}")),
        Field("price", lambda rng: rng.randrange(1, 1000), ("costs {} dollars",)),
        Field("place", lambda rng: rng.choice(w.ROOMS), ("is kept in the {}", "is in the {}")),
        Field("weight", lambda rng: rng.randrange(2, 100), ("weighs {} pounds",)),
        Field("owner", inventing.name, ("belongs to {}",)),
        Field("year", lambda rng: rng.randrange(1800, 2026), ("was made in {}",)),
        Field("broken", lambda rng: rng.random() < 0.5, ("is{} broken",)),
    ),
    "The {}",
)
TRIP = Form(
    Field("name", inventing.name, ()),
    (
        Field("from", lambda rng: rng.choice(w.CITIES), ("leaves from {}", "starts in {}")),
        Field("to", lambda rng: rng.choice(w.CITIES), ("travels to {}", "goes to {}")),
        Field("day", lambda rng: rng.choice(DAYS), ("starts on {}", "leaves on {}")),
        Field("nights", lambda rng: rng.randrange(2, 30), ("stays for {} nights",)),
        Field("guests", lambda rng: rng.randrange(2, 10), ("brings {} guests",)),
        Field("room", lambda rng: rng.randrange(1, 500), ("sleeps in room {}",)),
    ),
    "{}",
)
FORMS = (PERSON, PERSON, PERSON, ITEM, TRIP)
REQUESTS = (
    "Fill in a JSON object with the keys {keys}. {text}",
    "Make a JSON object with the keys {keys}: {text}",
    "Write JSON with the keys {keys}. {text}",
    "{text} Give me a JSON object with the keys {keys}.",
    "{text}\n\nWrite this as JSON with the keys {keys}.",
    "Fill in this JSON: {empty}\n{text}",
    "{text}\nFill in: {empty}",
    "json with keys {keys}: {text}",
)


def json_object(rng: Rng, split: Split) -> Problem:
    """A sentence or three about somebody or something; the answer has the keys in their order."""
    form = rng.choice(FORMS)
    facts = draw(lambda: filled(rng, form), content, split)
    wanted = asked_for(rng, facts)
    request = rng.choice(REQUESTS).format(
        keys=", ".join([fact.field.key for fact in wanted]),
        empty=json.dumps(dict.fromkeys([fact.field.key for fact in wanted])),
        text=text(rng, form, facts),
    )
    return asked("json", request, json.dumps({fact.field.key: fact.value for fact in wanted}))


def filled(rng: Rng, form: Form) -> list[Filled]:
    chosen = rng.sample(form.rest, rng.randrange(1, 6))
    return [Filled(field, field.drawn(rng)) for field in (form.subject, *chosen)]


def content(facts: Sequence[Filled]) -> str:
    return "json " + " ".join(sorted([f"{fact.field.key}={fact.value}" for fact in facts]))


def asked_for(rng: Rng, facts: Sequence[Filled]) -> list[Filled]:
    """At least two of the facts: mostly all with the subject first, else some in any order."""
    rest = list(facts[1:])
    rng.shuffle(rest)
    if rng.random() < 0.5:
        return [facts[0], *rest]
    chosen = [facts[0], *rest[: rng.randrange(1, len(rest) + 1)]]
    rng.shuffle(chosen)
    return chosen


def text(rng: Rng, form: Form, facts: Sequence[Filled]) -> str:
    """All facts in their order, in sentences of up to three."""
    clauses = [clause(rng, fact) for fact in facts[1:]]
    subject = form.opening.format(facts[0].value)
    sentences = []
    while clauses:
        count = rng.randrange(1, 4)
        sentences.append(f"{subject} {joined(clauses[:count])}.")
        clauses = clauses[count:]
        subject = pronoun(form, str(facts[0].value))
    return with_articles(" ".join(sentences))


def clause(rng: Rng, fact: Filled) -> str:
    if isinstance(fact.value, bool):
        return fact.field.said[0].format("" if fact.value else " not")
    return rng.choice(fact.field.said).format(fact.value)


def joined(clauses: Sequence[str]) -> str:
    return " and ".join((", ".join(clauses[:-1]), clauses[-1])) if clauses[1:] else clauses[0]


def pronoun(form: Form, name: str) -> str:
    if form is ITEM:
        return "It"
    return "She" if name in w.GIRLS else "He" if name in w.BOYS else name
