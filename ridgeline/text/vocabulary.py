"""How do token ids become text where only a table of their bytes is known, not the tokenizer?"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from copy import copy

from ridgeline.errors import RequestFault
from ridgeline.sampling.grammar import GrammarCompiler
from ridgeline.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from ridgeline.text.pieces import DecodingRule, Pieces

INDEX = "I"  # of arrays: 32 bits each


class Vocabulary:
    """The bytes of every token id and which of them are special. `pieces` is None only for a
    Tokenizer that is asked itself."""

    def __init__(self, pieces: Pieces | None, special_ids: frozenset[int]) -> None:
        self.pieces = pieces
        self.special_ids = special_ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.feed, token_ids), detokenizer.flush()])

    def detokenizer(
        self, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> Detokenizer:
        """A machine that takes one id at a time; its text continues that of the prompt."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        if self.pieces is None:
            return WindowDetokenizer(self.decode_whole, hidden, prompt_token_ids)
        return ByteDetokenizer(self.pieces, hidden, prompt_token_ids)

    def showing(self, token_ids: Collection[int]) -> Vocabulary:
        """The same, in which these are ordinary tokens of the text."""
        found = copy(self)
        found.special_ids = self.special_ids.difference(token_ids)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, wherever it stands in it."""
        if self.pieces is None:
            return self.decode_whole([token_id]).encode()
        return self.pieces.bytes_of(token_id)

    def grammar_compiler(self, size: int, end_token_ids: frozenset[int]) -> GrammarCompiler:
        """For a model with `size` logits. RequestFault where answers cannot be constrained."""
        if self.pieces is None or not end_token_ids:
            what = "a table of its tokens' bytes" if self.pieces is None else "an end token"
            raise RequestFault(
                f"structured_outputs: this needs a tokenizer with {what}",
                param="structured_outputs",
                code="unsupported_parameter",
            )
        tokens = [self.token_bytes(token_id) for token_id in range(size)]
        return GrammarCompiler(tokens, self.special_ids, end_token_ids)

    def decode_whole(self, token_ids: list[int]) -> str:
        """For vocabularies without pieces."""
        raise NotImplementedError


class Table(Pieces):
    """Pieces that were worked out before, perhaps in another process: the bytes of all tokens
    joined, and where each ends; where the rule is `bare_first`, also those of tokens that stand
    first in their text."""

    def __init__(self, rule: DecodingRule, *tables: tuple[bytes, bytes]) -> None:
        super().__init__(rule, lambda token_id: None, frozenset())
        self._tables = [(joined, array(INDEX, ends)) for joined, ends in tables]

    def first_bytes_of(self, token_id: int) -> bytes:
        return self._in(-1, token_id) if self.rule.bare_first else self.bytes_of(token_id)

    def _work_out(self, token_id: int) -> bytes:
        return self._in(0, token_id)

    def _in(self, place: int, token_id: int) -> bytes:
        joined, ends = self._tables[place]
        if not 0 <= token_id < len(ends):
            return b""
        return joined[ends[token_id - 1] if token_id else 0 : ends[token_id]]


def tables_of(pieces: Pieces, size: int) -> tuple[tuple[bytes, bytes], ...]:
    """What Table is made from, for ids below `size`."""
    ways = [pieces.bytes_of, pieces.first_bytes_of][: 1 + pieces.rule.bare_first]
    return tuple(_joined([way(token_id) for token_id in range(size)]) for way in ways)


def _joined(parts: Sequence[bytes]) -> tuple[bytes, bytes]:
    ends, end = array(INDEX), 0
    for part in parts:
        end += len(part)
        ends.append(end)
    return b"".join(parts), ends.tobytes()
