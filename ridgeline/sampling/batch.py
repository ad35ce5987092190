"""What do the rows of this step want, as tensors?

Built when the set of rows that sample changes, and kept while it does not. Each tensor exists only
if a row needs it. Letters: R rows, C penalised rows, N sparse (row, token) pairs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.kernels.draw_rows import Draws
from ridgeline.sampling.penalties import Array, Upload
from ridgeline.sampling.row import Needs, SamplingRow

# Rows are worked on in parts, so that what lies between logits and tokens stays small: few enough
# for a CPU's cache, enough to fill a GPU. What is done with them takes up to 36 bytes for each
# number on a CPU and 48 on a GPU, where sorting takes more.
NUMBERS_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 23}


def parts(num_rows: int, logits_RV: torch.Tensor) -> list[slice]:
    """`num_rows` rows as wide as these logits, cut into pieces; one piece when they are few."""
    step = max(1, NUMBERS_AT_ONCE[logits_RV.device.type] // logits_RV.shape[1])
    return [slice(start, start + step) for start in range(0, max(1, num_rows), step)]


@dataclass(frozen=True, slots=True)
class Filters:
    """Random rows' parameters. A tensor that no row needs is None; in the others a row without
    that filter has a value that filters nothing.

    `noisy_R1` is 0.0 for greedy rows, whose temperature stands as 1. `top_k_R1` is V when off,
    `max_top_k` the largest k that is on. `all_top_p_have_k`: no row needs the whole vocabulary
    sorted. `draws`: the same for the kernel that knows temperatures alone.
    """

    keys_R: torch.Tensor
    temperature_R1: torch.Tensor
    noisy_R1: torch.Tensor | None
    top_k_R1: torch.Tensor | None
    top_p_R1: torch.Tensor | None
    log_min_p_R1: torch.Tensor | None
    max_top_k: int
    all_have_top_k: bool
    all_top_p_have_k: bool
    draws: Draws

    @property
    def are_temperatures(self) -> bool:
        """Nothing but temperatures."""
        return self.top_k_R1 is None and self.top_p_R1 is None and self.log_min_p_R1 is None

    def part(self, rows: slice | torch.Tensor) -> Filters:
        """The same for some of the rows."""

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[rows]

        return Filters(
            self.keys_R[rows],
            self.temperature_R1[rows],
            cut(self.noisy_R1),
            cut(self.top_k_R1),
            cut(self.top_p_R1),
            cut(self.log_min_p_R1),
            self.max_top_k,
            self.all_have_top_k,
            self.all_top_p_have_k,
            Draws(
                self.draws.keys_R[rows], self.draws.temperatures_R[rows], self.draws.noisy_R[rows]
            ),
        )


@dataclass(frozen=True, slots=True)
class SparseAdds:
    """Numbers to add to single logits; `until_N` bounds the position that bans them (else None)."""

    rows_N: torch.Tensor
    tokens_N: torch.Tensor
    values_N: torch.Tensor
    until_N: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Penalties:
    """`rows_C` index the batch, `slots_C` the counts; None where nobody uses that penalty.
    `before_CK`: rows of the batch whose drafts count as tokens of this one, as they stand between
    the row's counts and its position; -1 for none. None: no row is part of a checked run."""

    rows_C: torch.Tensor
    slots_C: torch.Tensor
    repetition_C1: torch.Tensor | None
    frequency_C1: torch.Tensor
    presence_C1: torch.Tensor
    before_CK: torch.Tensor | None = None

    def part(self, rows: slice) -> Penalties:
        """The same for some of the penalised rows."""
        repetition, before = self.repetition_C1, self.before_CK
        return Penalties(
            self.rows_C[rows],
            self.slots_C[rows],
            None if repetition is None else repetition[rows],
            self.frequency_C1[rows],
            self.presence_C1[rows],
            None if before is None else before[rows],
        )


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows that want log-probabilities: on the host, on the device, how many top ones each."""

    rows: tuple[int, ...]
    top_ks: tuple[int, ...]
    rows_L: torch.Tensor


_NOT_DRAWN = ~(Needs.RANDOM | Needs.BANS | Needs.LOGPROBS)  # asked for in each step


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one step that sample. `needs` is everything that any of them asks for."""

    num_rows: int
    needs: Needs
    filters: Filters | None = None
    bias: SparseAdds | None = None
    bans: SparseAdds | None = None
    banned_until: Array | None = None  # host twin of bans, one per row
    penalties: Penalties | None = None
    logprobs: LogprobRows | None = None

    def is_drawn_at(self, positions: Array) -> bool:
        """Each row takes its largest logit or draws at a temperature: one kernel's work.
        `positions` are host numbers, one per row; the lowest they may be where that is open."""
        if self.needs & _NOT_DRAWN:
            return False
        return not self.bans_at(positions)

    def bans_at(self, positions: Array) -> bool:
        """Does any row still ban its stop tokens? `positions` as in `is_drawn_at`."""
        return self.banned_until is not None and bool((positions < self.banned_until).any())


