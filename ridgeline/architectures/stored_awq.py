"""What does an AWQ config say about each matrix, and which tensors does it have?

The "gemm" version of AutoAWQ: 4 bits, eight rows in a word in an order of its own.
"""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.stored import COLUMNS, ROWS, Dim, Raw, Stored, groups, scale_words
from ridgeline.architectures.stored_match import Find, is_kept_out, names_of

ROWS_A_WORD = 8
ZEROS = "qzeros"
MIDDLE = 0x88888888 - (1 << 32)  # a word of them, if all are the middle of the range
MAX_GROUP = 1 << 16


def read(section: ConfigReader, scale_dtype: str) -> Find:
    """Module name -> how it is stored. ConfigError names the key that is not supported."""
    version = section.text("version", default="gemm").lower()
    if version != "gemm":
        raise section.fail("version", f"is {version[:40]!r}; read is gemm")
    bits = section.integer("bits", high=8, default=4)
    if bits != 4:
        raise section.fail("bits", f"is {bits}; AWQ is read with 4")
    size = section.integer("group_size", low=-1, high=MAX_GROUP, default=128)
    has_zero = section.flag("zero_point", default=True)
    own = Stored("awq", 4, max(0, size), has_zero, scale_dtype)
    section.refuse("dynamic", {})
    kept_out = names_of(section, "modules_to_not_convert")

    def find(module: str) -> Stored | None:
        inside = module.startswith("model.layers.")
        # AutoAWQ leaves out every module whose name has one of the words in it.
        named = is_kept_out(module, kept_out) or any(word in module for word in kept_out)
        return own if inside and not named else None

    return find


def tensors(stored: Stored) -> tuple[Raw, ...]:
    """gptqmodel writes `qzeros` where there are no zeros too: the middle of the codes."""
    eighth, is_read = Dim("rows", 1, ROWS_A_WORD), stored.has_zero
    return (
        Raw("qweight", (COLUMNS, eighth), ("I32",)),
        Raw(ZEROS, (groups(stored), eighth), ("I32",), is_read=is_read, is_optional=not is_read),
        Raw("scales", (groups(stored), ROWS), scale_words(stored)),
    )
