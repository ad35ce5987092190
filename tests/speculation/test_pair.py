"""A draft is taken whose tokens mean the same, and any other is told what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ridgeline.architectures import read_spec
from ridgeline.errors import ConfigError
from ridgeline.speculation.draft_model import check_pair
from tests.tiny_model import tiny_config

SPEC = read_spec(tiny_config(vocab_size=100, max_position_embeddings=512))


class Pieces:
    def __init__(self, pieces: Sequence[str | None]) -> None:
        self.pieces, self.vocab_size = pieces, len(pieces)

    def id_to_piece(self, token_id: int) -> str | None:
        return self.pieces[token_id]


WORDS = [f"word{i}" for i in range(90)]


@pytest.mark.parametrize("draft_size", [100, 96, 128, 90])
def test_rows_that_nobody_uses_may_differ(draft_size: int) -> None:
    draft = replace(SPEC, vocab_size=draft_size)
    check_pair(SPEC, draft, max_model_len=512, tokenizers=(Pieces(WORDS), Pieces(WORDS)))


def test_a_piece_that_one_has_not() -> None:
    fewer: list[str | None] = [*WORDS[:-1], None]
    check_pair(SPEC, SPEC, max_model_len=512, tokenizers=(Pieces(WORDS), Pieces(fewer)))


def test_another_piece() -> None:
    other = [*WORDS[:40], "verb", *WORDS[41:]]
    with pytest.raises(ConfigError, match=r"token 40 is 'word40' in the model's and 'verb'"):
        check_pair(SPEC, SPEC, max_model_len=512, tokenizers=(Pieces(WORDS), Pieces(other)))


def test_ids_that_are_used_and_not_there() -> None:
    draft = replace(SPEC, vocab_size=80)
    with pytest.raises(ConfigError, match=r"100 token ids and the draft 80, .* has 90"):
        check_pair(SPEC, draft, max_model_len=512, tokenizers=(Pieces(WORDS), Pieces(WORDS)))


def test_without_tokenizers_the_sizes_are_the_same() -> None:
    check_pair(SPEC, SPEC, max_model_len=512, tokenizers=(None, None))
    draft = replace(SPEC, vocab_size=101)
    with pytest.raises(ConfigError, match="give both their tokenizers"):
        check_pair(SPEC, draft, max_model_len=512, tokenizers=(Pieces(WORDS), None))


def test_a_draft_that_reads_less() -> None:
    draft = replace(SPEC, max_position_embeddings=256)
    check_pair(SPEC, draft, max_model_len=256, tokenizers=(None, None))
    with pytest.raises(ConfigError, match="reads 256 tokens at most and max_model_len is 257"):
        check_pair(SPEC, draft, max_model_len=257, tokenizers=(None, None))
    check_pair(SPEC, draft, max_model_len=257, draft_context=512, tokenizers=(None, None))
