"""Which layers share a block table? Layers that need the same past: all of it, or one window.

Every group has the same number of layers (the last may have fewer), because a block is one slot
in each of `layers_per_group` shared tensors, whichever group it serves: a single pool of blocks of
equal bytes can then be handed to any group at any time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ridgeline.architectures.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """`layers` (indices into the model) need tokens back to `window`; None: all of them."""

    window: int | None
    layers: tuple[int, ...]


def kv_groups(spec: ModelSpec) -> tuple[KVGroup, ...]:
    """Groups of the layers that keep keys and values, those with full attention first."""
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if layer.attention.cache_layer is None:
            by_window.setdefault(layer.attention.window, []).append(index)
    size = gcd(*(len(layers) for layers in by_window.values()))
    order = sorted(by_window, key=lambda window: (window is not None, window or 0))
    return tuple(
        KVGroup(window, tuple(layers[i : i + size]))
        for window in order
        for layers in (by_window[window],)
        for i in range(0, len(layers), size)
    )
