"""How far are the next tokens of a quantized model from those of the original?

Letters: N windows, S tokens of a window, R rows, E hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp

import torch

from ridgeline.compression.layer import States
from ridgeline.errors import check
from ridgeline.layers.hidden import RMSNorm

ROWS_AT_ONCE = 512
VOCABULARY_ROWS = 1 << 14  # of the output matrix that are float32 at once
LARGEST = 700.0  # exp() of more is no float


@dataclass(frozen=True, slots=True)
class Quality:
    """Of the `num_tokens` held-out tokens that are scored. `kl`: mean divergence of the quantized
    model's distribution of the token from the original's, in nats. Perplexities: exp of the mean
    -log p of the token. `same_top`: share of tokens for which both say the same first."""

    num_tokens: int
    kl: float
    perplexity: float
    original_perplexity: float
    same_top: float


@dataclass(frozen=True, slots=True)
class Head:
    """What makes logits of the last states: the last norm, in float32, and the output matrix
    [V, E] of any float dtype; `cap` as in ModelSpec."""

    norm: RMSNorm
    matrix_VE: torch.Tensor
    cap: float | None = None

    def log_probabilities(self, states_RE: torch.Tensor) -> torch.Tensor:
        """[R, V] float32"""
        normed_RE = self.norm(states_RE)
        rows = range(0, len(self.matrix_VE), VOCABULARY_ROWS)
        parts_VE = (self.matrix_VE[begin : begin + VOCABULARY_ROWS] for begin in rows)
        pieces = [normed_RE @ part_VE.float().T for part_VE in parts_VE]
        logits_RV = torch.cat(pieces, -1)
        if self.cap is not None:
            logits_RV.div_(self.cap).tanh_().mul_(self.cap)
        return torch.log_softmax(logits_RV, -1)


def compare(
    head: Head,
    original: States,
    quantized: States,
    windows_NS: torch.Tensor,
    is_scored_NS: torch.Tensor,
    device: torch.device,
) -> Quality:
    """Of both states after their last layer; the first token of a window is never scored."""
    head = replace(head, matrix_VE=head.matrix_VE.to(device))
    sums = torch.zeros(4, dtype=torch.float64)
    flat = (states.all_NSE.view(-1, states.all_NSE.shape[-1]) for states in (original, quantized))
    original_RE, quantized_RE = flat
    follows_R = windows_NS.roll(-1, 1).flatten()
    is_scored_R = is_scored_NS.roll(-1, 1)
    is_scored_R[:, -1] = False  # what follows is in no window
    is_scored_R = is_scored_R.flatten()
    for begin in range(0, len(original_RE), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        scored = is_scored_R[rows]
        p_RV = head.log_probabilities(original_RE[rows][scored].to(device))
        q_RV = head.log_probabilities(quantized_RE[rows][scored].to(device))
        follows = follows_R[rows][scored, None].to(device)
        sums += torch.stack(
            [
                (p_RV.exp() * (p_RV - q_RV)).sum(-1).double().sum(),
                -q_RV.gather(1, follows).double().sum(),
                -p_RV.gather(1, follows).double().sum(),
                (p_RV.argmax(-1) == q_RV.argmax(-1)).double().sum(),
            ]
        ).cpu()
    num = int(is_scored_R.sum())
    check(num > 0, "some held-out token is scored")
    kl, loss, original_loss, same = sums.tolist()
    return Quality(
        num_tokens=num,
        kl=max(0.0, kl / num),
        perplexity=_perplexity(loss, num),
        original_perplexity=_perplexity(original_loss, num),
        same_top=same / num,
    )


def _perplexity(loss: float, num: int) -> float:
    return exp(min(loss / num, LARGEST))
