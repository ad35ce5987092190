"""Latent attention by our own Triton kernel, straight from the blocks of the cache.

Requests with one new token, or in captured steps with a few of which some are drafts, are answered
together by the decode kernel; all others by torch on what is gathered. Letters: T packed tokens, B
requests, H heads, D size of a query, V of a value, C of a latent vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, LatentUp, Supports, softmax_scale
from ridgeline.attention.latent import attend_rows
from ridgeline.attention.layout import AttentionLayout, DecodeLayout
from ridgeline.attention.sdpa import SdpaAttention, SdpaPlan
from ridgeline.attention.split_work import room_for
from ridgeline.errors import InternalError
from ridgeline.kernels.latent_decode import latent_attend
from ridgeline.kernels.paged_decode import DecodeBatch
from ridgeline.kvcache import LatentKV, LayerKV

if TYPE_CHECKING:
    from ridgeline.kernels.latent_decode_triton import LatentWork


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """`rows_T`: the tokens of `decodes`, None: all of the step. `rest`: what torch answers."""

    decodes: DecodeBatch | None
    rows_T: torch.Tensor | None = None
    rest: SdpaPlan | None = None


class PagedLatentAttention(AttentionBackend):
    """Layers that share a plan run one after the other."""

    name = "latent_triton"
    captures_decodes = True
    supports = Supports(
        ("cuda",),
        (torch.float32, torch.bfloat16, torch.float16),
        kv_formats=("auto", "fp8"),
        latent=True,
    )

    def __init__(self) -> None:
        self._torch = SdpaAttention()
        self._works: dict[tuple[int, ...], LatentWork] = {}

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> LatentPlan:
        lens, tables_BM = layout.query_lens, layout.block_tables_BM[group]
        single = [row for row, num_new in enumerate(lens) if num_new == 1]
        others = [row for row, num_new in enumerate(lens) if num_new != 1]
        rest = self._torch.plan_rows(layout, group, window, others) if others else None
        if not single:
            return LatentPlan(None, None, rest)
        tokens, lengths = ([x[b] for b in single] for x in (layout.query_start, layout.seq_lens))
        there = torch.tensor((single, tokens, lengths), device=tables_BM.device)
        starts = torch.arange(len(single) + 1, dtype=torch.int32, device=tables_BM.device)
        decodes = DecodeBatch(tables_BM, there[2].int(), starts, 1, None, there[0])
        return LatentPlan(decodes, there[1] if others else None, rest)

    def plan_decodes(self, layout: DecodeLayout, group: int, window: int | None) -> LatentPlan:
        batch = DecodeBatch(
            layout.tables_NM[group],
            layout.seq_lens_B,
            layout.query_start_B1,
            layout.num_new,
            None,
            layout.rows_B,
        )
        return LatentPlan(batch)

    def attend_latent(
        self,
        q_THD: torch.Tensor,
        up: LatentUp,
        layer_kv: LayerKV,
        plan: LatentPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if plan.decodes is not None and plan.rest is None:
            return self._decode(q_THD, up, layer_kv, plan.decodes, spec)
        out_THV = q_THD.new_empty((*q_THD.shape[:2], up.values_HVC.shape[1]))
        if plan.decodes is not None and plan.rows_T is not None:
            asked = q_THD.index_select(0, plan.rows_T)
            out_THV[plan.rows_T] = self._decode(asked, up, layer_kv, plan.decodes, spec)
        if plan.rest is not None:
            attend_rows(q_THD, up, layer_kv, plan.rest, spec, out_THV)
        return out_THV

    def _decode(
        self,
        q_THD: torch.Tensor,
        up: LatentUp,
        layer_kv: LayerKV,
        batch: DecodeBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if not isinstance(layer_kv, LatentKV) or layer_kv.latent_NSC is None:
            raise InternalError("this KV format is not read in place")
        work = self._work(batch, up.weight_HOC)
        asked = up.keys_HPC, up.values_HVC, layer_kv.latent_NSC
        return latent_attend(q_THD, *asked, batch, softmax_scale(spec), work=work)

    def _work(self, batch: DecodeBatch, weight_HOC: torch.Tensor) -> LatentWork:
        """One for each shape, as captured steps hold on to its memory."""
        from ridgeline.kernels.latent_decode_triton import make_work

        key = room_for(batch), batch.max_new, len(weight_HOC), weight_HOC.shape[2]
        if key not in self._works:
            room, new, heads, size = key
            self._works[key] = make_work(
                weight_HOC.device, num_heads=heads, size=size, max_requests=room, max_new=new
            )
        return self._works[key]
