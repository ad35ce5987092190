"""What do matrices take that are kept as a checkpoint stores them? Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.architectures.spec import LayerSpec
from ridgeline.architectures.stored import Stored

TOGETHER = {"gate_up": ("gate", "up"), "qkv": ("q", "k", "v")}  # products of several matrices


def kept_bytes(
    layer: LayerSpec, role: str, rows: int, columns: int, dtype_bytes: int
) -> tuple[int, int]:
    """Of one matrix of a layer: bytes of its numbers, and of what stands beside them. `role` may be
    gate_up, with the rows of both."""
    roles = TOGETHER.get(role, (role,))
    each = [_kept(layer.stored_as(one), rows // len(roles), columns, dtype_bytes) for one in roles]
    return sum(numbers for numbers, _ in each), sum(beside for _, beside in each)


def _kept(stored: Stored | None, rows: int, columns: int, dtype_bytes: int) -> tuple[int, int]:
    bits = None if stored is None else stored.kept_bits
    if stored is None or bits is None:
        return rows * columns * dtype_bytes, 0
    return rows * -(-columns * bits // 8), stored.beside_bytes(rows, columns)


def nearest_format(layer: LayerSpec, role: str) -> str:
    """The weight format of ours whose kernels do most nearly what is done for such a product."""
    for stored in _stored(layer, role):
        if stored.keeps == "codes":
            return f"int{stored.kept_bits}"
        if stored.keeps:
            return "fp8" if stored.keeps == "e4m3" else "fp8-block"
    return "plain"


def _stored(layer: LayerSpec, role: str) -> Iterator[Stored]:
    for one in TOGETHER.get(role, (role,)):
        stored = layer.stored_as(one)
        if stored is not None:
            yield stored
