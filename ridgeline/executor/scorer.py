"""What are the logits of a text, outside any engine? One forward pass with a cache of its own.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.attention.layout import AttentionLayout, ForwardBatch
from ridgeline.devices import Device
from ridgeline.errors import RequestFault
from ridgeline.executor.transfer import Array, transfer_to
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder

CHUNK_TOKENS = 512
CHUNK_BYTES = 64 << 20  # of float32 logits on the device at once


class Scorer:
    """Shares the decoder's weights with a running engine and nothing else."""

    def __init__(
        self, decoder: Decoder, device: Device, *, block_size: int, max_model_len: int
    ) -> None:
        self._decoder = decoder
        self._device = device.torch_device
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._transfer = transfer_to(device.torch_device)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] float32 on the CPU: row i is what follows `token_ids[: i + 1]`.

        RequestFault for no tokens, ids outside the vocabulary and more than the context holds.
        """
        self.check(token_ids)
        ids = np.array(token_ids, np.int64)
        out_TV = torch.empty(len(ids), self._decoder.spec.vocab_size)
        with torch.inference_mode():
            kv = self._cache(len(ids))
            for start in range(0, len(ids), CHUNK_TOKENS):
                stop = min(start + CHUNK_TOKENS, len(ids))
                hidden = self._decoder.forward(self._batch(ids, start, stop), kv)
                self._put_logits(hidden, out_TV[start:stop])
        return out_TV

    def check(self, token_ids: Sequence[int]) -> None:
        """RequestFault for tokens that cannot be scored."""
        spec = self._decoder.spec
        if not (spec.has_embedding and spec.has_head):
            raise RequestFault(
                "scores need all layers of the model on one rank; serve it with pp 1",
                param="prompt",
            )
        if not token_ids:
            raise RequestFault("there are no tokens to score", param="prompt", code="empty_input")
        if len(token_ids) > self._max_model_len:
            raise RequestFault(
                f"{len(token_ids)} tokens do not fit the context of {self._max_model_len};"
                " score a shorter text or raise max_model_len",
                param="prompt",
                code="context_length_exceeded",
            )
        size = spec.vocab_size
        if not 0 <= min(token_ids) <= max(token_ids) < size:
            raise RequestFault(
                f"token ids must be between 0 and {size - 1}",
                param="prompt",
                code="invalid_token_id",
            )

    def _cache(self, num_tokens: int) -> KVCache:
        spec, decoder = self._decoder.spec, self._decoder
        num_kv_heads = decoder.placement.shard_heads(spec.layers[0].attention.num_kv_heads).length
        groups = kv_groups(spec)
        return KVCache(
            spec,
            groups,
            len(groups) * -(-num_tokens // self._block_size),
            self._block_size,
            decoder.dtype,
            self._device,
            num_kv_heads=num_kv_heads,
        )

    def _batch(self, ids: Array, start: int, stop: int) -> ForwardBatch:
        """Group g has blocks 1 + g * n .. of the small cache, in order."""
        num_groups = len(kv_groups(self._decoder.spec))
        per_group = -(-len(ids) // self._block_size)
        positions = np.arange(start, stop)
        firsts = [1 + group * per_group for group in range(num_groups)]
        slots = [first * self._block_size + positions for first in firsts]
        tables = [np.arange(first, first + per_group, dtype=np.int32)[None] for first in firsts]
        sent = self._transfer.send_all([ids[start:stop], positions, *slots, *tables])
        layout = AttentionLayout(
            [stop - start],
            [stop],
            [0, stop - start],
            tuple(sent[2 + num_groups :]),
            tuple(sent[2 : 2 + num_groups]),
            self._block_size,
        )
        return ForwardBatch(sent[0], sent[1], layout)

    def _put_logits(self, hidden_TE: torch.Tensor, out_TV: torch.Tensor) -> None:
        rows = max(1, CHUNK_BYTES // (4 * out_TV.shape[1]))
        for start in range(0, len(hidden_TE), rows):
            logits = self._decoder.logits(hidden_TE[start : start + rows])
            out_TV[start : start + rows].copy_(logits)
