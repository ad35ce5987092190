"""What is a matrix of 4 or 8 bit integers? The word of this room for it; kernels know it too, so it
stands with them."""

from __future__ import annotations

from ridgeline.kernels.quantized_matrix import (
    QuantizedMatrix,
    join_bytes,
    joined,
    num_groups,
    outline,
    read_sizes,
    sizes_of,
    split_bytes,
)

__all__ = [
    "QuantizedMatrix",
    "join_bytes",
    "joined",
    "num_groups",
    "outline",
    "read_sizes",
    "sizes_of",
    "split_bytes",
]
