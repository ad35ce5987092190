"""Queries, keys and values, their rotation, the cache, and the way back.

Letters: T tokens, R of them, E hidden, H query heads, K KV heads, D head size (numbers of this
rank), C packed width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend
from ridgeline.attention.layout import LogitsIndices
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.errors import InternalError
from ridgeline.kernels.cpu.elementwise import rotate_and_write, runs_native
from ridgeline.kernels.paged_decode_cuda import Prologue
from ridgeline.kernels.qk_norm_rope_write import (
    HeadNorms,
    PagedKV,
    qk_norm_rope_write,
    qk_norm_rope_write_reference,
    rotate_,
)
from ridgeline.kvcache import LayerKV
from ridgeline.layers.hidden import Hidden, RMSNorm, SplitRMSNorm, normed_together
from ridgeline.layers.linear import Linear, Part
from ridgeline.layers.piece import Vector
from ridgeline.layers.rope import rotation_at

HEADS = 4  # of a program


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What one step means to the layers of one KV group and rotation. `rotated_T1D`: cosines and
    signed sines of the step's positions; None where a kernel looks them up in `table_L2D`."""

    table_L2D: torch.Tensor
    positions_T: torch.Tensor
    rotated_T1D: tuple[torch.Tensor, torch.Tensor] | None
    slots_T: torch.Tensor
    plan: Any


def writes_in_place(device: torch.device, dtype: torch.dtype, views: PagedKV | None) -> bool:
    """One kernel norms, turns and writes to the cache."""
    if views is None or device.type == "cuda":
        return views is not None
    same = views.k_NSKD.dtype in (dtype, torch.float8_e4m3fn)
    knows = same or views.code_bits > 0
    return knows and runs_native(device, dtype)


class AttentionBranch(ABC):
    """What a layer does before its feed-forward; `out` is its last product. `spec` has this rank's
    numbers of heads."""

    spec: AttentionSpec
    out: Linear
    vectors: tuple[Vector, ...] = ()  # what else it has learned

    def __call__(
        self,
        hidden: Hidden,
        norm: RMSNorm | None,
        step: AttentionStep,
        layer_kv: LayerKV,
        logits_indices: LogitsIndices | None = None,
        norm_out: RMSNorm | None = None,
    ) -> None:
        """Adds attention of the normed states, and its own norm of that; writes new keys and values
        to the cache. Only the tokens at `logits_indices` are left afterwards."""
        is_last = logits_indices is not None and logits_indices.is_last
        out_TC = self._attended(hidden, norm, step, layer_kv, is_last=is_last)
        if logits_indices is not None:
            hidden.keep(logits_indices.rows_R)
            if not len(logits_indices.rows_R):
                return
            is_alone = is_last and len(out_TC) == 1
            out_TC = out_TC if is_alone else out_TC.index_select(0, logits_indices.rows_R)
        self.out.add_to(hidden, out_TC, norm=norm_out)

    @abstractmethod
    def _attended(
        self,
        hidden: Hidden,
        norm: RMSNorm | None,
        step: AttentionStep,
        layer_kv: LayerKV,
        *,
        is_last: bool,
    ) -> torch.Tensor:
        """What `out` multiplies, [T, C]; `is_last`: perhaps of the last token alone."""

    @property
    @abstractmethod
    def linears(self) -> list[Linear]:
        """All its products."""

    @property
    def norms(self) -> list[RMSNorm]:
        """Those within it."""
        return []

    def parts(self) -> list[RMSNorm | Linear | Vector]:
        """All that holds parameters."""
        return [*self.norms, *self.linears, *self.vectors]


