"""Can this draft draft for this model? Only if a token id means the same to both."""

from __future__ import annotations

from typing import Protocol

from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError


class Vocabulary(Protocol):
    """What `ridgeline.text.tokenizer.Tokenizer` has: pieces of 0 .. vocab_size - 1."""

    vocab_size: int

    def id_to_piece(self, token_id: int) -> str | None: ...


def check_pair(
    target: ModelSpec,
    draft: ModelSpec,
    *,
    max_model_len: int,
    draft_context: int | None = None,
    tokenizers: tuple[Vocabulary | None, Vocabulary | None],
) -> None:
    """ConfigError that says what differs. `tokenizers` are the target's and the draft's;
    `draft_context` is what the draft's positions were made for, scaling included, unless given its
    `max_position_embeddings`.

    A matrix of the vocabulary may be filled up to a round number of rows, each model's to another
    one: that is seen by tokenizers that agree on every id which both have a piece for.
    """
    longest = draft_context or draft.max_position_embeddings
    if longest < max_model_len:
        raise ConfigError(
            f"the draft reads {longest} tokens at most and max_model_len is {max_model_len}; set "
            f"max_model_len to {longest} or less, or choose another draft"
        )
    ours, theirs = tokenizers
    if ours is None or theirs is None:
        if target.vocab_size != draft.vocab_size:
            raise ConfigError(
                f"{_sizes(target, draft)}, and without a tokenizer of both it cannot be seen "
                "whether they mean the same; give both their tokenizers, or choose another draft"
            )
        return
    _check_pieces(ours, theirs)
    known = max(ours.vocab_size, theirs.vocab_size)
    if target.vocab_size != draft.vocab_size and known > min(target.vocab_size, draft.vocab_size):
        raise ConfigError(
            f"{_sizes(target, draft)}, which is more than rows nobody uses: the tokenizer has "
            f"{known}; {_OTHER}"
        )


_OTHER = "a draft must share the model's vocabulary: choose one of the same family"


def _check_pieces(ours: Vocabulary, theirs: Vocabulary) -> None:
    for token_id in range(min(ours.vocab_size, theirs.vocab_size)):
        mine, other = ours.id_to_piece(token_id), theirs.id_to_piece(token_id)
        if mine != other and mine is not None and other is not None:
            raise ConfigError(
                f"the draft has another vocabulary than the model: token {token_id} is {mine!r} in "
                f"the model's and {other!r} in the draft's; {_OTHER}"
            )


def _sizes(target: ModelSpec, draft: ModelSpec) -> str:
    return f"the model has {target.vocab_size} token ids and the draft {draft.vocab_size}"
