"""An attention backend from outside: the textbook formula, one request and head at a time.

Its table line: `ATTENTION_BACKENDS["toy"] = "tests.extensions.toy_attention:TextbookAttention"`.
"""

from __future__ import annotations

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention import AttentionBackend, Supports
from ridgeline.attention.backend import softmax_scale
from ridgeline.attention.layout import AttentionLayout
from ridgeline.kvcache import LayerKV

Plan = list[tuple[slice, torch.Tensor, torch.Tensor]]


class TextbookAttention(AttentionBackend):
    name = "toy"
    supports = Supports(("cpu", "cuda"), (torch.float32, torch.bfloat16))

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> Plan:
        """Rows, visible slots and mask of each request."""
        pieces: Plan = []
        size = layout.block_size
        for row, end in enumerate(layout.seq_lens):
            first = end - layout.query_lens[row]
            begin = 0 if window is None else max(0, first + 1 - window)
            table = layout.block_tables_BM[group][row].tolist()
            slots = [table[place // size] * size + place % size for place in range(begin, end)]
            query, key = torch.arange(first, end)[:, None], torch.arange(begin, end)
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            device = layout.slots_T[group].device
            rows = slice(layout.query_start[row], layout.query_start[row + 1])
            pieces.append((rows, torch.tensor(slots, device=device), seen.to(device)))
        return pieces

    def attend(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: Plan, spec: AttentionSpec
    ) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        share = spec.num_heads // spec.num_kv_heads
        for rows, slots, seen in plan:
            k, v = layer_kv.gather(slots).float().unbind(1)
            for head in range(spec.num_heads):
                scores = q_THD[rows, head].float() @ k[:, head // share].T * softmax_scale(spec)
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                out_THD[rows, head] = (weights @ v[:, head // share]).to(q_THD.dtype)
        return out_THD
