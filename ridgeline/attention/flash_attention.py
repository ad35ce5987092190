"""Attention by FlashAttention's kernels, straight from the blocks of the cache.

FlashAttention (https://github.com/Dao-AILab/flash-attention) is a package of its own. This is its
fourth version, `flash_attn.cute`, which reads blocks of any size and compiles its kernels when they
are first used. One launch answers every request of a step, with decodes as prompts of one token.
Letters: T packed tokens, B requests, M blocks per table row, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, Supports, softmax_scale
from ridgeline.attention.layout import AttentionLayout
from ridgeline.errors import EngineFault, InternalError
from ridgeline.kvcache import LayerKV

PACKAGE = "flash_attn.cute"
GENERATIONS = (9, 10, 11)  # of compute capabilities, whose kernels read blocks of a cache


@dataclass(frozen=True, slots=True)
class _FlashAttention(Supports):
    """And the package, and a card that it reads blocks on."""

    def lacks(self, device: torch.device) -> str | None:
        if not _is_installed():
            return (
                "needs the package flash-attn-4, which is not installed (pip install flash-attn-4)"
            )
        if torch.cuda.get_device_capability(device)[0] not in GENERATIONS:
            return "reads blocks on GPUs of compute capability 9.0 to 11.x only"
        return None


@dataclass(frozen=True, slots=True)
class FlashAttentionPlan:
    """Where the requests of a step begin, how long they are, and where their blocks lie."""

    query_start_B1: torch.Tensor  # int32
    seq_lens_B: torch.Tensor  # int32
    tables_BM: torch.Tensor  # int32
    max_new: int
    max_len: int


class FlashAttention(AttentionBackend):
    """Keys and values that lie beside each other are read as they are."""

    name = "flash_attention"
    # No windows: what lies behind one may be NaN, which its kernels multiply by zero.
    supports: Supports = _FlashAttention(
        ("cuda",),
        (torch.bfloat16, torch.float16),
        windows=False,
        head_dims=(64, 128),
        kv_formats=("auto",),
    )

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> FlashAttentionPlan:
        if window is not None:
            raise InternalError("flash_attention was given a window")
        tables_BM = layout.block_tables_BM[group][: len(layout.seq_lens)]
        starts_B1 = layout.query_start_B1
        if starts_B1 is None:
            starts_B1 = _sent(layout.query_start, tables_BM.device)
        return FlashAttentionPlan(
            starts_B1,
            _sent(layout.seq_lens, tables_BM.device),
            tables_BM,
            max(layout.query_lens),
            max(layout.seq_lens),
        )

    def attend(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: FlashAttentionPlan, spec: AttentionSpec
    ) -> torch.Tensor:
        """EngineFault with what its compiler said, where it cannot compile."""
        if (views := layer_kv.views) is None:
            raise InternalError("this KV format is not read in place")
        try:
            out_THD: torch.Tensor
            out_THD, _ = import_module(PACKAGE).flash_attn_varlen_func(
                q_THD,
                views.k_NSKD,
                views.v_NSKD,
                cu_seqlens_q=plan.query_start_B1,
                seqused_k=plan.seq_lens_B,
                max_seqlen_q=plan.max_new,
                max_seqlen_k=plan.max_len,
                page_table=plan.tables_BM,
                softmax_scale=softmax_scale(spec),
                causal=True,
            )
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # its compiler has errors of its own, which share no class
            raise EngineFault(
                f"FlashAttention cannot answer this step: {str(error)[:2000]}; use"
                " attention_backend triton"
            ) from error
        return out_THD


def _sent(numbers: list[int], device: torch.device) -> torch.Tensor:
    """On the device, which nobody waits for."""
    there = torch.tensor(numbers, dtype=torch.int32)
    if device.type == "cuda":
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


def _is_installed() -> bool:
    try:
        return find_spec(PACKAGE) is not None
    except ImportError:  # of a part of it that is there
        return False
