"""The rows' block tables as captured steps read them: a copy on the device that follows the host's.

Letters: g KV groups, N rows there is room for, M blocks per table row.
"""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.executor.rows import Rows
from ridgeline.executor.transfer import Transfer

FEW_WRITES = 2  # as quick one by one as all in one transfer, which a kernel then spreads


class DeviceTables:
    """`tables_gNM` (int32) is as the rows' once `follow` was called."""

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
