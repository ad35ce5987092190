"""Over how many devices is a model spread, and how?"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.architectures.spec import DenseSpec, LayerSpec, ModelSpec
from ridgeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """`tp` devices split every layer, `pp` stages split the layers, `replicas` are whole copies.

    `ep` of the `tp` devices divide the experts among them (1: every expert is split like a dense
    feed-forward); inside such a group an expert is split over tp / ep devices.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.tp % self.ep:
            raise ConfigError(f"ep is {self.ep}; it must divide tp ({self.tp})")

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp

    @property
    def all_devices(self) -> int:
        return self.devices * self.replicas

    @property
    def words(self) -> str:
        """As the command line says it: "tp 4, pp 2", or "1 device"."""
        parts = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "ep", "replicas")]
        return ", ".join(part for part in parts if not part.endswith(" 1")) or "1 device"

    def check(self, spec: ModelSpec) -> None:
        """ConfigError if this model cannot be spread like this; it names what does not divide."""
        if self.pp > spec.num_layers:
            raise ConfigError(f"pp is {self.pp}; the model has only {spec.num_layers} layers")
        has_experts = any(not isinstance(one.feed_forward, DenseSpec) for one in spec.layers)
        if self.ep > 1 and not has_experts:
            raise ConfigError(f"ep is {self.ep}; this model has no experts to divide")
        for layer in dict.fromkeys(spec.layers):
            self._check_layer(layer)

    def _check_layer(self, layer: LayerSpec) -> None:
        attention, inner = layer.attention, layer.feed_forward
        self._divides("tp", attention.num_heads, "attention heads")
        kv_heads = attention.num_kv_heads
        if self.tp % kv_heads:  # else every KV head is held by the same number of ranks
            self._divides("tp", kv_heads, "KV heads")
        if isinstance(inner, DenseSpec):
            self._divides("tp", inner.intermediate_size, "rows of the feed-forward")
            return
        self._divides("ep", inner.num_experts, "experts")
        inside = Layout(tp=self.tp // self.ep)
        inside._divides("tp", inner.intermediate_size, "rows of an expert")
        self._divides("tp", inner.shared_size, "rows of the shared experts")

    def _divides(self, name: str, total: int, what: str) -> None:
        size = getattr(self, name)
        if total % size:
            raise ConfigError(
                f"{name} is {size}; {total} {what} cannot be split so, use a divisor of {total}"
            )


ONE_DEVICE = Layout()