class Attention(AttentionBranch):
    """`name(role)` is the checkpoint name of a tensor of this layer, and `norm` makes one of a name
    and a size, and of heads where each has weights of its own."""

    num_states = 1  # side by side, that queries, keys and values are made of

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        norm: Callable[..., RMSNorm],
        name: Callable[[str], str],
        linear: Callable[..., Linear],
        backend: AttentionBackend,
        placement: Placement,
        unit: int = 1,
    ) -> None:
        kv_heads = placement.shard_heads(spec.num_kv_heads)
        q_heads = placement.shard_queries(spec.num_heads, spec.num_kv_heads, unit)
        self.spec = replace(spec, num_heads=q_heads.length, num_kv_heads=kv_heads.length)
        self.backend = backend
        head_dim = spec.head_dim
        bias = "_bias" if spec.qkv_bias else None
        shards = {"q": q_heads}
        if spec.cache_layer is None:
            shards |= {"k": kv_heads, "v": kv_heads}
        self.qkv = linear(
            [
                Part(name(role), name(role + bias) if bias else None, heads.times(head_dim))
                for role, heads in shards.items()
            ],
            self.num_states * hidden_size,
        )
        out_bias = name("o_bias") if spec.out_bias else None
        self.out = linear(
            [Part(name("o"), out_bias, Shard(0, hidden_size))],
            spec.num_heads * head_dim,
            columns=q_heads.times(head_dim),
        )
        self.q_norm = self.k_norm = None
        self._before: tuple[RMSNorm, RMSNorm] | None = None  # of each head alone, and the rotation
        self._norms_first = spec.norms_all_heads or spec.qk_norm_kind != "rms"
        self.q_size = q_heads.length * head_dim
        self.kv_size = kv_heads.length * head_dim
        if spec.qk_norm:
            sizes = (self.q_size, self.kv_size) if spec.norms_all_heads else (head_dim, head_dim)
            own: list[dict[str, Any]] = [
                {} if spec.qk_norm_kind == "rms" else {"heads": n} for n in (q_heads, kv_heads)
            ]
            if spec.norms_all_heads and placement.size > 1:
                every = zip((q_heads, kv_heads), (spec.num_heads, spec.num_kv_heads), strict=True)
                own = [{"heads": n, "num_heads": num, "placement": placement} for n, num in every]
            self.q_norm = norm(name("q_norm"), sizes[0], **own[0])
            if spec.cache_layer is None:
                self.k_norm = norm(name("k_norm"), sizes[1], **own[1])
            if self.k_norm is not None and not self._norms_first:
                self._before = self.q_norm, self.k_norm
        if spec.sinks:
            device = next(iter(self.out.parameters.values())).device
            self.vectors = (Vector(name("sinks"), q_heads, device),)

    def _attended(
        self,
        hidden: Hidden,
        norm: RMSNorm | None,
        step: AttentionStep,
        layer_kv: LayerKV,
        *,
        is_last: bool,
    ) -> torch.Tensor:
        out_THD = self._attend(self.qkv.of_normed(hidden, norm), step, layer_kv, is_last=is_last)
        return out_THD.reshape(len(out_THD), self.q_size)

    def _attend(
        self, qkv_TC: torch.Tensor, step: AttentionStep, layer_kv: LayerKV, *, is_last: bool = False
    ) -> torch.Tensor:
        """[T, H, D]; `is_last`: perhaps of the last token alone."""
        if self._norms_first:
            self._norm_first(qkv_TC)
        backend = self.backend
        in_place = step.rotated_T1D is None
        if in_place and backend.takes_product(layer_kv, step.plan, self.spec, qkv_TC.dtype):
            prologue = Prologue(step.table_L2D, step.slots_T, self._head_norms)
            return backend.attend_product(qkv_TC, prologue, layer_kv, step.plan, self.spec)
        q_THD = self._queries(qkv_TC, step, layer_kv)
        if is_last:
            out_1HD = backend.attend_last(q_THD[-1:], layer_kv, step.plan, self.spec)
            if out_1HD is not None:
                return out_1HD
        return backend.attend(q_THD, layer_kv, step.plan, self.spec)

    def _queries(
        self, qkv_TC: torch.Tensor, step: AttentionStep, layer_kv: LayerKV
    ) -> torch.Tensor:
        """[T, H, D]; keys and values go to the cache."""
        if step.rotated_T1D is None:
            return self._rotate_and_write(qkv_TC, step, layer_kv)
        q_THD = self._rotate(qkv_TC, *step.rotated_T1D)
        layer_kv.write(step.slots_T, qkv_TC[:, self.q_size :])
        return q_THD

    def _rotate_and_write(
        self, qkv_TC: torch.Tensor, step: AttentionStep, layer_kv: LayerKV
    ) -> torch.Tensor:
        """Norms, rotation and the write to the cache in one kernel; the queries."""
        if (views := layer_kv.views) is None:
            raise InternalError("this KV format is not written in place")
        table, positions_T, slots_T = step.table_L2D, step.positions_T, step.slots_T
        if not qkv_TC.is_cuda:
            return rotate_and_write(qkv_TC, table, positions_T, slots_T, views, self._head_norms)
        return qk_norm_rope_write(
            qkv_TC, table, positions_T, slots_T, views, norms=self._head_norms
        )

    def _norm_first(self, qkv_TC: torch.Tensor) -> None:
        """In place, what no kernel does as it rotates."""
        if self.q_norm is None or self.k_norm is None:
            return
        q_TC, k_TC, _ = torch.split(qkv_TC, [self.q_size, self.kv_size, self.kv_size], dim=-1)
        if isinstance(self.q_norm, SplitRMSNorm) and isinstance(self.k_norm, SplitRMSNorm):
            both = q_TC, k_TC
            for x_TC, y_TC in zip(
                both, normed_together((self.q_norm, self.k_norm), both), strict=True
            ):
                x_TC.copy_(y_TC)
            return
        q_TC.copy_(self.q_norm(q_TC))
        k_TC.copy_(self.k_norm(k_TC))

    @property
    def _head_norms(self) -> HeadNorms | None:
        """Of each head alone."""
        if self._before is None:
            return None
        q_norm, k_norm = self._before
        return HeadNorms(q_norm.weight_E, k_norm.weight_E, q_norm.eps)

    def _rotate(
        self, qkv_TC: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
    ) -> torch.Tensor:
        """The same without the write, in place, by torch's kernels."""
        heads, kv_heads, size = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        tokens, width = qkv_TC.shape
        rotated_TND = qkv_TC.as_strided((tokens, heads + kv_heads, size), (width, size, 1))
        if self._before is not None:
            halves = torch.split(rotated_TND, [heads, kv_heads], 1)
            for x_TND, norm in zip(halves, self._before, strict=True):
                x_TND.copy_(norm(x_TND))
        rotate_(rotated_TND, cos_T1D, sin_T1D)
        return qkv_TC.as_strided((tokens, heads, size), (width, size, 1))

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv, self.out]

    @property
    def norms(self) -> list[RMSNorm]:
        return [norm for norm in (self.q_norm, self.k_norm) if norm is not None]


