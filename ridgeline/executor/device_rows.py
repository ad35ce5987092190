"""What do captured steps read of their rows? Block tables and sampling parameters on the device,
always in the same place, which few copies fill: an answer's first step waits for them.

Letters: g KV groups, N rows there is room for, M blocks per table row, B rows of a step, R rows
that are drawn, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ridgeline.executor.rows import Rows
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kernels.sample_rows import (
    Controls,
    Counts,
    SampleSpace,
    make_sample_space,
    sample_rows,
)
from ridgeline.sampling.batch import HostDraws
from ridgeline.sampling.controls import MAX_ENTRIES, RowControls, row_controls
from ridgeline.sampling.penalties import PenaltyCounts

FEW_WRITES = 2  # as quick one by one as all in one transfer, which a kernel then spreads
_WORD = 8  # bytes


class DeviceTables:
    """The rows' block tables; `tables_gNM` (int32) is as theirs once `follow` was called."""

    def __init__(
        self, rows: Rows, transfer: Transfer, num_groups: int, width: int, device: torch.device
    ) -> None:
        self._rows, self._transfer, self._device = rows, transfer, device
        self._num_groups, self._width = num_groups, width
        self._generation = -1
        self.tables_gNM = torch.empty(0)

    def follow(self) -> None:
        """Bring the copy up to date. It is another tensor when there is room for more rows than
        before: what was captured is then of no use any more."""
        if self._generation != self._rows.generation:
            self._generation = self._rows.generation
            num_rows = len(self._rows.last_ids_N)
            shape = (self._num_groups, num_rows, self._width)
            self.tables_gNM = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._rows.dirty.update(range(num_rows))
        if self._rows.dirty:
            self._write()

    def _write(self) -> None:
        """Rows that have changed other than by a captured step."""
        dirty = sorted(self._rows.dirty)
        self._rows.dirty.clear()
        if len(dirty) * self._num_groups <= FEW_WRITES:
            for there_NM, table_NM in zip(self.tables_gNM, self._rows.tables_NM, strict=True):
                for slot in dirty:
                    target = there_NM[slot, : table_NM.shape[1]]
                    self._transfer.send_into(table_NM[slot], target)
            return
        slots = np.array(dirty, np.int64)
        there, *tables = self._transfer.send_all(
            [slots, *(table[slots] for table in self._rows.tables_NM)]
        )
        for table_NM, some in zip(self.tables_gNM, tables, strict=True):
            table_NM[:, : some.shape[1]].index_copy_(0, there, some)


class DeviceDraws:
    """How rows are drawn at temperatures. `parts` have room for so many rows each, `flags_B` (bool)
    for `num_flags`. What `put` and `put_flags` were given is there once `send` was called; rows
    behind it keep what they had."""

    def __init__(
        self, sizes: Sequence[int], transfer: Transfer, device: torch.device, num_flags: int = 0
    ) -> None:
        self._transfer = transfer
        num_words = 2 * sum(sizes)
        num_words += -(-num_flags // _WORD)
        self._there = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._here = np.zeros(num_words, np.int64)
        self.parts: list[Draws] = []
        self._host: list[HostDraws] = []
        first = 0
        for size in sizes:
            end = first + 2 * size
            there, here = self._there[first:end], self._here[first:end]
            floats, host_floats = there[size:].view(torch.float32), here[size:].view(np.float32)
            floats[:size] = 1.0
            host_floats[:size] = 1.0
            self.parts.append(Draws(there[:size], floats[:size], floats[size:]))
            self._host.append(HostDraws(here[:size], host_floats[:size], host_floats[size:]))
            first = end
        self.flags_B = self._there[first:].view(torch.uint8)[:num_flags].view(torch.bool)
        self._host_flags_B = self._here[first:].view(np.bool_)[:num_flags]

    def put(self, part: int, draws: HostDraws, num_each: int = 1) -> None:
        """Each of these rows so many times in a row."""
        num, mine = len(draws.keys_R), self._host[part]
        for target, numbers in zip(_arrays(mine), _arrays(draws), strict=True):
            target[: num * num_each].reshape(num, num_each)[:] = numbers[:, None]

    def put_flags(self, flags_R: Array) -> None:
        self._host_flags_B[: len(flags_R)] = flags_R

    def send(self) -> None:
        self._transfer.send_into(self._here, self._there)


def _arrays(draws: HostDraws) -> tuple[Array, Array, Array]:
    return draws.keys_R, draws.temperatures_R, draws.noisy_R


class DeviceControls:
    """All else that rows may ask of sampling, and its scratch; nothing is taken before a row first
    needs it. Room for steps of up to `max_rows` rows. The counts are those of all rows: a row that
    opens, after a preemption too, counts its tokens there, and captured steps add each one they
    draw."""

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
