from __future__ import annotations

import numpy as np
import pytest

from ridgeline.errors import InternalError
from ridgeline.executor.rows import Rows
from ridgeline.executor.transfer import Transfer
from ridgeline.request import SamplingParams
from ridgeline.step import BlockCopy, BlockTables, NewRequest

PENALISED = SamplingParams(presence_penalty=1.0)


def make_rows(num_groups: int = 1, max_model_len: int = 64) -> Rows:
    return Rows(num_groups, 4, max_model_len, 11, Transfer())


def new(name: str, blocks: BlockTables = ((),), tokens: int = 3) -> NewRequest:
    return NewRequest(name, tuple(range(tokens)), tokens, PENALISED, blocks)


def test_slots_are_used_again() -> None:
    rows = make_rows()
    for i in range(100):
        rows.open(new(f"r{i}"))
        rows.close(f"r{i}")
        rows.close(f"r{i}")
    assert len(rows) == 0
    assert len(rows.last_ids_N) == len(rows.tables_NM[0]) == 16
    assert len(rows.counts.counts_PV) == 4


def test_rows_never_share_a_slot_however_many_there_are() -> None:
    rows = make_rows()
    for i in range(70):
        rows.open(new(f"r{i}", ((i + 1,),)))
    found = [rows.get(f"r{i}") for i in range(70)]
    slots = [row.slot for row in found if row is not None]
    assert len(set(slots)) == 70
    assert rows.tables_NM[0][slots, 0].tolist() == list(range(1, 71))
    assert len(rows.last_ids_N) >= 70


def test_tables_grow_group_by_group() -> None:
    rows = make_rows(num_groups=2, max_model_len=400)
    rows.open(new("r", ((1, 2), (0, 5))))
    row = rows.get("r")
    assert row is not None
    assert row.num_slots == 8
    before = rows.version
    rows.append_blocks(row, (tuple(range(10, 60)), (7,)))
    assert rows.version > before
    assert row.num_blocks == [52, 3]
    assert row.num_slots == 12
    assert rows.tables_NM[0][row.slot, :52].tolist() == [1, 2, *range(10, 60)]
    assert rows.tables_NM[1][row.slot, :3].tolist() == [0, 5, 7]
    rows.replace_block(BlockCopy("r", 1, 1, 5, 9))
    assert rows.tables_NM[1][row.slot, :3].tolist() == [0, 9, 7]


def test_a_table_is_null_behind_its_end() -> None:
    rows = make_rows()
    rows.open(new("long", (tuple(range(1, 9)),)))
    rows.close("long")
    rows.open(new("short", ((5, 6),)))
    row = rows.get("short")
    assert row is not None
    assert rows.tables_NM[0][row.slot].tolist() == [5, 6] + [0] * 14


def test_what_cannot_be() -> None:
    rows = make_rows()
    rows.open(new("r", ((1,),)))
    row = rows.get("r")
    assert row is not None
    with pytest.raises(InternalError, match="exists"):
        rows.open(new("r"))
    with pytest.raises(InternalError, match="KV group"):
        rows.open(new("s", ((), ())))
    with pytest.raises(InternalError, match="without a row"):
        rows.replace_block(BlockCopy("nobody", 0, 0, 1, 2))
    with pytest.raises(InternalError, match="beyond the table"):
        rows.replace_block(BlockCopy("r", 0, 1, 1, 2))
    with pytest.raises(InternalError, match="longer than the context"):
        rows.append_blocks(row, (tuple(range(17)),))


def test_known_tokens_are_kept_as_numbers() -> None:
    rows = make_rows()
    rows.open(new("r", tokens=5))
    row = rows.get("r")
    assert row is not None
    assert row.known_ids.dtype == np.int64
    assert (row.num_known, row.num_tokens, row.num_prompt_tokens) == (5, 5, 5)
