"""One token for each row of logits, whatever its sampling parameters: bias to noise, no sorting.

The work and its order are those of `sampling.sampler`; the parameters are numbers on the device,
so that a captured step serves any rows. What a filter keeps is found by bisection: a score's key is
the bits of its distance to the row's largest score, a non-negative float, and so ordered as the
distances are. Top-k and top-p each ask for the largest key whose likelier tokens weigh (in number,
or in probability) less than k, or than p of all; tokens that tie with it are kept.
Letters: R rows, V vocabulary, N tokens with a bias or a ban, P rows of counts, C chunks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import torch

from ridgeline.kernels.noise import minus_gumbel

CHUNK = 4096
# Numbers of all rows that are worked on at once: few enough to stay in the cache of a large GPU.
NUMBERS_AT_ONCE = 1 << 23
LISTED = 1 << 14  # candidates of a row that are put side by side; of more the whole row is read
LEVELS = 16
# Distances that bracket a threshold before the candidates inside are counted one by one.
_DISTANCES = (0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, inf)

# Lines of `Controls`.
KEY, TOP_K, COUNTS, FIRST, END = range(5)
TEMPERATURE, NOISY, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE = range(7)


@dataclass(frozen=True, slots=True)
class Controls:
    """What rows want. `whole_5R` (int64): key of the noise, k (V when off), row of the counts (-1
    without penalties), first and end of the row's entries among N. `floats_7R` (float32):
    temperature (1 for greedy rows), 0 for greedy rows and else 1, p (1 when off), log of min-p
    (minus infinity when off), the three penalties. `places_2N` (int64): token, different ones for
    a row, and the position from which on it is not banned; `values_N` (float32): its bias."""

    whole_5R: torch.Tensor
    floats_7R: torch.Tensor
    places_2N: torch.Tensor
    values_N: torch.Tensor

    def part(self, rows: slice) -> Controls:
        """The same for some of the rows."""
        return Controls(
            self.whole_5R[:, rows], self.floats_7R[:, rows], self.places_2N, self.values_N
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """`output_PV` (int32) counts the tokens of answers, `prompt_PV` (bool) marks prompts'."""

    output_PV: torch.Tensor
    prompt_PV: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleSpace:
    """Scratch of one stream for so many rows at once; `arrivals_R` is zero between launches, the
    rest may hold anything. `state_5R`, `most_R` and `aims_2R` are what launches tell each other of
    a row (see sample_rows_triton), `offsets_RC` and `listed_RL` its candidates."""

    adjusted_RV: torch.Tensor
    most_R: torch.Tensor
    state_5R: torch.Tensor
    aims_2R: torch.Tensor
    partial_R3C: torch.Tensor
    counts_RCJ: torch.Tensor
    masses_RCJ: torch.Tensor
    offsets_RC: torch.Tensor
    listed_RL: torch.Tensor
    pivots_J: torch.Tensor
    arrivals_R: torch.Tensor
    chunk: int

    @property
    def num_rows(self) -> int:
        return len(self.most_R)


