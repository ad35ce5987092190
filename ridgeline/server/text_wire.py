"""What do the HTTP process and the processes for templates and tokenizers say to each other?

Frames as in wire.py. The fork server loads the model's files and makes workers, one command after
the other; each worker answers one question at a time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.parsers import NONE
from ridgeline.text.pieces import DecodingRule
from ridgeline.text.vocabulary import Table, Vocabulary

TEMPLATE_S = 0.25  # of processor time, as all seconds here but WALL_S
ENCODE_S = 0.5
GRAMMAR_S = 1.0
ENCODE_S_PER_BYTE = 5e-6  # of text, as UTF-8
WORK_BYTES = 256 << 20
ENCODE_BYTES_PER_BYTE = 500
MAX_IDS = 1 << 22  # of all texts of a request: no fewer than the bytes of the largest ordinary body
RETAINED_BYTES = 128 << 20  # that a worker may keep from one request to the next
LOAD_S = 30.0
LOAD_BYTES = 1 << 30
LOAD_BYTES_PER_BYTE = 40
WALL_S = 20.0  # a worker that gets no processor for so long is killed
WALL_S_PER_BYTE = 20e-6
LOAD_WALL_S = 120.0

IDS = "i"  # code of an array of token ids: 32 bits each


class LoadText(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """The first command: read the tokenizer and the chat template of this folder or GGUF file, or
    the template in a file of its own, for that tool parser if one is named. The answer is Loaded
    or LoadFailed."""

    folder: str
    chat_template: str | None = None
    tool_parser: str | None = None


class Fork(msgspec.Struct, tag="fork", array_like=True, frozen=True):
    """Make a worker; its end of a socket pair comes with this message. The answer is Forked."""


class End(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """Kill this worker, if it still runs; the answer is Ended."""

    pid: int


class VocabularyTable(msgspec.Struct, array_like=True, frozen=True):
    """See ridgeline.text.vocabulary.Table; no `rule` where only the tokenizer itself can decode."""

    special_ids: tuple[int, ...]
    rule: DecodingRule | None
    tables: tuple[tuple[bytes, bytes], ...]


def vocabulary_of(table: VocabularyTable) -> Vocabulary | None:
    """None where only the tokenizer itself can decode."""
    if table.rule is None:
        return None
    return Vocabulary(Table(table.rule, *table.tables), frozenset(table.special_ids))


class Loaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """`vocabulary`: None for a model without a tokenizer. `end_token_id`: what its files say; the
    model's own configuration may say others. `tool_parser` and `reasoning_parser`: names of
    ridgeline.parsers, found in the template."""

    has_template: bool
    vocabulary: VocabularyTable | None
    end_token_id: int | None = None
    tool_parser: str = NONE
    reasoning_parser: str = NONE


class LoadFailed(msgspec.Struct, tag="load failed", array_like=True, frozen=True):
    message: str


class Forked(msgspec.Struct, tag="forked", array_like=True, frozen=True):
    pid: int


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """`code`: as of subprocess, negative for a signal."""

    code: int


class Encode(msgspec.Struct, tag="encode", array_like=True, frozen=True):
    """Texts to tokens. One that is over `max_tokens` already at its beginning is refused."""

    texts: tuple[str, ...]
    add_special_tokens: bool
    max_tokens: int


class EncodeChat(msgspec.Struct, tag="chat", array_like=True, frozen=True):
    """The same of a conversation."""

    messages: tuple[dict[str, Any], ...]
    add_generation_prompt: bool
    options: dict[str, Any]
    max_tokens: int
    tools: tuple[dict[str, Any], ...] = ()
    continue_final_message: bool = False


class CheckGrammar(msgspec.Struct, tag="grammar", array_like=True, frozen=True):
    """Compile what an answer must be, as `Sampling.structured_outputs` has it, for a model with so
    many logits. The answer is Ids of no text, or Refusal."""

    constraint: str
    vocab_size: int
    end_token_ids: tuple[int, ...]


class Stage(msgspec.Struct, tag="stage", array_like=True, frozen=True):
    """On the way to an answer: who works now, the template or the tokenizer. A conversation begins
    with its template."""

    is_template: bool


class Ids(msgspec.Struct, tag="ids", array_like=True, frozen=True):
    """The answer: an array of token ids for each text. `is_last`: as of Refusal."""

    prompts: tuple[bytes, ...]
    is_last: bool = False


class Refusal(msgspec.Struct, tag="refusal", array_like=True, frozen=True):
    """The answer: the RequestFault of text number `place`. `crash`: the kind of exception or panic
    that it was; "" where everything works and the text is refused. `is_last`: the worker ends now
    and takes no further question."""

    message: str
    param: str | None
    code: str
    place: int
    crash: str = ""
    is_last: bool = False


Command = LoadText | Fork | End
Done = Loaded | LoadFailed | Forked | Ended
Question = Encode | EncodeChat | CheckGrammar
Answer = Stage | Ids | Refusal
