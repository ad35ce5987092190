"""In which tensors does a checkpoint store a matrix that somebody quantized? Vocabulary, pure.

Letters: rows are outputs, columns inputs; a group is a few neighbours of a row that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd, lcm

from ridgeline.errors import check
from ridgeline.registry import opened


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How checkpoints of one `quant_method` are read, each part a "module:function".

    `config`: (its section of config.json, dtype of the scales) -> `scheme_match.Find`, which says
    of each module how its matrix is stored. `tensors`: (Scheme) -> the tensors that make it up, as
    `Raw`. `matrix`: (Scheme, tensors, outputs, inputs) -> what they mean, one of
    `quantization.readers.Read`; the only part that needs torch. `layouts`: all that a Scheme of it
    may have. `scale_dtype`: that of the scales where the files do not say; empty: the model's.
    """

    config: str
    tensors: str
    matrix: str
    layouts: tuple[str, ...]
    scale_dtype: str = ""


_OURS = "ridgeline.architectures.scheme_methods"
_READERS = "ridgeline.quantization.readers"
# By the quant_method of a config.json. Another format is a line of it and a file for its functions.
CHECKPOINT_FORMATS: dict[str, CheckpointFormat] = {
    "compressed-tensors": CheckpointFormat(
        "ridgeline.architectures.scheme_compressed_tensors:compressed_tensors_config",
        "ridgeline.architectures.scheme_compressed_tensors:compressed_tensors",
        f"{_READERS}:compressed_tensors",
        ("pack-quantized", "int-quantized", "float-quantized"),
    ),
    "gptq": CheckpointFormat(
        f"{_OURS}:gptq_config",
        f"{_OURS}:gptq_tensors",
        f"{_READERS}:gptq",
        ("gptq", "gptq_v2"),
        "float16",
    ),
    "awq": CheckpointFormat(
        f"{_OURS}:awq_config", f"{_OURS}:awq_tensors", f"{_READERS}:awq", ("awq",), "float16"
    ),
    "fp8": CheckpointFormat(
        f"{_OURS}:fp8_config",
        f"{_OURS}:fp8_tensors",
        f"{_READERS}:fp8",
        ("fp8", "fp8-whole"),
        "float32",
    ),
    "bitsandbytes": CheckpointFormat(
        f"{_OURS}:bitsandbytes_config",
        f"{_OURS}:bitsandbytes_tensors",
        f"{_READERS}:bitsandbytes",
        ("nf4", "fp4", "llm-int8"),
    ),
    "gguf": CheckpointFormat(
        f"{_OURS}:gguf_config",
        f"{_OURS}:gguf_tensors",
        "ridgeline.quantization.gguf_blocks:read",
        ("Q8_0", "Q4_0", "Q5_0", "Q3_K", "Q6_K"),
        "float16",
    ),
}
WEIGHT = "weight"  # what the names of matrices end in
ZERO = "weight_zero_point"
E4M3_BLOCK = 128  # rows and columns of the blocks of e4m3 that are kept
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors -> ours
SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
E4M3_SCALE_BYTES = 4  # they become float32
ORDER_BYTES = 4  # of a column's place


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix is stored, and what is kept of it.

    A weight is (code - zero) * scale: codes of `bits`, a scale for each `group` columns of a row
    (0: all of them) or for `block_rows` x `group` weights, or one for the matrix (`is_whole`), in
    a format of its own (`is_nested`).
    `keeps` is "codes" (integers of 4 or 8 bits), "e4m3" (rows of fp8), "blocks" (of fp8) or ""
    (nothing: it becomes numbers of the serving dtype when it is read). With `act_order` the
    checkpoint says for each column which group it belongs to. `inputs`: how the checkpoint wants
    inputs to be rounded, in words; empty: not at all.
    """

    layout: str
    bits: int
    group: int = 0
    has_zero: bool = False
    scale_dtype: str = "bfloat16"
    act_order: bool = False
    block_rows: int = 0
    is_whole: bool = False
    is_nested: bool = False
    keeps: str = "codes"
    inputs: str = ""

    @property
    def kept_bits(self) -> int | None:
        """Bits of a code as it is kept; None where nothing is."""
        if self.keeps == "codes":
            return 4 if self.bits <= 4 else 8
        return 8 if self.keeps else None

    def beside_bytes(self, rows: int, columns: int) -> int:
        """Of the scales, zeros and the order of columns that are kept beside the codes."""
        if self.keeps == "codes":
            groups = -(-columns // self.group) if self.group else 1
            one = SCALE_BYTES[self.scale_dtype] + (1 if self.has_zero else 0)
            return rows * groups * one + (ORDER_BYTES * columns if self.act_order else 0)
        if self.keeps == "blocks":
            return -(-rows // self.block_rows) * -(-columns // self.group) * E4M3_SCALE_BYTES
        return rows * E4M3_SCALE_BYTES if self.keeps else 0

    @property
    def text(self) -> str:
        """For people: "gptq, 4 bits, groups of 128, zeros"."""
        if self.block_rows:
            shared = f"blocks of {self.block_rows} x {self.group}"
        elif self.is_whole:
            shared = "one scale"
        else:
            shared = f"groups of {self.group}" if self.group else "a scale for each row"
        more = [*(["zeros"] if self.has_zero else []), *(["act-order"] if self.act_order else [])]
        return ", ".join([self.layout, f"{self.bits} bits", shared, *more])


@dataclass(frozen=True, slots=True)
class Dim:
    """`times` / `over` entries, rounded up, for each of the matrix's `of` ("rows", "columns", or
    "weights", which is all of them); without them `times` entries. It can be cut at multiples of
    `step` of them."""

    of: str = ""
    times: int = 1
    over: int = 1
    step: int = 1

    def size(self, rows: int, columns: int) -> int:
        if not self.of:
            return self.times
        count = {"rows": rows, "columns": columns}.get(self.of, rows * columns)
        return -(-count * self.times // self.over)

    def divides(self, index: int) -> bool:
        """An entry begins where row or column `index` does."""
        return index % self.step == 0 and index * self.times % self.over == 0

    def entry(self, index: int) -> int:
        return index * self.times // self.over


ROWS, COLUMNS, ONE = Dim("rows"), Dim("columns"), Dim()


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor of the checkpoint. `suffix` stands where the matrix's name has "weight"; `dtypes`
    are those it may have, as safetensors call them. What is not read is only compared; of `is_any`
    the shape is not, it is JSON."""

    suffix: str
    dims: tuple[Dim, ...]
    dtypes: tuple[str, ...]
    is_read: bool = True
    is_optional: bool = False
    is_any: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return tuple(dim.size(rows, columns) for dim in self.dims)

    def dim_of(self, what: str) -> int | None:
        """The dimension along which "rows" or "columns" lie; None: all of them share it."""
        found = [at for at, dim in enumerate(self.dims) if dim.of == what]
        return found[0] if found else None