class SinkAttention(Attention):
    """Each head has a learned score that takes part in its softmax and mixes nothing in."""

    def _attend(
        self, qkv_TC: torch.Tensor, step: AttentionStep, layer_kv: LayerKV, *, is_last: bool = False
    ) -> torch.Tensor:
        if self._norms_first:
            self._norm_first(qkv_TC)
        q_THD, (sinks,) = self._queries(qkv_TC, step, layer_kv), self.vectors
        return self.backend.attend_with_sinks(q_THD, sinks.values, layer_kv, step.plan, self.spec)


class ReadingAttention(Attention):
    """Of a layer whose queries ask the keys and values that an earlier layer has written."""

    def _attend(
        self, qkv_TC: torch.Tensor, step: AttentionStep, layer_kv: LayerKV, *, is_last: bool = False
    ) -> torch.Tensor:
        q_THD = qkv_TC.view(len(qkv_TC), self.spec.num_heads, self.spec.head_dim)
        if self.q_norm is not None:
            normed = self.q_norm(qkv_TC if self._norms_first else q_THD)
            q_THD = normed.view(q_THD.shape)
        rotate_(q_THD, *(step.rotated_T1D or rotation_at(step.table_L2D, step.positions_T)))
        if is_last:
            out_1HD = self.backend.attend_last(q_THD[-1:], layer_kv, step.plan, self.spec)
            if out_1HD is not None:
                return out_1HD
        return self.backend.attend(q_THD, layer_kv, step.plan, self.spec)


class InvariantAttention(Attention):
    def _rotate_and_write(
        self, qkv_TC: torch.Tensor, step: AttentionStep, layer_kv: LayerKV
    ) -> torch.Tensor:
        if (views := layer_kv.views) is None:
            raise InternalError("this KV format is not written in place")
        norms = self._head_norms
        where = step.table_L2D, step.positions_T, step.slots_T, views
        if not qkv_TC.is_cuda:
            return qk_norm_rope_write_reference(qkv_TC, *where, norms=norms)
        from ridgeline.kernels.qk_norm_rope_write_triton import qk_norm_rope_write_triton

        return qk_norm_rope_write_triton(qkv_TC, *where, norms=norms, block_heads=HEADS)


class RotatedFirst(Attention):
    """Norms of each head behind the rotation, which leaves the length of a head as it is: the
    division stays in front of it, and the weights of both norms multiply the rotated queries."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.q_norm is None or self.k_norm is None:
            raise InternalError("norms behind the rotation, and there are none")
        self.k_norm.heir, self._before = self.q_norm, (self.k_norm, self.k_norm)
        self.weight_D = self.q_norm.weight_E

    def _rotate_and_write(
        self, qkv_TC: torch.Tensor, step: AttentionStep, layer_kv: LayerKV
    ) -> torch.Tensor:
        return super()._rotate_and_write(qkv_TC, step, layer_kv).mul_(self.weight_D)

    def _rotate(
        self, qkv_TC: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
    ) -> torch.Tensor:
        return super()._rotate(qkv_TC, cos_T1D, sin_T1D).mul_(self.weight_D)


class InvariantRotatedFirst(RotatedFirst, InvariantAttention):
    """Both."""


def attention_class(spec: AttentionSpec, *, deterministic: bool) -> type[Attention]:
    """`deterministic`: all tokens are treated alike."""
    if spec.cache_layer is not None:
        return ReadingAttention
    if spec.norms_rotated:
        return InvariantRotatedFirst if deterministic else RotatedFirst
    if deterministic:
        return InvariantAttention
    return SinkAttention if spec.sinks else Attention
