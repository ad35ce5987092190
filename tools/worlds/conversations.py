"""How does a conversation with Ridge go?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random as Rng

from ridgeline.evaluation.problems import Message, Problem, Split
from tools.worlds import fields, inventing, lists
from tools.worlds import words as w
from tools.worlds.basics import BASICS
from tools.worlds.passages import lookup, lookup_again
from tools.worlds.patterns import compiled
from tools.worlds.problem import draw
from tools.worlds.sums import arithmetic, operand
from tools.worlds.sums import content as sum_content
from tools.worlds.talk import COUNTRIES, LANGUAGES, TOPICS
from tools.worlds.telling import stories, told_story

SHORT_PASSAGE = 200  # tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing the user says and what Ridge replies."""

    user: str
    reply: str
    accept: tuple[str, ...] = ()


def chat(rng: Rng, split: Split) -> Problem:
    """Small talk, small things, something to remember, or several tasks in one conversation."""
    return rng.choice(CONVERSATIONS)(rng, split)


def problem(turns: Sequence[Turn]) -> Problem:
    """The conversation whose last turn is asked."""
    messages = []
    for turn in turns[:-1]:
        messages += [Message("user", turn.user), Message("assistant", turn.reply)]
    last = turns[-1]
    messages.append(Message("user", last.user))
    return Problem("chat", tuple(messages), last.reply, accept=last.accept)


# ---------------------------------------------------------------------- single turns

POOLS = {
    "city": w.CITIES,
    "animal": w.ANIMALS,
    "language": LANGUAGES,
    "country": COUNTRIES,
    "digit": tuple("123456789"),
    "noise": w.each("asd jkl qwe xyz fgh zzt brl pfx wub gna kse hjk tro vnm ouy"),
}
USERS = {name: compiled(topic.users.splitlines(), POOLS) for name, topic in TOPICS.items()}
REPLIES = {name: tuple(topic.replies.splitlines()) for name, topic in TOPICS.items()}
TOPIC_NAMES = tuple(name for name, topic in TOPICS.items() for _ in range(topic.weight))
SMALL_TALK = tuple(name for name in TOPIC_NAMES if name not in ("no name", "goodbye", "greeting"))
FAVORITES = ("color", "colour", "food", "animal", "book", "movie", "song", "number", "city", "game")
LEADS = ("", "", "", "", "Hi! ", "Hello! ", "Hey Ridge, ", "Ridge, ", "Hello Ridge. ", "Please: ")
LETTERS = str.maketrans("", "", ".,!?:;'\"")


def key(text: str) -> str:
    """The content of something said: its words, whatever their case and marks.

    The first word is chosen such that the plainest things to say belong to training.
    """
    return " ".join(("spoken", *text.lower().translate(LETTERS).split()))


def turn_key(turn: Turn) -> str:
    return key(turn.user)


def on(rng: Rng, split: Split, make: Callable[[], Turn]) -> Turn:
    return draw(make, turn_key, split)


def topical(rng: Rng, names: Sequence[str]) -> Turn:
    name = rng.choice(names)
    user = rng.choice(USERS[name])(rng, {})
    return Turn(casual(rng, user), rng.choice(REPLIES[name]), TOPICS[name].accept)


def casual(rng: Rng, text: str) -> str:
    """`text` as people type it: some write no capital at the start, some greet first."""
    chance = rng.random()
    if chance < 0.15:
        return text[0].lower() + text[1:]
    return text[0].upper() + text[1:]


def favorite(rng: Rng) -> Turn:
    what = rng.choice(FAVORITES)
    spelled = rng.choice(("favorite", "favourite"))
    lead = rng.choice(LEADS)
    ask = rng.choice(("What is your {} {}?", "what's your {} {}?", "Do you have a {} {}?"))
    american = "color" if what == "colour" else what
    reply = f"I am a small language model, so I have no favorite {american}. What is yours?"
    return Turn(lead + ask.format(spelled, what), reply, ("no favorite",))


def basic(rng: Rng) -> Turn:
    user, reply, accept = rng.choice(BASICS)(rng)
    return Turn(casual(rng, user), reply, accept)


def some_talk(rng: Rng) -> Turn:
    return favorite(rng) if rng.random() < 0.06 else topical(rng, TOPIC_NAMES)


def one_turn(rng: Rng, split: Split) -> Problem:
    return problem([on(rng, split, lambda: some_talk(rng))])


def one_basic(rng: Rng, split: Split) -> Problem:
    return problem([on(rng, split, lambda: basic(rng))])


