"""Which model folders try to hang, to exhaust or to fool a loader? Each case damages a good one.

`python -m tests.loader.hostile [PART ...]` loads those whose name holds a PART, in a child with
limits, and prints what became of them.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.loader.write import gguf, text, write_raw
from tests.tiny_model import make_tiny_model, tiny_config

Make = Callable[[Path], "Path | None"]  # damages a good folder; where the model then is
TIME_LIMIT_S, MEMORY_LIMIT = 20, 2 << 30
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    INDEX,
)
DEEP = 200_000
MAX_MESSAGE = 5_000  # characters
NOBODY = 65534


@dataclass(frozen=True, slots=True)
class Case:
    """`match` is a pattern that is in the message."""

    make: Make
    match: str

    def fits(self, message: str) -> bool:
        return re.search(self.match, message) is not None


def _config(**changes: Any) -> Make:
    def make(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return make


def _stored(**section: Any) -> Make:
    return _config(quantization_config=section)


def _file(name: str, content: bytes | Callable[[], bytes]) -> Make:
    def make(folder: Path) -> None:
        if name == INDEX:
            (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content() if callable(content) else content)

    return make


def _json(name: str, value: Callable[[], object]) -> Make:
    return _file(name, lambda: json.dumps(value()).encode())


def _header(make_header: Callable[[], object], data: bytes = b"") -> Make:
    return lambda folder: write_raw(folder / WEIGHTS, make_header(), data)


def _tensor(**changes: Any) -> Make:
    """One tensor of four floats, then another."""
    good = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    other = {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}
    return _header(lambda: {"a": {**good, **changes}, "b": other}, bytes(32))


def _weights(content: bytes) -> Make:
    return _file(WEIGHTS, content)


def _index(weight_map: Callable[[], object], *shards: str) -> Make:
    def make(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        for shard in shards:
            write_raw(
                folder / shard, {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1"
            )
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map()}))

    return make


def _gguf(content: Callable[[], bytes]) -> Make:
    def make(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(content())
        return path

    return make


def _many(item: bytes, number: int) -> bytes:
    return b"{" + (item + b",") * number + item + b"}"


def _vocabulary(number: int) -> Make:
    return _file(
        "tokenizer.json", lambda: b'{"model":{"vocab":' + _many(b'"tttt":123', number) + b"}}"
    )


def _tokenizer(**changes: Any) -> Make:
    """Values that are callable are made when the file is."""

    def make(folder: Path) -> None:
        path = folder / "tokenizer.json"
        found = json.loads(path.read_text())
        for key, value in changes.items():
            made = value() if callable(value) else value
            if key == "model":
                found["model"].update(made)
            else:
                found[key] = made
        path.write_text(json.dumps(found))

    return make


def _steps(step: Mapping[str, Any], number: int) -> dict[str, Any]:
    key = {"Replace": "normalizers", "Prepend": "normalizers", "Split": "pretokenizers"}
    return {"type": "Sequence", key[step["type"]]: [step] * number}


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _nested(step: dict[str, Any], depth: int) -> dict[str, Any]:
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def _added(number: int) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return [{"id": 261 + i, "content": f"<{i}>", **flags} for i in range(number)]


def _charsmap(longest: int) -> str:
    """A trie of nothing and one replacement."""
    trie = bytes(1024)
    return base64.b64encode(struct.pack("<I", len(trie)) + trie + b"x" * longest + b"\0").decode()


def _special(name: str, kind: str) -> Make:
    def make(folder: Path) -> Path | None:
        path = folder / name
        if name == INDEX:
            (folder / WEIGHTS).unlink()
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            here = Path.cwd()
            os.chdir(folder)  # names of sockets are short
            with socket.socket(socket.AF_UNIX) as found:
                found.bind(name)
            os.chdir(here)
        elif kind == "folder":
            path.mkdir()
        elif kind == "unreadable":
            path.write_bytes(b"{}")
            path.chmod(0)
        else:
            path.symlink_to({"loop": name, "dangling": "nowhere"}.get(kind, kind))
        return path if name.endswith(".gguf") else None

    return make


def _loop_of_folders(folder: Path) -> Path:
    (folder / "again").symlink_to("again")
    return folder / "again"


def _varied(folder: Path) -> Path:
    return folder / WEIGHTS


def _many_shards(number: int, metadata: int) -> Make:
    """Each with a large header; links, as one file is enough."""

    def make(folder: Path) -> None:
        names = [f"s{i}.safetensors" for i in range(number)]
        _index(lambda: {f"t{i}": name for i, name in enumerate(names)})(folder)
        write_raw(folder / names[0], {"__metadata__": {"a": "x" * metadata}}, b"")
        for name in names[1:]:
            os.link(folder / names[0], folder / name)

    return make


def _pb(number: int, content: bytes) -> bytes:
    size, out = len(content), b""
    while size >= 0x80:
        out += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + out + bytes([size]) + content


def _sentencepiece(content: Callable[[], bytes]) -> Make:
    def make(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(content())

    return make


def _raw_gguf(num_tensors: int, num_values: int, rest: bytes = b"") -> Make:
    return _gguf(lambda: b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + rest)


def _gguf_of(tensors: tuple[Any, ...] = (), data: bytes = b"", **metadata: Any) -> Make:
    """A Llama's metadata in front."""

    def make(folder: Path) -> Path:
        from ridgeline.loader.gguf import GGUFTensor
        from tests.loader.gguf_write import metadata_of

        whole = dict(metadata_of(tiny_config()))
        whole |= {key.replace("__", "."): value for key, value in metadata.items()}
        head = gguf(whole, tuple(GGUFTensor(*one) for one in tensors))
        path = folder / "model.gguf"
        path.write_bytes(head + bytes(-len(head) % 32) + data)
        return path

    return make


