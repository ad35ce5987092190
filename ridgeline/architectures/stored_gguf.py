"""Which matrices of a GGUF file are kept packed? Those whose blocks are codes and their scales.

What stands for a quantization_config is written by the reader of the file: the type of each role's
matrix, one for all layers or a list. Other types (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K) have minima too:
they are unpacked when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.stored import ROWS, Dim, Raw, Stored
from ridgeline.architectures.stored_match import Find

METHOD = "gguf"
BLOCKS = "blocks"  # what the names of their bytes end in
BLOCK, LARGE_BLOCK = 32, 256  # numbers
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, "Q3_K": 110, "Q6_K": 210}
KINDS: Mapping[str, Stored] = {
    "Q8_0": Stored("Q8_0", 8, BLOCK, scale_dtype="float16"),
    "Q4_0": Stored("Q4_0", 4, BLOCK, scale_dtype="float16"),
    "Q5_0": Stored("Q5_0", 5, BLOCK, scale_dtype="float16"),
    # A scale is a product of a float16 and a small integer.
    "Q3_K": Stored("Q3_K", 3, 16, scale_dtype="float32"),
    "Q6_K": Stored("Q6_K", 6, 16, scale_dtype="float32"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def described(types: Mapping[str, str]) -> dict[str, object] | None:
    """What takes the place of a quantization_config, of name of matrix -> type; None: nothing is
    kept packed."""
    by_place: dict[str, dict[int, str]] = {}
    for name, kind in types.items():
        found = _LAYER.fullmatch(name.removesuffix(".weight"))
        if found is not None and name.endswith(".weight"):
            by_place.setdefault(found[2], {})[int(found[1])] = kind
    if not any(kind in KINDS for kinds in by_place.values() for kind in kinds.values()):
        return None
    return {"quant_method": METHOD, "types": {k: _short(v) for k, v in by_place.items()}}


def _short(kinds: Mapping[int, str]) -> str | list[str]:
    every = [kinds[index] for index in sorted(kinds)]
    return every[0] if len(set(every)) == 1 else every


def read(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored."""
    types = section.section("types")
    if types is None:
        raise section.fail("types", "is missing (an object of modules)")
    listed: dict[str, str | Sequence[str]] = {}
    for place, value in types.values.items():
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        if not isinstance(value, str) and not is_list:
            raise types.fail(place, "must be the name of a type, or one for each layer")
        listed[place] = value  # type: ignore[assignment]

    def find(module: str) -> Stored | None:
        found = _LAYER.fullmatch(module)
        kinds = None if found is None else listed.get(found[2])
        if found is None or kinds is None:
            return None
        if isinstance(kinds, str):
            return KINDS.get(kinds)
        index = int(found[1])
        return KINDS.get(kinds[index]) if index < len(kinds) else None

    return find


def blocks(stored: Stored) -> tuple[Raw, ...]:
    """The bytes of whole rows."""
    block = LARGE_BLOCK if stored.layout.endswith("_K") else BLOCK
    width = Dim("columns", BLOCK_BYTES[stored.layout], block, step=block)
    return (Raw(BLOCKS, (ROWS, width), ("U8",)),)
