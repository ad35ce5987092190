"""What do configs of GPTQ, AWQ, bitsandbytes, fp8 and GGUF say about each matrix, and which tensors
does it have? One section for each method, in the order of `stored.CHECKPOINT_FORMATS`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.quantization_scheme import (
    COLUMNS,
    FLOATS,
    ROWS,
    Dim,
    Raw,
    Scheme,
    groups,
    kept_e4m3,
    scale_dtypes,
)
from ridgeline.architectures.scheme_compressed_tensors import MAX_GROUP, WORD_BITS, read_block
from ridgeline.architectures.scheme_match import (
    PATTERN,
    Find,
    check_pattern,
    is_kept_out,
    matches,
    names_of,
)


def _in_layers(own: Scheme, kept_out: tuple[str, ...], *, anywhere: bool = False) -> Find:
    """All matrices of layers but those that `kept_out` names; `anywhere`: as a part of a name."""

    def find(module: str) -> Scheme | None:
        if not module.startswith("model.layers.") or is_kept_out(module, kept_out):
            return None
        return None if anywhere and any(word in module for word in kept_out) else own

    return find


# ------------------------------------------------------------------------ GPTQ
# As AutoGPTQ and gptqmodel write them: codes lie down the columns' dimension, 32 bits in a word;
# "gptq" (v1) stores each zero less 1, "gptq_v2" as it is.

GPTQ_BITS = (2, 3, 4, 8)
GPTQ_LAYOUTS = ("gptq", "gptq_v2")
SKIPPED, CHANGED = "-:", "+:"


def gptq_config(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    layout = section.text("checkpoint_format", default="gptq")
    if section.flag("is_marlin_format", default=False) or layout not in GPTQ_LAYOUTS:
        raise section.fail("checkpoint_format", f"is {layout[:40]!r}; read are gptq and gptq_v2")
    words = section.text("pack_dtype", default="int32").removeprefix("torch.")
    if words != "int32":
        raise section.fail("pack_dtype", f"is {words[:40]!r}; read is int32")
    own = _change(section, Scheme(layout, 4, scale_dtype=scale_dtype, has_zero=True))
    rules = _rules(section, own)
    return _GptqModules(
        own, rules, names_of(section, "modules_to_not_convert"), _inside(section)
    ).find


@dataclass(frozen=True, slots=True)
class _GptqModules:
    """`rules`: pattern -> how, None: not at all. `inside`: endings of the modules that are
    quantized, None: all. The output matrix is one if a rule or `lm_head` says so."""

    own: Scheme
    rules: Mapping[str, Scheme | None]
    kept_out: tuple[str, ...]
    inside: tuple[str, ...] | None

    def find(self, module: str) -> Scheme | None:
        for pattern, scheme in self.rules.items():
            if matches(PATTERN + pattern, module):
                return scheme
        if is_kept_out(module, self.kept_out) or not module.startswith("model.layers."):
            return None
        if self.inside is not None and not module.endswith(self.inside):
            return None
        return self.own


def _change(section: ConfigReader, scheme: Scheme) -> Scheme:
    """The same with what this object says otherwise."""
    bits = section.integer("bits", high=8, default=scheme.bits)
    if bits not in GPTQ_BITS:
        raise section.fail("bits", f"is {bits}; read are {', '.join(map(str, GPTQ_BITS))}")
    size = section.integer("group_size", low=-1, high=MAX_GROUP, default=scheme.group or -1)
    act_order = section.flag("desc_act", default=scheme.act_order)
    symmetric = section.flag("sym", default=not scheme.has_zero)
    return replace(
        scheme,
        bits=bits,
        group=max(0, size),
        has_zero=not symmetric,
        act_order=act_order and size > 0,
    )


def _rules(section: ConfigReader, own: Scheme) -> dict[str, Scheme | None]:
    """gptqmodel's `dynamic`: a pattern with what is different there, "-:" before it: plain."""
    found: dict[str, Scheme | None] = {}
    if section.flag("lm_head", default=False):
        found[r"lm_head$"] = own
    dynamic = section.section("dynamic")
    for key in () if dynamic is None else dynamic.values:
        if dynamic is None:
            break
        pattern = key.removeprefix(SKIPPED).removeprefix(CHANGED)
        check_pattern(section, "dynamic", pattern)
        change = dynamic.section(key)
        scheme = own if change is None else _change(change, own)
        found[pattern] = None if key.startswith(SKIPPED) else scheme
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


def gptq_tensors(scheme: Scheme) -> tuple[Raw, ...]:
    """`g_idx` is there in all files; where nothing was ordered it says so."""
    return (
        Raw("qweight", (Dim("columns", scheme.bits, WORD_BITS), ROWS), ("I32",)),
        Raw("qzeros", (groups(scheme), Dim("rows", scheme.bits, WORD_BITS)), ("I32",)),
        Raw("scales", (groups(scheme), ROWS), scale_dtypes(scheme)),
        Raw("g_idx", (COLUMNS,), ("I32",), is_optional=not scheme.act_order),
    )


# ------------------------------------------------------------------------ AWQ
# The "gemm" version of AutoAWQ: 4 bits, eight rows in a word in an order of its own.

AWQ_ROWS_A_WORD = 8
AWQ_ZEROS = "qzeros"
AWQ_MIDDLE = 0x88888888 - (1 << 32)  # a word of them, if all are the middle of the range


def awq_config(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    version = section.text("version", default="gemm").lower()
    if version != "gemm":
        raise section.fail("version", f"is {version[:40]!r}; read is gemm")
    bits = section.integer("bits", high=8, default=4)
    if bits != 4:
        raise section.fail("bits", f"is {bits}; AWQ is read with 4")
    size = section.integer("group_size", low=-1, high=MAX_GROUP, default=128)
    has_zero = section.flag("zero_point", default=True)
    own = Scheme("awq", 4, max(0, size), has_zero, scale_dtype)
    section.refuse("dynamic", {})
    kept_out = names_of(section, "modules_to_not_convert")

    # AutoAWQ leaves out every module whose name has one of the words in it.
    return _in_layers(own, kept_out, anywhere=True)


def awq_tensors(scheme: Scheme) -> tuple[Raw, ...]:
    """gptqmodel writes `qzeros` where there are no zeros too: the middle of the codes."""
    eighth, is_read = Dim("rows", 1, AWQ_ROWS_A_WORD), scheme.has_zero
    return (
        Raw("qweight", (COLUMNS, eighth), ("I32",)),
        Raw(
            AWQ_ZEROS, (groups(scheme), eighth), ("I32",), is_read=is_read, is_optional=not is_read
        ),
        Raw("scales", (groups(scheme), ROWS), scale_dtypes(scheme)),
    )


# ------------------------------------------------------------------------ fp8
# Numbers are e4m3, to be multiplied by one scale: fine-grained (DeepSeek, Qwen) one for a block of
# rows and columns, as AutoFP8 writes them one for the matrix.


def fp8_config(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    form = section.text("fmt", default="e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise section.fail("fmt", f"is {form[:40]!r}; read is e4m3")
    scheme = section.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise section.fail("activation_scheme", f"is {scheme[:40]!r}; read are dynamic, static")
    # Of DeepSeek-V3.1: scales are powers of two, in float32, and those of inputs should be.
    section.refuse("scale_fmt", "float", "ue8m0")
    section.refuse("kv_cache_scheme", {})
    own = (
        _fp8_blocks(section, scale_dtype)
        if section.has("weight_block_size")
        else _fp8_whole(scale_dtype)
    )
    kept_out = names_of(section, "modules_to_not_convert") + names_of(section, "ignored_layers")
    return _in_layers(own, kept_out)


def _fp8_blocks(section: ConfigReader, scale_dtype: str) -> Scheme:
    rows, columns = read_block(section, "weight_block_size")
    return Scheme(
        "fp8",
        8,
        group=columns,
        block_rows=rows,
        scale_dtype=scale_dtype,
        keeps=kept_e4m3(columns, rows),
        inputs=f"e4m3, {columns} at a time",
    )


def _fp8_whole(scale_dtype: str) -> Scheme:
    return Scheme(
        "fp8-whole", 8, scale_dtype=scale_dtype, is_whole=True, keeps="e4m3", inputs="e4m3"
    )


def fp8_tensors(scheme: Scheme) -> tuple[Raw, ...]:
    """The one scale of a whole matrix is a tensor without dimensions."""
    codes = Raw("weight", (ROWS, COLUMNS), ("F8_E4M3",))
    if scheme.is_whole:
        rounds_inputs = Raw("input_scale", (), tuple(FLOATS), is_read=False, is_optional=True)
        return codes, Raw("weight_scale", (), scale_dtypes(scheme)), rounds_inputs
    blocks = Dim("rows", 1, scheme.block_rows), groups(scheme)
    return codes, Raw("weight_scale_inv", blocks, scale_dtypes(scheme))


# ------------------------------------------------------------------------ bitsandbytes
# Of 4 bits: two weights in a byte, each the place of a number in a map of 16, for 64 weights one
# factor, which with double quantization is a byte itself. Of 8 bits: signed bytes and a factor for
# each row. Both are unpacked when they are read.

BNB_BLOCK, BNB_NESTED = 64, 256  # weights, and factors, that share a factor
BNB_STATE = "weight.quant_state.bitsandbytes__"
BNB_KINDS = ("nf4", "fp4")


def bitsandbytes_config(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    if section.flag("load_in_4bit", default=False):
        own = _four_bits(section)
    elif section.flag("load_in_8bit", default=False):
        own = Scheme("llm-int8", 8, scale_dtype="float32", keeps="")
    else:
        raise section.fail("load_in_4bit", "is false, and load_in_8bit is too")
    kept_out = names_of(section, "llm_int8_skip_modules")
    return _in_layers(own, kept_out)


def _four_bits(section: ConfigReader) -> Scheme:
    kind = section.text("bnb_4bit_quant_type", default="fp4")
    if kind not in BNB_KINDS:
        raise section.fail(
            "bnb_4bit_quant_type", f"is {kind[:40]!r}; read are {', '.join(BNB_KINDS)}"
        )
    storage = section.text("bnb_4bit_quant_storage", default="uint8").removeprefix("torch.")
    if storage != "uint8":
        raise section.fail("bnb_4bit_quant_storage", f"is {storage[:40]!r}; read is uint8")
    is_double = section.flag("bnb_4bit_use_double_quant", default=False)
    return Scheme(
        kind, 4, BNB_BLOCK, has_zero=False, scale_dtype="float32", is_nested=is_double, keeps=""
    )


def bitsandbytes_tensors(scheme: Scheme) -> tuple[Raw, ...]:
    if scheme.layout not in BNB_KINDS:
        return (
            Raw("weight", (ROWS, COLUMNS), ("I8",)),
            Raw("SCB", (ROWS,), ("F32",)),
            Raw("weight_format", (), ("U8",), is_read=False, is_optional=True),
        )
    factors = Dim("weights", 1, BNB_BLOCK)
    nested = (
        Raw("weight.absmax", (factors,), ("U8",)),
        Raw("weight.nested_absmax", (Dim("weights", 1, BNB_BLOCK * BNB_NESTED),), ("F32",)),
        Raw("weight.nested_quant_map", (Dim(times=256),), ("F32",)),
    )
    return (
        Raw("weight", (Dim("weights", 1, 2), Dim()), ("U8",)),
        *(nested if scheme.is_nested else (Raw("weight.absmax", (factors,), ("F32",)),)),
        Raw("weight.quant_map", (Dim(times=16),), ("F32",)),
        Raw(BNB_STATE + scheme.layout, (), ("U8",), is_any=True),
    )


# ------------------------------------------------------------------------ GGUF
# Packed are kept matrices whose blocks are codes and their scales. What stands for a
# quantization_config is written by the reader of the file: the type of each role's matrix, one for
# all layers or a list; all experts of a layer are of one. Other types are unpacked when they are
# read: Q4_1, Q5_1, Q2_K, Q4_K and Q5_K have minima too, MXFP4 has no integers.

GGUF = "gguf"
GGUF_BLOCKS = "blocks"  # what the names of their bytes end in
GGUF_BLOCK, GGUF_LARGE_BLOCK = 32, 256  # numbers
GGUF_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q5_0": 22, "Q3_K": 110, "Q6_K": 210}
GGUF_KINDS: Mapping[str, Scheme] = {
    "Q8_0": Scheme("Q8_0", 8, GGUF_BLOCK, scale_dtype="float16"),
    "Q4_0": Scheme("Q4_0", 4, GGUF_BLOCK, scale_dtype="float16"),
    "Q5_0": Scheme("Q5_0", 5, GGUF_BLOCK, scale_dtype="float16"),
    # A scale is a product of a float16 and a small integer.
    "Q3_K": Scheme("Q3_K", 3, 16, scale_dtype="float32"),
    "Q6_K": Scheme("Q6_K", 6, 16, scale_dtype="float32"),
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def gguf_described(types: Mapping[str, str]) -> dict[str, object] | None:
    """What takes the place of a quantization_config, of name of matrix -> type; None: nothing is
    kept packed."""
    by_place: dict[str, dict[int, str]] = {}
    for name, kind in types.items():
        found = _LAYER.fullmatch(name.removesuffix(".weight"))
        if found is not None and name.endswith(".weight"):
            by_place.setdefault(_place(found[2]), {})[int(found[1])] = kind
    if not any(kind in GGUF_KINDS for kinds in by_place.values() for kind in kinds.values()):
        return None
    return {"quant_method": GGUF, "types": {k: _short(v) for k, v in by_place.items()}}


def _short(kinds: Mapping[int, str]) -> str | list[str]:
    """By the number of the layer, "" of one without."""
    every = [kinds.get(index, "") for index in range(max(kinds) + 1)]
    return next(iter(kinds.values())) if len(set(kinds.values())) == 1 else every


def _place(module: str) -> str:
    return _EXPERT.sub(".experts.", module)


def gguf_config(section: ConfigReader, scale_dtype: str) -> Find:
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

    def find(module: str) -> Scheme | None:
        found = _LAYER.fullmatch(module)
        kinds = None if found is None else listed.get(_place(found[2]))
        if found is None or kinds is None:
            return None
        if isinstance(kinds, str):
            return GGUF_KINDS.get(kinds)
        index = int(found[1])
        return GGUF_KINDS.get(kinds[index]) if index < len(kinds) else None

    return find


def gguf_tensors(scheme: Scheme) -> tuple[Raw, ...]:
    """The bytes of whole rows."""
    block = GGUF_LARGE_BLOCK if scheme.layout.endswith("_K") else GGUF_BLOCK
    width = Dim("columns", GGUF_BLOCK_BYTES[scheme.layout], block, step=block)
    return (Raw(GGUF_BLOCKS, (ROWS, width), ("U8",)),)
