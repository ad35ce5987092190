"""How do token ids become logits? The one loop that every model family shares.

Letters: T packed tokens, R tokens that need logits, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ridgeline.architectures import optional_tensors
from ridgeline.architectures.counts import vocabulary_rows
from ridgeline.architectures.parts import Branch, branch_norms, branches, layer_name
from ridgeline.architectures.shares import head_unit, inner_unit
from ridgeline.architectures.spec import DenseSpec, LayerSpec, ModelSpec, NormKind
from ridgeline.architectures.tensor_layouts import checkpoint_shapes
from ridgeline.attention.backend import AttentionBackend
from ridgeline.attention.layout import ForwardBatch, LogitsIndices
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.errors import ConfigError, check
from ridgeline.kvcache import KVCache, LayerKV
from ridgeline.layers.attention import AttentionBranch, AttentionStep, attention_class
from ridgeline.layers.cut_source import of_parameters
from ridgeline.layers.embedding import VocabularyMatrix
from ridgeline.layers.experts import Experts
from ridgeline.layers.feed_forward import FeedForward, UngatedFeedForward
from ridgeline.layers.hidden import (
    Beside,
    HeadLayerNorm,
    Hidden,
    RMSNorm,
    SplitRMSNorm,
    make_norm,
)
from ridgeline.layers.latent_attention import LatentAttention
from ridgeline.layers.linear import Linear
from ridgeline.layers.piece import Piece, RandomSource, TensorSource, Vector
from ridgeline.layers.rope import Rotation
from ridgeline.layers.steps import attention_steps
from ridgeline.quantization import WeightFormat, open_vocabulary_format
from ridgeline.quantization.plain import PlainWeights, UnpackedWeights

COMPARED_ROWS = 4096  # of a matrix of the vocabulary, at once


class DecoderLayer:
    """`norms` by role; `around` says which of them stand around the two branches."""

    def __init__(
        self,
        attention: AttentionBranch,
        feed_forward: FeedForward | Experts,
        norms: Mapping[str, RMSNorm],
        around: tuple[Branch, Branch],
    ) -> None:
        self.attention = attention
        self.feed_forward = feed_forward
        self.norms = norms
        self._attention_norms, self._feed_forward_norms = (
            tuple(None if role is None else norms[role] for role in (one.norm_in, one.norm_out))
            for one in around
        )

    def __call__(
        self,
        hidden: Hidden,
        step: AttentionStep,
        layer_kv: LayerKV,
        logits_indices: LogitsIndices | None = None,
    ) -> None:
        """Adds to `hidden` what the layer adds; only the tokens at `logits_indices` are left."""
        self.attend(hidden, step, layer_kv, logits_indices)
        if len(hidden.sum_TE):
            self.feed(hidden)

    def attend(
        self,
        hidden: Hidden,
        step: AttentionStep,
        layer_kv: LayerKV,
        logits_indices: LogitsIndices | None = None,
    ) -> None:
        norm_in, norm_out = self._attention_norms
        self.attention(hidden, norm_in, step, layer_kv, logits_indices, norm_out)

    def feed(self, hidden: Hidden) -> None:
        norm_in, norm_out = self._feed_forward_norms
        self.feed_forward(hidden, norm_in, norm_out)

    def parts(self) -> Iterator[RMSNorm | Linear | Vector]:
        """All that holds parameters."""
        yield from self.norms.values()
        yield from self.attention.parts()
        yield from self.feed_forward.parts()


class ParallelLayer(DecoderLayer):
    """Attention and feed-forward read the same hidden states, and both are added."""

    def __call__(
        self,
        hidden: Hidden,
        step: AttentionStep,
        layer_kv: LayerKV,
        logits_indices: LogitsIndices | None = None,
    ) -> None:
        norm, fed_norm = self._attention_norms[0], self._feed_forward_norms[0]
        attended_TE = hidden.normed(norm)
        fed_TE = attended_TE if fed_norm is norm else hidden.normed(fed_norm)
        both = Beside(hidden.sum_TE, attended_TE, fed_TE)
        self.attention(both, None, step, layer_kv, logits_indices)
        if len(both.sum_TE):
            self.feed_forward(both, None)
        hidden.sum_TE, hidden.partial_TE, hidden.ranks = both.sum_TE, both.partial_TE, both.ranks


@dataclass(frozen=True, slots=True)
class LayerMaker:
    """Builds one rank's share of any layer of a model, with nothing loaded."""

    spec: ModelSpec
    weight_format: WeightFormat
    backend: AttentionBackend
    dtype: torch.dtype
    device: torch.device
    placement: Placement
    deterministic: bool = False

    def norm(self, kind: NormKind, role: str, name: Callable[[str], str]) -> RMSNorm:
        """Around a branch; those in front of it read the hidden states."""
        spec = self.spec
        eps = spec.norm_eps if role.startswith("post_") else spec.states_eps
        made = spec.hidden_size, eps, self.dtype, self.device
        return make_norm(kind, role, name, *made, offset=spec.norm_offset)

    def layer(self, index: int) -> DecoderLayer:
        spec, layer = self.spec, self.spec.layers[index]

        def name(role: str, expert: int | None = None) -> str:
            return layer_name(spec, role, index, expert)

        linear = partial(
            Linear,
            weight_format=self.weight_format,
            dtype=self.dtype,
            device=self.device,
            placement=self.placement,
        )
        attention = self._attention(layer, name, linear)
        norms = {role: self.norm(layer.norm_kind, role, name) for role in branch_norms(layer)}
        feed_forward = self._feed_forward(layer, name, linear)
        kind = ParallelLayer if layer.parallel_norms else DecoderLayer
        return kind(attention, feed_forward, norms, branches(layer))

    def _attention(
        self, layer: LayerSpec, name: Callable[..., str], linear: Callable[..., Linear]
    ) -> AttentionBranch:
        width, backend, placement = self.spec.hidden_size, self.backend, self.placement
        attention, unit = layer.attention, head_unit(layer, self.weight_format.name)
        if attention.latent is not None:
            numbers = UnpackedWeights.beside(self.weight_format)
            unpacked = partial(linear, weight_format=numbers)
            made = backend, self.dtype, self.device, placement, unit
            return LatentAttention(attention, width, name, linear, unpacked, *made)
        kind = attention_class(attention, deterministic=self.deterministic)
        norms: type[RMSNorm] = RMSNorm if attention.qk_norm_kind == "rms" else HeadLayerNorm
        if attention.norms_all_heads and placement.size > 1:
            norms = SplitRMSNorm
        norm = partial(
            norms,
            eps=self.spec.norm_eps,
            dtype=self.dtype,
            device=self.device,
            offset=self.spec.norm_offset,
        )
        return kind(attention, width, norm, name, linear, backend, placement, unit)

    def _feed_forward(
        self,
        layer: LayerSpec,
        name: Callable[..., str],
        linear: Callable[..., Linear],
    ) -> FeedForward | Experts:
        width, inner, own = self.spec.hidden_size, layer.feed_forward, self.weight_format.name
        unit = inner_unit(layer, own)
        if isinstance(inner, DenseSpec):
            kind = FeedForward if inner.gated else UngatedFeedForward
            return kind(inner, width, name, linear, self.placement, unit=unit)
        # Routers are tiny and decide much: they stay as they are in every format.
        plain = PlainWeights().invariant() if self.deterministic else PlainWeights()
        return Experts(
            inner,
            width,
            name,
            partial(linear, weight_format=self.weight_format.of_experts()),
            partial(linear, weight_format=plain),
            self.placement,
            units=(unit, inner_unit(layer, own, "shared_")),
            deterministic=self.deterministic,
        )


