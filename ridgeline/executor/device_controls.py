"""Where do captured steps read what their rows want? Sampling parameters on the device, always in
the same place, and the scratch of the sampling; nothing is taken before a row first needs it.

Letters: B rows of a step, V vocabulary.
"""

from __future__ import annotations

import torch

from ridgeline.executor.transfer import Transfer
from ridgeline.kernels.sample_rows import (
    Controls,
    Counts,
    SampleSpace,
    make_sample_space,
    sample_rows,
)
from ridgeline.sampling.controls import MAX_ENTRIES, RowControls, row_controls
from ridgeline.sampling.penalties import PenaltyCounts


class DeviceControls:
    """Room for steps of up to `max_rows` rows. The counts are those of all rows: a row that opens,
    after a preemption too, counts its tokens there, and captured steps add each one they draw."""

    def __init__(
        self, vocab_size: int, max_rows: int, counts: PenaltyCounts, transfer: Transfer
    ) -> None:
        self._vocab_size, self._max_rows = vocab_size, max_rows
        self._counts, self._transfer = counts, transfer
        self._controls: Controls | None = None
        self._space: SampleSpace | None = None
        self._taken: RowControls | None = None
        self._captured: torch.Tensor | None = None

    def follow(self) -> bool:
        """True when what was captured with `draw` is of no use any more: the counts have moved."""
        is_new = self._captured is not self._counts.counts_PV
        self._captured = self._counts.counts_PV
        return is_new

    def take(self, wanted: RowControls) -> None:
        """From now on `draw` is for these rows, and greedy ones behind them."""
        if wanted is self._taken:
            return
        controls, _ = self._opened()
        rows, entries = wanted.padded(self._max_rows, self._vocab_size), wanted.num_entries
        self._transfer.send_into(rows.whole_5R, controls.whole_5R.view(-1))
        self._transfer.send_into(rows.floats_7R, controls.floats_7R.view(-1))
        if entries:
            places_2N, values_N = self._transfer.send_all([rows.places_2N, rows.values_N])
            controls.places_2N[:, :entries].copy_(places_2N)
            controls.values_N[:entries].copy_(values_N)
        self._taken = wanted

    def clear(self) -> None:
        """From now on `draw` is for greedy rows, of which nothing is remembered."""
        self.take(row_controls([], self._vocab_size))

    def draw(
        self, logits_BV: torch.Tensor, positions_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `sample_rows`. May be captured, after `clear`, until `follow` says otherwise."""
        controls, space = self._opened()
        counts = Counts(self._counts.counts_PV, self._counts.prompt_PV)
        part = controls.part(slice(0, len(positions_B)))
        return sample_rows(logits_BV, positions_B, part, counts, space)

    def _opened(self) -> tuple[Controls, SampleSpace]:
        if self._controls is None or self._space is None:
            device = self._counts.counts_PV.device

            def whole(*shape: int) -> torch.Tensor:
                return torch.zeros(shape, dtype=torch.int64, device=device)

            shape = row_controls([], self._vocab_size)
            self._controls = Controls(
                whole(len(shape.whole_5R), self._max_rows),
                torch.zeros(len(shape.floats_7R), self._max_rows, device=device),
                whole(2, MAX_ENTRIES),
                torch.zeros(MAX_ENTRIES, device=device),
            )
            self._space = make_sample_space(device, self._max_rows, self._vocab_size)
        return self._controls, self._space
