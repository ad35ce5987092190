"""How many bits does a weight or a cached token take, and which class does the work? Data only:
cost, planner and resolve read these lines without loading torch."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightFormatLine:
    """`bits` a weight, None for those of the serving dtype; `group` weights share scales of
    `scale_bytes` (group 0: no scales). `where` is "module:Class" of a WeightFormat."""

    where: str
    bits: int | None = None
    group: int = 0
    scale_bytes: int = 0

    def bits_per_weight(self, dtype_bytes: int) -> float:
        """Bits of one weight and its part of the scales, served in a dtype of `dtype_bytes`."""
        bits = dtype_bytes * 8 if self.bits is None else self.bits
        return bits + (8 * self.scale_bytes / self.group if self.group else 0.0)


@dataclass(frozen=True, slots=True)
class KVFormatLine:
    """`element_bits` of one K or V number, None for those of the serving dtype; `head_bytes` are
    added per token, KV head and side (scales). `where` is "module:Class" of a KVFormat."""

    where: str
    element_bits: int | None = None
    head_bytes: int = 0

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        """Bytes of K and V of one token in one layer, served in a dtype of `dtype_bytes`."""
        bits = dtype_bytes * 8 if self.element_bits is None else self.element_bits
        return 2 * num_kv_heads * (-(-head_dim * bits // 8) + self.head_bytes)


WEIGHT_FORMATS: dict[str, WeightFormatLine] = {
    "plain": WeightFormatLine("ridgeline.quantization.plain:PlainWeights"),
}
KV_FORMATS: dict[str, KVFormatLine] = {
    "auto": KVFormatLine("ridgeline.kvcache.plain:PlainKV"),
}


def weight_line(name: str) -> WeightFormatLine:
    """The line of a weight format; ConfigError lists the choices."""
    if name not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS)
        raise ConfigError(f"unknown weight format {name!r}; choose one of {known}")
    return WEIGHT_FORMATS[name]


def kv_line(name: str) -> KVFormatLine:
    """The line of a KV format; ConfigError lists the choices."""
    if name not in KV_FORMATS:
        raise ConfigError(f"unknown KV format {name!r}; choose one of {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]
