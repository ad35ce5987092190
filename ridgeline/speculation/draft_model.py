"""What would a smaller model say next? A decoder with a cache of its own in the target's blocks.

Each block of the target's tables has room for the draft's keys and values too, so that the draft
needs no tables, no pool and no prefix cache of its own; a request that finds a prompt cached finds
it cached for both. After a full acceptance the draft has not seen its own last draft, therefore its
first pass is of each row's two newest tokens.
"""

from __future__ import annotations

import torch

from ridgeline.architectures.draft_groups import draft_groups
from ridgeline.attention.layout import ForwardBatch
from ridgeline.errors import ConfigError, check
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.speculation.contract import DraftMethod, DraftStep
from ridgeline.speculation.passes import ModelPasses

UNSEEN = 2  # tokens at the end of a row that the draft has not computed, at most


class DraftModel(DraftMethod):
    """A DraftMethod. `kv` is the draft's, over the target's block ids; `vocab_size` the target's,
    and that of the logits that `draft` returns: ids that the draft has not are at minus infinity.

    A block that a request filled with a fully accepted step and then ended may lack the draft's
    keys of its last token (they are then older numbers): who finds it cached gets worse drafts for
    a while, and the same tokens.
    """

    name = "draft"
    needs_tokens = True

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        *,
        vocab_size: int,
        max_draft_tokens: int,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        """Steps of up to `max_rows` rows; with draws, of rows * drafts <= `max_logit_rows`."""
        check(
            decoder.num_token_ids >= vocab_size,
            "the draft can look up all ids of the target",
            has=decoder.num_token_ids,
            needs=vocab_size,
        )
        self.decoder, self.kv = decoder, kv
        self.max_draft_tokens = max_draft_tokens
        self._passes = ModelPasses(
            decoder,
            kv,
            vocab_size=vocab_size,
            max_rows=max_rows,
            max_logit_rows=max_logit_rows,
            longest=UNSEEN,
        )

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        return self._passes.draft(step, num_draft_tokens, begin=UNSEEN)

    def follow(self, batch: ForwardBatch) -> None:
        self.decoder.fill(batch, self.kv)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.kv.copy_blocks(sources, targets)

    def shares_work(self, target: Decoder, target_kv: KVCache) -> bool:
        """`follow` may be given the MixedLayout of the target: how its work is cut depends on the
        heads of a layer, the dtype and the windows."""
        return _cut(self.decoder, self.kv) == _cut(target, target_kv)

    @property
    def num_bytes(self) -> int:
        return self.decoder.num_bytes + self.kv.num_bytes + self._passes.num_bytes


def open_draft_model(
    decoder: Decoder,
    target: Decoder,
    target_kv: KVCache,
    *,
    max_draft_tokens: int,
    max_rows: int,
    max_logit_rows: int,
    kv_format: str = "auto",
) -> DraftModel:
    """With a cache for all blocks of the target's, in `kv_format`. ConfigError if the draft's
    layers find no block tables, or it does not reach as far as the target."""
    if decoder.max_model_len < target.max_model_len:
        raise ConfigError(
            f"the draft is made for max_model_len {decoder.max_model_len}, the model for "
            f"{target.max_model_len}; make both for the same"
        )
    kv = KVCache(
        decoder.spec,
        draft_groups(target_kv.groups, decoder.spec),
        target_kv.num_blocks,
        target_kv.block_size,
        decoder.dtype,
        decoder.device,
        kv_format=kv_format,
    )
    return DraftModel(
        decoder,
        kv,
        vocab_size=target.spec.vocab_size,
        max_draft_tokens=max_draft_tokens,
        max_rows=max_rows,
        max_logit_rows=max_logit_rows,
    )


def _cut(decoder: Decoder, kv: KVCache) -> tuple[object, ...]:
    spec = decoder.layers[0].attention.spec
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return (*heads, decoder.dtype, tuple(group.window for group in kv.groups))
