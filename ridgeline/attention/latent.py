"""Latent attention by torch's own kernels, on what is gathered from the cache.

A request with few new tokens asks the latent vectors themselves, which are one key for all heads
and whose first numbers are the values: its queries are multiplied by what makes keys of a vector,
its results by what makes values of one. For longer pieces keys and values of every head are
computed first, where that takes fewer operations. Letters: T packed tokens, B requests of a tile,
L keys of each, n keys of a piece, H heads, P plain and R rotated numbers of a key, D = P + R, V of
a value, C of a latent vector.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ridgeline.architectures.counts import is_expanded
from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, LatentUp, Supports, softmax_scale
from ridgeline.attention.layout import AttentionLayout, DecodeLayout
from ridgeline.attention.sdpa import LongPiece, SdpaAttention, SdpaPlan, attend_piece, attend_tile
from ridgeline.kvcache import LayerKV

EXPANDED_BYTES = 64 << 20  # keys and values of a piece that are in memory at a time


class TorchLatentAttention(AttentionBackend):
    name = "latent"
    supports = Supports(
        ("cuda", "meta"), (torch.float32, torch.bfloat16, torch.float16), latent=True
    )

    def __init__(self) -> None:
        self._torch = SdpaAttention()

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> SdpaPlan:
        return self._torch.plan(layout, group, window)

    def attend_latent(
        self,
        q_THD: torch.Tensor,
        up: LatentUp,
        layer_kv: LayerKV,
        plan: SdpaPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        out_THV = q_THD.new_empty((*q_THD.shape[:2], up.values_HVC.shape[1]))
        attend_rows(q_THD, up, layer_kv, plan, spec, out_THV)
        return out_THV


class HostLatentAttention(TorchLatentAttention):
    """On a processor the host knows the lengths of a captured step too."""

    name = "latent_cpu"
    captures_decodes = True
    supports = Supports(("cpu",), TorchLatentAttention.supports.dtypes, latent=True)

    def plan_decodes(self, layout: DecodeLayout, group: int, window: int | None) -> SdpaPlan:
        num, tables_NM = layout.num_new, layout.tables_NM[group]
        lens = [max(length, num) for length in layout.seq_lens_B.tolist()]
        size, (rows, width) = layout.block_size, (len(lens), tables_NM.shape[1])
        tables_BM = tables_NM.new_zeros(rows, max(width, -(-max(lens) // size)))
        tables_BM[:, :width] = tables_NM.index_select(0, layout.rows_B)
        starts, slots = [num * row for row in range(rows + 1)], layout.slots_T[group : group + 1]
        same = AttentionLayout([num] * rows, lens, starts, (tables_BM,), slots, size)
        return self._torch.plan(same, 0, window)


def attend_rows(
    q_THD: torch.Tensor,
    up: LatentUp,
    layer_kv: LayerKV,
    plan: SdpaPlan,
    spec: AttentionSpec,
    out_THV: torch.Tensor,
) -> None:
    """Writes the rows of the plan's requests, and no others."""
    scale, size = softmax_scale(spec), up.weight_HOC.shape[2]
    for tile in plan.short:
        rows = slice(None) if tile.rows_T is None else tile.rows_T
        cached = layer_kv.gather(tile.slots)
        if tile.num_new > 1:  # what drafts without a block have left may be NaN
            cached = cached.nan_to_num(0.0)
        k_B1LD = cached.view(tile.num_requests, 1, tile.length, -1)
        mixed_THC = attend_tile(absorb(q_THD[rows], up), k_B1LD, k_B1LD[..., :size], tile, scale)
        out_THV[rows] = values_of(mixed_THC, up)
    for piece in plan.long:
        num_new = piece.stop - piece.start
        cached_nC = layer_kv.gather(piece.slots[: piece.num_keys])
        if is_expanded(spec, num_new, piece.num_keys - num_new):
            _attend_expanded(q_THD, up, cached_nC, piece, plan, scale, out_THV)
            continue
        q_THC = absorb(q_THD[piece.start : piece.stop], up)
        mixed_THC = torch.empty_like(q_THC[..., :size])
        k_n1C, own = cached_nC[:, None], piece.from_start
        attend_piece(q_THC, k_n1C, k_n1C[..., :size], own, plan, scale, mixed_THC)
        out_THV[piece.start : piece.stop] = values_of(mixed_THC, up)


def absorb(q_THD: torch.Tensor, up: LatentUp) -> torch.Tensor:
    """Queries of cached vectors, [T, H, C + R]."""
    return torch.cat((rotated_queries(q_THD, up), q_THD[..., up.num_plain :]), -1)


def rotated_queries(q_THD: torch.Tensor, up: LatentUp) -> torch.Tensor:
    """[T, H, C]: what is not rotated of queries, as queries of latent vectors."""
    return torch.bmm(q_THD[..., : up.num_plain].transpose(0, 1), up.keys_HPC).transpose(0, 1)


def values_of(mixed_THC: torch.Tensor, up: LatentUp) -> torch.Tensor:
    """[T, H, V]: what mixtures of latent vectors are as values of the heads."""
    return torch.bmm(mixed_THC.transpose(0, 1), up.values_HVC.mT).transpose(0, 1)


def _attend_expanded(
    q_THD: torch.Tensor,
    up: LatentUp,
    cached_nC: torch.Tensor,
    piece: LongPiece,
    plan: SdpaPlan,
    scale: float,
    out_THV: torch.Tensor,
) -> None:
    """As many heads at a time as there is room for."""
    num_heads, rows, size = up.weight_HOC.shape
    latent_nC, rotated_n1R = cached_nC[:, :size], cached_nC[:, None, size:]
    of_head = len(cached_nC) * (rows + rotated_n1R.shape[2]) * cached_nC.element_size()
    step = max(1, EXPANDED_BYTES // of_head)
    for first in range(0, num_heads, step):
        heads = slice(first, first + step)
        kv_nHO = (latent_nC @ up.weight_HOC[heads].flatten(0, 1).T).view(len(cached_nC), -1, rows)
        plain_nHP, v_nHV = kv_nHO[..., : up.num_plain], kv_nHO[..., up.num_plain :]
        rotated_nHR = rotated_n1R.expand(-1, plain_nHP.shape[1], -1)
        k_nHD = torch.cat((plain_nHP, rotated_nHR), -1)
        if (more := k_nHD.shape[2] - v_nHV.shape[2]) <= 0 or k_nHD.is_cuda:
            attend_piece(q_THD[:, heads], k_nHD, v_nHV, piece, plan, scale, out_THV[:, heads])
            continue
        # A CPU's fused kernel takes values as wide as keys; another one makes all scores at once.
        wide_THD = torch.empty_like(q_THD[piece.start : piece.stop, heads])
        q_QHD, v_nHD = q_THD[piece.start : piece.stop, heads], functional.pad(v_nHV, (0, more))
        attend_piece(q_QHD, k_nHD, v_nHD, piece.from_start, plan, scale, wide_THD)
        out_THV[piece.start : piece.stop, heads] = wide_THD[..., :-more]