@cache
def tensors_of(scheme: Scheme) -> tuple[Raw, ...]:
    """All tensors of one such matrix."""
    found: tuple[Raw, ...] = opened(format_of(scheme).tensors)(scheme)
    return found


@cache
def cut_steps(scheme: Scheme) -> tuple[int, int]:
    """Rows and columns at multiples of which a matrix, with all that stands beside it, can be cut:
    no word and no group is then in two parts."""
    needed = (raw for raw in tensors_of(scheme) if raw.is_read and not raw.is_optional)
    dims = [dim for raw in needed for dim in raw.dims]
    rows, columns = (
        lcm(*(lcm(dim.step, dim.over // gcd(dim.times, dim.over)) for dim in dims if dim.of == of))
        for of in ("rows", "columns")
    )
    return rows, columns


def format_of(scheme: Scheme) -> CheckpointFormat:
    """The line that has this layout."""
    found = [one for one in CHECKPOINT_FORMATS.values() if scheme.layout in one.layouts]
    check(len(found) == 1, "one checkpoint format has this layout", layout=scheme.layout)
    return found[0]


def groups(scheme: Scheme) -> Dim:
    """The dimension that counts the groups of a row."""
    return Dim("columns", 1, scheme.group) if scheme.group else ONE


def scale_dtypes(scheme: Scheme) -> tuple[str, ...]:
    """The dtypes that a scale may have in the file."""
    return tuple(name for name, own in FLOATS.items() if own == scheme.scale_dtype)


def raw_name(weight_name: str, raw: Raw) -> str:
    """What the checkpoint calls that tensor of the matrix `weight_name`."""
    check(weight_name.endswith(WEIGHT), "a matrix's name ends in weight", name=weight_name)
    return weight_name.removesuffix(WEIGHT) + raw.suffix


def kept_e4m3(group: int, block_rows: int) -> str:
    """What is kept of e4m3 numbers with a scale for `block_rows` x `group` of them."""
    if group == 0 and block_rows == 0:
        return "e4m3"
    return "blocks" if group == block_rows == E4M3_BLOCK else ""
