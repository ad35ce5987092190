"""How does a draft head run the one layer that it has? A decoder layer without a decoder.

Letters: T tokens, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Generic, TypeVar

import torch

from ridgeline.architectures.spec import DenseSpec, ModelSpec
from ridgeline.attention import AttentionBackend
from ridgeline.attention.layout import ForwardBatch
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.errors import ConfigError, InternalError
from ridgeline.kvcache import KVCache
from ridgeline.layers.attention import Attention, AttentionStep
from ridgeline.layers.embedding import VocabularyMatrix
from ridgeline.layers.feed_forward import FeedForward
from ridgeline.layers.hidden import RMSNorm
from ridgeline.layers.linear import Linear, Part
from ridgeline.layers.piece import TensorSource
from ridgeline.layers.rope import Rotation
from ridgeline.layers.steps import attention_steps
from ridgeline.quantization import WeightFormat

A = TypeVar("A", bound=Attention)


class HeadLayer(Generic[A]):
    """Of the only layer of `spec`; `names` has the checkpoint name of each role. `attention_type`
    may read more than the hidden states."""

    def __init__(
        self,
        spec: ModelSpec,
        names: Mapping[str, str],
        attention_type: type[A],
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend,
        weight_format: WeightFormat,
        max_model_len: int,
    ) -> None:
        self.spec, self.names = spec, names
        self.dtype, self.device, self.backend = dtype, device, attention
        place = Placement()
        self._linear = partial(
            Linear, weight_format=weight_format, dtype=dtype, device=device, placement=place
        )
        self._norm = partial(RMSNorm, eps=spec.norm_eps, dtype=dtype, device=device)
        layer = spec.layers[0]
        if not isinstance(layer.feed_forward, DenseSpec):
            raise InternalError("a draft head with experts")
        self.attention: A = attention_type(
            layer.attention,
            spec.hidden_size,
            self._norm,
            names.__getitem__,
            self._linear,
            attention,
            place,
        )
        self.feed_forward = FeedForward(
            layer.feed_forward, spec.hidden_size, names.__getitem__, self._linear, place
        )
        self.input_norm, self.post_norm = map(self.norm, ("input_norm", "pre_feed_forward_norm"))
        rope = layer.attention.rope, layer.attention.head_dim
        self._rotation = Rotation(*rope, max_model_len, device)

    def norm(self, role: str) -> RMSNorm:
        """Of the hidden size."""
        return self._norm(self.names[role], self.spec.hidden_size)

    def linear(self, role: str, inputs: int) -> Linear:
        """From `inputs` numbers to a hidden state."""
        return self._linear([Part(self.names[role], None, Shard(0, self.spec.hidden_size))], inputs)

    def step(self, batch: ForwardBatch, kv: KVCache) -> AttentionStep:
        (step,) = attention_steps(
            batch, kv, self.backend, self.dtype, [self._rotation], [0]
        ).values()
        return step

    def parts(self) -> Iterator[RMSNorm | Linear]:
        yield self.input_norm
        yield from self.attention.norms
        yield from self.attention.linears
        yield self.post_norm
        yield from self.feed_forward.linears


def load_parts(
    source: TensorSource,
    parts: list[RMSNorm | Linear | VocabularyMatrix],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Fill all of them. ConfigError for a tensor of another shape than `shapes` says by name."""
    for name, shape in shapes.items():
        if (found := tuple(source.shape(name))) != shape:
            raise ConfigError(f"tensor {name} has shape {found} where {shape} is needed")
    pieces = [piece for part in parts for piece in part.pieces()]
    with source.bring(pieces) as arrived:
        for _ in arrived:
            pass
    for part in parts:
        part.finish()