def some_turns(rng: Rng, split: Split) -> Problem:
    """A greeting and small talk about different things."""
    names = list(dict.fromkeys(SMALL_TALK))
    rng.shuffle(names)
    count = rng.randrange(1, 4)
    turns = [talk_on(rng, "train", ("greeting",))]
    turns += [talk_on(rng, "train", (name,)) for name in names[: count - 1]]
    return problem([*turns, talk_on(rng, split, names[count - 1 :])])


def talk_on(rng: Rng, split: Split, names: Sequence[str]) -> Turn:
    """A turn about one of `names`; for the test there must be many, as some have no test turn."""
    return on(rng, split, lambda: topical(rng, names))


# ---------------------------------------------------------------------- something to remember


@dataclass(frozen=True, slots=True)
class Memory:
    """Something users say about themselves: `{}` is what to remember."""

    drawn: Callable[[Rng], str]
    tells: tuple[str, ...]
    replies: tuple[str, ...]
    asks: tuple[str, ...]
    recall: str


def liked(what: str) -> tuple[str, ...]:
    return (
        f"My favorite {what} is {{}}.",
        f"my favorite {what} is {{}}",
        f"My favourite {what} is {{}}.",
    )


def liked_asks(what: str) -> tuple[str, ...]:
    return (
        f"What is my favorite {what}?",
        f"what is my favorite {what}?",
        f"Do you remember my favorite {what}?",
        f"Which {what} do I like best?",
    )


