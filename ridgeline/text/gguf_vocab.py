"""Which tokenizer does the metadata of a GGUF file describe?

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md . The split
patterns are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from ridgeline.errors import ConfigError
from ridgeline.loader.folder import refuse
from ridgeline.loader.gguf import read_gguf
from ridgeline.text.sentencepiece import (
    Algorithm,
    Piece,
    PieceKind,
    SentencePieceModel,
    build_sentencepiece,
)
from ridgeline.text.tokenizer import Tokenizer, TokenizerSettings
from ridgeline.text.tokenizer_file import MAX_TOKENS, check_added, refuse_many

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

# Value of tokenizer.ggml.pre: the patterns that cut a text into words, applied in this order.
# None is the split of GPT-2, which the byte-level step knows by itself.
SPLITS: Mapping[str, tuple[str, ...] | None] = {
    "gpt-2": None,
    "default": None,
    "qwen2": (QWEN2_SPLIT,),
    "llama-bpe": (LLAMA3_SPLIT,),
    "llama3": (LLAMA3_SPLIT,),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
}
# These take a word that is in the vocabulary as it is, and begin with <|begin_of_text|>; neither is
# in the file.
LLAMA3 = ("llama-bpe", "llama3")
NO_VOCABULARY = (None, "none", "no_vocab")
NORMALIZED = ("qwen2",)  # these bring texts into Unicode's NFC form first

# Kinds of tokens that are looked for in a text before it is cut into words.
IS_SPECIAL = {PieceKind.CONTROL: True, PieceKind.UNKNOWN: True, PieceKind.USER_DEFINED: False}

ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class _Vocabulary:
    """Typed access to the `tokenizer.ggml.*` keys of one file."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self.tokens: list[str] = self.values("tokens", str)
        self.kinds = [PieceKind(kind) for kind in self._kinds()]

    def _kinds(self) -> list[int]:
        kinds: list[int] = self.values("token_type", int, required=False)
        if not kinds:
            return [PieceKind.NORMAL] * len(self.tokens)
        if len(kinds) != len(self.tokens) or not set(kinds) <= set(PieceKind):
            refuse(self._path, "tokenizer.ggml.token_type does not fit its tokens")
        return kinds

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def values(self, key: str, kind: type, *, required: bool = True) -> list[Any]:
        found = self.get(key)
        if found is None and not required:
            return []
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            refuse(self._path, f"tokenizer.ggml.{key} is missing or no list of {kind.__name__}")
        return found

    def special_id(self, role: str) -> int:
        found = self.get(ROLES[role])
        inside = isinstance(found, int) and 0 <= found < len(self.tokens)
        return found if inside else -1

    def settings(self, *, add_bos: bool) -> TokenizerSettings:
        ids = {role: self.special_id(role) for role in ROLES}
        return TokenizerSettings(
            {role: self.tokens[i] for role, i in ids.items() if i >= 0},
            self.get("add_bos_token", add_bos) is True,
            self.get("add_eos_token", False) is True,
        )


def find_gguf_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file, None when it says that it has none. ConfigError for one that
    cannot be read."""
    metadata = read_gguf(path).metadata
    is_there = metadata.get("tokenizer.ggml.model") not in NO_VOCABULARY
    return _tokenizer(path, metadata) if is_there else None


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a GGUF file. ConfigError when it has none, or one of another kind."""
    return _tokenizer(path, read_gguf(path).metadata)


def _tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = _Vocabulary(path, metadata)
    kind = vocabulary.get("model")
    if kind == "llama":
        return Tokenizer(_sentencepiece(path, vocabulary), vocabulary.settings(add_bos=True))
    if kind == "gpt2":
        is_llama3 = vocabulary.get("pre") in LLAMA3
        return Tokenizer(_byte_level(path, vocabulary), vocabulary.settings(add_bos=is_llama3))
    refuse(path, f"holds a vocabulary of kind {str(kind)[:40]!r}; readable are llama and gpt2")


def _sentencepiece(path: Path, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    scores = vocabulary.values("scores", float)
    if len(scores) != len(vocabulary.tokens):
        refuse(path, "tokenizer.ggml.scores does not fit its tokens")
    pieces = zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
    model = SentencePieceModel(
        pieces=tuple(Piece(text, score, kind) for text, score, kind in pieces),
        algorithm=Algorithm.BPE,
        byte_fallback=PieceKind.BYTE in vocabulary.kinds,
        unk_id=max(0, vocabulary.special_id("unk_token")),
        add_dummy_prefix=vocabulary.get("add_space_prefix", True) is True,
        remove_extra_whitespaces=vocabulary.get("remove_extra_whitespaces", False) is True,
    )
    try:
        return build_sentencepiece(model)
    except ConfigError as error:  # it knows no file
        refuse(path, str(error))


def _byte_level(path: Path, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    split = vocabulary.get("pre", "default")
    if split not in SPLITS:
        known = ", ".join(SPLITS)
        refuse(path, f"cuts texts by rule {str(split)[:40]!r}; known rules are {known}")
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        refuse(path, "tokenizer.ggml.tokens holds a token twice")
    if len(ids) > MAX_TOKENS:
        refuse_many(path, "tokens in tokenizer.ggml.tokens", len(ids), MAX_TOKENS)
    merges = [_pair(path, merge, ids) for merge in vocabulary.values("merges", str)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=split in LLAMA3)
    )
    if split in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(SPLITS[split])
    backend.decoder = decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(token, normalized=False, special=IS_SPECIAL[kind])
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in IS_SPECIAL and token
    ]
    check_added(path, "tokenizer.ggml.tokens", [token.content for token in added])
    backend.add_tokens(added)
    return backend


def _pair(path: Path, merge: str, ids: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in ids or right not in ids or left + right not in ids:
        refuse(path, f"tokenizer.ggml.merges joins {merge[:80]!r}, which is not in the vocabulary")
    return left, right


def _pre_tokenizer(patterns: tuple[str, ...] | None) -> Any:
    if patterns is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    splits = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, byte_level])
