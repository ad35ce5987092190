"""Attention of a whole step on a CPU, straight from the blocks of the cache, in C.

Requests with one new token and with many go in one call; see attention.h for how they are shared
between threads. Letters: T packed tokens, B requests, H query heads, K KV heads, D head size,
N blocks, S block size, M blocks per table row.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from ridgeline.errors import check
from ridgeline.kernels.cpu.elementwise import (
    DTYPES,
    KV_DTYPES,
    MAX_HEAD_DIM,
    check_cache,
    kernel_of,
    scale_strides_of,
)
from ridgeline.kernels.cpu.native import numbers, pointers
from ridgeline.kernels.cpu.recorder import launch, pointer
from ridgeline.kernels.paged_kv import PagedKV


class _Attention(ctypes.Structure):
    _fields_ = (
        *pointers("q", "out", "k", "v", "tables", "rows", "seq_lens", "query_start"),
        *pointers("k_scales", "v_scales", "k_lows", "v_lows"),
        *numbers("num_requests", "table_stride", "table_width", "q_stride", "out_stride"),
        *numbers("block_stride", "slot_stride", "head_stride", "block_size"),
        *numbers("heads", "kv_heads", "head_dim", "window", "dtype", "kv_dtype"),
        *numbers("scale_block_stride", "scale_slot_stride", "scale_head_stride"),
        ("scale", ctypes.c_double),
        *pointers("sinks"),
        ("cap", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Requests of a step; all numbers int32 but `rows_B` (int64), which says where in the tables a
    request's row is; None: in order. Only what a request's tokens may look at is ever read.
    Positions past the end of the tables are in block 0; a new token that has no numbers in the
    cache, but NaN, does not reach those before it."""

    tables_NM: torch.Tensor
    seq_lens_B: torch.Tensor
    query_start_B1: torch.Tensor
    window: int | None = None
    rows_B: torch.Tensor | None = None


def cpu_attention(
    q_THD: torch.Tensor,
    kv: PagedKV,
    batch: AttentionBatch,
    scale: float,
    sinks_H: torch.Tensor | None = None,
    *,
    cap: float | None = None,
) -> torch.Tensor:
    """Causal attention of every packed token over its request, [T, H, D] in the dtype of q.
    `sinks_H`: a further score of each head, whose value is zero. `cap`: scores become
    cap * tanh(score / cap)."""
    tokens, heads, size = q_THD.shape
    _, block_size, kv_heads, _ = kv.k_NSKD.shape
    kv_size = kv.head_dim
    _check(q_THD, kv, batch)
    check(size == kv_size <= MAX_HEAD_DIM, "a head size that is served", size=size, kv=kv_size)
    check(sinks_H is None or sinks_H.dtype == torch.float32, "sinks of 32 bits")
    check(heads % kv_heads == 0, "query heads share KV heads", heads=heads, kv_heads=kv_heads)
    out_THD = torch.empty((tokens, heads, size), dtype=q_THD.dtype)
    strides, scale_strides = kv.k_NSKD.stride(), scale_strides_of(kv)
    arguments = _Attention(
        pointer(q_THD), pointer(out_THD), pointer(kv.k_NSKD), pointer(kv.v_NSKD),
        pointer(batch.tables_NM), pointer(batch.rows_B), pointer(batch.seq_lens_B),
        pointer(batch.query_start_B1), pointer(kv.k_scales_NSK), pointer(kv.v_scales_NSK),
        pointer(kv.k_lows_NSK), pointer(kv.v_lows_NSK),
        len(batch.seq_lens_B), batch.tables_NM.stride(0), batch.tables_NM.shape[1],
        q_THD.stride(0), out_THD.stride(0),
        strides[0], strides[1], strides[2], block_size, heads, kv_heads, size, batch.window or 0,
        DTYPES[q_THD.dtype], KV_DTYPES[kv.k_NSKD.dtype], *scale_strides, scale,
        pointer(sinks_H), cap or 0.0,
    )  # fmt: skip
    launch(kernel_of("rl_attention"), arguments, q_THD, out_THD, kv, batch, sinks_H)
    return out_THD


def _check(q_THD: torch.Tensor, kv: PagedKV, batch: AttentionBatch) -> None:
    check(q_THD.dtype in DTYPES, "a known dtype", dtype=q_THD.dtype)
    check(q_THD.stride(-1) == 1 or q_THD.shape[-1] == 1, "contiguous rows")
    check_cache(kv, q_THD.dtype)
    check(q_THD.stride(1) == q_THD.shape[2] or q_THD.shape[1] == 1, "heads lie side by side")
    whole = batch.tables_NM, batch.seq_lens_B, batch.query_start_B1
    check(all(x.dtype == torch.int32 for x in whole), "whole numbers of 32 bits")
    check(batch.rows_B is None or batch.rows_B.dtype == torch.int64, "rows of 64 bits")
    check(all(x.stride(-1) == 1 or x.shape[-1] <= 1 for x in whole), "contiguous tables")
