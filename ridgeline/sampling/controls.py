"""What do the rows of this step want, as numbers for `kernels.sample_rows`?

Built when the set of rows that sample changes. Letters: R rows, N tokens with a bias or a ban.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.sampling.batch import columns
from ridgeline.sampling.penalties import Array
from ridgeline.sampling.row import NOT_RANDOM, Needs, SamplingRow

MAX_ENTRIES = 1 << 14  # tokens with a bias or a ban that all rows of a step together may have
_NOT_PENALISED = (1.0, 0.0, 0.0)  # the last three floats of `Controls`


@dataclass(frozen=True, slots=True, eq=False)
class RowControls:
    """`Controls` on the host."""

    whole_5R: Array
    floats_7R: Array
    places_2N: Array
    values_N: Array

    @property
    def num_entries(self) -> int:
        return len(self.values_N)

    @property
    def is_too_long(self) -> bool:
        """More tokens with a bias or a ban than there is room for on the device."""
        return self.num_entries > MAX_ENTRIES

    def padded(self, num_rows: int, vocab_size: int) -> RowControls:
        """The same with greedy rows behind them, up to `num_rows`."""
        missing = num_rows - self.whole_5R.shape[1]
        whole = np.array([0, vocab_size, -1, 0, 0], np.int64)
        floats = np.array([*NOT_RANDOM, *_NOT_PENALISED], np.float32)
        return RowControls(
            np.hstack([self.whole_5R, np.tile(whole[:, None], missing)]),
            np.hstack([self.floats_7R, np.tile(floats[:, None], missing)]),
            self.places_2N,
            self.values_N,
        )


def row_controls(rows: Sequence[SamplingRow], vocab_size: int) -> RowControls:
    """For these rows, in this order."""
    whole: list[tuple[int, ...]] = []
    floats: list[tuple[float, ...]] = []
    entries: list[tuple[int, int, float]] = []
    for row in rows:
        first = len(entries)
        if row.needs & (Needs.BIAS | Needs.BANS):
            entries += _entries(row, vocab_size)
        slot = row.counts_slot if row.needs & Needs.PENALTIES else -1
        whole.append((row.key, row.top_k(vocab_size), slot, first, len(entries)))
        floats.append((*row.filters, *_penalties(row)))
    return RowControls(
        columns(whole, 5, np.int64),
        columns(floats, 7, np.float32),
        columns([entry[:2] for entry in entries], 2, np.int64),
        np.array([entry[2] for entry in entries], np.float32),
    )


def _entries(row: SamplingRow, vocab_size: int) -> list[tuple[int, int, float]]:
    """(token, where its ban ends, its bias), each token once."""
    biases = dict(row.biases)
    banned = frozenset(row.params.stop_token_ids) if row.needs & Needs.BANS else frozenset()
    return [
        (token_id, row.banned_until if token_id in banned else -1, biases.get(token_id, 0.0))
        for token_id in sorted(biases.keys() | banned)
        if token_id < vocab_size
    ]


def _penalties(row: SamplingRow) -> tuple[float, ...]:
    params = row.params
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty
