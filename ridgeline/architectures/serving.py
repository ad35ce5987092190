"""Can the decoder of this version follow this description? All of it can be priced and planned."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.architectures.spec import ExpertsSpec, LayerSpec, ModelSpec
from ridgeline.errors import ConfigError


def check_served(spec: ModelSpec) -> None:
    """ConfigError that says what is missing, for a model that can only be planned for."""
    reasons = missing(spec)
    if reasons:
        raise ConfigError(
            f"model family {spec.family!r} can be planned for, cannot be served by this version: "
            f"it needs {', '.join(reasons)}"
        )


def missing(spec: ModelSpec) -> tuple[str, ...]:
    """What the model needs and the decoder does not have; empty when it can be served."""
    found = [spec.unserved] if spec.unserved else []
    for layer in dict.fromkeys(spec.layers):
        found += _missing_in(layer)
    return tuple(dict.fromkeys(found))


def _missing_in(layer: LayerSpec) -> Iterator[str]:
    attention, inner = layer.attention, layer.feed_forward
    if attention.latent is not None:
        yield "latent attention"
    if attention.cache_layer is not None:
        yield "layers that read another layer's cache"
    if isinstance(inner, ExpertsSpec):
        if inner.shared_size:
            yield "shared experts"
        if inner.scoring != "softmax" or inner.score_bias:
            yield f"{inner.scoring} scores of experts"
