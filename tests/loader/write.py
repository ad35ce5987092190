"""Writes small safetensors and GGUF files, right ones and wrong ones."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from ridgeline.loader.gguf import GGUFTensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def header_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    return header


def write_raw(path: Path, header: object, data: bytes, *, pad: bool = True) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if pad:
        text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], *, pad: bool = True) -> None:
    data = b"".join(raw_bytes(tensor) for tensor in tensors.values())
    write_raw(path, header_of(tensors), data, pad=pad)


def write_sharded(folder: Path, tensors: Mapping[str, torch.Tensor], num_shards: int) -> None:
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[i::num_shards])
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(kind: int, content: object) -> bytes:
    if kind == 8:
        return text(str(content))
    if kind == 9:
        inner, items = cast("tuple[int, list[object]]", content)
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, i) for i in items)
    return struct.pack("<" + FORMS[kind], content)


def gguf(
    metadata: Mapping[str, tuple[int, object]],
    tensors: tuple[GGUFTensor, ...] = (),
    *,
    version: int = 3,
) -> bytes:
    data = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, content) in metadata.items():
        data += text(key) + struct.pack("<I", kind) + value(kind, content)
    for t in tensors:
        data += text(t.name) + struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape[::-1])
        data += struct.pack("<IQ", t.ggml_type, t.offset)
    return data
