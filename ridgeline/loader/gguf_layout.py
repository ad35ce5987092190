"""Which bytes of a GGUF file are which tensor, and can they be where its header says?

Types and their blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h .
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.loader.folder import GET_AGAIN, refuse
from ridgeline.loader.gguf import GGUFHeader, GGUFTensor
from ridgeline.loader.header import TensorEntry

WORD = 8  # bytes; the format wants alignments that are a multiple of it
MAX_SIZE = 1 << 40  # of a dimension


@dataclass(frozen=True, slots=True)
class BlockType:
    """`block` numbers are stored together in `num_bytes`."""

    name: str
    block: int
    num_bytes: int


# What `ggml_blocks.decode` can read, by the number of the type in a file.
TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
BY_NAME: Mapping[str, BlockType] = {kind.name: kind for kind in TYPES.values()}
# Only to say what a file holds that is refused.
OTHERS: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


def locate(header: GGUFHeader) -> dict[str, TensorEntry]:
    """Every tensor of the file by its name there, its dtype in the format's words.

    ConfigError for an unknown type, a shape of no whole blocks, and for bytes that are not in the
    file, not aligned, another tensor's or nobody's.
    """
    if header.alignment % WORD:
        refuse(header.path, f"general.alignment is {header.alignment}, no multiple of {WORD}")
    entries = {tensor.name: _entry(header, tensor) for tensor in header.tensors}
    end = header.data_start
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start < end:
            refuse(header.path, f"tensor {entry.name[:80]!r} overlaps the one before it")
        if entry.start - end >= header.alignment:
            refuse(header.path, f"tensor {entry.name[:80]!r} leaves a hole before it: {GET_AGAIN}")
        end = entry.end
    if entries and header.num_bytes - end >= header.alignment:
        behind = header.num_bytes - end
        refuse(header.path, f"has {behind} bytes that belong to no tensor: {GET_AGAIN}")
    return entries


def _entry(header: GGUFHeader, tensor: GGUFTensor) -> TensorEntry:
    path, shape, what = header.path, tensor.shape, f"tensor {tensor.name[:80]!r}"
    kind = _kind(path, tensor, what)
    if not shape or not all(1 <= size <= MAX_SIZE for size in shape):
        refuse(path, f"{what} has shape {str(list(shape))[:80]}; sizes are from 1 to {MAX_SIZE}")
    if shape[-1] % kind.block:
        refuse(path, f"{what} has rows of {shape[-1]}, no multiple of the {kind.block} of a block")
    if tensor.offset % header.alignment:
        refuse(path, f"{what} has offset {tensor.offset}, no multiple of {header.alignment}")
    start = header.data_start + tensor.offset
    end = start + math.prod(shape) // kind.block * kind.num_bytes
    if end > header.num_bytes:
        refuse(
            path,
            f"is cut off: {what} of type {kind.name} and shape {str(list(shape))[:80]} ends at "
            f"byte {end}, the file at {header.num_bytes}",
        )
    return TensorEntry(tensor.name, kind.name, shape, start, end)


def _kind(path: Path, tensor: GGUFTensor, what: str) -> BlockType:
    kind = TYPES.get(tensor.ggml_type)
    if kind is None:
        name = OTHERS.get(tensor.ggml_type, f"number {tensor.ggml_type}")
        refuse(path, f"{what} has type {name}; readable are {', '.join(BY_NAME)}")
    if kind.block > 1 and len(tensor.shape) < 2:
        refuse(path, f"{what} is packed as {kind.name}, but is no matrix")
    return kind
