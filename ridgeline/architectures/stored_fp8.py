"""What does a config of method fp8 say, and which tensors does a matrix have?

Numbers are e4m3, to be multiplied by one scale: fine-grained (DeepSeek, Qwen) one for a block of
rows and columns, as AutoFP8 writes them one for the matrix.
"""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.stored import (
    COLUMNS,
    ROWS,
    Dim,
    Raw,
    Stored,
    groups,
    kept_e4m3,
    scale_words,
)
from ridgeline.architectures.stored_compressed_tensors import read_block
from ridgeline.architectures.stored_match import Find, is_kept_out, names_of


def read(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    form = section.text("fmt", default="e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise section.fail("fmt", f"is {form[:40]!r}; read is e4m3")
    scheme = section.text("activation_scheme", default="dynamic")
    if scheme not in ("dynamic", "static"):
        raise section.fail("activation_scheme", f"is {scheme[:40]!r}; read are dynamic, static")
    section.refuse("scale_fmt", "float")
    section.refuse("kv_cache_scheme", {})
    own = _blocks(section, scale_dtype) if section.has("weight_block_size") else _whole(scale_dtype)
    kept_out = names_of(section, "modules_to_not_convert") + names_of(section, "ignored_layers")

    def find(module: str) -> Stored | None:
        inside = module.startswith("model.layers.")
        return own if inside and not is_kept_out(module, kept_out) else None

    return find


def _blocks(section: ConfigReader, scale_dtype: str) -> Stored:
    rows, columns = read_block(section, "weight_block_size")
    return Stored(
        "fp8",
        8,
        group=columns,
        block_rows=rows,
        scale_dtype=scale_dtype,
        keeps=kept_e4m3(columns, rows),
        inputs=f"e4m3, {columns} at a time",
    )


def _whole(scale_dtype: str) -> Stored:
    return Stored(
        "fp8-whole", 8, scale_dtype=scale_dtype, is_whole=True, keeps="e4m3", inputs="e4m3"
    )


def tensors(stored: Stored) -> tuple[Raw, ...]:
    blocks = Dim("rows", 1, stored.block_rows), groups(stored)
    return (
        Raw("weight", (ROWS, COLUMNS), ("F8_E4M3",)),
        Raw("weight_scale_inv", blocks, scale_words(stored)),
    )


def whole(stored: Stored) -> tuple[Raw, ...]:
    """Scales are tensors without dimensions."""
    return (
        Raw("weight", (ROWS, COLUMNS), ("F8_E4M3",)),
        Raw("weight_scale", (), scale_words(stored)),
        Raw("input_scale", (), ("F32", "F16", "BF16"), is_read=False, is_optional=True),
    )
