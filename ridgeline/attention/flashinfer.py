"""Attention by FlashInfer's kernels, straight from the blocks of the cache.

FlashInfer (https://github.com/flashinfer-ai/flashinfer) is a package of its own, which compiles its
kernels when they are first used. One launch answers every request of a step, with decodes as
prompts of one token. The numbers of heads are needed for its plan, so the first layer makes that.
Letters: T packed tokens, B requests, I blocks of all requests, H query heads, D head size.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, Supports, softmax_scale
from ridgeline.attention.layout import AttentionLayout
from ridgeline.errors import EngineFault, InternalError
from ridgeline.kvcache import LayerKV

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation advises
IN_FLIGHT = 3  # plans of a KV group whose numbers may be on their way to the device at a time


@dataclass(frozen=True, slots=True)
class _FlashInfer(Supports):
    """And the package, with what it compiles with."""

    def lacks(self, device: torch.device) -> str | None:
        if find_spec("flashinfer") is None:
            return (
                "needs the package flashinfer-python, which is not installed"
                " (pip install flashinfer-python)"
            )
        if shutil.which("ninja") is None:
            return "compiles its kernels with ninja, which is not on the PATH (pip install ninja)"
        return None


@dataclass(slots=True)
class FlashInferPlan:
    """A step as its layers see it; `case` is what it was planned for, by `place`."""

    layout: AttentionLayout
    group: int
    case: tuple[Any, ...] | None = None
    place: _Place | None = None


@dataclass(slots=True)
class _Place:
    """One of FlashInfer's wrappers, and whose numbers are in it. They go to the device from one
    pinned buffer, which may be filled anew once they have arrived."""

    wrapper: Any
    arrived: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    owner: FlashInferPlan | None = None


class FlashInferAttention(AttentionBackend):
    """Keys and values that lie beside each other are read as they are: its kernels take any block,
    token and head stride, if K and V have the same."""

    name = "flashinfer"
    # No windows: what lies behind one may be NaN, which its kernels multiply by zero.
    supports: Supports = _FlashInfer(
        ("cuda",),
        (torch.bfloat16, torch.float16),
        windows=False,
        head_dims=(64, 128, 256),
        kv_formats=("auto",),
    )

    def __init__(self) -> None:
        self._places: dict[int, list[_Place]] = {}
        self._workspace: torch.Tensor | None = None

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> FlashInferPlan:
        if window is not None:
            raise InternalError("flashinfer was given a window")
        return FlashInferPlan(layout, group)

    def attend(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: FlashInferPlan, spec: AttentionSpec
    ) -> torch.Tensor:
        if (views := layer_kv.views) is None:
            raise InternalError("this KV format is not read in place")
        case = (spec.num_heads, spec.num_kv_heads, spec.head_dim, softmax_scale(spec), q_THD.dtype)
        place = plan.place
        if place is None or place.owner is not plan or plan.case != case:
            place = self._free_place(plan.group, q_THD.device)
            _fill(place.wrapper, plan, case, q_THD.device)
            place.arrived.record()
            place.owner, plan.place, plan.case = plan, place, case
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        place.wrapper.run(q_THD, (views.k_NSKD, views.v_NSKD), out=out_THD)
        return out_THD

    def _free_place(self, group: int, device: torch.device) -> _Place:
        """The one that was filled longest ago, emptied."""
        places = self._places.setdefault(group, [])
        if len(places) < IN_FLIGHT:
            if self._workspace is None:
                self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            module = import_module("flashinfer")
            kind = module.BatchPrefillWithPagedKVCacheWrapper
            place = _Place(kind(self._workspace, "NHD", backend="fa2"))
        else:
            place = places.pop(0)
            place.arrived.synchronize()
        places.append(place)
        return place


def _fill(wrapper: Any, plan: FlashInferPlan, case: tuple[Any, ...], device: torch.device) -> None:
    """EngineFault with what its compiler said, where it cannot compile."""
    layout, size = plan.layout, plan.layout.block_size
    heads, kv_heads, head_dim, scale, dtype = case
    seq_lens = np.array(layout.seq_lens, np.int32)
    blocks = -(-seq_lens // size)
    starts_B1 = np.concatenate(([0], np.cumsum(blocks))).astype(np.int32)
    table_BM = layout.block_tables_BM[plan.group]
    rows_I = np.repeat(np.arange(len(blocks)), blocks)
    places_I = rows_I * table_BM.stride(0) + np.arange(starts_B1[-1]) - starts_B1[rows_I]
    flat = table_BM.as_strided((table_BM.shape[0] * table_BM.stride(0),), (1,))
    wanted = torch.from_numpy(places_I).to(device, non_blocking=True)
    try:
        wrapper.plan(
            torch.tensor(layout.query_start, dtype=torch.int32),
            torch.from_numpy(starts_B1),
            flat.index_select(0, wanted),
            torch.from_numpy(seq_lens - (blocks - 1) * size),
            heads,
            kv_heads,
            head_dim,
            size,
            causal=True,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
    except (RuntimeError, OSError) as error:
        raise EngineFault(
            f"FlashInfer cannot plan this step: {str(error)[:2000]}; use attention_backend triton"
        ) from error
