"""What does a compressed-tensors config say about each matrix, and which tensors does it have?

As version 0.20 of that package writes it; formats pack-quantized, int-quantized, float-quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.quantization_scheme import (
    COLUMNS,
    ONE,
    ROWS,
    ZERO,
    Dim,
    Raw,
    Scheme,
    groups,
    kept_e4m3,
    scale_dtypes,
)
from ridgeline.architectures.scheme_match import Find, matches, names_of

WORD_BITS = 32
FORMATS = ("pack-quantized", "int-quantized", "float-quantized")
NAIVE = {"int": "int-quantized", "float": "float-quantized"}
LINEAR = "Linear"
WRITTEN = ("compressed", "frozen")  # older versions called a checkpoint that is written frozen
MAX_GROUP = 1 << 16
# Orders of columns in which groups were made, but in which nothing is stored.
STATIC_ORDERS = ("weight", "static")
BY_GROUP = ("group", "dynamic")


def compressed_tensors_config(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    section.refuse("kv_cache_scheme", {})
    section.refuse("transform_config", {})
    section.refuse("moe_sparsity_config", {})
    sparse = section.section("sparsity_config")
    if sparse is not None:
        sparse.refuse("format", "dense")
    status = section.text("quantization_status", default="compressed")
    if status not in WRITTEN:
        reason = f"is {status[:40]!r}; read are {', '.join(WRITTEN)}"
        raise section.fail("quantization_status", reason)
    listed = section.section("config_groups")
    if listed is None:
        raise section.fail("config_groups", "is missing (an object of groups)")
    own = section.text("format", default="pack-quantized")
    targets: dict[str, Scheme] = {}
    for name in listed.values:
        group = listed.section(name)
        if group is None:
            raise listed.fail(name, "is empty")
        scheme = _stored(group, own, scale_dtype)
        targets |= dict.fromkeys(names_of(group, "targets"), scheme)
    ignored = names_of(section, "ignore")
    return _Targets(targets, ignored).find


@dataclass(frozen=True, slots=True)
class _Targets:
    """An exact name beats a pattern, a pattern the class of the module."""

    scheme: Mapping[str, Scheme]
    ignored: Sequence[str]

    def find(self, module: str) -> Scheme | None:
        if any(ignored == LINEAR or matches(ignored, module) for ignored in self.ignored):
            return None
        own = sorted(self.scheme, key=lambda target: ("re:" in target, target))
        for target in own:
            if matches(target, module):
                return self.scheme[target]
        return self.scheme.get(LINEAR)


def _stored(group: ConfigReader, own_format: str, scale_dtype: str) -> Scheme:
    group.refuse("output_activations", {})
    weights = group.section("weights")
    if weights is None:
        raise group.fail("weights", "is missing; only checkpoints with quantized weights are read")
    weights.refuse("dynamic", False)
    kind = weights.text("type", default="int")
    layout = _layout(group, own_format, kind)
    strategy = weights.text("strategy", default=_own_strategy(weights))
    bits = weights.integer("num_bits", high=8, default=8)
    symmetric = weights.flag("symmetric", default=True)
    if layout == "int-quantized" and kind == "int":
        bits = 8  # a byte is kept as it is
    if layout == "float-quantized":
        if bits != 8 or kind != "float" or not symmetric:
            raise weights.fail("num_bits", "must be 8, symmetric and of type float in this format")
    elif kind != "int" or bits < 2:
        raise weights.fail("type", f"is {kind[:40]!r} with {bits} bits; read are int of 2 to 8")
    if strategy == "tensor" and not symmetric:
        raise weights.fail("symmetric", "is false, which is not supported with one scale for all")
    size, block_rows = _shared(weights, strategy, layout)
    return Scheme(
        layout,
        bits,
        group=size,
        has_zero=not symmetric,
        scale_dtype=scale_dtype,
        act_order=_act_order(weights, strategy),
        block_rows=block_rows,
        is_whole=strategy == "tensor",
        keeps=_keeps(layout, size, block_rows),
        inputs=_inputs(group),
    )


def _own_strategy(weights: ConfigReader) -> str:
    """What the package takes a missing one for."""
    size = weights.values.get("group_size")
    if not isinstance(size, int):
        return "tensor"
    return "group" if size > 0 else "channel"


def _layout(group: ConfigReader, own_format: str, kind: str) -> str:
    name = group.text("format", default=own_format)
    if name == "naive-quantized":
        name = NAIVE.get(kind, name)
    if name not in FORMATS:
        raise group.fail("format", f"is {name[:40]!r}; read are {', '.join(FORMATS)}")
    return name


def _shared(weights: ConfigReader, strategy: str, layout: str) -> tuple[int, int]:
    """Columns and rows that share a scale; 0: all columns, one row."""
    if strategy in ("channel", "tensor"):
        return 0, 0
    if strategy == "group":
        return weights.integer("group_size", high=MAX_GROUP), 0
    if strategy == "block" and layout == "float-quantized":
        rows, columns = read_block(weights, "block_structure")
        return columns, rows
    known = "group, channel, tensor" + (", block" if layout == "float-quantized" else "")
    raise weights.fail("strategy", f"is {strategy[:40]!r}; read are {known} in {layout}")


def read_block(section: ConfigReader, key: str) -> tuple[int, int]:
    """[rows, columns] of a block."""
    value = section.values.get(key)
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or len(value) != 2
        or not all(type(one) is int and 0 < one <= MAX_GROUP for one in value)
    ):
        raise section.fail(key, "must be two positive integers, rows and columns of a block")
    return value[0], value[1]


def _act_order(weights: ConfigReader, strategy: str) -> bool:
    value = weights.values.get("actorder")
    if value in (None, False, *STATIC_ORDERS):
        return False
    if value not in BY_GROUP or strategy != "group":
        raise weights.fail("actorder", f"is {repr(value)[:60]}, which is not supported here")
    return True


def _keeps(layout: str, group: int, block_rows: int) -> str:
    return "codes" if layout != "float-quantized" else kept_e4m3(group, block_rows)


def _inputs(group: ConfigReader) -> str:
    given = group.section("input_activations")
    if given is None:
        return ""
    bits, kind = given.integer("num_bits", high=16, default=8), given.text("type", default="int")
    return f"{kind} of {bits} bits"


# ------------------------------------------------------------------------ tensors


def _scale(scheme: Scheme) -> Raw:
    if scheme.is_whole:
        dims: tuple[Dim, ...] = (ONE,)
    elif scheme.block_rows:
        dims = (Dim("rows", 1, scheme.block_rows), groups(scheme))
    else:
        dims = (ROWS, groups(scheme))
    return Raw("weight_scale", dims, scale_dtypes(scheme))


def _beside(scheme: Scheme) -> tuple[Raw, ...]:
    """What says how inputs are rounded: nothing that is used here."""
    if not scheme.inputs:
        return ()
    floats = ("F32", "F16", "BF16")
    return (
        Raw("input_scale", (ONE,), floats, is_read=False, is_optional=True),
        Raw("input_zero_point", (ONE,), ("I8", *floats), is_read=False, is_optional=True),
    )


def _no_zero(scheme: Scheme) -> Raw:
    """Older versions write zeros of 0 for symmetric codes."""
    dims = (ONE,) if scheme.is_whole else (ROWS, groups(scheme))
    dtypes = ("I8", "I32", "F8_E4M3", "F32", "F16", "BF16")
    return Raw(ZERO, dims, dtypes, is_read=False, is_optional=True)


def compressed_tensors(scheme: Scheme) -> tuple[Raw, ...]:
    """All tensors of a matrix of one of FORMATS."""
    return {"pack-quantized": _packed, "int-quantized": _integers, "float-quantized": _floats}[
        scheme.layout
    ](scheme)


def _packed(scheme: Scheme) -> tuple[Raw, ...]:
    """Codes one behind the other in words of 32 bits."""
    found = [
        Raw("weight_packed", (ROWS, Dim("columns", scheme.bits, WORD_BITS)), ("I32",)),
        _scale(scheme),
        Raw("weight_shape", (Dim(times=2),), ("I64", "I32"), is_read=False),
    ]
    if scheme.has_zero:
        dims = Dim("rows", scheme.bits, WORD_BITS), groups(scheme)
        found.append(Raw(ZERO, dims, ("I32",)))
    if scheme.act_order:
        found.append(Raw("weight_g_idx", (COLUMNS,), ("I32", "I64")))
    return (*found, *_beside(scheme))


def _integers(scheme: Scheme) -> tuple[Raw, ...]:
    """A byte for each code."""
    found = [Raw("weight", (ROWS, COLUMNS), ("I8",)), _scale(scheme)]
    zero = Raw(ZERO, (ROWS, groups(scheme)), ("I8",))
    found.append(zero if scheme.has_zero else _no_zero(scheme))
    if scheme.act_order:
        found.append(Raw("weight_g_idx", (COLUMNS,), ("I32", "I64")))
    return (*found, *_beside(scheme))


def _floats(scheme: Scheme) -> tuple[Raw, ...]:
    """An e4m3 number for each weight."""
    codes = Raw("weight", (ROWS, COLUMNS), ("F8_E4M3",))
    beside = () if scheme.block_rows else (_no_zero(scheme),)
    return (codes, _scale(scheme), *beside, *_beside(scheme))
