"""What does a SentencePiece `tokenizer.model` say, and which `tokenizers` object does the same?

The file is one protobuf message; the fields read here are those of
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto .
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from ridgeline.errors import ConfigError
from ridgeline.loader.folder import read_bytes, refuse
from ridgeline.text.pieces import SPACE_MARK
from ridgeline.text.tokenizer_file import (
    MAX_ADDED,
    MAX_GROWTH,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    check_charsmap,
)

MAX_MODEL_BYTES = 64 << 20
MAX_PIECES = 300_000  # Gemma 3: 262,144
MAX_PIECE_FIELDS, MAX_FIELDS = 8, 1 << 16
MAX_CHARS = 1 << 22  # of all pieces; Gemma 3: 1.8 million


class PieceKind(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(IntEnum):
    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    """A vocabulary (the id of a piece is its place) and how texts are prepared for it."""

    pieces: tuple[Piece, ...]
    algorithm: Algorithm
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    def named_tokens(self) -> dict[str, object]:
        """Role (as tokenizer_config.json calls it) to the text of its token."""
        roles = {
            "unk_token": self.unk_id,
            "bos_token": self.bos_id,
            "eos_token": self.eos_id,
            "pad_token": self.pad_id,
        }
        return {r: self.pieces[i].text for r, i in roles.items() if 0 <= i < len(self.pieces)}


Field = tuple[int, int | bytes]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _fields(data: bytes) -> Iterator[Field]:
    """Field number and raw value (an int, or the bytes) of one protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("a field that goes beyond its message")
        yield key >> 3, data[at : at + size]
        at += size


def _message(value: int | bytes, most: int = MAX_FIELDS) -> dict[int, int | bytes]:
    """The last value of every field of a nested message, of its first `most`; unset fields are
    absent."""
    return dict(islice(_fields(_bytes(value)), most))


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _int(fields: dict[int, int | bytes], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    return value - (1 << 64) if value >= 1 << 63 else value


def _piece(value: int | bytes) -> Piece:
    fields = _message(value, MAX_PIECE_FIELDS)
    score = _bytes(fields.get(2, b"\0\0\0\0"))
    kind = PieceKind(_int(fields, 3, PieceKind.NORMAL))
    return Piece(_bytes(fields.get(1, b"")).decode(), struct.unpack("<f", score)[0], kind)


def parse_sentencepiece(data: bytes) -> SentencePieceModel:
    """Read the protobuf. ValueError or IndexError when it is not one."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    found = list(islice(_fields(data), MAX_PIECES))
    if len(found) == MAX_PIECES:
        raise ValueError(f"more than {MAX_PIECES} pieces")
    for number, value in found:
        if number == 1:
            pieces.append(_piece(value))
        elif number == 2:
            trainer = _message(value)
        elif number == 3:
            normalizer = _message(value)
    if not pieces:
        raise ValueError("no pieces")
    if _int(trainer, 24, 0) or not _int(normalizer, 5, 1):
        raise ValueError("whitespace as suffix, or not escaped, which is not supported")
    return SentencePieceModel(
        pieces=tuple(pieces),
        algorithm=Algorithm(_int(trainer, 3, Algorithm.UNIGRAM)),
        byte_fallback=bool(_int(trainer, 35, 0)),
        unk_id=_int(trainer, 40, 0),
        bos_id=_int(trainer, 41, 1),
        eos_id=_int(trainer, 42, 2),
        pad_id=_int(trainer, 43, -1),
        charsmap=_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(_int(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_int(normalizer, 4, 1)),
    )


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The model in a `tokenizer.model` file. ConfigError names the file and the reason."""
    data = read_bytes(path, MAX_MODEL_BYTES)
    try:
        return parse_sentencepiece(data)
    except IndexError:
        refuse(path, "is no SentencePiece model (cut off)")
    except (ValueError, struct.error) as error:
        refuse(path, f"is no SentencePiece model ({error})")


def build_sentencepiece(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """A `tokenizers` object that gives the same ids and texts. ConfigError for word models, and for
    those that would take too much to build or to use."""
    _check_sizes(model)
    backend = tokenizers.Tokenizer(_model(model))
    steps = _normalizers(model)
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    ends = [decoders.Strip(content=" ", left=1, right=0)] if model.add_dummy_prefix else []
    fallback = [decoders.ByteFallback()] if model.byte_fallback else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), *fallback, decoders.Fuse(), *ends]
    )
    backend.add_tokens([t for piece in model.pieces if (t := _added(piece)) is not None])
    return backend


