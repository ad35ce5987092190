"""Is a tokenizer.json so small in every part that to load and to use it stays cheap?

The library that reads it trusts the file: a vocabulary of 10^7 tokens takes gigabytes, sixty
replacements of one letter by two turn a word into 10^18 letters, and a damaged table ends the
process. Sizes of real files are beside the limits.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from ridgeline.loader.folder import GET_AGAIN, parse_object, refuse

MAX_BYTES = 64 << 20  # Gemma 3: 33 MB
MAX_VALUES = 5 << 19  # Gemma 3: 1.9 million
MAX_KEYS = 1 << 20
MAX_TOKENS = 1 << 19  # Gemma 3: 262,144
MAX_MERGES = 1 << 20  # Gemma 3: 514,906
MAX_ID = 1 << 24
MAX_ADDED = 1 << 15  # Gemma 3: 6,242
MAX_ADDED_CHARS = 1 << 19  # of all added tokens
MAX_TOKEN_CHARS = 512
MAX_PARTS = 1024  # values in a section; DeepSeek-V3: 40
MAX_PATTERNS = 32
MAX_TEXT = 1 << 13  # a pattern of o200k has 300 characters
MAX_GROWTH = 256  # SentencePiece's own table: 33
MAX_CHARSMAP = 4 << 20  # SentencePiece's own: 300 kB
SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
CHARSMAP = "precompiled_charsmap"


def check_tokenizer_json(data: bytes, path: Path) -> None:
    """ConfigError names the part of the file that is too large, and the limit."""
    if (keys := data.count(b":")) > MAX_KEYS:
        refuse_many(path, "keys", keys, MAX_KEYS)
    found = parse_object(data, path, most=MAX_VALUES)
    model = found.get("model")
    if isinstance(model, Mapping):
        _check_model(model, path)
    check_added(path, "added_tokens", _contents(found.get("added_tokens")))
    for name in SECTIONS:
        _check_section(found.get(name), name, path)


def refuse_many(path: Path, what: str, number: int, most: int) -> NoReturn:
    refuse(path, f"has {number} {what}; at most {most} are read: {GET_AGAIN}")


def check_added(path: Path, key: str, contents: list[str]) -> None:
    """Tokens that are looked for in every text take far more to load than others."""
    if len(contents) > MAX_ADDED:
        refuse_many(path, f"tokens in {key}", len(contents), MAX_ADDED)
    if (longest := max(map(len, contents), default=0)) > MAX_TOKEN_CHARS:
        refuse_many(path, f"characters in one token of {key}", longest, MAX_TOKEN_CHARS)
    if (total := sum(map(len, contents))) > MAX_ADDED_CHARS:
        refuse_many(path, f"characters in {key}", total, MAX_ADDED_CHARS)


def check_charsmap(data: bytes) -> int:
    """How many bytes one character may become by the table of a SentencePiece normalizer: a trie
    behind its length, then texts that end in 0. ValueError if it is none, or too large."""
    size = int.from_bytes(data[:4], "little")
    if len(data) > MAX_CHARSMAP or len(data) < 4 or size % 4 or not 0 < size <= len(data) - 4:
        raise ValueError(f"holds a {CHARSMAP} that is damaged or above {MAX_CHARSMAP} bytes")
    texts = data[4 + size :]
    texts.decode()  # UnicodeDecodeError is a ValueError
    return max(1, *map(len, texts.split(b"\0")))


def _check_model(model: Mapping[str, object], path: Path) -> None:
    vocab, merges = model.get("vocab"), model.get("merges")
    if isinstance(vocab, (dict, list)):
        if not vocab:
            refuse(path, "has no tokens in model.vocab; the tokenizer is damaged")
        if len(vocab) > MAX_TOKENS:
            refuse_many(path, "tokens in model.vocab", len(vocab), MAX_TOKENS)
    if isinstance(vocab, dict):
        largest = max((i for i in vocab.values() if isinstance(i, int)), default=0)
        if largest > MAX_ID:
            refuse(path, f"has a token in model.vocab whose id is above {MAX_ID}: {GET_AGAIN}")
    if isinstance(merges, list) and len(merges) > MAX_MERGES:
        refuse_many(path, "merges", len(merges), MAX_MERGES)


def _contents(added: object) -> list[str]:
    listed = added if isinstance(added, list) else []
    found = [one.get("content") for one in listed if isinstance(one, Mapping)]
    return [one for one in found if isinstance(one, str)]


def _check_section(section: object, name: str, path: Path) -> None:
    patterns, growth = 0, 1
    for number, part in enumerate(_parts(section)):
        if number == MAX_PARTS:
            refuse(path, f"{name} has more than {MAX_PARTS} parts; simplify the tokenizer")
        if isinstance(part, str) and len(part) > MAX_TEXT:
            refuse(
                path, f"{name} has a text of {len(part)} characters; at most {MAX_TEXT} are read"
            )
        if isinstance(part, Mapping):
            patterns += "pattern" in part
            growth *= _growth(part, name, path)
        if patterns > MAX_PATTERNS:
            refuse(path, f"{name} has more than {MAX_PATTERNS} patterns; join some of them")
        if growth > MAX_GROWTH:
            refuse(
                path,
                f"{name} makes texts up to {growth} times as long; at most {MAX_GROWTH} times is"
                " allowed: shorten what it replaces or puts in front",
            )


def _parts(value: object) -> Iterator[object]:
    """All values inside, but for the table of a charsmap."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, Mapping):
            waiting += [one for key, one in value.items() if key != CHARSMAP]
        elif isinstance(value, list):
            waiting += value


def _growth(part: Mapping[str, object], name: str, path: Path) -> int:
    """By what this step may multiply the length of a text, from above."""
    pattern, content = part.get("pattern"), part.get("content")
    found = 1
    if pattern is not None and isinstance(content, str):
        literal = pattern.get("String") if isinstance(pattern, Mapping) else pattern
        size = len(literal) if isinstance(literal, str) else 0
        found = max(1, -(-len(content) // size)) if size else 1 + len(content)
    if isinstance(prepended := part.get("prepend"), str):
        found = 1 + len(prepended)
    if isinstance(table := part.get(CHARSMAP), str):
        try:
            found = check_charsmap(binascii.a2b_base64(table, strict_mode=True))
        except ValueError as error:
            refuse(path, f"{name} {error}")
    return found
