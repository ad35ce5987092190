"""Which text shows what goes into a model's matrices, and which one tells how good they still are?

A file of UTF-8, packed with gzip or not. Or the bundled text: stories, and questions with their
answers in the model's chat format if it has one; those for calibration are of the training split,
those held out of the test.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.errors import ConfigError
from ridgeline.evaluation.problems import STORY, Problem, Split, texts

if TYPE_CHECKING:
    from ridgeline.text.chat import ChatTemplate
    from ridgeline.text.tokenizer import Tokenizer

GZIP_MARK = b"\x1f\x8b"
MAX_BYTES = 256 << 20  # unpacked; far more than a perplexity needs


@dataclass(frozen=True, slots=True)
class Marked:
    """Token ids, and for each whether a model should foresee it: no words of users."""

    token_ids: tuple[int, ...]
    is_scored: tuple[bool, ...]


def bundled_tokens(
    tokenizer: Tokenizer, template: ChatTemplate | None, split: Split, num_tokens: int
) -> Marked:
    """At least so many tokens of whole pieces, each from the model's beginning to its end.
    ConfigError when the bundled text has fewer."""
    ids: list[int] = []
    scored: list[bool] = []
    for piece, num_given in _pieces(tokenizer, template, split):
        if len(ids) >= num_tokens:
            break
        ids += piece
        scored += [index >= num_given for index in range(len(piece))]
    if len(ids) < num_tokens:
        raise ConfigError(
            f"the bundled text has {len(ids)} tokens of this model, fewer than the {num_tokens} of"
            " all windows; give fewer or shorter windows, or a text of your own"
        )
    return Marked(tuple(ids), tuple(scored))


def text_tokens(tokenizer: Tokenizer, text: str) -> Marked:
    """A text as it is, without beginning and end, all of it to be foreseen."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return Marked(tuple(ids), (True,) * len(ids))


def _pieces(
    tokenizer: Tokenizer, template: ChatTemplate | None, split: Split
) -> Iterator[tuple[list[int], int]]:
    """Token ids, and how many of them are given."""
    begin = [i for i in (tokenizer.bos_token_id,) if i is not None]
    end = [i for i in (tokenizer.eos_token_id,) if i is not None]
    for one in texts(split):
        if one.task == STORY:
            ids = tokenizer.encode(one.answer, add_special_tokens=False)
            yield [*begin, *ids, *end], len(begin)
        elif template is not None:
            yield _conversation(template, one)


def _conversation(template: ChatTemplate, problem: Problem) -> tuple[list[int], int]:
    """A question, which is given, and its answer."""
    question = [{"role": m.role, "content": m.content} for m in problem.messages]
    whole = [*question, {"role": "assistant", "content": problem.answer}]
    given = template.encode_chat(question)
    return template.encode_chat(whole, add_generation_prompt=False), len(given)


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. ConfigError names the file and what is wrong with it."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(len(GZIP_MARK)) == GZIP_MARK
        with gzip.open(path) if packed else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes of text; give a part of it")
    if not text.strip():
        raise ConfigError(f"{path}: holds no text")
    return text
