"""What stands there, word for word? Look-ups of what is longer than a word: lists, serial numbers,
sentences that somebody said.

What `passages` asks for has a word or two; these answers are copied from the middle of a text,
which is what guesses from the prompt are good for.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random as Rng

from ridgeline.evaluation.problems import Message, Problem, Split
from tools.worlds import inventing, lists, passages
from tools.worlds.passages import Fact, Kind, colored, said
from tools.worlds.problem import asked, draw

RECORDS = range(2, 9)  # in a text
ITEMS = range(6, 17)  # of a list
GROUPS, SIGNS_IN_GROUP = range(3, 6), 4  # of a serial number
SENTENCES = range(2, 4)  # that one person says
QUESTIONS = range(1, 5)  # about one text of training


def items(rng: Rng) -> str:
    make = rng.choice(lists.ITEMS)
    return ", ".join([make(rng) for _ in range(rng.choice(ITEMS))])


def serial(rng: Rng) -> str:
    return "-".join(
        [
            "".join([rng.choice(inventing.SIGNS) for _ in range(SIGNS_IN_GROUP)])
            for _ in range(rng.choice(GROUPS))
        ]
    )


def speech(rng: Rng) -> str:
    sentences = []
    for _ in range(rng.choice(SENTENCES)):
        name = rng.choice(passages.KIND_NAMES)
        kind = passages.KINDS[name]
        sentences.append(said(rng.choice(kind.texts), Fact(name, *kind.drawn(rng))))
    return " ".join(sentences)


KINDS: dict[str, Kind] = {
    "list": Kind(
        lambda rng: (inventing.name(rng), items(rng)),
        ("The list of {s}: {v}.", "On the list of {s} stands {v}.", "{s} wrote down {v}."),
        ("What is on the list of {s}?", "what is on the list of {s}?", "What did {s} write down?"),
    ),
    "box": Kind(
        lambda rng: (colored(rng), items(rng)),
        ("In the {s}: {v}.", "The {s} holds {v}.", "The {s} has room for {v}."),
        ("What is in the {s}?", "what is in the {s}?", "What does the {s} hold?"),
    ),
    "serial": Kind(
        lambda rng: (colored(rng), serial(rng)),
        ("The serial number of the {s} is {v}.", "The {s} has the serial number {v}."),
        ("What is the serial number of the {s}?", "Tell me the serial number of the {s}."),
    ),
    "speech": Kind(
        lambda rng: (inventing.name(rng), speech(rng)),
        ('{s} said: "{v}"', '{s} called: "{v}"', '"{v}" said {s}.'),
        ("What did {s} say?", "what did {s} say?", "What were the words of {s}?"),
    ),
}
KIND_NAMES = tuple(KINDS)
LAYOUTS = (
    "{text}\n\n{question}",
    "{text}\n\n{question}",
    "Read this text and answer the question.\n\n{text}\n\nQuestion: {question}",
    "Text: {text}\nQuestion: {question}",
    "{question}\n\n{text}",
)


def records(rng: Rng, split: Split) -> Problem:
    """A text of 2 to 8 records and a question for one of them, to be said as it stands there."""
    facts = draw(lambda: drawn(rng), content, split)
    question, answer = question_about(rng, facts)
    return asked("records", laid_out(rng, facts, question), answer)


def several_records(rng: Rng, split: Split) -> tuple[Message, ...]:
    """A text and several questions about it, all answered: for training."""
    facts = draw(lambda: drawn(rng), content, split)
    return passages.conversation(
        rng,
        ask=lambda: question_about(rng, facts),
        lay_out=lambda question: laid_out(rng, facts, question),
        num_more=lambda: rng.choice(QUESTIONS) - 1,
    )


def content(facts: Sequence[Fact]) -> str:
    return passages.content(facts, "records")


def drawn(rng: Rng) -> list[Fact]:
    """Records of which no two of one kind are about the same subject."""
    names = rng.sample(KIND_NAMES, rng.randrange(1, 4))
    found: dict[tuple[str, str], Fact] = {}
    wanted = rng.choice(RECORDS)
    while len(found) < wanted:
        name = rng.choice(names)
        subject, value = KINDS[name].drawn(rng)
        found.setdefault((name, subject), Fact(name, subject, value))
    return list(found.values())


def question_about(rng: Rng, facts: Sequence[Fact]) -> tuple[str, str]:
    fact = rng.choice(facts)
    kind = KINDS[fact.kind]
    return said(rng.choice(kind.questions), fact), said(kind.answer, fact)


def laid_out(rng: Rng, facts: Sequence[Fact], question: str) -> str:
    text = rng.choice((" ", "\n")).join(
        [said(rng.choice(KINDS[fact.kind].texts), fact) for fact in facts]
    )
    return rng.choice(LAYOUTS).format(text=text, question=question)
