"""Which text shows what goes into a model's matrices, and which one tells how good they still are?

Where no file is given: stories of our worlds, and questions with their answers in the model's chat
format if it has one; those for calibration are of the training split, those held out of the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from ridgeline.evaluation import worlds
from ridgeline.evaluation.worlds import Split

if TYPE_CHECKING:
    from ridgeline.text.chat import ChatTemplate
    from ridgeline.text.tokenizer import Tokenizer

STORY_SHARE = 0.2  # of the pieces, where the model can chat


@dataclass(frozen=True, slots=True)
class Marked:
    """Token ids, and for each whether a model should foresee it: no words of users."""

    token_ids: tuple[int, ...]
    is_scored: tuple[bool, ...]


def bundled_tokens(
    tokenizer: Tokenizer, template: ChatTemplate | None, split: Split, num_tokens: int
) -> Marked:
    """At least so many tokens of whole pieces, each from the model's beginning to its end."""
    ids: list[int] = []
    scored: list[bool] = []
    pieces = _pieces(tokenizer, template, split)
    while len(ids) < num_tokens:
        piece, num_given = next(pieces)
        ids += piece
        scored += [index >= num_given for index in range(len(piece))]
    return Marked(tuple(ids), tuple(scored))


def text_tokens(tokenizer: Tokenizer, text: str) -> Marked:
    """A text as it is, without beginning and end, all of it to be foreseen."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Marked(tuple(ids), (True,) * len(ids))


def _pieces(
    tokenizer: Tokenizer, template: ChatTemplate | None, split: Split
) -> Iterator[tuple[list[int], int]]:
    """Token ids, and how many of them are given."""
    rng = Random(f"calibration:{split}")
    begin = [i for i in (tokenizer.bos_token_id,) if i is not None]
    end = [i for i in (tokenizer.eos_token_id,) if i is not None]
    while True:
        if template is None or rng.random() < STORY_SHARE:
            ids = tokenizer.encode(worlds.document(rng, split), add_special_tokens=False)
            yield [*begin, *ids, *end], len(begin)
        else:
            yield _conversation(template, rng, split)


def _conversation(template: ChatTemplate, rng: Random, split: Split) -> tuple[list[int], int]:
    """A question, which is given, and its answer."""
    problem = worlds.problem(rng.choice(list(worlds.TASKS)), rng, split)
    question = [{"role": m.role, "content": m.content} for m in problem.messages]
    whole = [*question, {"role": "assistant", "content": problem.answer}]
    given = template.encode_chat(question)
    return template.encode_chat(whole, add_generation_prompt=False), len(given)
