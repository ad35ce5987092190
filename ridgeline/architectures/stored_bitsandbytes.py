"""What does a bitsandbytes config say about each matrix, and which tensors does it have?

Of 4 bits: two weights in a byte, each the place of a number in a map of 16, for 64 weights one
factor, which with double quantization is a byte itself. Of 8 bits: signed bytes and a factor for
each row. Both are unpacked when they are read.
"""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.stored import COLUMNS, ROWS, Dim, Raw, Stored
from ridgeline.architectures.stored_match import Find, is_kept_out, names_of

BLOCK, NESTED = 64, 256  # weights, and factors, that share a factor
STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")


def read(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    if section.flag("load_in_4bit", default=False):
        own = _four_bits(section)
    elif section.flag("load_in_8bit", default=False):
        own = Stored("llm-int8", 8, scale_dtype="float32", keeps="")
    else:
        raise section.fail("load_in_4bit", "is false, and load_in_8bit is too")
    kept_out = names_of(section, "llm_int8_skip_modules")

    def find(module: str) -> Stored | None:
        inside = module.startswith("model.layers.")
        return own if inside and not is_kept_out(module, kept_out) else None

    return find


def _four_bits(section: ConfigReader) -> Stored:
    kind = section.text("bnb_4bit_quant_type", default="fp4")
    if kind not in KINDS:
        raise section.fail("bnb_4bit_quant_type", f"is {kind[:40]!r}; read are {', '.join(KINDS)}")
    storage = section.text("bnb_4bit_quant_storage", default="uint8").removeprefix("torch.")
    if storage != "uint8":
        raise section.fail("bnb_4bit_quant_storage", f"is {storage[:40]!r}; read is uint8")
    is_double = section.flag("bnb_4bit_use_double_quant", default=False)
    return Stored(
        kind, 4, BLOCK, has_zero=False, scale_dtype="float32", is_nested=is_double, keeps=""
    )


def four_bits(stored: Stored) -> tuple[Raw, ...]:
    factors = Dim("weights", 1, BLOCK)
    nested = (
        Raw("weight.absmax", (factors,), ("U8",)),
        Raw("weight.nested_absmax", (Dim("weights", 1, BLOCK * NESTED),), ("F32",)),
        Raw("weight.nested_quant_map", (Dim(times=256),), ("F32",)),
    )
    return (
        Raw("weight", (Dim("weights", 1, 2), Dim()), ("U8",)),
        *(nested if stored.is_nested else (Raw("weight.absmax", (factors,), ("F32",)),)),
        Raw("weight.quant_map", (Dim(times=16),), ("F32",)),
        Raw(STATE + stored.layout, (), ("U8",), is_any=True),
    )


def eight_bits(stored: Stored) -> tuple[Raw, ...]:
    return (
        Raw("weight", (ROWS, COLUMNS), ("I8",)),
        Raw("SCB", (ROWS,), ("F32",)),
        Raw("weight_format", (), ("U8",), is_read=False, is_optional=True),
    )