def build_batch(rows: Sequence[SamplingRow], vocab_size: int, upload: Upload) -> SamplingBatch:
    """Tensors for these rows, in this order. Never waits for the device."""
    needs = Needs(0)
    for row in rows:
        needs |= row.needs
    if not needs:
        return SamplingBatch(len(rows), needs)
    return SamplingBatch(
        len(rows),
        needs,
        _filters(rows, needs, vocab_size, upload) if needs & Needs.RANDOM else None,
        _bias(rows, vocab_size, upload) if needs & Needs.BIAS else None,
        _bans(rows, vocab_size, upload) if needs & Needs.BANS else None,
        _banned_until(rows) if needs & Needs.BANS else None,
        _penalties(rows, upload) if needs & Needs.PENALTIES else None,
        _logprobs(rows, upload) if needs & Needs.LOGPROBS else None,
    )


def _filters(rows: Sequence[SamplingRow], needs: Needs, vocab_size: int, upload: Upload) -> Filters:
    floats_4R1 = upload(columns([row.filters for row in rows], 4, np.float32)).unsqueeze(2)
    top_ks = [row.top_k(vocab_size) for row in rows]
    whole_2R = upload(np.array([[row.key for row in rows], top_ks], np.int64))
    limits = [k for k in top_ks if k < vocab_size]
    return Filters(
        whole_2R[0],
        floats_4R1[0],
        None if all(row.needs & Needs.RANDOM for row in rows) else floats_4R1[1],
        whole_2R[1].unsqueeze(1) if limits else None,
        floats_4R1[2] if needs & Needs.TOP_P else None,
        floats_4R1[3] if needs & Needs.MIN_P else None,
        max(limits, default=0),
        len(limits) == len(rows),
        not any(_bare_top_p(row, k, vocab_size) for row, k in zip(rows, top_ks, strict=True)),
        Draws(whole_2R[0], floats_4R1[0].squeeze(1), floats_4R1[1].squeeze(1)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class HostDraws:
    """`Draws` as the host has them."""

    keys_R: Array
    temperatures_R: Array
    noisy_R: Array


def host_draws(rows: Sequence[SamplingRow]) -> HostDraws:
    """Of rows that are greedy or drawn at a temperature, and nothing else."""
    floats_R4 = np.array([row.filters for row in rows], np.float32)
    keys_R = np.array([row.key for row in rows], np.int64)
    return HostDraws(keys_R, floats_R4[:, 0], floats_R4[:, 1])


def columns(rows: Sequence[Sequence[float]], width: int, dtype: type[np.generic]) -> Array:
    """[width, len(rows)], contiguous, from rows of `width` numbers."""
    return np.ascontiguousarray(np.array(rows, dtype).reshape(-1, width).T)


def _bare_top_p(row: SamplingRow, top_k: int, vocab_size: int) -> bool:
    return bool(row.needs & Needs.TOP_P) and top_k == vocab_size


def _bias(rows: Sequence[SamplingRow], vocab_size: int, upload: Upload) -> SparseAdds:
    entries = [
        (r, token_id, value)
        for r, row in enumerate(rows)
        for token_id, value in row.biases
        if token_id < vocab_size
    ]
    at = upload(columns([entry[:2] for entry in entries], 2, np.int64))
    return SparseAdds(at[0], at[1], upload(np.array([e[2] for e in entries], np.float32)), None)


def _bans(rows: Sequence[SamplingRow], vocab_size: int, upload: Upload) -> SparseAdds:
    entries = [
        (r, token_id, row.banned_until)
        for r, row in enumerate(rows)
        if row.needs & Needs.BANS
        for token_id in sorted(row.params.stop_token_ids)
        if token_id < vocab_size
    ]
    at = upload(columns(entries, 3, np.int64))
    values = upload(np.full(len(entries), -np.inf, np.float32))
    return SparseAdds(at[0], at[1], values, at[2])


def _banned_until(rows: Sequence[SamplingRow]) -> Array:
    return np.array([r.banned_until if r.needs & Needs.BANS else -1 for r in rows], np.int64)


def _penalties(rows: Sequence[SamplingRow], upload: Upload) -> Penalties:
    chosen = [(r, row) for r, row in enumerate(rows) if row.needs & Needs.PENALTIES]
    params = [row.params for _, row in chosen]
    at = upload(
        np.array([[r for r, _ in chosen], [row.counts_slot for _, row in chosen]], np.int64)
    )
    factors = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    by = upload(columns(factors, 3, np.float32))
    repeats = any(p.repetition_penalty != 1 for p in params)
    return Penalties(
        at[0],
        at[1],
        by[0].unsqueeze(1) if repeats else None,
        by[1].unsqueeze(1),
        by[2].unsqueeze(1),
    )


def _logprobs(rows: Sequence[SamplingRow], upload: Upload) -> LogprobRows:
    chosen = tuple(r for r, row in enumerate(rows) if row.needs & Needs.LOGPROBS)
    top_ks = tuple(rows[r].params.logprobs or 0 for r in chosen)
    return LogprobRows(chosen, top_ks, upload(np.array(chosen, np.int64)))
