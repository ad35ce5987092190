"""Which tokenizer does the metadata of a GGUF file describe?

Keys and token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md . The rules are
those of the models' own tokenizer.json files, which a test compares with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{ENDS}"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"?\p{L}", r"?[\p{L}\p{M}]").replace(r"s\p{L}", r"s\p{L}\p{M}")
SEED_SPLIT = QWEN2_SPLIT.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+")
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# A word ends where small letters are followed by a capital.
TEKKEN_SPLIT = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{ENDS}"
)
GPT4O_SPLIT = (
    TEKKEN_SPLIT.replace(rf"{_LOWER}+|", rf"{_LOWER}+{CONTRACTION}?|")
    .replace(rf"{_LOWER}*|", rf"{_LOWER}*{CONTRACTION}?|")
    .replace(r"|\p{N}|", r"|\p{N}{1,3}|")
)
KIMI_SPLIT = r"\p{Han}+|" + GPT4O_SPLIT.replace("M}]", r"M}&&[^\p{Han}]]").replace("n/]", "n]")
DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + ENDS,
)
# Letters that are large or small, but those of scripts that DeepSeek's list leaves out.
DEEPSEEK_LETTER = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{ab68}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df2a}]]"
)
DEEPSEEK_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _digits() -> Any:
    return pre_tokenizers.Digits(individual_digits=True)


def _numbers() -> Any:
    return pre_tokenizers.Digits(individual_digits=False)


def _punctuation() -> Any:
    return pre_tokenizers.Punctuation("contiguous")


def _words() -> Any:
    """The split of GPT-2, with the step from characters to bytes."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """`steps` cut a text into words, each the words of the one before: a pattern isolates what it
    finds. `takes_words`: a word that is in the vocabulary is taken as it is, without merges.
    `normalized`: texts are brought into Unicode's NFC form first. `begins`: every text begins with
    the beginning token, unless the file says otherwise."""

    steps: tuple[str | Callable[[], Any], ...]
    takes_words: bool = False
    normalized: bool = False
    begins: bool = False


GPT2 = Rule((_words,))
LLAMA3 = Rule((LLAMA3_SPLIT,), takes_words=True, begins=True)
GPT4O = Rule((GPT4O_SPLIT,), takes_words=True)
QWEN2 = Rule((QWEN2_SPLIT,), normalized=True)
GLM4 = Rule((LLAMA3_SPLIT,), takes_words=True)
DIGITS = Rule((_digits, _words))
DEEPSEEK3 = Rule(DEEPSEEK3_SPLITS)

# By the value of tokenizer.ggml.pre.
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais", "mellum", "gigachat", "a.x-4.0"), GPT2),
    **dict.fromkeys(("exaone4", "trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("mpt", "olmo"), Rule((_words,), normalized=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Rule((LLAMA3_SPLIT,))),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), GLM4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2", "stablelm2"), QWEN2),
    **dict.fromkeys(("megrez", "kormo", "solar-open", "grok-2"), Rule((QWEN2_SPLIT,))),
    "hunyuan": Rule((QWEN2_SPLIT,), takes_words=True, normalized=True),
    "qwen35": Rule((QWEN35_SPLIT,), normalized=True),
    "seed-coder": Rule((SEED_SPLIT,)),
    "minicpm5": Rule((r"\p{N}{1,3}", LLAMA3_SPLIT), takes_words=True),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    **dict.fromkeys(("kanana2", "talkie", "minimax-m2"), Rule((GPT4O_SPLIT,))),
    "tekken": Rule((TEKKEN_SPLIT,), takes_words=True, begins=True),
    "kimi-k2": Rule((KIMI_SPLIT,), takes_words=True),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "minerva-7b"), DIGITS),
    **dict.fromkeys(("exaone", "mellum2"), DIGITS),
    "command-r": Rule((_digits, _words), normalized=True),
    "falcon": Rule((_punctuation, _words, _numbers, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), DEEPSEEK3),
    "deepseek-llm": Rule(
        (
            r"[\r\n]",
            rf"\s?{DEEPSEEK_LETTER}+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            DEEPSEEK_WIDE,
            _digits,
        )
    ),
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_WIDE, _digits)),
}
NO_VOCABULARY = (None, "none", "no_vocab")

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
        rule = _rule(path, vocabulary)
        backend = _byte_level(path, vocabulary, rule)
        return Tokenizer(backend, vocabulary.settings(add_bos=rule.begins))
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


def _rule(path: Path, vocabulary: _Vocabulary) -> Rule:
    name = vocabulary.get("pre", "default")
    if name not in RULES:
        refuse(path, f"cuts texts by rule {str(name)[:40]!r}; known rules are {', '.join(RULES)}")
    return RULES[name]


def _byte_level(path: Path, vocabulary: _Vocabulary, rule: Rule) -> tokenizers.Tokenizer:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        refuse(path, "tokenizer.ggml.tokens holds a token twice")
    if len(ids) > MAX_TOKENS:
        refuse_many(path, "tokens in tokenizer.ggml.tokens", len(ids), MAX_TOKENS)
    merges = [_pair(path, merge, ids) for merge in vocabulary.values("merges", str)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=rule.takes_words)
    )
    if rule.normalized:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(rule)
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


def _pre_tokenizer(rule: Rule) -> Any:
    steps = [
        pre_tokenizers.Split(tokenizers.Regex(step), "isolated")
        if isinstance(step, str)
        else step()
        for step in rule.steps
    ]
    if _words not in rule.steps:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