class Decoder:
    """One rank's share of a model. Build it, `load` or `randomize` it, then run it.

    On the meta device it has all shapes and no memory. `deterministic`: a token's states do not
    depend on what else is in the step, if those of `attention` and `weight_format` do not.
    `min_token_ids`: so many may be looked up; those that the model has not are zeros.
    """

    not_captured = ""  # why no step of it can be captured, whatever the attention backend

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        placement: Placement,
        attention: AttentionBackend,
        weight_format: WeightFormat,
        max_model_len: int,
        deterministic: bool = False,
        min_token_ids: int = 0,
    ) -> None:
        self.spec = spec
        self.deterministic = deterministic
        self.dtype = dtype
        self.device = device
        self.placement = placement
        self.backend = attention
        self.max_model_len = max_model_len
        names = spec.tensor_names
        weight_format = weight_format.of_model(spec)
        self._expected = weight_format.tensors_read(spec)
        self.num_token_ids = max(spec.vocab_size, min_token_ids)
        self._matrix = partial(
            VocabularyMatrix,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            dtype=dtype,
            placement=placement,
            vocabulary_format=open_vocabulary_format(
                weight_format.name, deterministic=deterministic
            ),
            held_rows=vocabulary_rows(self.num_token_ids, weight_format.name, placement.size),
            scale=embedding_scale(spec, dtype),
            cap=spec.logits_cap,
        )
        nowhere = torch.device("meta")  # a stage without a matrix of the vocabulary keeps its shape
        held = device if spec.holds_embedding else nowhere
        self.embedding = self.lm_head = self._matrix(names["embedding"], device=held)
        if not spec.tie_embeddings:
            held = device if spec.holds_head else nowhere
            self.lm_head = self._matrix(names["lm_head"], device=held)
        self.positions: Vector | None = None
        if spec.has_embedding and spec.learned_positions:
            rows = Shard(0, spec.learned_positions)
            width = (spec.hidden_size,)
            self.positions = Vector(names["positions"], rows, device, width, dtype)
        maker = LayerMaker(
            spec, weight_format, attention, dtype, device, placement, deterministic=deterministic
        )
        self.layers = [maker.layer(index) for index in range(spec.num_layers)]
        self.norm = last_norm(spec, dtype, device)
        ropes = [(layer.attention.rope, layer.attention.rotated_dim) for layer in spec.layers]
        kinds = list(dict.fromkeys(ropes))
        self.rotations = [Rotation(*kind, max_model_len, device) for kind in kinds]
        self.rotation_of_layer = [kinds.index(kind) for kind in ropes]

    def _parts(self) -> Iterator[VocabularyMatrix | RMSNorm | Linear | Vector]:
        """All that holds parameters, each once, in the order in which it is loaded: matrices of
        the vocabulary first, since nothing is as large while it is in memory packed and unpacked.
        """
        if self.spec.holds_embedding:
            yield self.embedding
        if self.spec.holds_head:
            yield self.lm_head
        if self.positions is not None:
            yield self.positions
        for layer in self.layers:
            yield from layer.parts()
        if self.spec.has_head:
            yield self.norm

    @torch.inference_mode()
    def load(self, source: TensorSource, progress: Callable[[int], None] | None = None) -> None:
        """Read this rank's share of every tensor into its final place, as the source does it.

        `progress` gets the bytes read so far. ConfigError if a tensor has another shape than the
        spec says or is damaged, or if a tied model's file holds a different output matrix.
        """
        source = of_parameters(source, self.spec)
        for name, shape in self._expected.items():
            if (found := tuple(source.shape(name))) != shape:
                raise ConfigError(f"tensor {name} has shape {found} where {shape} is needed")
        wanted, done = set(self._expected), 0
        with source.bring(self.pieces()) as sizes:
            for part in self._parts():
                for piece in part.pieces():
                    done += next(sizes)
                    wanted.discard(piece.name)
                    if progress is not None:
                        progress(done)
                part.finish()
        check(
            self.placement.for_experts.size > 1 or not wanted,
            "every tensor was read",
            left=sorted(wanted),
        )
        self._check_tied(source)

    def _check_tied(self, source: TensorSource) -> None:
        present = set(source.names())
        for name in optional_tensors(self.spec):
            if name not in present or not self.embedding.rows.length:
                continue
            rows = self.embedding.rows
            if not all(self._alike(source, name, part) for part in _pieces_of(rows)):
                raise ConfigError(
                    f"tie_word_embeddings is true but {name} differs from"
                    f" {self.embedding.name}; set tie_word_embeddings to false in config.json"
                )

    def _alike(self, source: TensorSource, name: str, part: Shard) -> bool:
        """These rows of a matrix of the vocabulary are those of the embedding, as served."""
        both = (
            source.slice(one, 0, part.start, part.length).to(self.device, self.dtype)
            for one in (name, self.embedding.name)
        )
        return torch.equal(*both)

    @property
    def is_packed(self) -> bool:
        """`load` has ordered weights for the native kernels, which took a while."""
        return any(name.endswith("panels") for part in self._parts() for name in part.kept())

    def kept(self) -> dict[str, torch.Tensor]:
        """All that `load` made, by names that `adopt` knows."""
        parts = enumerate(self._parts())
        return {f"{at}.{name}": kept for at, part in parts for name, kept in part.kept().items()}

    def adopt(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Be as the decoder of the same model and settings that kept this, instead of `load`."""
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in kept.items():
            at, _, own = name.partition(".")
            found[at][own] = tensor
        for number, part in enumerate(self._parts()):
            part.adopt(found[str(number)])

    def randomize(self, seed: int) -> None:
        """Fill with random numbers, the same for the same seed, device and dtype."""
        shapes = checkpoint_shapes(self.spec)
        self.load(RandomSource(shapes, seed, self.dtype, self.device))

    def num_parameters(self) -> int:
        """Numbers read from a checkpoint by this rank."""
        return sum(p.target.numel() for p in self.pieces())

    @property
    def num_bytes(self) -> int:
        """All that the parameters of this rank take."""
        held = (tensor for part in self._parts() for tensor in part.tensors())
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def pieces(self) -> Iterator[Piece]:
        """Where each checkpoint tensor goes; only before `load` has packed the weights."""
        for part in self._parts():
            yield from part.pieces()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        """Hidden states of the step's tokens before the final norm, [T, E], or of those that the
        batch wants, [R, E]; fills the cache."""
        return self._forward(batch, kv).whole()

    @torch.inference_mode()
    def forward_stage(
        self, batch: ForwardBatch, kv: KVCache, states_TE: torch.Tensor | None
    ) -> torch.Tensor:
        """The same of a stage: one that has no embedding goes on from the states of the one before,
        and writes to them; one that has no head gives those of all tokens."""
        return self._forward(batch, kv, states_TE=states_TE).whole()

    @torch.inference_mode()
    def forward_logits(
        self,
        batch: ForwardBatch,
        kv: KVCache,
        out_RV: torch.Tensor,
        *,
        num_layers: int | None = None,
        last_of: int = 1,
    ) -> torch.Tensor:
        """Logits of all tokens of a step, or of the last of each `last_of` tokens, into `out_RV`
        (float32), which may have fewer columns than V; fills the cache. With a captured backend
        the same shapes are the same launches, and nothing is waited for.

        `num_layers`: by the first layers alone, the final norm and the output matrix."""
        hidden = self._forward(batch, kv, num_layers)
        return self.lm_head.logits_into(hidden.last_of(last_of).normed(self.norm), out_RV)

    @torch.inference_mode()
    def fill(self, batch: ForwardBatch, kv: KVCache) -> None:
        """Fills the cache, and no more. As `forward_logits` it can be captured."""
        self._forward(replace(batch, logits_indices=LogitsIndices(batch.token_ids_T[:0])), kv)

    @torch.inference_mode()
    def forward_tapped(
        self, batch: ForwardBatch, kv: KVCache, taps: Sequence[int], out_nTE: torch.Tensor
    ) -> torch.Tensor:
        """`forward`, and the hidden states before the layers `taps`, at most all that there are,
        into `out_nTE`; a tap of `num_layers` is what comes out of the last one."""

        def tap(index: int, hidden: Hidden) -> None:
            for place, tap in enumerate(taps):
                if tap == index:
                    out_nTE[place].copy_(hidden.whole())

        check(batch.logits_indices is None, "taps are of all tokens")
        hidden = self._forward(batch, kv, before=tap)
        tap(len(self.layers), hidden)
        return hidden.whole()

    def _forward(
        self,
        batch: ForwardBatch,
        kv: KVCache,
        num_layers: int | None = None,
        before: Callable[[int, Hidden], None] | None = None,
        states_TE: torch.Tensor | None = None,
    ) -> Hidden:
        if states_TE is None:
            states_TE = self.embedding.embed(batch.token_ids_T)
        hidden = Hidden(states_TE)
        if self.positions is not None:
            hidden.sum_TE.add_(self.positions.values.index_select(0, batch.positions_T))
        steps = attention_steps(
            batch,
            kv,
            self.backend,
            self.dtype,
            self.rotations,
            self.rotation_of_layer,
            num_layers,
        )
        layers = self.layers[:num_layers]
        for index, layer in enumerate(layers):
            if before is not None:
                before(index, hidden)
            layer_kv = kv.layers[index]
            step = steps[layer_kv.group, self.rotation_of_layer[index]]
            is_last = index == len(layers) - 1 and self.spec.has_head
            layer(hidden, step, layer_kv, batch.logits_indices if is_last else None)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Final norm and output matrix: [R, E] rows of `forward` -> [R, V] float32."""
        return self.lm_head.logits(self.norm(hidden_RE))


def last_norm(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    """In front of the output matrix; what scales logits scales its weight."""
    made = spec.hidden_size, spec.states_eps, dtype, device
    name, scales = spec.tensor_names.__getitem__, (spec.norm_offset, spec.logits_scale)
    return make_norm(spec.norm_kind, "norm", name, *made, offset=scales[0], scale=scales[1])


def embedding_scale(spec: ModelSpec, dtype: torch.dtype) -> float:
    """What rows of the embedding are multiplied by: the model's scale in its own dtype, and as
    hidden states are held, see `ModelSpec.states_eps`."""
    return torch.tensor(spec.embedding_scale, dtype=dtype).item() / spec.residual_scale


def _pieces_of(rows: Shard) -> Iterator[Shard]:
    for begin in range(0, rows.length, COMPARED_ROWS):
        yield Shard(rows.start + begin, min(COMPARED_ROWS, rows.length - begin))
