"""How do token ids become text while they come in, one by one or some at a time?

The pieces handed out, joined, are exactly what decoding everything at once gives, as
`Tokenizer.decode` is this same machine. Work per token is constant, at most three bytes are held
back, and U+FFFD appears only where the bytes can no longer become a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from ridgeline.text.pieces import Pieces

CONTEXT_TOKENS = 4  # a character has at most four bytes, and a token of the prompt at least one


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        ...

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """The same of several tokens, together."""
        ...

    def flush(self) -> str:
        """What was still held back. Call it once, at the end."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes: all byte-level and SentencePiece ones.

    `prompt_token_ids` is what the text continues: with it, the space at the start of the first
    piece is kept and a character that the prompt began is completed.
    """

    def __init__(
        self, pieces: Pieces, hidden_ids: frozenset[int], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._pieces = pieces
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=pieces.rule.errors)
        self._strip = pieces.rule.strip
        self._at_start = True
        self._take_context(prompt_token_ids)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        raw = self._first(token_id) if self._at_start else self._pieces.bytes_of(token_id)
        return self._decoded(raw)

    def feed_all(self, token_ids: Sequence[int]) -> str:
        hidden, bytes_of = self._hidden_ids, self._pieces.bytes_of
        if self._at_start:
            return "".join(map(self.feed, token_ids))
        return self._decoded(b"".join([bytes_of(i) for i in token_ids if i not in hidden]))

    def _decoded(self, raw: bytes) -> str:
        text = self._decoder.decode(raw)
        return self._stripped(text) if self._strip and text else text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip and text else text

    def _first(self, token_id: int) -> bytes:
        self._at_start = False
        return self._pieces.first_bytes_of(token_id)

    def _stripped(self, text: str) -> str:
        spaces = min(self._strip, len(text) - len(text.lstrip(" ")))
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]

    def _take_context(self, token_ids: Sequence[int]) -> None:
        tail: list[int] = []
        for token_id in reversed(token_ids):
            if token_id not in self._hidden_ids and self._pieces.bytes_of(token_id):
                tail.append(token_id)
                if len(tail) == CONTEXT_TOKENS:
                    break
        for token_id in reversed(tail):
            self._decoder.decode(self._pieces.bytes_of(token_id))
        if tail:
            self._strip, self._at_start = 0, False


class WindowDetokenizer:
    """For any other vocabulary: decode the last token with and without its neighbour."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        hidden_ids: frozenset[int],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._hidden_ids = hidden_ids
        shown = [token_id for token_id in prompt_token_ids if token_id not in hidden_ids]
        self._last: list[int] = shown[-1:]

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        before = self._decode(self._last) if self._last else ""
        both = self._decode([*self._last, token_id])
        self._last = [token_id]
        return both[len(before) :]

    def feed_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.feed, token_ids))

    def flush(self) -> str:
        return ""
