"""What are the numbers inside a model while it reads a prompt and answers, one pass after another?

The real decoder in float32 with the reference attention, whose weights are kept. Slow and small:
for looking at, not for serving.

Letters: T new tokens, n all tokens so far, H query heads, K KV heads, D head size, E hidden, L
states (one more than layers), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, Supports, softmax_scale
from ridgeline.attention.layout import AttentionLayout, ForwardBatch, slots_of_range
from ridgeline.attention.reference import ReferenceAttention, ReferencePlan
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache, LayerKV
from ridgeline.layers.decoder import Decoder
from ridgeline.loader import open_checkpoint, read_config
from ridgeline.quantization.plain import PlainWeights

BLOCK_SIZE = 16


class WatchedAttention(ReferenceAttention):
    """The reference, which also keeps the weights [H, T, n] of each layer that attends."""

    supports = Supports(("cpu",), (torch.float32,), windows=False)

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def attend(
        self,
        q_THD: torch.Tensor,
        layer_kv: LayerKV,
        plan: ReferencePlan,
        spec: AttentionSpec,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        table_M = plan.layout.block_tables_BM[plan.group][0]
        num_seen, num_new = plan.layout.seq_lens[0], len(q_THD)
        slots_n = slots_of_range(table_M, 0, num_seen, plan.layout.block_size)
        k_nKD = layer_kv.gather(slots_n)[:, 0].float()
        k_nHD = k_nKD.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
        scores_HTn = torch.einsum("thd,nhd->htn", q_THD.float() * softmax_scale(spec), k_nHD)
        hidden_Tn = torch.ones(num_new, num_seen, dtype=torch.bool).triu(num_seen - num_new + 1)
        self.weights.append(scores_HTn.masked_fill(hidden_Tn, -torch.inf).softmax(-1))
        return super().attend(q_THD, layer_kv, plan, spec, sinks_H)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over T tokens. `states_LTE`: in front of each layer (the first are the embeddings),
    and behind the last. `weights`: of each layer [H, T, n], where they were watched. `logits_LV`:
    of what follows the last token, as each of its states would have it; the last ones count."""

    states_LTE: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    logits_LV: torch.Tensor


class TracedModel:
    """A model of a folder that reads one sequence, a pass at a time."""

    def __init__(
        self,
        folder: Path,
        max_tokens: int,
        *,
        attention: AttentionBackend | None = None,
        weights: PlainWeights | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.spec = read_spec(read_config(folder))
        self.attention = attention or WatchedAttention()
        for layer in self.spec.layers:
            reason = self.attention.supports.why_not(layer.attention, dtype, torch.device("cpu"))
            if reason is not None:
                raise ConfigError(f"{folder}: attention backend {self.attention.name} {reason}")
        self._max_tokens = max_tokens
        device = torch.device("cpu")
        self._decoder = Decoder(
            self.spec,
            dtype=dtype,
            device=device,
            placement=Placement(),
            attention=self.attention,
            weight_format=weights or PlainWeights(),
            max_model_len=max_tokens,
        )
        self._decoder.load(open_checkpoint(folder, written=self.spec.written))
        groups, num_blocks = kv_groups(self.spec), -(-max_tokens // BLOCK_SIZE)
        self._kv = KVCache(self.spec, groups, num_blocks, BLOCK_SIZE, dtype, device)
        self._table_1M = torch.arange(1, num_blocks + 1, dtype=torch.int32)[None]

    @property
    def weight_bytes(self) -> int:
        """All parameters, as they are held."""
        return self._decoder.num_bytes

    def _batch(self, token_ids: Sequence[int], start: int) -> ForwardBatch:
        end = start + len(token_ids)
        if end > self._max_tokens:
            raise ConfigError(f"{end} tokens; at most {self._max_tokens} are traced")
        positions_T = torch.arange(start, end)
        layout = AttentionLayout(
            [len(token_ids)],
            [end],
            [0, len(token_ids)],
            (self._table_1M,),
            (positions_T + BLOCK_SIZE,),
            BLOCK_SIZE,
        )
        return ForwardBatch(torch.tensor(token_ids), positions_T, layout)

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int], start: int = 0) -> Pass:
        """Tokens from position `start` on; what was read before them is in the cache."""
        watched = self.attention if isinstance(self.attention, WatchedAttention) else None
        if watched is not None:
            watched.weights.clear()
        layers = self.spec.num_layers + 1
        states_LTE = torch.empty(layers, len(token_ids), self.spec.hidden_size)
        batch = self._batch(token_ids, start)
        self._decoder.forward_tapped(batch, self._kv, range(layers), states_LTE)
        kept = () if watched is None else tuple(watched.weights)
        return Pass(states_LTE, kept, self._decoder.logits(states_LTE[:, -1]))

    @torch.inference_mode()
    def next_token(self, token_ids: Sequence[int], start: int = 0) -> int:
        """The likeliest token after these, and nothing else kept."""
        hidden_TE = self._decoder.forward(self._batch(token_ids, start), self._kv)
        return int(self._decoder.logits(hidden_TE[-1:])[0].argmax())