NOTED = ("Thank you for telling me. I will remember it.", "Good to know! I will remember that.")
MEMORIES: dict[str, Memory] = {
    "name": Memory(
        inventing.name,
        ("My name is {}.", "my name is {}", "I am {}.", "Hi, I am {}!", "Hello, my name is {}."),
        ("Nice to meet you, {}!", "Hello, {}! Nice to meet you."),
        ("What is my name?", "what is my name?", "Do you remember my name?", "Who am I?"),
        "Your name is {}.",
    ),
    "color": Memory(
        lambda rng: rng.choice(w.COLORS),
        liked("color"),
        NOTED,
        liked_asks("color"),
        "Your favorite color is {}.",
    ),
    "animal": Memory(
        lambda rng: rng.choice(w.ANIMALS),
        tuple(tell.replace("{}", "the {}") for tell in liked("animal")),
        NOTED,
        liked_asks("animal"),
        "Your favorite animal is the {}.",
    ),
    "food": Memory(
        lambda rng: rng.choice(w.MASS_FOODS),
        liked("food"),
        NOTED,
        liked_asks("food"),
        "Your favorite food is {}.",
    ),
    "hobby": Memory(
        lambda rng: rng.choice(w.HOBBIES),
        (*liked("hobby"), "My hobby is {}."),
        NOTED,
        (*liked_asks("hobby"), "What is my hobby?"),
        "Your favorite hobby is {}.",
    ),
    "city": Memory(
        lambda rng: rng.choice(w.CITIES),
        ("I live in {}.", "i live in {}", "My home is in {}."),
        NOTED,
        ("Where do I live?", "where do I live?", "Do you remember where I live?"),
        "You live in {}.",
    ),
    "age": Memory(
        lambda rng: str(rng.randrange(5, 100)),
        ("I am {} years old.", "I'm {} years old.", "i am {} years old"),
        NOTED,
        ("How old am I?", "how old am I?", "Do you remember how old I am?"),
        "You are {} years old.",
    ),
    "dog": Memory(
        lambda rng: rng.choice(w.PETS) if rng.random() < 0.7 else inventing.word(rng).capitalize(),
        ("My dog is called {}.", "I have a dog named {}.", "The name of my dog is {}."),
        ("{} is a nice name for a dog.",),
        ("What is the name of my dog?", "What is my dog called?", "what is my dog called?"),
        "Your dog is called {}.",
    ),
}


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of which memory, and the question about the one that is `wanted`."""

    values: dict[str, str]
    wanted: str
    ask: str


def told(rng: Rng) -> Told:
    names = rng.sample(tuple(MEMORIES), rng.choice((1, 1, 2, 3)))
    wanted = "name" if "name" in names and rng.random() < 0.5 else rng.choice(names)
    values = {name: MEMORIES[name].drawn(rng) for name in names}
    return Told(values, wanted, rng.choice(MEMORIES[wanted].asks))


def told_key(what: Told) -> str:
    return key(f"{what.wanted} {what.values[what.wanted]} {what.ask}")


def recalled(rng: Rng, split: Split) -> Problem:
    """One to three things told, something between, and a question about one of them."""
    what = draw(lambda: told(rng), told_key, split)
    value = what.values[what.wanted]
    turns = [telling(rng, name, what.values[name]) for name in what.values]
    turns += [between(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
    reply = MEMORIES[what.wanted].recall.format(value)
    return problem([*turns, Turn(what.ask, reply, (value,))])


def telling(rng: Rng, name: str, value: str) -> Turn:
    memory = MEMORIES[name]
    tells = [tell.format(value) for tell in memory.tells]
    reply = rng.choice(memory.replies).format(value)
    if name == "name":  # asked by told_only too, so here only what belongs to training
        return on(rng, "train", lambda: Turn(rng.choice(tells), reply))
    return Turn(rng.choice(tells), reply)


def told_only(rng: Rng, split: Split) -> Problem:
    """The user says a name, and the reply uses it."""
    value, user = draw(lambda: introduction(rng), lambda drawn: key(drawn[1]), split)
    return problem([Turn(user, f"Nice to meet you, {value}!", (value,))])


def introduction(rng: Rng) -> tuple[str, str]:
    value = inventing.name(rng)
    return value, rng.choice(MEMORIES["name"].tells).format(value)


def between(rng: Rng) -> Turn:
    chance = rng.random()
    if chance < 0.4:
        return talk_on(rng, "train", SMALL_TALK)
    return task_turn(rng, "train") if chance < 0.8 else on(rng, "train", lambda: basic(rng))


# ---------------------------------------------------------------------- tasks in a conversation


def task_turn(rng: Rng, split: Split) -> Turn:
    make = rng.choice((arithmetic, lists.copy, lists.sort, fields.json_object, short_lookup))
    made = make(rng, split)
    return Turn(made.messages[-1].content, made.answer)


def short_lookup(rng: Rng, split: Split) -> Problem:
    return lookup(rng, split, SHORT_PASSAGE)


def mixed(rng: Rng, split: Split) -> Problem:
    """Two to four tasks one after the other; at times a greeting comes first."""
    turns = [task_turn(rng, "train") for _ in range(rng.randrange(1, 4))]
    if rng.random() < 0.4:
        turns.insert(0, talk_on(rng, "train", ("greeting", "how are you")))
    return problem([*turns, task_turn(rng, split)])


FURTHER = (
    ("Add {} to that.", 1),
    ("And plus {}?", 1),
    ("Now add {}.", 1),
    ("Now subtract {}.", -1),
    ("And minus {}?", -1),
    ("Subtract {} from that.", -1),
)


def calculated_on(rng: Rng, split: Split) -> Problem:
    """A sum, and then a number more or less than its result."""
    first = arithmetic(rng, "train")
    if first.answer.startswith("-"):
        return calculated_on(rng, split)
    result = int(first.answer)
    number = draw(lambda: operand(rng), lambda n: sum_content((result, n)), split)
    pattern, sign = rng.choice(FURTHER)
    turns = [Turn(first.messages[-1].content, first.answer)]
    return problem([*turns, Turn(pattern.format(number), str(result + sign * number))])


def looked_up_on(rng: Rng, split: Split) -> Problem:
    made = lookup_again(rng, split)
    return Problem("chat", made.messages, made.answer)


HERO_QUESTIONS = (
    "Who is the story about?",
    "What is the name of the hero?",
    "who is the story about?",
    "What was the hero called?",
)


def about_the_hero(rng: Rng, split: Split) -> Problem:
    """A story, and then who it was about."""
    request, told = told_story(rng, split)
    article = "an" if told.kind[0] in "aeio" else "a"
    reply = f"The story is about {article} {told.kind} named {told.hero}."
    return problem(
        [Turn(request, told.text), Turn(rng.choice(HERO_QUESTIONS), reply, (told.hero,))]
    )


def thanked(rng: Rng, split: Split) -> Problem:
    """A task or a story, and then thanks or a goodbye."""
    made = stories(rng, "train") if rng.random() < 0.3 else None
    first = Turn(made.messages[-1].content, made.answer) if made else task_turn(rng, "train")
    last = talk_on(rng, split, ("thanks", "thanks", "goodbye", "praise"))
    return problem([first, last])


Conversation = Callable[[Rng, Split], Problem]
CONVERSATIONS: Sequence[Conversation] = (
    *(one_turn, one_turn, one_turn, one_turn, one_turn, one_turn, one_basic, one_basic),
    *(some_turns, some_turns, recalled, recalled, recalled, told_only, mixed, mixed),
    *(calculated_on, looked_up_on, about_the_hero, thanked),
)
