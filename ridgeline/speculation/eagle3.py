"""What does an EAGLE-3 head say next? One layer over three of the target's hidden states.

At each position it is given what the target made of the tokens up to there (its states before
three layers, low, middle and high) and the token that came out of it, and says the token after
that. Its own state stands in for the target's when it goes on to draft. Its output matrix has the
most frequent ids alone; `target_ids` tells which. Source: see `architectures.eagle3_head`.

Letters: T tokens, R rows, E hidden of the head, X = 3 hidden states of the target side by side,
D ids that the head can draft, V ids of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from ridgeline.architectures.counts import vocabulary_rows
from ridgeline.architectures.eagle3_head import NUM_TAPS, EagleSpec, eagle3_shapes
from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention import AttentionBackend
from ridgeline.attention.layout import ForwardBatch
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache, LayerKV
from ridgeline.layers.attention import Attention, AttentionStep
from ridgeline.layers.embedding import VocabularyMatrix
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear
from ridgeline.layers.piece import TensorSource
from ridgeline.quantization import WeightFormat, open_vocabulary_format
from ridgeline.speculation.head_layer import HeadLayer, load_parts
from ridgeline.speculation.heads import DraftHead


class PairAttention(Attention):
    """Queries, keys and values are made of two states side by side."""

    num_states = 2

    def of_pair(
        self, pair_TP: torch.Tensor, hidden: Hidden, step: AttentionStep, layer_kv: LayerKV
    ) -> None:
        """Adds attention to the hidden states; writes new keys and values to the cache."""
        out_THD = self._attend(self.qkv(pair_TP), step, layer_kv)
        self.out.add_to(hidden, out_THD.reshape(len(out_THD), self.q_size))


class Eagle3Head(DraftHead):
    """Make it, `load` it, then `fuse` states of the target, `forward` and `logits`."""

    def __init__(
        self,
        spec: EagleSpec,
        names: Mapping[str, str],
        embedding: VocabularyMatrix,
        *,
        attention: AttentionBackend,
        weight_format: WeightFormat,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """`names` as `eagle3_names` has them; `embedding` is the target's, which heads of another
        hidden size have one of their own for. ConfigError if such a head has none."""
        self.spec, self._names, self.taps = spec, names, spec.taps
        dtype, self._format = embedding.dtype, weight_format.name
        self._layer = HeadLayer(
            spec.model,
            names,
            PairAttention,
            dtype=dtype,
            device=device,
            attention=attention,
            weight_format=weight_format,
            max_model_len=max_model_len,
        )
        width = spec.model.hidden_size
        matrix = partial(
            VocabularyMatrix,
            hidden_size=width,
            dtype=dtype,
            device=device,
            placement=Placement(),
            vocabulary_format=open_vocabulary_format(weight_format.name),
        )
        self._fc = self._layer.linear("fc", NUM_TAPS * spec.target_hidden_size)
        self._hidden_norm, self._norm = (self._layer.norm(r) for r in ("hidden_norm", "norm"))
        self._lm_head = self._matrix("lm_head", spec.model.vocab_size, matrix)
        self._embedding = embedding
        if not spec.shares_embedding:
            if "embedding" not in names:
                raise ConfigError(
                    f"the EAGLE-3 head has {width} numbers a state and the model"
                    f" {spec.target_hidden_size}, and no embedding of its own; it is damaged"
                )
            self._embedding = self._matrix("embedding", spec.num_target_ids, matrix)
        # int64: the target's id for each id of the head
        self.target_ids_D = torch.arange(spec.model.vocab_size, device=device)

    def _matrix(
        self, role: str, rows: int, make: Callable[..., VocabularyMatrix]
    ) -> VocabularyMatrix:
        held = vocabulary_rows(rows, self._format)
        return make(self._names[role], rows, held_rows=held)

    @property
    def cache_spec(self) -> ModelSpec:
        """Of the KV cache that `forward` fills: a model of one layer."""
        return self.spec.model

    @torch.inference_mode()
    def load(self, source: TensorSource) -> None:
        """ConfigError for tensors of other shapes, or ids that the target has not."""
        wanted = {self._names[role]: shape for role, shape in eagle3_shapes(self.spec).items()}
        load_parts(source, list(self._parts()), wanted)
        shape = (self.spec.model.vocab_size,)
        if "d2t" not in self._names:
            if shape[0] != self.spec.num_target_ids:
                raise ConfigError(
                    f"the EAGLE-3 head drafts {shape[0]} of {self.spec.num_target_ids} ids and"
                    " lacks 'd2t', which says which; it is damaged"
                )
            return
        offsets = source.tensor(self._names["d2t"])
        if tuple(offsets.shape) != shape or offsets.is_floating_point():
            raise ConfigError(f"tensor d2t has shape {tuple(offsets.shape)}, not whole {shape}")
        self.target_ids_D += offsets.to(self.target_ids_D)
        least, most = self.target_ids_D.aminmax()
        if least < 0 or most >= self.spec.num_target_ids:
            raise ConfigError(
                f"tensor d2t leads to ids outside 0 .. {self.spec.num_target_ids - 1}"
            )

    def _parts(self) -> Iterator[RMSNorm | Linear | VocabularyMatrix]:
        yield self._lm_head
        if not self.spec.shares_embedding:
            yield self._embedding
        yield self._fc
        yield self._hidden_norm
        yield from self._layer.parts()
        yield self._norm

    @property
    def num_bytes(self) -> int:
        """All that its parameters take."""
        held = [tensor for part in self._parts() for tensor in part.tensors()]
        return sum(t.numel() * t.element_size() for t in (*held, self.target_ids_D))

    @torch.inference_mode()
    def fuse(self, tapped_TX: torch.Tensor) -> torch.Tensor:
        """The target's states before its layers `spec.taps`, side by side -> [T, E]."""
        return self._fc(tapped_TX)

    def of_target(self, tapped_nTE: torch.Tensor) -> torch.Tensor:
        return self.fuse(torch.cat(tuple(tapped_nTE), -1))

    def draft_logits(self, states_BE: torch.Tensor) -> torch.Tensor:
        return self.target_logits(states_BE)

    @torch.inference_mode()
    def forward(self, states_TE: torch.Tensor, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Its own states [T, E]; fills the cache. `states_TE` (overwritten) are fused ones, or its
        own of the position before where it drafts on; tokens are those that came out there, so
        that token i stands one place behind position i."""
        embedded_TE = self._layer.input_norm(self._embedding.embed(batch.token_ids_T))
        normed_TE = self._hidden_norm(states_TE)
        pair_TP = torch.cat((embedded_TE, normed_TE), -1)
        hidden = Hidden(normed_TE if self.spec.norm_before_residual else states_TE)
        step = self._layer.step(batch, kv)
        self._layer.attention.of_pair(pair_TP, hidden, step, kv.layers[0])
        self._layer.feed_forward(hidden, self._layer.post_norm)
        return hidden.whole()

    @torch.inference_mode()
    def logits(self, states_RE: torch.Tensor) -> torch.Tensor:
        """Of its own ids, [R, D] float32."""
        return self._lm_head.logits(self._norm(states_RE))

    @torch.inference_mode()
    def target_logits(self, states_RE: torch.Tensor) -> torch.Tensor:
        """The same as the target counts, [R, V]: minus infinity for ids that it cannot draft."""
        logits_RD = self.logits(states_RE)
        shape = len(states_RE), self.spec.num_target_ids
        whole_RV = torch.full(shape, -torch.inf, device=logits_RD.device)
        return whole_RV.index_copy_(1, self.target_ids_D, logits_RD)
