"""What would the model say if it stopped after its first layers? Drafts without another model.

The first layers, the final norm and the output matrix draft; their keys and values go to the very
places of the target's cache where the check writes the same numbers a moment later, so nothing has
to be kept or followed. Source of the idea: Zhang et al., "Draft & Verify: Lossless Large Language
Model Acceleration via Self-Speculative Decoding", 2023 (who leave out other layers than the last).
"""

from __future__ import annotations

import torch

from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.speculation.contract import DraftMethod, DraftStep
from ridgeline.speculation.passes import ModelPasses


class EarlyLayers(DraftMethod):
    """A DraftMethod over the target's own decoder and cache."""

    name = "early"

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        *,
        num_layers: int,
        max_draft_tokens: int,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        """Steps of up to `max_rows` rows; with draws, of rows * drafts <= `max_logit_rows`.
        ConfigError if so many layers are none, or all."""
        if not 0 < num_layers < decoder.spec.num_layers:
            raise ConfigError(
                f"speculate early:{num_layers}: draft with 1 to {decoder.spec.num_layers - 1} of "
                f"the model's {decoder.spec.num_layers} layers"
            )
        self.max_draft_tokens = max_draft_tokens
        self._passes = ModelPasses(
            decoder,
            kv,
            vocab_size=decoder.spec.vocab_size,
            max_rows=max_rows,
            max_logit_rows=max_logit_rows,
            num_layers=num_layers,
        )

    def draft(self, step: DraftStep, num_draft_tokens: int) -> torch.Tensor | None:
        return self._passes.draft(step, num_draft_tokens)

    @property
    def num_bytes(self) -> int:
        return self._passes.num_bytes
