"""What does the executor keep of each request between steps?

A row: the tokens the host knew when it was opened, its block tables, its sampling state, and on the
device the token sampled last. A token that is not among the known ones is always that last one.
Letters: N rows there is room for, M blocks per table row.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import pack_into

import numpy as np
import torch

from ridgeline.errors import check
from ridgeline.executor.transfer import Array, Transfer
from ridgeline.kernels.drafts import History, make_history
from ridgeline.sampling.penalties import FIRST_COUNTS, PenaltyCounts
from ridgeline.sampling.row import Needs, SamplingRow, sampling_row
from ridgeline.step import NULL_BLOCK, BlockCopy, BlockTables, NewRequest

PADDING_ROW = 0  # is nobody's; its table has null blocks alone
FIRST_ROWS = 16
_FIRST_BLOCKS = 16


@dataclass(slots=True, eq=False)
class Row:
    """`slot` is its place in the tables. `known_ids` (int64) are prompt and output as they were
    when the row was opened; `num_tokens` counts them and every token sampled since, but where
    tokens are drafted: there only the device knows."""

    request_id: str
    slot: int
    known_ids: Array
    num_known: int
    num_prompt_tokens: int
    num_tokens: int
    num_blocks: list[int]  # per KV group
    num_slots: int  # tokens that the shortest table has room for
    sampling: SamplingRow
    top_prompt_logprobs: int | None
    num_missed: int = 0  # tokens since, that a draft model has not seen


class Rows:
    """All rows, by request id. `tables_NM` (int32, one per KV group) are on the host; `version`
    changes whenever they do, and `dirty` collects the rows that were changed. `last_ids_N` (int64)
    is on the device; `generation` changes when there is room for more rows than before.
    `history`, of an engine that drafts up to `max_draft_tokens` tokens of a row, knows all
    tokens."""

    def __init__(
        self,
        num_groups: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        transfer: Transfer,
        first_rows: int = FIRST_ROWS,
        first_counts: int = FIRST_COUNTS,
        max_draft_tokens: int = 0,
    ) -> None:
        self._transfer = transfer
        self._block_size = block_size
        self._max_blocks = max_blocks = -(-max_model_len // block_size)
        self._rows: dict[str, Row] = {}
        self.get = self._rows.get
        self._free = list(range(first_rows - 1, PADDING_ROW, -1))
        width = min(_FIRST_BLOCKS, max_blocks)
        self.tables_NM = [np.zeros((first_rows, width), np.int32) for _ in range(num_groups)]
        self.last_ids_N = transfer.send(np.zeros(first_rows, np.int64))
        self.counts = PenaltyCounts(vocab_size, transfer.send, first_counts)
        self.history: History | None = None
        if max_draft_tokens:
            where = self.last_ids_N.device
            self.history = make_history(first_rows, max_model_len, max_draft_tokens, where)
        self.version = 0
        self.dirty: set[int] = set()
        self.generation = 0

    def __len__(self) -> int:
        return len(self._rows)

    def open(self, new: NewRequest) -> None:
        check(new.request_id not in self._rows, "row exists already", request=new.request_id)
        check(len(new.block_ids) == len(self.tables_NM), "one table per KV group")
        known_ids = np.empty(len(new.token_ids), np.int64)
        pack_into(f"{len(known_ids)}q", known_ids.data, 0, *new.token_ids)  # twice as fast
        num_prompt = new.num_prompt_tokens
        row = Row(
            new.request_id,
            self._take_slot(),
            known_ids,
            len(known_ids),
            num_prompt,
            len(known_ids),
            [0] * len(self.tables_NM),
            0,
            sampling_row(new.request_id, new.sampling, num_prompt),
            new.sampling.prompt_logprobs,
        )
        self._rows[new.request_id] = row
        for table_NM in self.tables_NM:
            table_NM[row.slot] = NULL_BLOCK
        self.dirty.add(row.slot)
        self.append_blocks(row, new.block_ids)
        if row.sampling.needs & Needs.PENALTIES:
            prompt, output = known_ids[:num_prompt], known_ids[num_prompt:]
            row.sampling.counts_slot = self.counts.open(prompt, output)
        if self.history is not None:
            ids = known_ids.astype(np.int32)
            self._transfer.send_into(ids, self.history.tokens_NL[row.slot, : len(ids)])
            self.history.lens_N[row.slot] = len(known_ids)
            self.history.found_N[row.slot] = 0

    def close(self, request_id: str) -> None:
        """Forget a row; harmless for a request without one."""
        if (row := self._rows.pop(request_id, None)) is None:
            return
        self._free.append(row.slot)
        if row.sampling.counts_slot >= 0:
            self.counts.close(row.sampling.counts_slot)

    def append_blocks(self, row: Row, block_ids: BlockTables) -> None:
        for group, ids in enumerate(block_ids):
            if ids:
                start = row.num_blocks[group]
                end = row.num_blocks[group] = start + len(ids)
                if end > self.tables_NM[group].shape[1]:
                    self._widen(group, end)
                self.tables_NM[group][row.slot, start:end] = ids
        row.num_slots = min(row.num_blocks) * self._block_size
        self.version += 1
        self.dirty.add(row.slot)

    def replace_block(self, copy: BlockCopy) -> None:
        row = self._rows.get(copy.request_id)
        check(row is not None, "copy for a request without a row", request=copy.request_id)
        if row is not None:
            check(copy.index < row.num_blocks[copy.group], "copy beyond the table", copy=copy)
            self.tables_NM[copy.group][row.slot, copy.index] = copy.target
            self.version += 1
            self.dirty.add(row.slot)

    def _take_slot(self) -> int:
        if not self._free:
            old = len(self.last_ids_N)
            self.tables_NM = [
                np.concatenate([table, np.zeros_like(table)]) for table in self.tables_NM
            ]
            self.last_ids_N = _doubled(self.last_ids_N)
            if (h := self.history) is not None:
                tensors = h.tokens_NL, h.lens_N, h.found_N
                self.history = History(*(_doubled(x) for x in tensors))
            self._free.extend(range(2 * old - 1, old - 1, -1))
            self.generation += 1
        return self._free.pop()

    def _widen(self, group: int, needed: int) -> None:
        check(needed <= self._max_blocks, "table longer than the context", blocks=needed)
        table = self.tables_NM[group]
        more = min(max(needed, 2 * table.shape[1]), self._max_blocks) - table.shape[1]
        self.tables_NM[group] = np.pad(table, ((0, 0), (0, more)))


def _doubled(x: torch.Tensor) -> torch.Tensor:
    """With as many rows of zeros behind."""
    return torch.cat([x, torch.zeros_like(x)])
