"""Does any damaged file of a model get past its reader with another end than a model or a refusal?

A case is the content of one file: a good one with some of its values, or of its bytes, replaced.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.architectures import FAMILIES, expected_tensors, read_spec
from ridgeline.architectures.catalogue import catalogue
from ridgeline.architectures.scheme_config import checkpoint_tensors
from ridgeline.errors import RidgelineError
from ridgeline.generation import generation_defaults
from ridgeline.loader.folder import parse_object
from ridgeline.loader.gguf import read_gguf
from ridgeline.loader.gguf_model import read_gguf_model
from ridgeline.loader.header import read_header
from ridgeline.loader.shards import INDEX_FILE, find_tensors
from ridgeline.text.gguf_vocab import find_gguf_tokenizer
from ridgeline.text.tokenizer import load_tokenizer
from tests.loader.gguf_write import metadata_of
from tests.loader.write import gguf as gguf_bytes
from tests.loader.write import write_raw
from tests.tiny_model import tiny_config, write_tokenizer
from tools.fuzz import Target

MAX_CPU_S, MAX_GROWTH = 1.0, 200 << 20
MAX_MESSAGE = 2000
ATOMS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 255, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 32,
    1 << 53, (1 << 63) - 1, 1 << 64, 10**30, 10**400, 10**4000, 0.0, -0.0, 0.5, 1e-300, 1e308,
    float("nan"), float("inf"), "", "a", "llama", "re:.*", "re:(a+)+$", "[", "\0", "\ud800",
    "\u2581", "a" * 5000, [], [1], [[]], ["a"], [1, 2], [-1], {}, {"a": 1}, {"": None},
)  # fmt: skip
QUANTIZED: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
     "checkpoint_format": "gptq", "dynamic": {"-:.*down.*": {}, "+:.*up.*": {"bits": 8}}},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
     "modules_to_not_convert": ["lm_head"]},
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
     "activation_scheme": "dynamic", "ignored_layers": ["model.layers.0.mlp.gate"]},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
     "llm_int8_skip_modules": ["lm_head"]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
     "config_groups": {"g": {"targets": ["Linear", "re:.*up_proj"], "weights": {
         "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}}},
)  # fmt: skip
GENERATION = {
    "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20,
    "min_p": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
STEPS: tuple[dict[str, Any], ...] = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"},
    {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
    {"type": "Prepend", "prepend": "\u2581"},
    {"type": "NFKC"},
    {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAAYWJjAA=="},
    {"type": "Split", "pattern": {"Regex": "\\p{L}+"}, "behavior": "Isolated", "invert": False},
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)


def mutate(rng: random.Random, value: Any) -> Any:
    """A copy with some values replaced, left out, or put into another's place."""
    value = _copy(value)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        places = list(_places(value))
        if not places:
            return _copy(rng.choice(ATOMS))
        holder, key = rng.choice(places)
        kind = rng.random()
        if kind < 0.1:
            del holder[key]
        elif kind < 0.25:
            other, at = rng.choice(places)
            holder[key] = _copy(other[at])
        elif kind < 0.35 and isinstance(holder[key], list):
            holder[key] = _copy(holder[key] * rng.choice((2, 100)))
        else:
            holder[key] = _copy(rng.choice(ATOMS))
    return value


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], (dict, list))]
    return found


def garble(rng: random.Random, data: bytes) -> bytes:
    """Often the same, else with bytes flipped, cut out, repeated or cut off."""
    found = bytearray(data)
    for _ in range(rng.choice((0, 0, 1, 3)) if found else 0):
        at = rng.randrange(len(found) + 1)
        size = rng.choice((1, 2, 8, 64))
        kind = rng.randrange(5)
        if kind == 0:
            found[at : at + size] = rng.randbytes(size)
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = found[at : at + size] * rng.choice((1, 50))
        elif kind == 3:
            found[at : at + 8] = rng.choice((0, 1, 255, 1 << 31, 1 << 62)).to_bytes(8, "little")
        else:
            del found[at:]
    return bytes(found)


def _text(rng: random.Random, value: Any) -> bytes:
    return garble(rng, json.dumps(mutate(rng, value)).encode())


