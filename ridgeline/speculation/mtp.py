"""What does a model's own MTP module say next? One more layer over the model's hidden state.

At each position it is given the target's state there and the token that came out of it, and says
the token after that; then its own state stands in for the target's. Embedding and output matrix
are the target's. Source: see `architectures.mtp_head`.

Letters: T tokens, R rows, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ridgeline.architectures.mtp_head import MTPSpec, mtp_shapes
from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention import AttentionBackend
from ridgeline.attention.layout import ForwardBatch
from ridgeline.kvcache import KVCache
from ridgeline.layers.attention import Attention
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear
from ridgeline.layers.piece import TensorSource
from ridgeline.quantization import WeightFormat
from ridgeline.speculation.head_layer import HeadLayer, load_parts
from ridgeline.speculation.heads import DraftHead


class MTPHead(DraftHead):
    """Make it, `load` it, then `forward` states of the target, and `logits`."""

    def __init__(
        self,
        spec: MTPSpec,
        target: Decoder,
        *,
        attention: AttentionBackend,
        weight_format: WeightFormat,
    ) -> None:
        self.spec, self._target = spec, target
        self.taps = (target.spec.num_layers,)  # what comes out of the last one
        self._layer = HeadLayer(
            spec.model,
            spec.names,
            Attention,
            dtype=target.dtype,
            device=target.device,
            attention=attention,
            weight_format=weight_format,
            max_model_len=target.max_model_len,
        )
        self._projection = self._layer.linear("projection", 2 * spec.model.hidden_size)
        roles = ("token_norm", "hidden_norm", "norm")
        self._token_norm, self._hidden_norm, self._norm = map(self._layer.norm, roles)

    @property
    def cache_spec(self) -> ModelSpec:
        """Of the KV cache that `forward` fills: a model of one layer."""
        return self.spec.model

    @torch.inference_mode()
    def load(self, source: TensorSource) -> None:
        """ConfigError for tensors of other shapes."""
        names, shapes = self.spec.names, mtp_shapes(self.spec.model)
        wanted = {names[role]: shape for role, shape in shapes.items()}
        load_parts(source, list(self._parts()), wanted)

    def _parts(self) -> Iterator[RMSNorm | Linear]:
        yield self._token_norm
        yield self._hidden_norm
        yield self._projection
        yield from self._layer.parts()
        yield self._norm

    @property
    def num_bytes(self) -> int:
        """All that its parameters take; embedding and output matrix are the target's."""
        held = (tensor for part in self._parts() for tensor in part.tensors())
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.inference_mode()
    def of_target(self, tapped_nTE: torch.Tensor) -> torch.Tensor:
        (hidden_TE,) = tapped_nTE
        return self._target.norm(hidden_TE) if self.spec.layout.takes_normed else hidden_TE

    def draft_logits(self, states_BE: torch.Tensor) -> torch.Tensor:
        return self.logits(states_BE)

    @torch.inference_mode()
    def forward(self, states_TE: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Its own states [T, E]; fills the cache. `states_TE` are the target's, or its own of the
        position before where it drafts on; tokens are those that came out there, so that token i
        stands one place behind position i."""
        layout = self.spec.layout
        token_TE = self._token_norm(self._target.embedding.embed(batch.token_ids_T))
        state_TE = self._hidden_norm(states_TE)
        both = (token_TE, state_TE) if layout.embedding_first else (state_TE, token_TE)
        hidden = Hidden(self._projection(torch.cat(both, -1)))
        step = self._layer.step(batch, kv)
        self._layer.attention(hidden, self._layer.input_norm, step, kv.layers[0])
        self._layer.feed_forward(hidden, self._layer.post_norm)
        return hidden.normed(self._norm) if layout.gives_normed else hidden.whole()

    @torch.inference_mode()
    def logits(self, states_RE: torch.Tensor) -> torch.Tensor:
        """Of states that `forward` gave, [R, V] float32."""
        normed = states_RE if self.spec.layout.gives_normed else self._norm(states_RE)
        return self._target.lm_head.logits(normed)
