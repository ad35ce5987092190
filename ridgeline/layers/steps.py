"""What does one step mean to the layers that share a block table and a rotation?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.attention.backend import AttentionBackend
from ridgeline.attention.layout import AttentionLayout, DecodeLayout, ForwardBatch, MixedLayout
from ridgeline.kvcache import KVCache
from ridgeline.layers.attention import AttentionStep, writes_in_place
from ridgeline.layers.rope import Rotation


def attention_steps(
    batch: ForwardBatch,
    kv: KVCache,
    backend: AttentionBackend,
    dtype: torch.dtype,
    rotations: Sequence[Rotation],
    rotation_of_layer: Sequence[int],
    num_layers: int | None = None,
) -> dict[tuple[int, int], AttentionStep]:
    """For each (KV group, rotation) that the first `num_layers` layers (None: all) have."""
    positions_T = batch.positions_T
    is_fused = writes_in_place(positions_T.device, dtype, kv.layers[0].views)
    steps: dict[tuple[int, int], AttentionStep] = {}
    rotated = [None if is_fused else rotation.at(positions_T) for rotation in rotations]
    plans: dict[int, object] = {}
    for layer_kv, rotation in zip(kv.layers[:num_layers], rotation_of_layer, strict=False):
        index = layer_kv.group
        if (index, rotation) in steps:
            continue
        if index not in plans:
            plans[index] = _plan(backend, batch.layout, index, kv.groups[index].window)
        steps[index, rotation] = AttentionStep(
            rotations[rotation].table_L2D,
            positions_T,
            rotated[rotation],
            batch.layout.slots_T[index],
            plans[index],
        )
    return steps


def _plan(
    backend: AttentionBackend,
    layout: AttentionLayout | DecodeLayout | MixedLayout,
    group: int,
    window: int | None,
) -> object:
    if isinstance(layout, AttentionLayout):
        return backend.plan(layout, group, window)
    if isinstance(layout, DecodeLayout):
        return backend.plan_decodes(layout, group, window)
    return backend.plan_mixed(layout, group, window)
