"""Attention by our own Triton kernels, straight from the blocks of the cache.

Requests with one new token, or a few of which some are drafts, are answered together by the decode
kernel, the others together by the prefill kernel; but a long prompt with nothing before it by
torch's kernel on what is gathered, in a captured step too if it is alone there.
With `is_invariant` the prefill kernel answers them all, always cut in the same way, so that what a
token gets depends on its position, the query and the cache alone: tiles of keys begin at multiples
of one size, their order is that of the keys, and a key that a row does not see changes no bit.
Letters: T packed tokens, B requests, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import (
    AttentionBackend,
    AttentionCase,
    Pieces,
    Supports,
    softmax_scale,
)
from ridgeline.attention.layout import AttentionLayout, DecodeLayout, MixedLayout
from ridgeline.attention.sdpa import LONG_PIECE, SdpaAttention, SdpaPlan, attend_whole, suits_cudnn
from ridgeline.attention.split_work import SplitWork, StreamedDecodes
from ridgeline.errors import InternalError, check
from ridgeline.kernels.launching import shared_workspace
from ridgeline.kernels.paged_decode import HEAD_DIMS, DecodeBatch, paged_decode, schedule_for
from ridgeline.kernels.paged_prefill import (
    MOST_PROGRAMS,
    Config,
    PrefillBatch,
    paged_prefill,
    piece_items,
    prefill_config,
    work_items,
)
from ridgeline.kvcache import LayerKV

FEW_PIECES = 32  # prompts of a captured step, beside the tiles that all its tokens make
MANY_PIECES = 512  # the same where decodes are pieces too

if TYPE_CHECKING:
    from ridgeline.kernels.paged_decode_cuda import Prologue
    from ridgeline.kernels.paged_decode_triton import Schedule


@dataclass(slots=True)
class Prompts:
    """Requests with several new tokens in a step of `num_tokens`. Of a captured step the work is
    in `work_WR`; else the first layer makes it of the lengths of `requests`. `num_tokens` None:
    they are cut the same in a step of any length."""

    tables: torch.Tensor
    num_tokens: int | None
    work_WR: torch.Tensor | None = None
    layout: AttentionLayout | None = None
    requests: tuple[int, ...] = ()

    def batch(self, window: int | None, case: AttentionCase) -> PrefillBatch:
        config, spec = _config(case, self.num_tokens), case.spec
        if self.work_WR is None and self.layout is not None:
            work = work_items(
                self.layout.query_lens,
                self.layout.seq_lens,
                self.requests,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                window=window,
                config=config,
                num_programs=_num_programs(self.num_tokens),
            )
            # From memory that is not pinned the host would wait for all that was asked before.
            there = torch.from_numpy(work)
            there = there.pin_memory() if case.device.type == "cuda" else there
            self.work_WR = there.to(case.device, non_blocking=True)
        if self.work_WR is None:
            raise InternalError("prompts without work")
        workspace = None
        if config is not None and _num_programs(self.num_tokens):
            workspace = shared_workspace(case.device)
        return PrefillBatch(self.tables, self.work_WR, window, config, workspace)


@dataclass(slots=True)
class PagedPlan:
    """`decodes`: requests with one new token, or with a few of which some are drafts. `prompts`:
    those with several; `long`: those of them that torch answers. None: there are none. `whole_T`:
    the slots of the one prompt that a captured step is, which torch answers."""

    window: int | None
    decodes: DecodeBatch | None
    prompts: Prompts | None = None
    long: SdpaPlan | None = None
    whole_T: torch.Tensor | None = None

    @property
    def torch_alone(self) -> SdpaPlan | None:
        """`long`, if there is nothing beside it."""
        return self.long if self.decodes is None and self.prompts is None else None


class PagedAttention(AttentionBackend):
    """Layers that share a plan run one after the other."""

    name = "triton"
    captures_decodes = True
    captures_mixed = True
    supports = Supports(
        ("cuda",),
        (torch.float32, torch.bfloat16, torch.float16),
        head_dims=HEAD_DIMS,
        kv_formats=("auto", "fp8", "int8", "int4"),
    )

    def __init__(self, *, is_invariant: bool = False) -> None:
        self.is_invariant = is_invariant
        self._torch = SdpaAttention()
        self._streamed = StreamedDecodes()
        self._work = SplitWork(_make, _refresh)

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> PagedPlan:
        lens = layout.query_lens
        if self.is_invariant:
            tables = layout.block_tables_BM[group]
            every = Prompts(tables, None, layout=layout, requests=tuple(range(len(lens))))
            return PagedPlan(window, None, every)
        long = [row for row in range(len(lens)) if _suits_torch(layout, row, window)]
        others = [row for row, n in enumerate(lens) if n != 1 and row not in long]
        decodes = None
        if len(others) + len(long) < len(lens):
            lens_B, start_B1 = _on_device(layout, layout.block_tables_BM[group].device)
            decodes = DecodeBatch(layout.block_tables_BM[group], lens_B, start_B1, 1, window)
        rest = self._torch.plan_rows(layout, group, window, long) if long else None
        return PagedPlan(window, decodes, _prompts(layout, group, others), rest)

    def plan_decodes(self, layout: DecodeLayout, group: int, window: int | None) -> PagedPlan:
        check(not self.is_invariant, "decodes are pieces of one token here")
        return PagedPlan(window, _decodes(layout, group, window))

    def plan_mixed(self, layout: MixedLayout, group: int, window: int | None) -> PagedPlan:
        has_decodes = layout.decodes is not None
        check(not (self.is_invariant and has_decodes), "decodes are pieces of one token here")
        if layout.is_whole:
            return PagedPlan(window, None, whole_T=layout.slots_T[group])
        decodes = None if layout.decodes is None else _decodes(layout.decodes, group, window)
        prompts = None
        if layout.work is not None:
            tables = layout.tables_NM[group]
            prompts = Prompts(tables, self._cut(layout.num_tokens), work_WR=layout.work[group])
        return PagedPlan(window, decodes, prompts)

    def takes_whole(self, case: AttentionCase, num_tokens: int, window: int | None) -> bool:
        """Not where the one kernel that treats all tokens alike is asked for."""
        sees_all = window is None or window >= num_tokens
        return not self.is_invariant and num_tokens >= LONG_PIECE and sees_all and suits_cudnn(case)

    def work_width(self, case: AttentionCase, num_tokens: int) -> int:
        if (config := _config(case, self._cut(num_tokens))) is None:
            return num_tokens
        if self.is_invariant:
            return num_tokens * case.group // config.block_m + min(num_tokens, MANY_PIECES)
        dealt = MOST_PROGRAMS // case.spec.num_kv_heads
        return num_tokens * case.group // config.block_m + max(dealt, FEW_PIECES)

    def prefill_work(
        self, pieces: Pieces, num_tokens: int, window: int | None, case: AttentionCase
    ) -> npt.NDArray[np.int32]:
        pieces_4P = np.array([pieces.rows, pieces.starts, pieces.num_new, pieces.seq_lens])
        return piece_items(
            pieces_4P,
            num_heads=case.spec.num_heads,
            num_kv_heads=case.spec.num_kv_heads,
            window=window,
            config=_config(case, self._cut(num_tokens)),
            num_programs=_num_programs(self._cut(num_tokens)),
        )

    def _cut(self, num_tokens: int) -> int | None:
        """The length of a step, as far as it may decide how work is cut."""
        return None if self.is_invariant else num_tokens

    def attend(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: PagedPlan, spec: AttentionSpec
    ) -> torch.Tensor:
        if plan.whole_T is not None:
            return attend_whole(q_THD, layer_kv, plan.whole_T, spec)
        if (views := layer_kv.views) is None:
            raise InternalError("this KV format is not read in place")
        if (alone := plan.torch_alone) is not None:
            single_THD = self._torch.attend_single(q_THD, layer_kv, alone, spec)
            if single_THD is not None:
                return single_THD
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        scale, device = softmax_scale(spec), q_THD.device
        if plan.decodes is not None:
            paged_decode(
                q_THD,
                views,
                plan.decodes,
                scale,
                schedule=self._work.schedule(plan.decodes, device, spec),
                out_THD=out_THD,
            )
        # Behind the decode kernel, which leaves zeros at the first row of every other request.
        if plan.prompts is not None:
            batch = plan.prompts.batch(plan.window, AttentionCase(spec, q_THD.dtype, device))
            paged_prefill(q_THD, views, batch, scale, out_THD=out_THD)
        if plan.long is not None:
            self._torch.attend_rows(q_THD, layer_kv, plan.long, spec, out_THD)
        return out_THD

    def attend_last(
        self, q_1HD: torch.Tensor, layer_kv: LayerKV, plan: PagedPlan, spec: AttentionSpec
    ) -> torch.Tensor | None:
        if (alone := plan.torch_alone) is None:
            return None
        return self._torch.attend_last(q_1HD, layer_kv, alone, spec)

    def takes_product(
        self, layer_kv: LayerKV, plan: PagedPlan, spec: AttentionSpec, dtype: torch.dtype
    ) -> bool:
        if plan.decodes is None or plan.prompts is not None or plan.long is not None:
            return False
        return self._streamed.takes(layer_kv.views, dtype, plan.decodes, spec)

    def attend_product(
        self,
        qkv_TX: torch.Tensor,
        prologue: Prologue,
        layer_kv: LayerKV,
        plan: PagedPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        if layer_kv.views is None or plan.decodes is None:
            raise InternalError("takes_product has not been asked")
        return self._streamed.attend(qkv_TX, prologue, layer_kv.views, plan.decodes, spec)


def _decodes(layout: DecodeLayout, group: int, window: int | None) -> DecodeBatch:
    tables, rows = layout.tables_NM[group], layout.rows_B
    return DecodeBatch(
        tables, layout.seq_lens_B, layout.query_start_B1, layout.num_new, window, rows
    )


def _prompts(layout: AttentionLayout, group: int, requests: list[int]) -> Prompts | None:
    if not requests:
        return None
    tables, longest = layout.block_tables_BM[group], max(layout.query_lens)
    return Prompts(tables, longest, layout=layout, requests=tuple(requests))


def _config(case: AttentionCase, num_tokens: int | None) -> Config | None:
    """For a step whose longest piece has so many tokens; None: the one for single tokens, which
    most steps have the most of."""
    return prefill_config(
        case.device,
        head_dim=case.spec.head_dim,
        num_rows=0 if num_tokens is None else num_tokens * case.group,
        dtype=case.dtype,
    )


def _num_programs(num_tokens: int | None) -> int:
    """That the keys of few tiles are dealt out to. How many there are depends on the batch."""
    return 0 if num_tokens is None else MOST_PROGRAMS


def _suits_torch(layout: AttentionLayout, row: int, window: int | None) -> bool:
    """A long piece with nothing before it: cuDNN's kernel is the faster one there."""
    num_new, seq_len = layout.query_lens[row], layout.seq_lens[row]
    return num_new == seq_len >= LONG_PIECE and (window is None or window >= seq_len)


def _on_device(layout: AttentionLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    if layout.decode_lens_B is not None and layout.query_start_B1 is not None:
        return layout.decode_lens_B, layout.query_start_B1
    lens = [
        seq_len if num_new == 1 else 0
        for seq_len, num_new in zip(layout.seq_lens, layout.query_lens, strict=True)
    ]
    return (
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.tensor(layout.query_start, dtype=torch.int32, device=device),
    )


def _make(
    device: torch.device, spec: AttentionSpec, max_requests: int, max_new: int
) -> Schedule | None:
    return schedule_for(
        device,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_requests=max_requests,
        max_new=max_new,
    )


def _refresh(schedule: Schedule, batch: DecodeBatch) -> None:
    """Imported where it is used: a machine without a GPU may have no Triton."""
    from ridgeline.kernels.paged_decode_triton import refresh

    refresh(schedule, batch)
