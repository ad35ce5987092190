"""A model folder with a byte-level tokenizer and a chat template, and no weights."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character of each byte in a byte-level vocabulary, by byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in names)
    names |= {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    assert set(names.values()) == set(alphabet)
    return [names[byte] for byte in range(256)]


def write_model_folder(folder: Path, chat: bool = True) -> Path:
    """Ids 0..255 are bytes, then the special tokens."""
    vocabulary = {piece: i for i, piece in enumerate(byte_characters())}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "add_bos_token": True}
    if chat:
        config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_ids(text: str) -> list[int]:
    """The prompt ids of a text, with the beginning token."""
    return [256, *text.encode()]
