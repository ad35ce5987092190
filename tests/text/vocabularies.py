"""Unpacks the shared vocabularies into folders like those of models, and their expectations."""

from __future__ import annotations

import atexit
import gzip
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ridgeline.text.gguf_vocab import load_gguf_tokenizer
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import find_shared

SEPARATOR = "\n__ggml_vocab_test__\n"

# Set of expectations, where its vocabulary is and in which forms it can be read.
WAYS = {
    "gpt2": ("tokenizer.json", "ggml-vocab-gpt-2.gguf"),
    "qwen2.5": ("tokenizer.json",),
    "llama2-32000": ("tokenizer.json", "tokenizer.model", "ggml-vocab-llama-spm.gguf"),
    "deepseek-coder": ("ggml-vocab-deepseek-coder.gguf",),
    "phi-3": ("ggml-vocab-phi-3.gguf",),
    "minimind-6400": ("tokenizer.json",),
    "mistral": ("tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"),
}
WITHOUT_VOCABULARY = {
    "expectations-only"
}  # Llama 3 and Command-R; their vocabularies are not there
TEMPLATES_ONLY = {"chat-templates"}
ALL_WAYS = [(name, way) for name, ways in WAYS.items() for way in ways]


def vocabulary_folder() -> Path:
    shared = find_shared()
    assert shared is not None
    return shared / "tokenizers"


def _unpacked(path: Path) -> bytes:
    packed = path.with_name(path.name + ".gz")
    return gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()


@cache
def folder_for(name: str, way: str) -> Path:
    """A folder with this one form of the vocabulary and its tokenizer_config.json."""
    folder = Path(mkdtemp(prefix="ridgeline-vocabulary-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source = vocabulary_folder() / name
    target = "tokenizer.model" if ".model" in way else way
    (folder / target).write_bytes(_unpacked(source / way))
    if (source / "tokenizer_config.json").exists():
        shutil.copy(source / "tokenizer_config.json", folder)
    return folder


@cache
def vocabulary(name: str, way: str) -> Tokenizer:
    folder = folder_for(name, way)
    if way.endswith(".gguf"):
        return load_gguf_tokenizer(folder / way)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@cache
def model_tokenizer(name: str) -> Tokenizer:
    tokenizer = load_tokenizer(vocabulary_folder().parent / "models" / name)
    assert tokenizer is not None
    return tokenizer


def expectations(path: Path) -> list[tuple[str, list[int]]]:
    """(text, ids) of a pair of llama.cpp's .inp and .out files."""
    texts = path.with_suffix(".inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_suffix(".out").read_text().split("\n")
    assert texts.pop() == lines.pop() == ""
    return [
        (text, [int(token) for token in line.split()])
        for text, line in zip(texts, lines, strict=True)
    ]


def conformance(name: str) -> list[dict[str, Any]]:
    path = vocabulary_folder() / name / "conformance.json"
    return list(json.loads(path.read_text()))