def _check_sizes(model: SentencePieceModel) -> None:
    sizes = [len(piece.text) for piece in model.pieces]
    if len(sizes) > MAX_TOKENS or max(sizes) > MAX_TOKEN_CHARS or sum(sizes) > MAX_CHARS:
        raise ConfigError(
            f"the vocabulary has {len(sizes)} pieces of up to {max(sizes)} and together "
            f"{sum(sizes)} characters; at most {MAX_TOKENS}, {MAX_TOKEN_CHARS} and {MAX_CHARS} are"
            " read: make the tokenizer smaller"
        )
    if sum(_added(piece) is not None for piece in model.pieces) > MAX_ADDED:
        raise ConfigError(f"the vocabulary has more than {MAX_ADDED} special pieces")
    if not 0 <= model.unk_id < len(sizes):
        raise ConfigError(f"unk_id is {model.unk_id}; the vocabulary has {len(sizes)} pieces")
    if model.charsmap:
        try:
            growth = check_charsmap(model.charsmap)
        except ValueError as error:
            raise ConfigError(f"the normalizer {error}") from None
        if growth > MAX_GROWTH:
            raise ConfigError(
                f"the normalizer's charsmap makes {growth} bytes of a character; at most "
                f"{MAX_GROWTH} are read"
            )


def _added(piece: Piece) -> tokenizers.AddedToken | None:
    special = piece.kind in (PieceKind.CONTROL, PieceKind.UNKNOWN)
    # A user's piece with a space in it is found by its merges, after spaces have become marks.
    by_user = piece.kind is PieceKind.USER_DEFINED and SPACE_MARK not in piece.text
    if not piece.text or not (special or by_user):
        return None
    return tokenizers.AddedToken(piece.text, normalized=False, special=special)


def _normalizers(model: SentencePieceModel) -> list[Any]:
    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(tokenizers.Regex(r" {2,}"), " "))
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    return [*steps, normalizers.Replace(" ", SPACE_MARK)]


def _model(model: SentencePieceModel) -> Any:
    if model.algorithm is Algorithm.WORD:
        raise ConfigError("SentencePiece models of type WORD are not supported")
    if model.algorithm is Algorithm.UNIGRAM:
        return models.Unigram(
            [(piece.text, piece.score) for piece in model.pieces],
            unk_id=model.unk_id,
            byte_fallback=model.byte_fallback,
        )
    vocab = {piece.text: i for i, piece in enumerate(model.pieces)}
    if len(vocab) != len(model.pieces):
        raise ConfigError("the SentencePiece vocabulary holds a piece twice")
    return models.BPE(
        vocab=vocab,
        merges=_merges(model.pieces) if model.algorithm is Algorithm.BPE else [],
        unk_token=model.pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=model.byte_fallback,
    )


def _merges(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best-scored piece first.

    SentencePiece keeps no list of merges: it joins the neighbours whose joint piece scores best.
    """
    mergeable = (PieceKind.NORMAL, PieceKind.USER_DEFINED, PieceKind.UNUSED)
    ids = {piece.text: i for i, piece in enumerate(pieces) if piece.kind in mergeable}
    ways: list[tuple[float, int, int, int]] = []
    for text, i in ids.items():
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                ways.append((-pieces[i].score, i, left, right))
    return [(pieces[left].text, pieces[right].text) for _, _, left, right in sorted(ways)]
