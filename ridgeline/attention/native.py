"""Attention by our own CPU kernels, straight from the blocks of the cache, all of a step at once.

Letters: T packed tokens, B requests, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, Supports, softmax_scale
from ridgeline.attention.layout import AttentionLayout, DecodeLayout
from ridgeline.errors import InternalError
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.attention import AttentionBatch, cpu_attention
from ridgeline.kernels.cpu.elementwise import DTYPES, MAX_HEAD_DIM
from ridgeline.kvcache import LayerKV


@dataclass(frozen=True, slots=True)
class _Native(Supports):
    """And a library that could be built, on a processor that it runs on."""

    def lacks(self, device: torch.device) -> str | None:
        if native.library() is None:
            return "needs the native library, which is not there"
        return None


FORMATS = "auto", "fp8", "int8", "int4"


class NativeAttention(AttentionBackend):
    """A plan is the batch itself: how its work is cut is decided in C, by the lengths it finds, so
    that a recorded step serves any lengths."""

    name = "native"
    captures_decodes = True
    supports: Supports = _Native(
        ("cpu",),
        tuple(DTYPES),
        max_head_dim=MAX_HEAD_DIM,
        kv_formats=FORMATS,
        sinks=True,
        scores_caps=True,
    )

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> AttentionBatch:
        return AttentionBatch(
            layout.block_tables_BM[group],
            torch.tensor(layout.seq_lens, dtype=torch.int32),
            torch.tensor(layout.query_start, dtype=torch.int32),
            window,
        )

    def plan_decodes(self, layout: DecodeLayout, group: int, window: int | None) -> AttentionBatch:
        return AttentionBatch(
            layout.tables_NM[group], layout.seq_lens_B, layout.query_start_B1, window, layout.rows_B
        )

    def attend(
        self,
        q_THD: torch.Tensor,
        layer_kv: LayerKV,
        plan: AttentionBatch,
        spec: AttentionSpec,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if (views := layer_kv.views) is None:
            raise InternalError("this KV format is not read in place")
        scale, cap = softmax_scale(spec), spec.scores_cap
        return cpu_attention(q_THD, views, plan, scale, sinks_H, cap=cap)

    def attend_with_sinks(
        self,
        q_THD: torch.Tensor,
        sinks_H: torch.Tensor,
        layer_kv: LayerKV,
        plan: AttentionBatch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        return self.attend(q_THD, layer_kv, plan, spec, sinks_H)
