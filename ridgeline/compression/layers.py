"""Which tensors of a checkpoint make one layer, and how is that layer read alone?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ridgeline.architectures.parts import expected_tensors
from ridgeline.architectures.spec import ExpertsSpec, ModelSpec
from ridgeline.compression.block import Block
from ridgeline.layers.piece import TensorSource
from ridgeline.layers.rope import Rotation


def layer_names(spec: ModelSpec, index: int) -> dict[str, str]:
    """Role (gate.3 of an expert) -> tensor name, of all tensors of this layer."""
    expected = expected_tensors(spec)
    inner = spec.layers[index].feed_forward
    experts = range(inner.num_experts) if isinstance(inner, ExpertsSpec) else range(0)
    found: dict[str, str] = {}
    for role, pattern in spec.tensor_names.items():
        if "{layer}" not in pattern:
            continue
        if "{expert}" in pattern:
            names = {f"{role}.{e}": pattern.format(layer=index, expert=e) for e in experts}
        else:
            names = {role: pattern.format(layer=index)}
        found.update({r: name for r, name in names.items() if name in expected})
    return found


def matrix_names(spec: ModelSpec, index: int) -> dict[str, str]:
    """Role -> tensor name of the matrices that are quantized."""
    skipped = ("norm", "bias", "router")
    names = layer_names(spec, index).items()
    return {r: name for r, name in names if not r.partition(".")[0].endswith(skipped)}


def rest_names(spec: ModelSpec) -> list[str]:
    """The tensors of no layer."""
    of_layers = {n for i in range(spec.num_layers) for n in layer_names(spec, i).values()}
    return [name for name in expected_tensors(spec) if name not in of_layers]


def read_block(
    source: TensorSource, spec: ModelSpec, index: int, rotation: Rotation, device: torch.device
) -> Block:
    """One layer in float32; it is all that is read."""
    weights = {
        role: source.tensor(name).to(device, torch.float32)
        for role, name in layer_names(spec, index).items()
    }
    return Block(spec.layers[index], spec.norm_eps, rotation, weights)


def rotations(spec: ModelSpec, tokens: int, device: torch.device) -> Mapping[int, Rotation]:
    """Layer -> its rotation for windows of so many tokens; layers that turn alike share one."""
    made: dict[object, Rotation] = {}
    found = {}
    for index, layer in enumerate(spec.layers):
        kind = layer.attention.rope, layer.attention.head_dim
        if kind not in made:
            made[kind] = Rotation(*kind, tokens, device)
        found[index] = made[kind]
    return found
