"""Streamed pieces join to the one-shot text, for any ids, and never show half a character."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from ridgeline.text.pieces import Pieces, byte_alphabet, read_rule
from ridgeline.text.tokenizer import Tokenizer, TokenizerSettings
from tests.conftest import find_shared
from tests.text.vocabularies import model_tokenizer, vocabulary

needs_shared = pytest.mark.skipif(find_shared() is None, reason="needs the shared vocabularies")


def tokenizer_of(name: str) -> Tokenizer:
    if name in ("stories260K", "babyllama-char105"):
        return model_tokenizer(name)
    way = "ggml-vocab-deepseek-coder.gguf" if name == "deepseek-coder" else "tokenizer.json"
    return vocabulary(name, way)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


def in_parts(rng: random.Random, tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> str:
    """Some at a time, none now and then."""
    detokenizer, text, rest = tokenizer.detokenizer(skip_special_tokens=skip), "", list(ids)
    while rest:
        num = rng.randint(0, 5)
        text += detokenizer.feed_all(rest[:num])
        del rest[:num]
    return text + detokenizer.flush()


def expected(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool, byte_level: bool) -> str:
    """The text by another road: all bytes at once."""
    shown = [i for i in ids if not (skip and tokenizer.is_special(i))]
    raw = b"".join(map(tokenizer.token_bytes, shown))
    if byte_level:
        return raw.decode("utf-8", errors="replace")
    text = raw.decode("utf-8", errors="surrogateescape")  # one lone surrogate for each bad byte
    marked = "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)
    return marked.removeprefix(" ")


@cache
def sources(name: str) -> tuple[Sequence[int], ...]:
    """All ids, those of lone bytes, and those of bytes that cannot stand alone."""
    tokenizer = tokenizer_of(name)
    lone = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    high = [i for i in lone if tokenizer.token_bytes(i)[0] >= 0x80]
    return range(tokenizer.vocab_size), lone, high


def random_ids(rng: random.Random, name: str) -> list[int]:
    """Ids of any kind, many of them lone bytes: mostly no valid UTF-8."""
    return [rng.choice(rng.choice(sources(name))) for _ in range(rng.randint(0, 24))]


BYTE_LEVEL = ("gpt2", "qwen2.5", "minimind-6400", "deepseek-coder")
SENTENCEPIECE = ("stories260K", "llama2-32000")


def check_random_ids(name: str, cases: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, tokenizer = random.Random(seed), tokenizer_of(name)
    broken = 0
    for _ in range(cases):
        ids, skip = random_ids(rng, name), rng.random() < 0.5
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(streamed(tokenizer, ids, skip=skip)) == whole
        assert in_parts(rng, tokenizer, ids, skip=skip) == whole, ids
        assert whole == expected(tokenizer, ids, skip=skip, byte_level=name in BYTE_LEVEL), ids
        broken += "\ufffd" in whole
    assert broken > cases // 10


@needs_shared
@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCEPIECE])
def test_random_ids(name: str) -> None:
    check_random_ids(name, 100)


@pytest.mark.slow
@needs_shared
@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCEPIECE])
def test_random_ids_in_number(name: str) -> None:
    check_random_ids(name, 10_000)


@needs_shared
@pytest.mark.parametrize("name", ["gpt2", "minimind-6400"])
def test_invalid_bytes_are_shown_as_the_tokenizers_package_shows_them(name: str) -> None:
    tokenizer = tokenizer_of(name)
    rng = random.Random(1)
    for _ in range(200):
        ids = random_ids(rng, name)
        theirs = tokenizer._backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == theirs


def random_text(rng: random.Random) -> str:
    ranges = ((0x20, 0x7F), (0xA0, 0x250), (0x400, 0x500), (0x4E00, 0x9000), (0x1F300, 0x1F650))
    chars = []
    for _ in range(rng.randint(1, 30)):
        low, high = rng.choice(ranges)
        chars.append(chr(rng.randrange(low, high)))
    return "".join(chars)


@needs_shared
@pytest.mark.parametrize("name", ["gpt2", "stories260K", "llama2-32000"])
def test_a_valid_text_never_shows_a_replacement_on_the_way(name: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng, tokenizer = random.Random(seed), tokenizer_of(name)
    for _ in range(60):
        text = random_text(rng)
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = streamed(tokenizer, ids, skip=True)
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""  # nothing is held back longer than it must be


@needs_shared
def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = tokenizer_of("stories260K")
    smile = [tokenizer.piece_to_id(f"<0x{byte:02X}>") for byte in "\U0001f642".encode()]
    detokenizer = tokenizer.detokenizer(prompt_token_ids=[403])
    assert [detokenizer.feed(i or 0) for i in smile] == ["", "", "", "\U0001f642"]
    assert detokenizer.feed(smile[0] or 0) == ""
    assert detokenizer.feed(tokenizer.encode("a", add_special_tokens=False)[-1])[0] == "\ufffd"
    assert [detokenizer.feed(i or 0) for i in smile[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd\ufffd\ufffd"


@needs_shared
def test_text_continues_the_prompt() -> None:
    tokenizer = tokenizer_of("llama2-32000")
    prompt, rest = tokenizer.encode("Once upon"), tokenizer.encode("a time")[1:]
    alone = tokenizer.detokenizer()
    after = tokenizer.detokenizer(prompt_token_ids=prompt)
    assert "".join(map(alone.feed, rest)) == "a time"
    assert "".join(map(after.feed, rest)) == " a time"
    from_bos = tokenizer.detokenizer(prompt_token_ids=[1])
    assert "".join(map(from_bos.feed, rest)) == "a time"
    bos_shown = tokenizer.detokenizer(skip_special_tokens=False, prompt_token_ids=[1])
    assert "".join(map(bos_shown.feed, rest)) == " a time"


@needs_shared
@pytest.mark.parametrize("name", ["gpt2", "stories260K"])
def test_a_character_begun_in_the_prompt_is_completed(name: str) -> None:
    tokenizer = tokenizer_of(name)
    by_byte = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    ids = [by_byte[bytes([byte])] for byte in "\u4e2d".encode()]
    for cut in range(1, 3):
        detokenizer = tokenizer.detokenizer(prompt_token_ids=[*ids, *ids[:cut]])
        assert "".join(map(detokenizer.feed, ids[cut:])) == "\u4e2d"


@needs_shared
def test_special_tokens_are_shown_only_when_asked_for() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    ids = tokenizer.encode("a<|im_end|>b<tool_call>")
    assert tokenizer.decode(ids) == "ab<tool_call>"  # this one is added but not special
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<tool_call>"


def test_the_byte_alphabet_is_complete() -> None:
    assert sorted(byte_alphabet().values()) == list(range(256))
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())


# ---------------------------------------------------------------- other decoders


def words(decoder: Any, vocab: Sequence[str]) -> Tokenizer:
    table = {word: i for i, word in enumerate(vocab)}
    backend = tokenizers.Tokenizer(models.WordLevel(table, unk_token=vocab[0]))
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, TokenizerSettings({}))


METASPACE = ["<unk>", "\u2581Hello", "\u2581world", "!", "\u2581", "x\u2581y"]
WORDPIECE = ["[UNK]", "play", "##ing", "the", "##s", "game"]


@pytest.mark.parametrize(
    ("decoder", "vocab"),
    [
        (decoders.Metaspace(), METASPACE),
        (decoders.Metaspace(prepend_scheme="never"), METASPACE),
        (decoders.WordPiece(cleanup=False), WORDPIECE),
        (decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]), METASPACE),
        (decoders.Sequence([decoders.Replace("\u2581", " ")]), METASPACE),
        (
            decoders.Sequence(
                [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
            ),
            METASPACE,
        ),
        (None, WORDPIECE),
    ],
)
def test_other_decoders_give_the_package_s_own_text(decoder: object, vocab: list[str]) -> None:
    tokenizer = words(decoder, vocab)
    rng = random.Random(5)
    for _ in range(100):
        ids = [rng.randrange(len(vocab)) for _ in range(rng.randint(0, 8))]
        theirs = tokenizer._backend.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == theirs, ids
        assert in_parts(rng, tokenizer, ids, skip=True) == theirs, ids


def test_which_decoders_are_understood() -> None:
    strip = decoders.Strip(" ", 1, 0)
    both = [decoders.ByteFallback(), decoders.Fuse()]
    rule = read_rule(decoders.Sequence([decoders.Replace("\u2581", " "), *both, strip]))
    assert rule is not None
    assert (rule.strip, rule.byte_pieces, rule.byte_level) == (1, True, False)
    assert read_rule(None) is None
    assert read_rule(decoders.CTC()) is None
    assert read_rule(decoders.Sequence([strip, *both])) is None
    assert read_rule(decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 1, 0)])) is None
    pattern = decoders.Replace(tokenizers.Regex("a+"), " ")
    assert read_rule(decoders.Sequence([pattern, decoders.Fuse()])) is None


def test_unknown_ids_add_nothing() -> None:
    rule = read_rule(decoders.ByteLevel())
    assert rule is not None
    assert Pieces(rule, lambda token_id: None, frozenset()).bytes_of(3) == b""
