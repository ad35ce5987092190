"""GGUF vocabularies cut texts as the published tokenizer.json files of the same models do.

`published_rules.json` holds what these files say, rule by rule: a text alone is a Split whose
pieces are isolated.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import trainers

from ridgeline.text.gguf_vocab import load_gguf_tokenizer
from ridgeline.text.tokenizer import Tokenizer
from tests.loader.write import gguf

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_name("published_rules.json").read_text())
# Names of llama.cpp's for other models whose files say the same.
ALIKE = {
    **{"llama4": "gpt-4o", "chatglm-bpe": "glm4", "hunyuan-dense": "deepseek-v3", "mpt": "olmo"},
    **{"starcoder": "smollm", "refact": "smollm", "exaone": "smollm", "exaone4": "gpt-2"},
}
SPECIAL = "<|end|>"
_PARTS = """
don't|We'LL|you'Re |HelloWorld|camelCase|ÉCOLE|e\u0301te\u0301|über|ǅ|0|12|123456789|3.14|1,000,000
½|٣٤|Ⅷ|x²y³|¼¾|100%|你好世界|龥龦|こんにちは|カタカナ|한국어|ㄅㄆ|\uff0c。\uff01|\u2018\u2019“”|\u3000|々〇|😀|👩\u200d👧|🇩🇪|\u0301
हिन्दी|ไทย|العربية|עברית|ԱԲգդ|ქართული| |  |     |\t|\r|\u00a0|\u2003|!|?!...|->|==|$x^2$|`a~b`
<>+=|/*|//|'s|'|"|#include|_id
"""
PARTS = ("\n", "\r\n", "\n\n\n", " \n ", "//\n", *_PARTS.strip("\n").replace("\n", "|").split("|"))


@cache
def texts() -> tuple[str, ...]:
    rng = random.Random(36)
    mixed = ("".join(rng.choices(PARTS, k=rng.randrange(2, 12))) for _ in range(400))
    return (*PARTS, *mixed)


def pre_tokenizer(steps: list[Any]) -> dict[str, Any]:
    """As tokenizer.json has it. The split of GPT-2 is that of its byte-level step."""
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    found: list[dict[str, Any]] = []
    for step in steps:
        if isinstance(step, str):
            pattern = {"Regex": step}
            step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        found.append(bytes_of | {"use_regex": True} if step["type"] == "ByteLevel" else step)
    if all(step["type"] != "ByteLevel" for step in found):
        found.append(bytes_of | {"use_regex": False})
    return {"type": "Sequence", "pretokenizers": found}


@cache
def published(name: str) -> tokenizers.Tokenizer:
    """What its tokenizer.json says, with a small vocabulary that is learned here."""
    said = PUBLISHED[name]
    normalizer = said.get("normalizer")
    model: dict[str, Any] = {
        **{"type": "BPE", "vocab": {}, "merges": []},
        "ignore_merges": said.get("ignore_merges", False),
    }
    backend = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": []},
                "normalizer": None if normalizer is None else {"type": normalizer},
                "pre_tokenizer": pre_tokenizer(said["steps"]),
                **{"post_processor": None, "decoder": None, "model": model},
            }
        )
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[SPECIAL],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    return backend


def from_file(path: Path, name: str, backend: tokenizers.Tokenizer) -> Tokenizer:
    """The same vocabulary by way of a GGUF file."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) for pair in model["merges"]]
    keys: dict[str, tuple[int, object]] = {
        "model": (8, "gpt2"),
        "pre": (8, name),
        "tokens": (9, (8, tokens)),
        "token_type": (9, (5, [3 if token == SPECIAL else 1 for token in tokens])),
        "merges": (9, (8, merges)),
        "add_bos_token": (7, False),
    }
    path.write_bytes(gguf({f"tokenizer.ggml.{key}": value for key, value in keys.items()}))
    return load_gguf_tokenizer(path)


@pytest.mark.parametrize("name", [*PUBLISHED, *ALIKE])
def test_ids_are_those_of_the_published_rule(name: str, tmp_path: Path) -> None:
    theirs = published(ALIKE.get(name, name))
    ours = from_file(tmp_path / "v.gguf", name, theirs)
    assert ours.encode(f"a{SPECIAL}\n b") == theirs.encode(f"a{SPECIAL}\n b").ids
    for text in texts():
        assert ours.encode(text) == theirs.encode(text).ids, text
        if theirs.normalizer is None:
            assert ours.decode(ours.encode(text)) == text


def test_every_character_is_cut_alike(tmp_path: Path) -> None:
    """Classes that the table writes in a shorter way than the published file hold the same."""
    every = [
        chr(i) for i in range(0x20000) if not 0x4F00 <= i < 0x9F00 and not 0xD800 <= i < 0xE000
    ]
    for name in ("deepseek-llm", "kimi-k2"):
        theirs = published(name)
        ours = from_file(tmp_path / "v.gguf", name, theirs)
        for start in range(0, len(every), 64):
            text = " ".join(every[start : start + 64])
            assert ours.encode(text) == theirs.encode(text).ids, (name, start)
