"""Attention by the tiled reference kernel, one request after the other: slow, exact, portable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, Supports, softmax_scale
from ridgeline.attention.layout import AttentionLayout, slots_of_range
from ridgeline.kernels.paged_attention import paged_attention_reference
from ridgeline.kvcache import LayerKV


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    layout: AttentionLayout
    group: int
    window: int | None


class ReferenceAttention(AttentionBackend):
    name = "reference"
    supports = Supports(
        ("cpu", "cuda", "meta"),
        (torch.float32, torch.bfloat16, torch.float16),
        scores_caps=True,
        sinks=True,
    )

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> ReferencePlan:
        return ReferencePlan(layout, group, window)

    def attend(
        self,
        q_THD: torch.Tensor,
        layer_kv: LayerKV,
        plan: ReferencePlan,
        spec: AttentionSpec,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        layout = plan.layout
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for row, seq_len in enumerate(layout.seq_lens):
            start, stop = layout.query_start[row], layout.query_start[row + 1]
            table_M = layout.block_tables_BM[plan.group][row]

            def gather(first: int, last: int, table_M: torch.Tensor = table_M) -> torch.Tensor:
                return layer_kv.gather(slots_of_range(table_M, first, last, layout.block_size))

            paged_attention_reference(
                q_THD[start:stop],
                gather,
                seq_len=seq_len,
                num_kv_heads=spec.num_kv_heads,
                scale=softmax_scale(spec),
                window=plan.window,
                scores_cap=spec.scores_cap,
                out_THD=out_THD[start:stop],
                sinks_H=sinks_H,
            )
        return out_THD

    def attend_with_sinks(
        self,
        q_THD: torch.Tensor,
        sinks_H: torch.Tensor,
        layer_kv: LayerKV,
        plan: ReferencePlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        return self.attend(q_THD, layer_kv, plan, spec, sinks_H)
