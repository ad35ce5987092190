"""Which part of a layer does each of several ranks hold? Pure arithmetic.

A share is a whole number of units: of query heads with their KV head, of columns that a kernel or
the groups of a weight format do not cut, of experts. Of U units rank r of n has those from
floor(r U / n) to floor((r + 1) U / n), so ranks differ by a unit at the most, and the last one has
as many as any. More ranks than KV heads: each has one, neighbours the same, and they divide the
query heads that ask it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from ridgeline.architectures.parts import Part
from ridgeline.architectures.quantization_scheme import cut_steps
from ridgeline.architectures.spec import LayerSpec
from ridgeline.formats import CHECKPOINT, weight_line

KERNEL_STEP = 16  # columns: products of 8 bits on a GPU take no fewer


@dataclass(frozen=True, slots=True)
class Shard:
    """`length` of a dimension's entries from `start` on."""

    start: int
    length: int

    def times(self, size: int) -> Shard:
        """Of entries that are `size` times as many."""
        return Shard(self.start * size, self.length * size)


def shard(total: int, rank: int, size: int, unit: int = 1) -> Shard:
    """The last unit may be short."""
    units = -(-total // unit)
    first, end = (min(total, at * units // size * unit) for at in (rank, rank + 1))
    return Shard(first, end - first)


def fullest(total: int, size: int, unit: int = 1) -> int:
    """The longest share of all ranks: the last one's, or another's where its last unit is short."""
    units = -(-total // unit)
    is_alone = size == 1 or units % size == 1  # the last rank has more units than the others
    return -(-units // size) * unit - (units * unit - total if is_alone else 0)


def fitting(total: int, size: int, unit: int) -> int:
    """`unit`, or so much less of it that there are as many units as ranks."""
    while -(-total // unit) < size and unit > 1:
        unit = unit // 2 if unit % 2 == 0 else 1
    return unit


def kv_shard(num_kv_heads: int, rank: int, size: int) -> Shard:
    if size <= num_kv_heads:
        return shard(num_kv_heads, rank, size)
    return Shard(rank * num_kv_heads // size, 1)


def query_shard(num_heads: int, num_kv_heads: int, rank: int, size: int, unit: int = 1) -> Shard:
    """The query heads that ask this rank's KV heads, or its part of those that ask its only one, a
    multiple of `unit` of them if there are so many."""
    group = num_heads // num_kv_heads
    own = kv_shard(num_kv_heads, rank, size)
    if size <= num_kv_heads:
        return own.times(group)
    first, end = (-(-at * size // num_kv_heads) for at in (own.start, own.start + 1))
    part = shard(group, rank - first, end - first, fitting(group, end - first, unit))
    return Shard(own.start * group + part.start, part.length)


def fullest_queries(num_heads: int, num_kv_heads: int, size: int, unit: int = 1) -> int:
    """The last KV head has the fewest ranks."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        return group * fullest(num_kv_heads, size)
    ranks = size // num_kv_heads
    return fullest(group, ranks, fitting(group, ranks, unit))


# ------------------------------------------------------------------------ units of a weight format


def head_unit(layer: LayerSpec, weight_format: str) -> int:
    """Query heads that the output matrix is cut at."""
    attention = layer.attention
    latent = attention.latent
    columns = attention.head_dim if latent is None else latent.v_head_dim
    rows = attention.head_dim if latent is None else latent.qk_head_dim
    first = "q" if latent is None or latent.q_lora_rank is None else "q_b"
    steps = _steps(layer, weight_format, first)[0], _steps(layer, weight_format, "o")[1]
    return lcm(
        *(step // gcd(step, size) for step, size in zip(steps, (rows, columns), strict=True))
    )


def inner_unit(layer: LayerSpec, weight_format: str, prefix: str = "") -> int:
    """Rows of gate and up, and columns of down, that they are cut at."""
    steps = [_steps(layer, weight_format, f"{prefix}{role}")[0] for role in ("gate", "up")]
    return lcm(KERNEL_STEP, *steps, _steps(layer, weight_format, f"{prefix}down")[1])


def _steps(layer: LayerSpec, weight_format: str, role: str) -> tuple[int, int]:
    """Rows and columns of this matrix that share scales, or words of the checkpoint."""
    if weight_format != CHECKPOINT:
        line = weight_line(weight_format)
        return line.group_rows, line.group or 1
    scheme = layer.scheme_of(role)
    return (1, 1) if scheme is None or not scheme.keeps else cut_steps(scheme)


# ------------------------------------------------------------------------ parameters


def own_share(part: Part, layer: LayerSpec, weight_format: str, rank: int, ranks: int) -> Shard:
    """What one of `ranks` holds of the dimension along which a parameter is split; of an expert,
    one of the ranks that divide it."""
    each, units = _each(part), part.units
    if part.heads == "query":
        unit = head_unit(layer, weight_format)
        return query_shard(units, _kv_heads(layer), rank, ranks, unit).times(each)
    if part.heads == "kv":
        return kv_shard(units, rank, ranks).times(each)
    return shard(units, rank, ranks, _fitting_unit(part, layer, weight_format, ranks))


def fullest_share(part: Part, layer: LayerSpec, weight_format: str, ranks: int) -> tuple[int, ...]:
    """The shape of the largest part of it that any rank holds."""
    if not part.split:
        return part.shape
    each, units = _each(part), part.units
    if part.heads == "query":
        unit = head_unit(layer, weight_format)
        own = each * fullest_queries(units, _kv_heads(layer), ranks, unit)
    elif part.heads == "kv":
        own = each * fullest(units, min(ranks, units))
    else:
        own = fullest(units, ranks, _fitting_unit(part, layer, weight_format, ranks))
    return (own, *part.shape[1:]) if part.split == "rows" else (part.shape[0], own)


def held_copies(part: Part, ranks: int, ep: int, dp: int = 1) -> tuple[int, int]:
    """Ranks that divide each copy of a parameter, and copies that the fullest of them has: of `dp`
    times as many ranks `ep` groups divide the experts."""
    if not part.is_experts:
        return ranks, part.copies
    return ranks * dp // ep, fullest(part.copies, ep)


def held_share(
    part: Part, layer: LayerSpec, weight_format: str, ranks: tuple[int, int, int], rank: int | None
) -> tuple[int, tuple[int, ...]]:
    """Copies of a parameter, and the shape of each, on one of the `dp` times `tp` ranks of a stage
    (None: on the fullest). `ranks` are tp, ep and dp."""
    tp, ep, dp = ranks
    own, copies = held_copies(part, tp, ep, dp)
    if rank is None or not part.split:
        shape = fullest_share(part, layer, weight_format, own)
    else:
        length = own_share(part, layer, weight_format, rank % own, own).length
        shape = (length, *part.shape[1:]) if part.split == "rows" else (part.shape[0], length)
    if rank is not None and part.is_experts:
        copies = expert_shard(part.copies, rank, ranks).length
    return copies, shape


def expert_shard(num_experts: int, rank: int, ranks: tuple[int, int, int]) -> Shard:
    """The experts of this rank's group."""
    tp, ep, dp = ranks
    return shard(num_experts, rank * ep // (tp * dp), ep)


def _each(part: Part) -> int:
    """Rows or columns of a unit."""
    return part.shape[1 if part.split == "columns" else 0] // part.units


def _fitting_unit(part: Part, layer: LayerSpec, weight_format: str, ranks: int) -> int:
    prefix = "shared_" if part.role.startswith("shared_") else ""
    return fitting(part.units, ranks, inner_unit(layer, weight_format, prefix))


def _kv_heads(layer: LayerSpec) -> int:
    attention = layer.attention
    return attention.num_heads if attention.latent is not None else attention.num_kv_heads