def _target(make: Callable[[random.Random], bytes], read: Callable[[bytes], object]) -> Target:
    """`read` may end in an answer or in one of our own errors, with a message of one line."""

    def check(case: bytes) -> None:
        peak, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            read(case)
        except RidgelineError as refusal:
            message = str(refusal)
            if len(message) > MAX_MESSAGE or "\n" in message:
                raise AssertionError(f"no short line: {message[:200]!r}") from refusal
        except BaseException as fault:
            if type(fault).__name__ == "PanicException":
                raise AssertionError(f"a panic: {fault}") from fault
            raise
        cpu = time.process_time() - cpu
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
        if cpu > MAX_CPU_S or growth > MAX_GROWTH:
            raise AssertionError(f"took {cpu:.1f} s and {growth >> 20} MiB")

    return Target(make, check)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Goes when the process does."""
    return tempfile.TemporaryDirectory()


def _path(name: str, case: bytes) -> Path:
    path = Path(_folder().name) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(case)
    return path


def _make_safetensors(rng: random.Random) -> bytes:
    sizes, header, at = {"F32": 4, "BF16": 2, "U8": 1}, {}, 0
    for number in range(rng.randrange(5)):
        dtype, shape = rng.choice(list(sizes)), [rng.randrange(4) for _ in range(rng.randrange(4))]
        end = at + sizes[dtype] * functools.reduce(lambda a, b: a * b, shape, 1)
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    whole = {"__metadata__": {"format": "pt"}, **header} if rng.random() < 0.5 else header
    text = json.dumps(mutate(rng, whole)).encode()
    return garble(rng, len(text).to_bytes(8, "little") + text + bytes(at))


def _make_gguf(rng: random.Random) -> bytes:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
    vocabulary = {
        "tokenizer.ggml.model": (8, rng.choice(("llama", "gpt2", "none"))),
        "tokenizer.ggml.tokens": (9, (8, tokens)),
        "tokenizer.ggml.scores": (9, (6, [0.0] * 6)),
        "tokenizer.ggml.token_type": (9, (5, [2, 3, 3, 1, 1, 1])),
        "tokenizer.ggml.merges": (9, (8, ["a b"])),
        "general.alignment": (4, rng.choice((0, 8, 32, 7, 1 << 31))),
    }
    whole = {**metadata_of(tiny_config()), **vocabulary}
    for key in rng.sample(list(whole), rng.randrange(4)):
        del whole[key]
    for key in rng.sample(list(whole), rng.randrange(3)):
        whole[key] = rng.choice(
            ((4, 0), (4, (1 << 32) - 1), (6, float("nan")), (8, "x"), (7, True))
        )
    return garble(rng, gguf_bytes(whole) + bytes(rng.randrange(64)))


def _read_gguf(case: bytes) -> None:
    path = _path("m.gguf", case)
    readers: tuple[Callable[[Path], object], ...] = (read_gguf, find_gguf_tokenizer)
    for reader in readers:
        try:
            reader(path)
        except RidgelineError:
            continue
    read_gguf_model(path)


def _make_index(rng: random.Random) -> bytes:
    names = [f"{name}.safetensors" for name in "abc"]
    return _text(rng, {"metadata": {}, "weight_map": {f"t{i}": names[i % 3] for i in range(6)}})


def _read_index(case: bytes) -> object:
    path = _path(f"index/{INDEX_FILE}", case)
    logging.getLogger("ridgeline").setLevel(logging.ERROR)  # unlisted tensors are only warned of
    for number, name in enumerate("abc"):
        if not (shard := path.parent / f"{name}.safetensors").exists():
            one = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
            two = {**one, "data_offsets": [1, 2]}
            write_raw(shard, {f"t{number}": one, f"t{number + 3}": two}, b"12")
    return find_tensors(path.parent)


@functools.cache
def _configs() -> list[dict[str, Any]]:
    served = [tiny_config(model_type=family) for family in FAMILIES]
    known = [dict(entry.config) for entry in catalogue().values()]
    return served * (len(known) // len(served)) + known


def _make_config(rng: random.Random) -> bytes:
    return _text(rng, rng.choice(_configs()))


def _read_config(case: bytes) -> object:
    return expected_tensors(read_spec(parse_object(case, Path("config.json"))))


def _make_stored(rng: random.Random) -> bytes:
    return _text(rng, rng.choice(QUANTIZED))


def _read_stored(case: bytes) -> object:
    section = parse_object(case, Path("config.json"))
    config = tiny_config(hidden_size=128, intermediate_size=128, quantization_config=section)
    return checkpoint_tensors(read_spec(config))


def _make_generation(rng: random.Random) -> bytes:
    return _text(rng, GENERATION)


def _read_generation(case: bytes) -> object:
    return generation_defaults(parse_object(case, Path("generation_config.json")), ())


@functools.cache
def _tokenizer_json() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        found: dict[str, Any] = json.loads((Path(folder) / "tokenizer.json").read_text())
    vocab = found["model"]["vocab"]
    found["model"]["vocab"] = dict(list(vocab.items())[:40])
    return found


def _make_tokenizer(rng: random.Random) -> bytes:
    found = dict(_tokenizer_json())
    for section, key in (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("decoder", "decoders"),
    ):
        steps = rng.choices(STEPS, k=rng.randrange(3))
        if rng.random() < 0.5:
            found[section] = {"type": "Sequence", key: steps} if len(steps) != 1 else steps[0]
    kind = rng.choice(("BPE", "BPE", "Unigram", "WordPiece", "WordLevel"))
    if kind == "Unigram":
        found["model"] = {"type": kind, "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
    elif kind != "BPE":
        found["model"] = {"type": kind, "vocab": {"<unk>": 0, "a": 1}, "unk_token": "<unk>"}
    return _text(rng, found)


def _read_tokenizer(case: bytes) -> object:
    return load_tokenizer(_path("text/tokenizer.json", case).parent)


safetensors = _target(_make_safetensors, lambda case: read_header(_path("m.safetensors", case)))
gguf = _target(_make_gguf, _read_gguf)
index = _target(_make_index, _read_index)
config = _target(_make_config, _read_config)
stored = _target(_make_stored, _read_stored)
generation = _target(_make_generation, _read_generation)
tokenizer = _target(_make_tokenizer, _read_tokenizer)
