"""What does this text say about that?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random as Rng

from ridgeline.evaluation.problems import Message, Problem, Split
from tools.worlds import inventing
from tools.worlds import words as w
from tools.worlds.casting import cast_fields
from tools.worlds.patterns import with_articles
from tools.worlds.problem import asked, draw
from tools.worlds.telling import NATURE

MIN_TOKENS, MAX_TOKENS = 30, 1450
PAIRS = 2  # the fewest facts in a passage
MAX_QUESTIONS = 8  # about one passage of training
AMOUNTS = ("number", "price", "weight", "size")
SPOTS: tuple[str, ...] = tuple(f"in the {room}" for room in w.ROOMS for _ in range(2)) + tuple(
    f"{preposition} the {place}" for place, preposition in w.PREPOSITION.items()
)
SECRETS = ("code", "password", "key", "label")


@dataclass(frozen=True, slots=True)
class Fact:
    kind: str
    subject: str
    value: str


@dataclass(frozen=True, slots=True)
class Kind:
    """How facts of one kind are drawn, said and asked for; `{s}` is the subject, `{v}` the value.

    `backwards` asks for the subject, which only a value that no other fact has allows.
    """

    drawn: Callable[[Rng], tuple[str, str]]
    texts: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str = "{v}"
    backwards: tuple[str, ...] = ()
    backwards_answer: str = "{s}"


def colored(rng: Rng) -> str:
    return f"{rng.choice(w.COLORS)} {rng.choice(w.THINGS)}"


def attribute(rng: Rng) -> tuple[str, str]:
    if rng.random() < 0.5:
        return f"{rng.choice(AMOUNTS)} of the {colored(rng)}", inventing.number(rng, 4)
    return f"{rng.choice(SECRETS)} of the {colored(rng)}", value(rng)


def value(rng: Rng) -> str:
    chance = rng.random()
    if chance < 0.65:
        return inventing.number(rng, 4)
    return rng.choice(w.PLAIN) if chance < 0.85 else inventing.code(rng)


KINDS: dict[str, Kind] = {
    "value": Kind(
        lambda rng: attribute(rng),
        ("The {s} is {v}.", "The {s} is {v}.", "Note: the {s} is {v}."),
        ("What is the {s}?", "what is the {s}?", "Tell me the {s}."),
    ),
    "has": Kind(
        lambda rng: (inventing.name(rng), colored(rng)),
        ("{s} has a~ {v}.", "{s} has a~ {v}.", "{s} owns a~ {v}.", "The {v} belongs to {s}."),
        ("What does {s} have?", "what does {s} have?", "What belongs to {s}?"),
        "a~ {v}",
        ("Who has the {v}?", "Who has a~ {v}?", "who has the {v}?", "Who owns the {v}?"),
    ),
    "where": Kind(
        lambda rng: (colored(rng), rng.choice(SPOTS)),
        ("The {s} is {v}.", "The {s} lies {v}.", "You can find the {s} {v}."),
        ("Where is the {s}?", "where is the {s}?", "Where can I find the {s}?"),
    ),
    "likes": Kind(
        lambda rng: (inventing.name(rng), rng.choice(w.LIKED)),
        ("{s} likes {v}.", "{s} likes {v} very much.", "{s} loves {v}."),
        ("What does {s} like?", "what does {s} like?", "What does {s} love?"),
        "{v}",
        ("Who likes {v}?", "who likes {v}?", "Who loves {v}?"),
    ),
    "lives": Kind(
        lambda rng: (inventing.name(rng), rng.choice(w.CITIES)),
        ("{s} lives in {v}.", "{s} lives in {v}.", "The home of {s} is in {v}."),
        ("Where does {s} live?", "where does {s} live?", "In which city does {s} live?"),
        "{v}",
        ("Who lives in {v}?", "who lives in {v}?"),
    ),
    "age": Kind(
        lambda rng: (inventing.name(rng), str(rng.randrange(3, 100))),
        ("{s} is {v} years old.", "{s} is {v} years old.", "The age of {s} is {v}."),
        ("How old is {s}?", "how old is {s}?", "What is the age of {s}?"),
    ),
    "job": Kind(
        lambda rng: (inventing.name(rng), rng.choice(w.JOBS)),
        ("{s} works as a~ {v}.", "{s} is a~ {v}.", "The job of {s} is {v}."),
        ("What is the job of {s}?", "What does {s} work as?", "what is the job of {s}?"),
        "{v}",
        ("Who is the {v}?", "Who works as a~ {v}?", "who is the {v}?"),
    ),
}
TABLE = Kind(
    lambda rng: (rng.choice(w.PLAIN) if rng.random() < 0.7 else inventing.word(rng), value(rng)),
    ("{s}: {v}",),
    ("What is the value of {s}?", "What is {s}?", "Which value has {s}?", "{s}?"),
)
KIND_NAMES = tuple(KINDS)
LAYOUTS = (
    "{passage}\n\n{question}",
    "{passage}\n\n{question}",
    "{passage} {question}",
    "Read this text and answer the question.\n\n{passage}\n\nQuestion: {question}",
    "Text: {passage}\nQuestion: {question}",
    "Here are some facts. {passage}\n\n{question}",
    "{question}\n\n{passage}",
    "Question: {question}\n\n{passage}",
)
AGAIN = ("{question}", "And another question: {question}", "{question}", "Thanks. {question}")


def lookup(rng: Rng, split: Split, max_tokens: int = MAX_TOKENS) -> Problem:
    """A passage of facts, 2 facts to about 1,500 tokens (most are short), and a question."""
    facts = draw(lambda: drawn_facts(rng, max_tokens), content, split)
    question, answer = question_about(rng, facts)
    return asked("lookup", laid_out(rng, facts, question), answer)


def lookup_again(rng: Rng, split: Split) -> Problem:
    """A second question about a passage, after the first has been answered."""
    facts = draw(lambda: drawn_facts(rng, 300), content, split)
    question, answer = question_about(rng, facts)
    again, answer_again = question_about(rng, facts)
    messages = (
        Message("user", laid_out(rng, facts, question)),
        Message("assistant", answer),
        Message("user", rng.choice(AGAIN).format(question=again)),
    )
    return Problem("lookup", messages, answer_again)


def lookups(rng: Rng, split: Split) -> tuple[Message, ...]:
    """A passage and several questions about it, all answered: for training, where one question
    about a long passage would teach little."""
    facts = draw(lambda: drawn_facts(rng, MAX_TOKENS), content, split)
    return conversation(
        rng,
        ask=lambda: question_about(rng, facts),
        lay_out=lambda question: laid_out(rng, facts, question),
        num_more=lambda: rng.randrange(min(MAX_QUESTIONS, 2 + len(facts))),
    )


def conversation(
    rng: Rng,
    ask: Callable[[], tuple[str, str]],
    lay_out: Callable[[str], str],
    num_more: Callable[[], int],
) -> tuple[Message, ...]:
    """Questions with their answers, the first one beside its text."""
    question, answer = ask()
    messages = [Message("user", lay_out(question)), Message("assistant", answer)]
    for _ in range(num_more()):
        question, answer = ask()
        again = rng.choice(AGAIN).format(question=question)
        messages += [Message("user", again), Message("assistant", answer)]
    return tuple(messages)


def content(facts: Sequence[Fact], task: str = "lookup") -> str:
    return f"{task} " + " ".join(sorted([f"{f.kind} {f.subject} {f.value};" for f in facts]))


def drawn_facts(rng: Rng, max_tokens: int) -> list[Fact]:
    """Facts of which no two say something about the same subject in the same kind."""
    budget = exp(log(MIN_TOKENS) + rng.random() * log(max_tokens / MIN_TOKENS))
    names = ("table",) if rng.random() < 0.1 else rng.sample(KIND_NAMES, rng.randrange(1, 5))
    found: list[Fact] = []
    seen = set()
    tries = 0
    while (budget > 0 or len(found) < PAIRS) and tries < 2000:
        tries += 1
        name = rng.choice(names)
        fact = Fact(name, *(TABLE if name == "table" else KINDS[name]).drawn(rng))
        if (name, fact.subject) not in seen:
            seen.add((name, fact.subject))
            found.append(fact)
            budget -= num_tokens(fact)
    return found


def num_tokens(fact: Fact) -> int:
    """About how many tokens a fact takes; each digit or sign of a code is one."""
    is_spelled = not fact.value.islower()
    return 7 + fact.subject.count(" ") * 2 + (len(fact.value) if is_spelled else 2)


def question_about(rng: Rng, facts: Sequence[Fact]) -> tuple[str, str]:
    """A question with one right answer, and that answer."""
    fact = rng.choice(facts)
    kind = TABLE if fact.kind == "table" else KINDS[fact.kind]
    is_unique = sum(f.kind == fact.kind and f.value == fact.value for f in facts) == 1
    if kind.backwards and is_unique and rng.random() < 0.45:
        return said(rng.choice(kind.backwards), fact), said(kind.backwards_answer, fact)
    return said(rng.choice(kind.questions), fact), said(kind.answer, fact)


def said(pattern: str, fact: Fact) -> str:
    return with_articles(pattern.format(s=fact.subject, v=fact.value))


def laid_out(rng: Rng, facts: Sequence[Fact], question: str) -> str:
    layout = rng.choice(LAYOUTS)
    if facts[0].kind == "table":
        lines = "\n".join([said(TABLE.texts[0], fact) for fact in facts])
        layout = layout.replace(" {passage}", "\n{passage}").replace("{passage} ", "{passage}\n")
        return layout.format(passage=lines, question=question)
    return layout.format(passage=passage(rng, facts), question=question)


def passage(rng: Rng, facts: Sequence[Fact]) -> str:
    """The facts as sentences, in some passages with sentences between that say nothing of use."""
    share = rng.choice((0.0, 0.0, 0.1, 0.3)) if len(facts) < 60 else 0.0
    fields = cast_fields(rng, (), w.THINGS) if share else {}
    lines = []
    for fact in facts:
        if share and rng.random() < share:
            lines.append(rng.choice(FILLERS)(rng, fields))
        lines.append(said(rng.choice(KINDS[fact.kind].texts), fact))
    return with_articles(" ".join(lines))


FILLERS = tuple(choice for choices in NATURE.values() for choice in choices)
