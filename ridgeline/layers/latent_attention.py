"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): what of a token goes to the cache,
and what asks for it?

The cache gets the normed latent vector and the rotated key that all heads share. Letters: T tokens,
E hidden, H heads of this rank, P numbers of a query that are not rotated, R that are, D = P + R, V
of a value, C of a latent vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, LatentUp
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.errors import InternalError
from ridgeline.kernels.qk_norm_rope_write import rotate_
from ridgeline.kvcache import LatentKV, LayerKV
from ridgeline.layers.attention import AttentionBranch, AttentionStep
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear, Part


class LatentAttention(AttentionBranch):
    """`name(role)` is the checkpoint name of a tensor of this layer; `unpacked` makes a Linear that
    keeps its weights as numbers."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        name: Callable[[str], str],
        linear: Callable[..., Linear],
        unpacked: Callable[..., Linear],
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        placement: Placement,
        unit: int = 1,
    ) -> None:
        if (latent := spec.latent) is None:
            raise InternalError("latent attention without its sizes")
        heads = placement.shard_queries(spec.num_heads, spec.num_heads, unit)
        self.spec = replace(spec, num_heads=heads.length, num_kv_heads=heads.length)
        self.latent, self.backend = latent, backend
        rank, cached = latent.q_lora_rank, latent.cached_width
        both = latent.qk_nope_head_dim + latent.v_head_dim
        # All ranks hold all of the vectors, and need them.
        queries = heads.times(latent.qk_head_dim)
        first = Part(name("q_a"), None, Shard(0, rank)) if rank else Part(name("q"), None, queries)
        self.q_size = first.rows.length
        self.down = linear([first, Part(name("kv_a"), None, Shard(0, cached))], hidden_size)
        self.q_up = linear([Part(name("q_b"), None, queries)], rank) if rank else None
        self.kv_up = unpacked([Part(name("kv_b"), None, heads.times(both))], latent.kv_lora_rank)
        self.out = linear(
            [Part(name("o"), None, Shard(0, hidden_size))],
            spec.num_heads * latent.v_head_dim,
            columns=heads.times(latent.v_head_dim),
        )
        made = latent.norm_eps, dtype, device
        self.q_norm = RMSNorm(name("q_a_norm"), rank, *made) if rank else None
        self.kv_norm = RMSNorm(name("kv_a_norm"), latent.kv_lora_rank, *made)

    def _attended(
        self,
        hidden: Hidden,
        norm: RMSNorm | None,
        step: AttentionStep,
        layer_kv: LayerKV,
        *,
        is_last: bool,
    ) -> torch.Tensor:
        down_TC = self.down.of_normed(hidden, norm)
        q_TX = down_TC[:, : self.q_size]
        if self.q_up is not None and self.q_norm is not None:
            q_TX = self.q_up(self.q_norm(q_TX))
        heads = self.spec.num_heads, self.latent.qk_head_dim
        q_THD = q_TX.view(len(q_TX), *heads)
        self._write(down_TC[:, self.q_size :], q_THD, step, layer_kv)
        out_THV = self.backend.attend_latent(q_THD, self._up, layer_kv, step.plan, self.spec)
        return out_THV.flatten(1)

    def _write(
        self, kv_TC: torch.Tensor, q_THD: torch.Tensor, step: AttentionStep, layer_kv: LayerKV
    ) -> None:
        """Rotates queries in place, and writes normed vectors and their rotated keys."""
        size, q_THR = self.latent.kv_lora_rank, q_THD[:, :, self.latent.qk_nope_head_dim :]
        if kv_TC.is_cuda and isinstance(layer_kv, LatentKV) and layer_kv.latent_NSC is not None:
            from ridgeline.kernels.latent_decode_triton import write_latent_triton

            where = step.table_L2D, step.positions_T, step.slots_T, layer_kv.latent_NSC
            norm, is_interleaved = self.kv_norm, self.spec.rope.interleaved
            write_latent_triton(
                kv_TC, q_THR, norm.weight_E, norm.eps, *where, interleaved=is_interleaved
            )
            return
        self._rotate(q_THR, step)
        self._rotate(kv_TC[:, None, size:], step)
        rows_TC = torch.cat((self.kv_norm(kv_TC[:, :size]), kv_TC[:, size:]), -1)
        layer_kv.write(step.slots_T, rows_TC)

    def _rotate(self, x_TNR: torch.Tensor, step: AttentionStep) -> None:
        """In place. Pairs that lie side by side come out apart, in queries and keys alike."""
        if step.rotated_T1D is None:
            raise InternalError("latent vectors are rotated before they are written")
        if self.spec.rope.interleaved:
            x_TNR.copy_(torch.cat((x_TNR[..., ::2], x_TNR[..., 1::2]), -1))
        rotate_(x_TNR, *step.rotated_T1D)

    @property
    def _up(self) -> LatentUp:
        weight_OC = self.kv_up.parameters["weight"]
        weight_HOC = weight_OC.view(self.spec.num_heads, -1, self.latent.kv_lora_rank)
        return LatentUp(weight_HOC, self.latent.qk_nope_head_dim)

    @property
    def linears(self) -> list[Linear]:
        up = [] if self.q_up is None else [self.q_up]
        return [self.down, *up, self.kv_up, self.out]

    @property
    def norms(self) -> list[RMSNorm]:
        return [self.kv_norm] if self.q_norm is None else [self.q_norm, self.kv_norm]