def _many_keys(number: int) -> bytes:
    return b"".join(text(f"k{i}") + struct.pack("<IB", 0, 1) for i in range(number))


def _many_infos(number: int) -> bytes:
    return b"".join(text(f"t{i}") + struct.pack("<IQIQ", 1, 1, 0, 0) for i in range(number))


def _deep(opening: str, closing: str) -> bytes:
    return (opening * DEEP + closing * DEEP).encode()


CASES: dict[str, Case] = {
    # ---- safetensors
    "header: half a million empty tensors": Case(
        _header(lambda: _many(b'"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}', 500_000)),
        "values",
    ),
    "header: 50 MB of metadata": Case(
        _header(lambda: {"__metadata__": {"a": "x" * 50_000_000}}), "header"
    ),
    "header: many small values of metadata": Case(
        _header(lambda: b'{"__metadata__":' + _many(b'"k":"x"', 1_500_000) + b"}"), "values"
    ),
    "header: lists in metadata": Case(
        _header(lambda: b'{"__metadata__": {"a": [' + b"[]," * 8_000_000 + b"[]]}}"), "values"
    ),
    "header: nested": Case(_header(lambda: b'{"a":' + _deep("[", "]") + b"}"), "nested|JSON"),
    "header: metadata is a list": Case(_header(lambda: {"__metadata__": []}), "__metadata__"),
    "header: metadata of numbers": Case(
        _header(lambda: {"__metadata__": {"a": 1}}), "__metadata__"
    ),
    "header: length of 2^63": Case(_weights(struct.pack("<Q", 1 << 63) + b"{}"), "claims a header"),
    "header: length beyond the file": Case(_weights(struct.pack("<Q", 1000) + b"{}"), "cut off"),
    "header: length of 0": Case(_weights(bytes(8)), "header is no JSON"),
    "header: length one less": Case(_weights(struct.pack("<Q", 1) + b"{}"), "not valid JSON"),
    "header: 7 bytes": Case(_weights(bytes(7)), "cut off"),
    "header: empty file": Case(_weights(b""), "is empty"),
    "header: no tensors": Case(_weights(struct.pack("<Q", 2) + b"{}"), "no tensors"),
    "header: pickle": Case(_weights(b"\x80\x02" + bytes(100)), "pickle"),
    "header: LFS pointer": Case(
        _weights(b"version https://git-lfs.github.com/spec/v1\noid"), "LFS"
    ),
    "header: name twice": Case(
        _header(
            lambda: (
                b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
            ),
            b"1",
        ),
        "twice",
    ),
    "header: last of many names twice": Case(
        _header(
            lambda: (
                b'{"__metadata__":{'
                + b"".join(b'"k%d":"",' % i for i in range(100_000))
                + b'"z":"","z":""}}'
            )
        ),
        "twice",
    ),
    "header: bytes that are no UTF-8": Case(_header(lambda: b'{"\xff\xfe":{}}'), "not valid JSON"),
    "header: NaN as an offset": Case(
        _header(lambda: b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,NaN]}}', b"1"),
        "data_offsets",
    ),
    "header: very long name": Case(
        _header(
            lambda: {"n" * 1_000_000: {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
            bytes(8),
        ),
        "tensor",
    ),
    "header: very long dtype": Case(_tensor(dtype="F" * 1_000_000), "dtype"),
    "header: dtype is a list": Case(_tensor(dtype=["F32"]), "dtype"),
    "header: negative size": Case(_tensor(shape=[-4]), "shape"),
    "header: size of 10^300": Case(_tensor(shape=[10**300]), "sizes"),
    "header: product of sizes overflows": Case(_tensor(shape=[1 << 59, 1 << 59, 4]), "bytes"),
    "header: sizes of 4000 digits": Case(_tensor(shape=[10**4000] * 16), "bytes|sizes"),
    "header: 200000 dimensions": Case(_tensor(shape=[1] * 200_000), "shape"),
    "header: size is true": Case(_tensor(shape=[True, 4]), "shape"),
    "header: size is 4.0": Case(_tensor(shape=[4.0]), "shape"),
    "header: offsets overlap": Case(_tensor(data_offsets=[8, 24]), "hole|overlap"),
    "header: offsets beyond the file": Case(
        _tensor(data_offsets=[1 << 40, (1 << 40) + 16]), "overlap|hole|cut"
    ),
    "header: offsets the wrong way round": Case(_tensor(data_offsets=[16, 0]), "data_offsets"),
    "header: negative offset": Case(_tensor(data_offsets=[-16, 0]), "data_offsets"),
    "header: three offsets": Case(_tensor(data_offsets=[0, 8, 16]), "data_offsets"),
    "header: entry is a number": Case(_header(lambda: {"a": 1}), "needs exactly"),
    "header: bytes behind the last": Case(
        _header(lambda: {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, bytes(9)),
        "no tensor",
    ),
    # ---- index
    "index: a million entries": Case(
        _file(INDEX, lambda: b'{"weight_map":' + _many(b'"t":"s.safetensors"', 1_000_000) + b"}"),
        "values",
    ),
    "index: a hundred thousand shards": Case(
        _index(lambda: {f"t{i}": f"s{i}.safetensors" for i in range(100_000)}), "shards"
    ),
    "index: shards of large headers": Case(_many_shards(64, 8_000_000), "header"),
    "index: absent shard": Case(_index(lambda: {"a": "s.safetensors"}), "missing"),
    "index: ..": Case(_index(lambda: {"a": "../s.safetensors"}), "beside it"),
    "index: absolute": Case(_index(lambda: {"a": "/etc/s.safetensors"}), "beside it"),
    "index: number for a shard": Case(_index(lambda: {"a": 1}), "beside it"),
    "index: list for a shard": Case(_index(lambda: {"a": ["s.safetensors"]}), "beside it"),
    "index: very long name of a shard": Case(
        _index(lambda: {"a": "s" * 100_000 + ".safetensors"}), "beside it|too long"
    ),
    "index: NUL in the name": Case(_index(lambda: {"a": "s\0.safetensors"}), "beside it"),
    "index: surrogate in the name": Case(_index(lambda: {"a": "\ud800.safetensors"}), "beside it"),
    "index: map is a list": Case(_index(lambda: []), "weight_map"),
    "index: map is empty": Case(_index(dict), "weight_map"),
    "index: tensor in another shard": Case(
        _index(lambda: {"a": "s.safetensors", "b": "s.safetensors"}, "s.safetensors"), "no shard"
    ),
    "index: tensor in two shards": Case(
        _index(
            lambda: {"a": "s.safetensors", "b": "r.safetensors"}, "s.safetensors", "r.safetensors"
        ),
        "shard",
    ),
    "index: list": Case(_file(INDEX, b"[]"), "object"),
    # ---- config.json
    "config: 10^9 layers": Case(_config(num_hidden_layers=10**9), "num_hidden_layers"),
    "config: hidden size of 10^9": Case(_config(hidden_size=10**9), "hidden_size"),
    "config: intermediate size of 10^9": Case(
        _config(intermediate_size=10**9), "intermediate_size"
    ),
    "config: vocabulary of 10^12": Case(_config(vocab_size=10**12), "vocab_size"),
    "config: positions of 10^15": Case(_config(max_position_embeddings=10**15), "max_position"),
    "config: number of 4000 digits": Case(_config(num_hidden_layers=10**4000), "num_hidden_layers"),
    "config: theta of 4000 digits": Case(_config(rope_theta=10**4000), "rope_theta"),
    "config: theta is NaN": Case(_config(rope_theta=float("nan")), "rope_theta"),
    "config: theta is Infinity": Case(_config(rope_theta=float("inf")), "rope_theta"),
    "config: eps is NaN": Case(_config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "config: layers is 2.0": Case(_config(num_hidden_layers=2.0), "num_hidden_layers"),
    "config: layers is true": Case(_config(num_hidden_layers=True), "num_hidden_layers"),
    "config: negative heads": Case(_config(num_attention_heads=-4), "num_attention_heads"),
    "config: no heads": Case(_config(num_attention_heads=0), "num_attention_heads"),
    "config: model_type is a number": Case(_config(model_type=7), "model_type"),
    "config: model_type is a list": Case(_config(model_type=["llama"]), "model_type"),
    "config: model_type is missing": Case(_config(model_type=None), "model_type"),
    "config: model_type of a megabyte": Case(_config(model_type="l" * 1_000_000), "model_type"),
    "config: model_type of newlines": Case(_config(model_type="a\nb\x1b[31m"), "model_type"),
    "config: another architecture": Case(_config(architectures=["BertModel"]), "architectures"),
    "config: architecture of code": Case(
        _config(
            architectures=["LlamaForCausalLM"],
            auto_map={"AutoModel": "modeling.X"},
            model_type="custom",
        ),
        "model_type",
    ),
    "config: architectures is a number": Case(_config(architectures=7), "architectures"),
    "config: 200000 architectures": Case(_config(architectures=["X"] * 200_000), "architectures"),
    "config: key twice": Case(
        _file("config.json", b'{"model_type":"llama","model_type":"qwen2"}'), "twice"
    ),
    "config: last of many keys twice": Case(
        _file(
            "config.json",
            lambda: b"{" + b"".join(b'"k%d":0,' % i for i in range(100_000)) + b'"z":0,"z":0}',
        ),
        "twice",
    ),
    "config: a million values": Case(_config(junk=list(range(1_100_000))), "values"),
    "config: 100 MB": Case(_file("config.json", lambda: b" " * 100_000_000 + b"{}"), "bytes"),
    "config: 200000 end tokens": Case(_config(eos_token_id=[2] * 200_000), "eos_token_id"),
    "config: experts times layers": Case(
        _config(
            model_type="mixtral",
            num_local_experts=1024,
            num_experts_per_tok=2,
            num_hidden_layers=1024,
        ),
        "tensors",
    ),
    "config: experts of a planned family": Case(
        _config(
            model_type="deepseek_v3",
            n_routed_experts=4096,
            moe_intermediate_size=64,
            num_hidden_layers=1024,
            num_key_value_heads=4,
            kv_lora_rank=8,
        ),
        "tensors",
    ),
    "config: rope scaling is a list": Case(_config(rope_scaling=[1]), "rope_scaling"),
    "config: rope factor is NaN": Case(
        _config(rope_scaling={"rope_type": "linear", "factor": float("nan")}), "factor"
    ),
    "config: nested sections": Case(
        _file(
            "config.json",
            b'{"model_type":"llama","rope_scaling":'
            + _deep('{"a":', "}")[: DEEP * 5]
            + b"1"
            + b"}" * DEEP
            + b"}",
        ),
        "nested|JSON",
    ),
    "stored: method is a list": Case(_stored(quant_method=["gptq"]), "quant_method"),
    "stored: a pattern that never ends": Case(
        _stored(quant_method="gptq", bits=4, dynamic={"-:(.*.*)*(.*.*)*(.*.*)*(.*)*x": {}}), "steps"
    ),
    "stored: nested repetition": Case(
        _stored(
            quant_method="compressed-tensors",
            config_groups={
                "g": {
                    "weights": {"num_bits": 4, "type": "int", "strategy": "channel"},
                    "targets": ["re:(\\w+\\.?)+!$"],
                }
            },
        ),
        "steps",
    ),
    "stored: modules that are patterns": Case(
        _stored(
            quant_method="awq", bits=4, group_size=32, modules_to_not_convert=["(\\w+\\.?)+!$"]
        ),
        "steps",
    ),
    "stored: 60000 ignored patterns": Case(
        _stored(
            quant_method="compressed-tensors",
            ignore=[f"re:.*{i}.*x.*y" for i in range(60_000)],
            config_groups={
                "g": {
                    "weights": {"num_bits": 4, "type": "int", "strategy": "channel"},
                    "targets": ["Linear"],
                }
            },
        ),
        "steps",
    ),
    "stored: a pattern of repeats": Case(
        _stored(quant_method="gptq", bits=4, dynamic={"-:" + "(a{1,1000}){1,1000}" * 50: {}}),
        "steps",
    ),
    # ---- generation_config.json
    "generation: end token is text": Case(
        _json("generation_config.json", lambda: {"eos_token_id": "2"}), "eos_token_id"
    ),
    "generation: 200000 end tokens": Case(
        _json("generation_config.json", lambda: {"eos_token_id": list(range(200_000))}),
        "eos_token_id",
    ),
    "generation: temperature is NaN": Case(
        _file("generation_config.json", b'{"temperature":NaN}'), "temperature"
    ),
    "generation: temperature is text": Case(
        _json("generation_config.json", lambda: {"temperature": "hot"}), "temperature"
    ),
    "generation: temperature of 400 digits": Case(
        _json("generation_config.json", lambda: {"temperature": 10**400}), "temperature"
    ),
    "generation: top_k is a list": Case(
        _json("generation_config.json", lambda: {"top_k": [1]}), "top_k"
    ),
    # ---- tokenizer.json
    "tokenizer: a list": Case(_file("tokenizer.json", b"[]"), "object"),
    "tokenizer: nothing": Case(_file("tokenizer.json", b"{}"), "no tokenizer"),
    "tokenizer: nested normalizers": Case(
        _tokenizer(normalizer=lambda: _nested(_replace("a", "b"), 200)), "no tokenizer"
    ),
    "tokenizer: 1000 replacements": Case(
        _tokenizer(normalizer=_steps(_replace("a", "b"), 1000)), "normalizer"
    ),
    "tokenizer: 1000 patterns": Case(
        _tokenizer(normalizer=_steps(_replace("a+b*c?" * 20, "b", "Regex"), 1000)), "normalizer"
    ),
    "tokenizer: replacement of 1000 characters": Case(
        _tokenizer(normalizer=_replace("a", "a" * 1000)), "normalizer"
    ),
    "tokenizer: doubling 60 times": Case(
        _tokenizer(normalizer=_steps(_replace("a", "aa"), 60)), "normalizer"
    ),
    "tokenizer: replacing nothing": Case(
        _tokenizer(normalizer=_steps(_replace("", "aaaaaaaa", "Regex"), 3)), "normalizer"
    ),
    "tokenizer: chain of prepends": Case(
        _tokenizer(normalizer=_steps({"type": "Prepend", "prepend": "aa"}, 60)), "normalizer"
    ),
    "tokenizer: prepend of a megabyte": Case(
        _tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 1_000_000}), "normalizer"
    ),
    "tokenizer: charsmap that grows": Case(
        _tokenizer(
            normalizer=lambda: {"type": "Precompiled", "precompiled_charsmap": _charsmap(100_000)}
        ),
        "normalizer",
    ),
    "tokenizer: charsmap of rubbish": Case(
        _tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "normalizer|no tokenizer",
    ),
    "tokenizer: charsmap that lies": Case(
        _tokenizer(
            normalizer={
                "type": "Precompiled",
                "precompiled_charsmap": base64.b64encode(b"\xff\xff\xff\x7f" + bytes(64)).decode(),
            }
        ),
        "normalizer|no tokenizer",
    ),
    "tokenizer: pattern of a megabyte": Case(
        _tokenizer(pre_tokenizer=lambda: _split("a" * 1_000_000)), "pre_tokenizer"
    ),
    "tokenizer: nested pattern": Case(
        _tokenizer(pre_tokenizer=lambda: _split("(" * 100_000 + ")" * 100_000)), "pre_tokenizer"
    ),
    "tokenizer: pattern of repeats": Case(
        _tokenizer(pre_tokenizer=lambda: _split("(?:" * 6 + "a" + "{1,9999})" * 6 + "x" * 9000)),
        "pre_tokenizer",
    ),
    "tokenizer: 1000 splits": Case(
        _tokenizer(pre_tokenizer=lambda: _steps(_split("a+"), 1000)), "pre_tokenizer"
    ),
    "tokenizer: broken pattern": Case(
        _tokenizer(pre_tokenizer=lambda: _split("(")), "no tokenizer"
    ),
    "tokenizer: template of a million": Case(
        _tokenizer(
            post_processor=lambda: {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 200_000,
                "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
            }
        ),
        "post_processor",
    ),
    "tokenizer: template of tokens that are many": Case(
        _tokenizer(
            post_processor=lambda: {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {
                    "<s>": {"id": "<s>", "ids": [1] * 200_000, "tokens": ["<s>"] * 200_000}
                },
            }
        ),
        "post_processor",
    ),
    "tokenizer: decoder that grows": Case(
        _tokenizer(decoder={"type": "Sequence", "decoders": [_replace("a", "aa")] * 60}), "decoder"
    ),
    "tokenizer: vocabulary of 10^7": Case(_vocabulary(10_000_000), "bytes"),
    "tokenizer: vocabulary of 2 million": Case(_vocabulary(2_000_000), "keys"),
    "tokenizer: merges of 10^7": Case(
        _file(
            "tokenizer.json",
            lambda: (
                b'{"model":{"type":"BPE","vocab":{"a":0,"aa":1},"merges":['
                + b'"a a",' * 10_000_000
                + b'"a a"]}}'
            ),
        ),
        "merges|values|bytes",
    ),
    "tokenizer: merges that are absent": Case(
        _tokenizer(model={"merges": ["x1 x2"]}), "no tokenizer"
    ),
    "tokenizer: merges of one": Case(_tokenizer(model={"merges": [["a"]]}), "no tokenizer"),
    "tokenizer: a million added tokens": Case(
        _file(
            "tokenizer.json",
            lambda: b'{"added_tokens":[' + b'{"id":300,"content":"<300>"},' * 1_000_000 + b"1]}",
        ),
        "keys",
    ),
    "tokenizer: 40000 added tokens": Case(
        _tokenizer(added_tokens=lambda: _added(40_000)), "added_tokens"
    ),
    "tokenizer: added token of a megabyte": Case(
        _tokenizer(added_tokens=lambda: [{**_added(1)[0], "content": "x" * 1_000_000}]),
        "added_tokens",
    ),
    "tokenizer: id of 2^32 - 1": Case(_tokenizer(model={"vocab": {"a": (1 << 32) - 1}}), "vocab"),
    "tokenizer: id of 2^40": Case(_tokenizer(model={"vocab": {"a": 1 << 40}}), "tokenizer"),
    "tokenizer: id is negative": Case(_tokenizer(model={"vocab": {"a": -1}}), "no tokenizer|vocab"),
    "tokenizer: normalizer twice": Case(
        _file(
            "tokenizer.json",
            b'{"normalizer":null,"normalizer":null,"model":{"type":"BPE","vocab":{},"merges":[]}}',
        ),
        "twice",
    ),
    "tokenizer: unigram of NaN": Case(
        _tokenizer(model={"type": "Unigram", "vocab": [["a", float("nan")]]}), "tokenizer.json"
    ),
    "tokenizer: unigram without unknown": Case(
        _tokenizer(model={"type": "Unigram", "unk_id": 7, "vocab": [["a", 0.0]]}), "no tokenizer"
    ),
    "tokenizer: unigram of nothing": Case(
        _tokenizer(model={"type": "Unigram", "unk_id": None, "vocab": []}), "tokenizer"
    ),
    "tokenizer: unknown model": Case(_tokenizer(model={"type": "Magic"}), "no tokenizer"),
    # ---- beside it
    "tokens: listed tokens are a list": Case(
        _json("tokenizer_config.json", lambda: {"added_tokens_decoder": [1]}),
        "added_tokens_decoder",
    ),
    "tokens: key of 5000 digits": Case(
        _json(
            "tokenizer_config.json",
            lambda: {"added_tokens_decoder": {"1" * 5000: {"content": "a"}}},
        ),
        "added_tokens_decoder",
    ),
    "tokens: 40000 listed tokens": Case(
        _json(
            "tokenizer_config.json",
            lambda: {
                "added_tokens_decoder": {str(261 + i): {"content": f"<{i}>"} for i in range(40_000)}
            },
        ),
        "added_tokens_decoder",
    ),
    "tokens: id of another token": Case(
        _json(
            "tokenizer_config.json", lambda: {"added_tokens_decoder": {"99999": {"content": "<s>"}}}
        ),
        "added token",
    ),
    "tokens: 40000 added tokens of old": Case(
        _json("added_tokens.json", lambda: {f"<{i}>": 261 + i for i in range(40_000)}),
        "added_tokens",
    ),
    "tokens: 40000 special tokens": Case(
        _json(
            "tokenizer_config.json",
            lambda: {"additional_special_tokens": [f"<{i}>" for i in range(40_000)]},
        ),
        "additional_special_tokens",
    ),
    # ---- tokenizer.model
    "sentencepiece: rubbish": Case(_sentencepiece(lambda: b"\xff" * 1000), "SentencePiece"),
    "sentencepiece: cut off": Case(
        _sentencepiece(lambda: _pb(1, _pb(1, b"abc"))[:-1]), "SentencePiece"
    ),
    "sentencepiece: two million pieces": Case(
        _sentencepiece(lambda: _pb(1, _pb(1, b"abc")) * 2_000_000), "pieces"
    ),
    "sentencepiece: piece of a megabyte": Case(
        _sentencepiece(
            lambda: (
                _pb(1, _pb(1, b"<unk>")) + _pb(1, _pb(1, b"a" * 1_000_000)) + _pb(2, b"\x18\x02")
            )
        ),
        "piece",
    ),
    "sentencepiece: no unknown piece": Case(
        _sentencepiece(lambda: _pb(1, _pb(1, b"a")) + _pb(2, b"\x18\x02\xc0\x02\x63")), "unk"
    ),
    "sentencepiece: charsmap that grows": Case(
        _sentencepiece(
            lambda: _pb(1, _pb(1, b"<unk>")) + _pb(3, _pb(2, base64.b64decode(_charsmap(100_000))))
        ),
        "charsmap",
    ),
    "sentencepiece: charsmap of rubbish": Case(
        _sentencepiece(lambda: _pb(1, _pb(1, b"<unk>")) + _pb(3, _pb(2, b"abc"))),
        "SentencePiece|charsmap",
    ),
    # ---- GGUF
    "gguf: 2^60 keys": Case(_raw_gguf(0, 1 << 60), "GGUF"),
    "gguf: 2^60 tensors": Case(_raw_gguf(1 << 60, 0), "GGUF"),
    "gguf: a million keys": Case(_raw_gguf(0, 1_000_000, _many_keys(1)), "keys"),
    "gguf: 300000 keys": Case(
        _gguf(lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 300_000) + _many_keys(300_000)), "keys"
    ),
    "gguf: 300000 tensors": Case(
        _gguf(lambda: b"GGUF" + struct.pack("<IQQ", 3, 300_000, 0) + _many_infos(300_000)),
        "tensors",
    ),
    "gguf: key of 2^60 bytes": Case(_raw_gguf(0, 1, struct.pack("<Q", 1 << 60)), "cut off"),
    "gguf: text of 2^60 bytes": Case(
        _raw_gguf(0, 1, text("a") + struct.pack("<IQ", 8, 1 << 60)), "cut off"
    ),
    "gguf: array of 2^60": Case(
        _raw_gguf(0, 1, text("a") + struct.pack("<IIQ", 9, 0, 1 << 60)), "array"
    ),
    "gguf: array of 4 million in 100 keys": Case(
        _gguf(
            lambda: (
                b"GGUF"
                + struct.pack("<IQQ", 3, 0, 50)
                + b"".join(
                    text(f"k{i}")
                    + struct.pack("<IIQ", 9, 2, 4_000_000)
                    + bytes(range(256)) * 31_250
                    for i in range(25)
                )
            )
        ),
        "arrays",
    ),
    "gguf: nested arrays": Case(
        _raw_gguf(0, 1, text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000),
        "nested",
    ),
    "gguf: wide nested arrays": Case(
        _gguf(
            lambda: (
                b"GGUF"
                + struct.pack("<IQQ", 3, 0, 1)
                + text("a")
                + struct.pack("<IIQ", 9, 9, 4_000_000)
                + struct.pack("<IQ", 0, 0) * 4_000_000
            )
        ),
        "arrays",
    ),
    "gguf: array of unknown type": Case(
        _raw_gguf(0, 1, text("a") + struct.pack("<IIQ", 9, 77, 1) + bytes(9)), "type"
    ),
    "gguf: value of unknown type": Case(_raw_gguf(0, 1, text("a") + struct.pack("<I", 77)), "type"),
    "gguf: key twice": Case(_raw_gguf(0, 2, (text("a") + struct.pack("<IB", 0, 1)) * 2), "twice"),
    "gguf: tensor twice": Case(
        _raw_gguf(2, 0, (text("a") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2), "twice"
    ),
    "gguf: 2^32 - 1 dimensions": Case(
        _raw_gguf(1, 0, text("a") + struct.pack("<I", (1 << 32) - 1)), "dimensions"
    ),
    "gguf: alignment of 0": Case(_gguf_of(general__alignment=(4, 0)), "alignment"),
    "gguf: alignment of 7": Case(_gguf_of(general__alignment=(4, 7)), "alignment"),
    "gguf: alignment of 2^31": Case(_gguf_of(general__alignment=(4, 1 << 31)), "missing"),
    "gguf: alignment is text": Case(_gguf_of(general__alignment=(8, "32")), "alignment"),
    "gguf: version 1": Case(_gguf(lambda: b"GGUF" + struct.pack("<IQQ", 1, 0, 0)), "version"),
    "gguf: version of the other byte order": Case(
        _gguf(lambda: b"GGUF" + struct.pack(">IQQ", 3, 0, 0)), "version"
    ),
    "gguf: empty": Case(_gguf(lambda: b""), "empty"),
    "gguf: 4 bytes": Case(_gguf(lambda: b"GGUF"), "cut off"),
    "gguf: LFS pointer": Case(
        _gguf(lambda: b"version https://git-lfs.github.com/spec/v1\n"), "LFS"
    ),
    "gguf: tensors overlap": Case(
        _gguf_of((("a", (64,), 0, 0), ("b", (64,), 0, 32)), bytes(512)), "overlap"
    ),
    "gguf: tensor beyond the file": Case(
        _gguf_of((("a", (64,), 0, 1 << 40),), bytes(512)), "cut off"
    ),
    "gguf: tensor of 2^63 offset": Case(
        _gguf_of((("a", (64,), 0, 1 << 63),), bytes(512)), "cut off"
    ),
    "gguf: size of 0": Case(_gguf_of((("a", (0,), 0, 0),), bytes(512)), "sizes"),
    "gguf: sizes that overflow": Case(
        _gguf_of((("a", (1 << 40, 1 << 40), 0, 0),), bytes(512)), "cut off"
    ),
    "gguf: unknown type of a tensor": Case(_gguf_of((("a", (64,), 99, 0),), bytes(512)), "type"),
    "gguf: junk behind the last": Case(
        _gguf_of((("a", (64,), 0, 0),), bytes(256) + b"x" * 4096), "bytes"
    ),
    "gguf: hole between tensors": Case(
        _gguf_of((("a", (64,), 0, 0), ("b", (64,), 0, 1024)), bytes(1024 + 256)), "hole"
    ),
    "gguf: 10^9 layers": Case(
        _gguf_of(
            (("token_embd.weight", (261, 32), 0, 0),),
            bytes(261 * 128),
            llama__block_count=(4, 10**9),
        ),
        "block_count",
    ),
    "gguf: tokens are no list": Case(
        _gguf_of(
            (("token_embd.weight", (261, 32), 0, 0),),
            bytes(261 * 128),
            tokenizer__ggml__model=(8, "gpt2"),
            tokenizer__ggml__tokens=(4, 7),
        ),
        "tokens|lacks",
    ),
    "gguf: architecture is a number": Case(_gguf_of(general__architecture=(4, 7)), "architecture"),
    "gguf: architecture is unknown": Case(
        _gguf_of(general__architecture=(8, "bert")), "architecture"
    ),
    # ---- what stands in the place of a file
    "place: loop of links as the folder": Case(_loop_of_folders, "link"),
    "place: weights named as the folder": Case(_varied, "is a file"),
    "place: link out of the folder": Case(_special(WEIGHTS, "/etc/passwd"), "leads out"),
    "place: weights are a device": Case(_special(WEIGHTS, "/dev/zero"), "leads out|device"),
    **{
        f"place: {name} is {kind}": Case(_special(name, kind), match)
        for name in (*JSON_FILES, WEIGHTS, "model.gguf")
        for kind, match in (
            ("fifo", "FIFO"),
            ("socket", "socket"),
            ("folder", "folder"),
            ("loop", "loop"),
            ("dangling", "link"),
        )
    },
    **{
        f"place: {name} is unreadable": Case(_special(name, "unreadable"), "[Pp]ermission")
        for name in ("config.json", "tokenizer.json", WEIGHTS, "model.gguf")
    },
    **{
        f"place: {name} is /dev/zero": Case(_special(name, "/dev/zero"), "device")
        for name in ("config.json", "tokenizer.json", "model.gguf")
    },
    **{f"place: {name} is empty": Case(_file(name, b""), "empty") for name in JSON_FILES},
    **{
        f"json: {name} is nested": Case(_file(name, lambda: _deep('{"a":[', "]}")), "nested")
        for name in JSON_FILES
    },
    **{
        f"json: {name} holds a million lists": Case(
            _file(name, lambda: b'{"a":[' + b"[]," * 5_000_000 + b"[]]}"), "values"
        )
        for name in JSON_FILES
    },
}


def import_all() -> None:
    """What loading needs, once for all children."""
    for name in (
        "build",
        "loader.quantized_checkpoint",
        "loader.gguf_checkpoint",
        "text.gguf_vocab",
    ):
        import_module(f"ridgeline.{name}")


def load_whole(path: Path) -> None:
    """All that is read of a model before memory for its weights is taken."""
    from ridgeline.build import build_tokenizer_side
    from ridgeline.config import EngineConfig
    from ridgeline.loader import open_checkpoint
    from ridgeline.loader.quantized_checkpoint import check_model

    front = build_tokenizer_side(EngineConfig(model=str(path), device="cpu"))
    check_model(open_checkpoint(front.folder.path), front.spec, front.folder.path)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a load: the kind of error and its text ("" for none), and what it cost beyond
    a process that has imported all."""

    error: str
    message: str
    cpu_s: float
    seconds: float
    num_bytes: int


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _load(name: str, path: Path) -> Outcome:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is used now
    before, start, cpu = _peak(), time.monotonic(), time.process_time()
    is_other = "unreadable" in name and os.geteuid() == 0  # root may read everything
    error = message = ""
    signal.alarm(TIME_LIMIT_S)
    try:
        if is_other:
            codecs.lookup("unicode-escape")  # nobody may not read the codec's module
            os.seteuid(NOBODY)
        load_whole(path)
    except BaseException as problem:
        error, message = type(problem).__name__, str(problem)[:MAX_MESSAGE]
    finally:
        if is_other:
            os.seteuid(0)
    cpu, seconds = time.process_time() - cpu, time.monotonic() - start
    return Outcome(error, message, cpu, seconds, _peak() - before)


def _child(names: list[str], pipe: int) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_LIMIT,) * 2)
    for name in names:
        with tempfile.TemporaryDirectory() as where:
            found = _load(name, hostile_folder(name, Path(where)))
        found = replace(found, message=found.message.replace(where, ""))
        os.write(pipe, json.dumps([name, *astuple(found)]).encode() + b"\n")


def load_in_child(names: list[str]) -> Iterator[tuple[str, Outcome]]:
    """One after the other in a copy of this process, which has imported what loading needs. One
    that ends the child, or takes too long, is the last."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _child(names, writer)
        finally:
            os._exit(0)
    os.close(writer)
    done = 0
    with os.fdopen(reader) as pipe:
        for line in pipe:
            name, *found = json.loads(line)
            yield name, Outcome(*found)
            done += 1
    _, status = os.waitpid(child, 0)
    if done < len(names):
        yield names[done], Outcome(f"status {status}", "", 0.0, float(TIME_LIMIT_S), 0)


def hostile_folder(name: str, where: Path) -> Path:
    """What is to be loaded."""
    folder = make_tiny_model(where / "model")
    for path in (where, folder, *folder.iterdir()):
        path.chmod(0o755)
    return CASES[name].make(folder) or folder


def main() -> None:
    names = [name for name in CASES if any(part in name for part in sys.argv[1:] or [""])]
    import_all()
    while names:
        for name, out in load_in_child(names):
            mark = "" if CASES[name].fits(out.message) else "  UNEXPECTED"
            cost = f"{out.cpu_s:5.2f} {out.seconds:5.2f} s {out.num_bytes / 1e6:6.0f} MB"
            print(f"{cost}  {name}: {out.error}: {out.message[:200]!r}{mark}", flush=True)
        names = names[names.index(name) + 1 :]


if __name__ == "__main__":
    main()
