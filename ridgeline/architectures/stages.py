"""How is a model cut into stages of a pipeline? Each is a model of some of its layers, so that
decoder, loader, cache and counts need know nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from ridgeline.architectures.kv_groups import KVGroup
from ridgeline.architectures.spec import NATIVE, LayerSpec, ModelSpec
from ridgeline.errors import ConfigError


def stage_spec(spec: ModelSpec, layers: range) -> ModelSpec:
    """Those layers as a model: with the embedding if the first is among them, with the last norm
    and the output matrix if the last is. ConfigError if one of them reads the cache of a layer
    that is not, or if the layers are not computed here."""
    if spec.implementation != NATIVE:
        raise ConfigError(
            f"pp: the layers of {spec.family} are computed by {spec.implementation}, which runs all"
            " of them; use pp 1"
        )
    return replace(
        spec,
        layers=tuple(_moved(spec.layers[index], index, layers.start) for index in layers),
        first_layer=layers.start,
        has_embedding=layers.start == 0,
        has_head=layers.stop == spec.num_layers,
    )


def _moved(layer: LayerSpec, index: int, first: int) -> LayerSpec:
    owner = layer.attention.cache_layer
    if owner is None:
        return layer
    if owner < first:
        raise ConfigError(
            f"pp: layer {index} reads the keys and values of layer {owner}, so no stage may begin"
            f" between them, at layer {first}"
        )
    return replace(layer, attention=replace(layer.attention, cache_layer=owner - first))


def stage_groups(groups: Sequence[KVGroup], layers: range) -> tuple[KVGroup, ...]:
    """The model's KV groups with those layers alone, counted from the first of them. All groups
    stay, even without a layer: a block and its group mean the same in every stage."""
    return tuple(
        replace(group, layers=tuple(i - layers.start for i in group.layers if i in layers))
        for group in groups
    )


def may_begin(spec: ModelSpec, layer: int) -> bool:
    """A stage may begin with this layer: no later one reads the cache of an earlier one."""
    owners = (one.attention.cache_layer for one in spec.layers[layer:])
    return all(owner is None or owner >= layer for owner in owners)


def cut(
    spec: ModelSpec,
    num_stages: int,
    seconds: Callable[[range], float],
    fits: Callable[[range], bool] = lambda layers: True,
) -> tuple[range, ...]:
    """The stages of which the slowest is as fast as may be, by the time that layers take as one
    stage, among those that fit. ConfigError if there are none."""
    num = spec.num_layers
    starts = [layer for layer in range(num) if may_begin(spec, layer)]
    # By where a stage begins: the least time of the slowest from there on, and where it ends.
    best: dict[int, tuple[float, tuple[range, ...]]] = {num: (0.0, ())}
    for _ in range(num_stages):
        found: dict[int, tuple[float, tuple[range, ...]]] = {}
        for start in starts:
            for stop, (rest_s, rest) in best.items():
                layers = range(start, stop)
                if not layers or found.get(start, (inf,))[0] <= rest_s or not fits(layers):
                    continue
                slowest_s = max(rest_s, seconds(layers))
                if slowest_s < found.get(start, (inf,))[0]:
                    found[start] = slowest_s, (layers, *rest)
        best = found
    if 0 not in best:
        raise ConfigError(
            f"pp is {num_stages}; {spec.family} with {num} layers cannot be cut into so many stages"
            f" that fit and keep together what shares a cache ({len(starts)} layers may begin one);"
            " use fewer stages or devices with more memory"
        )
    return best[0][1]
