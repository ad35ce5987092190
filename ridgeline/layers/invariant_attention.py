"""How does attention treat a token the same in steps of any length?

All around the backend and the products: the norms of heads are sums that a kernel cuts as it likes
by the number of tokens, so here it is told how. Letters: T tokens, C packed width.
"""

from __future__ import annotations

import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.qk_norm_rope_write import qk_norm_rope_write_reference
from ridgeline.kvcache import LayerKV
from ridgeline.layers.attention import Attention, AttentionStep

HEADS = 4  # of a program


class InvariantAttention(Attention):
    def _turn_and_write(
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