def make_sample_space(
    device: torch.device,
    num_rows: int,
    vocab_size: int,
    *,
    chunk: int = CHUNK,
    listed: int = LISTED,
    at_once: int = NUMBERS_AT_ONCE,
) -> SampleSpace:
    """Room for `num_rows` rows, or as many of them as are worked on at once."""
    rows = max(1, min(num_rows, at_once // vocab_size))
    chunks = -(-vocab_size // chunk)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    distances = torch.tensor(_DISTANCES, dtype=torch.float32)
    return SampleSpace(
        empty(rows, vocab_size, dtype=torch.float32), empty(rows, dtype=torch.float32),
        empty(5, rows), empty(2, rows, dtype=torch.float64),
        empty(rows, 3, chunks, dtype=torch.float32), empty(rows, chunks, LEVELS),
        empty(rows, chunks, LEVELS, dtype=torch.float64), empty(rows, chunks),
        empty(rows, min(listed, vocab_size)), distances.view(torch.int32).to(device),
        torch.zeros(rows, dtype=torch.int32, device=device), chunk,
    )  # fmt: skip


def sample_rows(
    logits_RV: torch.Tensor,
    positions_R: torch.Tensor,
    controls: Controls,
    counts: Counts,
    space: SampleSpace,
    *,
    pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, int64; is sound, bool). The logits are never written to; the counts of penalised rows
    gain the new token. `positions_R` (int64) is where the new tokens will stand.

    A row that only asks for its largest logit, or for a temperature, gets what `draw_rows` gives.
    A row is unsound if the largest of its adjusted logits is not finite or one is NaN; its id is
    then 0. Rows with penalties must all have counts of their own.
    """
    if not logits_RV.is_cuda:
        return sample_rows_reference(logits_RV, positions_R, controls, counts)
    from ridgeline.kernels.sample_rows_triton import sample_rows_triton

    return sample_rows_triton(logits_RV, positions_R, controls, counts, space, pdl=pdl)


# --------------------------------------------------------------------------- the reference


def sample_rows_reference(
    logits_RV: torch.Tensor, positions_R: torch.Tensor, controls: Controls, counts: Counts
) -> tuple[torch.Tensor, torch.Tensor]:
    adjusted_RV = logits_RV.to(torch.float32, copy=True)
    _add_entries(adjusted_RV, positions_R, controls)
    _penalise(adjusted_RV, controls, counts)
    largest_R1 = adjusted_RV.amax(-1, keepdim=True)
    is_sound_R = largest_R1.isfinite().squeeze(1)
    floats_7R1 = controls.floats_7R.unsqueeze(2)
    scores_RV = (adjusted_RV - largest_R1) / floats_7R1[TEMPERATURE]
    scores_RV.masked_fill_(scores_RV < _lowest(scores_RV, controls), -inf)
    if controls.floats_7R[NOISY].any():
        noise_RV = minus_gumbel(controls.whole_5R[KEY], positions_R, logits_RV.shape[1])
        scores_RV -= noise_RV * floats_7R1[NOISY]
    ids_R = scores_RV.argmax(-1).where(is_sound_R, 0)
    slots_R = controls.whole_5R[COUNTS]
    has_R = slots_R >= 0
    counts.output_PV[slots_R[has_R], ids_R[has_R]] += 1
    return ids_R, is_sound_R


def _entries(controls: Controls) -> Iterator[tuple[int, slice]]:
    ends = controls.whole_5R[FIRST : END + 1].T.tolist()
    for row, (first, end) in enumerate(ends):
        if end > first:
            yield row, slice(first, end)


def _add_entries(logits_RV: torch.Tensor, positions_R: torch.Tensor, controls: Controls) -> None:
    for row, entries in _entries(controls):
        tokens_N, until_N = controls.places_2N[:, entries]
        ban_N = torch.zeros_like(controls.values_N[entries])
        ban_N.masked_fill_(positions_R[row] < until_N, -inf)
        logits_RV[row, tokens_N] = logits_RV[row, tokens_N] + controls.values_N[entries] + ban_N


def _penalise(logits_RV: torch.Tensor, controls: Controls, counts: Counts) -> None:
    slots_R = controls.whole_5R[COUNTS]
    (rows_C,) = (slots_R >= 0).nonzero(as_tuple=True)
    slots_C = slots_R[rows_C]
    by_3C1 = controls.floats_7R[REPETITION:, rows_C].unsqueeze(2)
    output_CV, some_CV = counts.output_PV[slots_C], logits_RV[rows_C]
    seen_CV = (output_CV > 0) | counts.prompt_PV[slots_C]
    pushed_CV = torch.where(some_CV < 0, some_CV * by_3C1[0], some_CV / by_3C1[0])
    some_CV = torch.where(seen_CV, pushed_CV, some_CV)
    logits_RV[rows_C] = some_CV - by_3C1[1] * output_CV - by_3C1[2] * (output_CV > 0)


def _lowest(scores_RV: torch.Tensor, controls: Controls) -> torch.Tensor:
    """[R, 1]: scores below it are out."""
    top_k_R1 = controls.whole_5R[TOP_K].unsqueeze(1)
    top_p_R1 = controls.floats_7R[TOP_P].unsqueeze(1)
    sorted_RV = scores_RV.sort(dim=-1, descending=True).values
    kth_R1 = sorted_RV.gather(1, top_k_R1 - 1)
    ranks_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    mass_RV = sorted_RV.exp().double().masked_fill(ranks_V >= top_k_R1, 0.0)
    up_to_RV = mass_RV.cumsum(-1)
    is_kept_RV = (up_to_RV - mass_RV < top_p_R1 * up_to_RV[:, -1:]) & (mass_RV > 0)
    last_R1 = (is_kept_RV.sum(-1, keepdim=True) - 1).clamp(min=0)
    nucleus_R1 = sorted_RV.gather(1, last_R1).where(top_p_R1 < 1, -inf)
    floor_R1 = controls.floats_7R[LOG_MIN_P].unsqueeze(1)
    return torch.maximum(torch.maximum(kth_R1, nucleus_R1), floor_R1)
