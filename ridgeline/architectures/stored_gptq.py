"""What does a GPTQ config say about each matrix, and which tensors does it have?

As AutoGPTQ and gptqmodel write them: codes lie down the columns' dimension, 32 bits in a word;
"gptq" (v1) stores each zero less 1, "gptq_v2" as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.stored import (
    COLUMNS,
    ROWS,
    Dim,
    Raw,
    Stored,
    groups,
    scale_words,
)
from ridgeline.architectures.stored_match import (
    PATTERN,
    Find,
    check_pattern,
    is_kept_out,
    matches,
    names_of,
)

WORD_BITS = 32
BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")
SKIPPED, CHANGED = "-:", "+:"
MAX_GROUP = 1 << 16


def read(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    layout = section.text("checkpoint_format", default="gptq")
    if section.flag("is_marlin_format", default=False) or layout not in FORMATS:
        raise section.fail("checkpoint_format", f"is {layout[:40]!r}; read are gptq and gptq_v2")
    words = section.text("pack_dtype", default="int32").removeprefix("torch.")
    if words != "int32":
        raise section.fail("pack_dtype", f"is {words[:40]!r}; read is int32")
    own = _change(section, Stored(layout, 4, scale_dtype=scale_dtype, has_zero=True))
    rules = _rules(section, own)
    return _Modules(own, rules, names_of(section, "modules_to_not_convert"), _inside(section)).find


@dataclass(frozen=True, slots=True)
class _Modules:
    """`rules`: pattern -> how, None: not at all. `inside`: endings of the modules that are
    quantized, None: all. The output matrix is one if a rule or `lm_head` says so."""

    own: Stored
    rules: Mapping[str, Stored | None]
    kept_out: tuple[str, ...]
    inside: tuple[str, ...] | None

    def find(self, module: str) -> Stored | None:
        for pattern, stored in self.rules.items():
            if matches(PATTERN + pattern, module):
                return stored
        if is_kept_out(module, self.kept_out) or not module.startswith("model.layers."):
            return None
        if self.inside is not None and not module.endswith(self.inside):
            return None
        return self.own


def _change(section: ConfigReader, stored: Stored) -> Stored:
    """The same with what this object says otherwise."""
    bits = section.integer("bits", high=8, default=stored.bits)
    if bits not in BITS:
        raise section.fail("bits", f"is {bits}; read are {', '.join(map(str, BITS))}")
    size = section.integer("group_size", low=-1, high=MAX_GROUP, default=stored.group or -1)
    act_order = section.flag("desc_act", default=stored.act_order)
    symmetric = section.flag("sym", default=not stored.has_zero)
    return replace(
        stored,
        bits=bits,
        group=max(0, size),
        has_zero=not symmetric,
        act_order=act_order and size > 0,
    )


def _rules(section: ConfigReader, own: Stored) -> dict[str, Stored | None]:
    """gptqmodel's `dynamic`: a pattern with what is different there, "-:" before it: plain."""
    found: dict[str, Stored | None] = {}
    if section.flag("lm_head", default=False):
        found[r"lm_head$"] = own
    dynamic = section.section("dynamic")
    for key in () if dynamic is None else dynamic.values:
        if dynamic is None:
            break
        pattern = key.removeprefix(SKIPPED).removeprefix(CHANGED)
        check_pattern(section, "dynamic", pattern)
        change = dynamic.section(key)
        stored = own if change is None else _change(change, own)
        found[pattern] = None if key.startswith(SKIPPED) else stored
    return found


def _inside(section: ConfigReader) -> tuple[str, ...] | None:
    """Of `modules_in_block_to_quantize`, lists of names within a layer."""
    value = section.values.get("modules_in_block_to_quantize")
    if value is None:
        return None
    lists = value if isinstance(value, list) else [value]
    flat = [name for one in lists for name in (one if isinstance(one, list) else [one])]
    if not all(isinstance(name, str) for name in flat):
        raise section.fail("modules_in_block_to_quantize", "must be lists of names")
    return tuple(f".{name}" for name in flat)


def tensors(stored: Stored) -> tuple[Raw, ...]:
    """`g_idx` is there in all files; where nothing was ordered it says so."""
    return (
        Raw("qweight", (Dim("columns", stored.bits, WORD_BITS), ROWS), ("I32",)),
        Raw("qzeros", (groups(stored), Dim("rows", stored.bits, WORD_BITS)), ("I32",)),
        Raw("scales", (groups(stored), ROWS), scale_words(stored)),
        Raw("g_idx", (COLUMNS,), ("I32",), is_optional=not stored.act_order),
    )
