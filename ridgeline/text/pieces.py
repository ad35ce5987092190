"""Which bytes does each token id stand for?

Three kinds of vocabulary cover what language models use: byte-level ones (a printable character
for each byte), SentencePiece ones (U+2581 for a space, <0xNN> for a lone byte) and Metaspace ones.
Source of the byte alphabet: GPT-2's encoder, as in
https://huggingface.co/docs/tokenizers/api/pre-tokenizers (ByteLevel).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

SPACE_MARK = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_BY_BYTE = "ridgeline.byte_by_byte"


def _one_mark_a_byte(error: UnicodeError) -> tuple[str, int]:
    """U+FFFD for every byte that is no UTF-8, as SentencePiece writes them."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(BYTE_BY_BYTE, _one_mark_a_byte)


@cache
def byte_alphabet() -> Mapping[str, int]:
    """Byte-level vocabularies: the character that stands for each byte, to that byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class DecodingRule:
    """How the pieces of one vocabulary turn into text.

    `replacements` are applied to each piece; `strip` is how many spaces to take from the front
    of the whole text; `bare_first` drops the space marks of the first piece (Metaspace).
    """

    byte_level: bool = False
    byte_pieces: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    bare_first: bool = False

    @property
    def errors(self) -> str:
        """How bytes that are no UTF-8 are shown: name of a codec error handler."""
        return "replace" if self.byte_level else BYTE_BY_BYTE


def read_rule(decoder: Any) -> DecodingRule | None:
    """The rule that a `tokenizers` decoder follows, or None for one of another kind."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecodingRule(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        bare = steps[0].get("prepend_scheme", "always") != "never"
        return DecodingRule(replacements=((mark, " "),), bare_first=bare)
    return _sentencepiece_rule(steps, kinds)


def _sentencepiece_rule(steps: list[dict[str, Any]], kinds: list[str]) -> DecodingRule | None:
    """Replace, ..., ByteFallback?, Fuse, Strip?: what SentencePiece vocabularies are given."""
    first = next((i for i, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    rest = kinds[first:]
    byte_pieces = rest[:1] == ["ByteFallback"]
    if rest[byte_pieces:] not in (["Fuse"], ["Fuse", "Strip"]):
        return None
    patterns = [(step["pattern"].get("String"), step["content"]) for step in steps[:first]]
    if any(pattern is None for pattern, _ in patterns):
        return None
    strip = 0
    if rest[-1] == "Strip":
        if steps[-1]["content"] != " " or steps[-1]["stop"]:
            return None
        strip = steps[-1]["start"]
    return DecodingRule(byte_pieces=byte_pieces, replacements=tuple(patterns), strip=strip)


class Pieces:
    """The bytes of every token id, worked out on first use and kept."""

    def __init__(
        self, rule: DecodingRule, piece_of: Callable[[int], str | None], added_ids: frozenset[int]
    ) -> None:
        self.rule = rule
        self._piece_of = piece_of
        self._added_ids = added_ids
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What this token adds to the output, wherever it stands; empty for an unknown id."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._work_out(token_id)
        return found

    def first_bytes_of(self, token_id: int) -> bytes:
        """The same for a token that stands first in its text."""
        if not self.rule.bare_first:
            return self.bytes_of(token_id)
        piece = self._piece_of(token_id) or ""
        return piece.replace(self.rule.replacements[0][0], "").encode()

    def _work_out(self, token_id: int) -> bytes:
        piece = self._piece_of(token_id)
        if piece is None:
            return b""
        if self.rule.byte_level:
            return self._byte_level(token_id, piece)
        for old, new in self.rule.replacements:
            piece = piece.replace(old, new)
        lone = BYTE_PIECE.fullmatch(piece) if self.rule.byte_pieces else None
        return bytes([int(lone[1], 16)]) if lone else piece.encode()

    def _byte_level(self, token_id: int, piece: str) -> bytes:
        if token_id in self._added_ids:
            return piece.encode()  # an added token is stored as it is written
        try:
            return bytes(map(byte_alphabet().__getitem__, piece))
        except KeyError:
            return piece.encode()
