"""One token for each position of a checked run: is the draft kept that stands there?

A draft g that was drawn from odds q is kept with probability min(1, p(g) / q(g)); in place of one
that is not, a token is drawn from max(0, p - q), normalised. What comes out has exactly the odds p
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023). Coin, draw
in place and draft have streams of noise of their own (see `noise`).
Letters: B rows of the step, k drafts of each, T = B * (k + 1) positions in order, O positions that
are checked by odds, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.errors import check
from ridgeline.kernels.draw_rows import Draws, draw_rows
from ridgeline.kernels.launching import Workspace
from ridgeline.kernels.noise import coins, rest_keys


@dataclass(frozen=True, slots=True)
class DraftOdds:
    """What a step's drafts were drawn from. `drafts_Bk` (int64) follow positions 0 .. k - 1 of
    their rows; `logits_BkV` gave them at the rows' temperatures, nothing else. `is_verified_B`
    (bool): rows at temperatures without a seed; the others get the token they would have drawn
    anyway, as all rows do behind the last draft."""

    drafts_Bk: torch.Tensor
    logits_BkV: torch.Tensor
    is_verified_B: torch.Tensor


def verified_rows(
    logits_TV: torch.Tensor,
    positions_T: torch.Tensor,
    draws: Draws | None,
    odds: DraftOdds | None,
    *,
    workspace: Workspace | None = None,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, int64; is sound, bool): the token that comes out if this position is reached.

    As `draw_rows`, which it is without odds, or where all rows are greedy; `draws` has T rows.
    With odds, positions of a row behind its first token that was not drafted, which nobody
    reaches, may get any token.
    """
    if odds is None or draws is None:
        return draw_rows(logits_TV, positions_T, draws, workspace=workspace, pdl=pdl)
    num_rows, num_draft_tokens, size = odds.logits_BkV.shape
    check(logits_TV.shape[1] == size, "one vocabulary", has=logits_TV.shape[1], draft_tokens=size)
    check(len(logits_TV) == num_rows * (num_draft_tokens + 1), "k + 1 positions", of=num_rows)
    if logits_TV.device.type == "cpu":
        from ridgeline.kernels.cpu import elementwise

        if elementwise.serves(logits_TV) and elementwise.serves(odds.logits_BkV):
            from ridgeline.kernels.cpu.drafts import verified_rows as native_verified_rows

            return native_verified_rows(logits_TV, positions_T, draws, odds)
    if logits_TV.is_cuda:
        from ridgeline.kernels.verified_rows_triton import verified_rows_triton

        return verified_rows_triton(
            logits_TV, positions_T, draws, odds, workspace=workspace, pdl=pdl
        )
    return verified_rows_reference(logits_TV, positions_T, draws, odds, workspace=workspace)


def verified_rows_reference(
    logits_TV: torch.Tensor,
    positions_T: torch.Tensor,
    draws: Draws,
    odds: DraftOdds,
    *,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    plain_T, is_sound_T = draw_rows(logits_TV, positions_T, draws, workspace=workspace)
    ids_Bq = plain_T.clone().view(len(odds.is_verified_B), -1)
    num_draft_tokens, size = odds.logits_BkV.shape[1:]

    def at_drafts(x_T: torch.Tensor) -> torch.Tensor:
        return x_T.view(*ids_Bq.shape, *x_T.shape[1:])[:, :num_draft_tokens].flatten(0, 1)

    hot_O1 = at_drafts(draws.temperatures_R).unsqueeze(1)
    taken_O, is_decided_O = odds_draw(
        scores_at(at_drafts(logits_TV), hot_O1),
        scores_at(odds.logits_BkV.reshape(-1, size), hot_O1),
        odds.drafts_Bk.reshape(-1),
        at_drafts(draws.keys_R),
        at_drafts(positions_T),
        workspace=workspace,
    )
    is_taken_Bk = is_decided_O.view(-1, num_draft_tokens) & odds.is_verified_B.unsqueeze(1)
    some_Bk = ids_Bq[:, :num_draft_tokens]
    some_Bk.copy_(taken_O.view(-1, num_draft_tokens).where(is_taken_Bk, some_Bk))
    return ids_Bq.view(-1).where(is_sound_T, 0), is_sound_T


def scores_at(logits_OV: torch.Tensor, temperatures_O1: torch.Tensor) -> torch.Tensor:
    """Logarithms of the odds (float32) up to a constant; each row's largest is 0."""
    wide_OV = logits_OV.float()
    return (wide_OV - wide_OV.amax(-1, keepdim=True)).div_(temperatures_O1)


def odds_draw(
    scores_OV: torch.Tensor,
    draft_scores_OV: torch.Tensor,
    drafts_O: torch.Tensor,
    keys_O: torch.Tensor,
    positions_O: torch.Tensor,
    *,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, int64; is decided, bool). Where nothing is decided, the caller's own draw from p
    stands: there is no draft (below 0), its odds are not numbers, or p and q are the same.

    Scores are logarithms of p and q (float32) up to a constant for each row, minus infinity for
    what cannot be drawn; `keys_O` (int64) are the rows' own. Never waits for the device.
    """
    p_OV, q_OV = scores_OV.softmax(-1), draft_scores_OV.softmax(-1)
    at_O1 = drafts_O.clamp(min=0).unsqueeze(1)
    p_O, q_O = p_OV.gather(1, at_O1).squeeze(1), q_OV.gather(1, at_O1).squeeze(1)
    is_draft_O = drafts_O >= 0
    # Not a number is less than nothing, and so is never kept.
    is_kept_O = (coins(keys_O, positions_O) * q_O < p_O) & is_draft_O
    one_O = torch.ones_like(p_O)
    drawn_O, has_rest_O = draw_rows(
        (p_OV - q_OV).clamp_(min=0).log_(),
        positions_O.contiguous(),
        Draws(rest_keys(keys_O).contiguous(), one_O, one_O),
        workspace=workspace,
    )
    return drafts_O.where(is_kept_O, drawn_O), is_kept_O | (has_rest_O & is_draft_O)
