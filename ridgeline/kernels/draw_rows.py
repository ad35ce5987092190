"""One token for each row of logits: its largest, or a draw from its softmax at a temperature.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.kernels.launching import Workspace
from ridgeline.kernels.noise import minus_gumbel


@dataclass(frozen=True, slots=True)
class Draws:
    """Random rows: `keys_R` (int64) start their streams of noise, `noisy_R` (float32) is 0 for
    greedy rows among them, whose temperature stands as 1."""

    keys_R: torch.Tensor
    temperatures_R: torch.Tensor
    noisy_R: torch.Tensor

    def first(self, num: int) -> Draws:
        return Draws(self.keys_R[:num], self.temperatures_R[:num], self.noisy_R[:num])


def native_serves(logits_RV: torch.Tensor) -> bool:
    """A native kernel of this CPU draws them."""
    if logits_RV.device.type != "cpu":
        return False
    from ridgeline.kernels.cpu import elementwise

    return elementwise.serves(logits_RV)


def draw_rows(
    logits_RV: torch.Tensor,
    positions_R: torch.Tensor,
    draws: Draws | None,
    *,
    workspace: Workspace | None = None,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, int64; is sound, bool), on a GPU in one launch; the logits are never written to.

    The noise is that of `kernels.noise`: a pure function of key, position (int64, where the new
    token will stand) and token id. Of equals the lowest id is taken. A row is unsound if its
    largest logit is not finite or it holds a NaN; its id is then 0.
    """
    if native_serves(logits_RV):
        from ridgeline.kernels.cpu import elementwise

        return elementwise.draw_rows(logits_RV, positions_R, draws)
    if not logits_RV.is_cuda:
        return draw_rows_reference(logits_RV, positions_R, draws)
    from ridgeline.kernels.draw_rows_triton import draw_rows_triton

    return draw_rows_triton(logits_RV, positions_R, draws, workspace=workspace, pdl=pdl)


def draw_rows_reference(
    logits_RV: torch.Tensor, positions_R: torch.Tensor, draws: Draws | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide_RV = logits_RV.float()
    largest_R1 = wide_RV.amax(-1, keepdim=True)  # NaN if there is one
    is_sound_R = largest_R1.isfinite().squeeze(1)
    scores_RV = wide_RV - largest_R1
    if draws is not None:
        noise_RV = minus_gumbel(draws.keys_R, positions_R, wide_RV.shape[1])
        scores_RV = scores_RV / draws.temperatures_R[:, None] - noise_RV * draws.noisy_R[:, None]
    return scores_RV.argmax(-1).where(is_sound_R, 0), is_sound_R
