"""Do drafts come into a step and out of it as a plain loop over lists says they should?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernels import drafts
from ridgeline.kernels.drafts import PADDING_LENGTH, History, first_inputs, make_history
from ridgeline.kernels.prompt_lookup import LookupRule, lookup, make_lookup_buffers
from ridgeline.kernels.step_inputs import StepInputs, make_step_inputs
from tests.kernels.draft_case import (
    DEVICE,
    DRAFT_TOKENS,
    MOST,
    ROOM,
    SIZE,
    Case,
    check_history,
    each_kind,
    each_seed,
    kernel,
    make_case,
    run_look_up,
    whole,
)

# ---------------------------------------------------------------------------------- inputs


@each_kind
@each_seed
@pytest.mark.parametrize(
    ("num_new", "first", "is_fresh"), [(1, 0, True), (4, 0, True), (2, -1, False), (1, 3, False)]
)
def test_inputs(kind: str, seed: int, num_new: int, first: int, is_fresh: bool) -> None:
    case, groups, width, positions = make_case(seed), 1 + seed % 3, 10, 39
    tables = case.random(1, 999, groups, ROOM, width).int()
    tables[:, 0] = 0
    want_tables = tables.tolist()
    fresh = torch.full((groups, 2, len(case.rows)), -1)
    for b, row in enumerate(case.rows):
        for group in range(groups):
            if row and (b + group) % 2:
                fresh[group, 0, b] = 1000 + b
                fresh[group, 1, b] = case.lens[row] // SIZE if case.lens[row] < MOST else 9
                want_tables[group][row][int(fresh[group, 1, b])] = 1000 + b
    if not is_fresh:
        tables = torch.tensor(want_tables, dtype=torch.int32)
    tables = tables.to(DEVICE)
    out = first_inputs(make_step_inputs(groups, 99, DEVICE), len(case.rows), num_new)
    kernel(kind, "draft_inputs")(
        *case.on_device(),
        case.history,
        tables,
        out,
        SIZE,
        num_new=num_new,
        first=first,
        max_positions=positions,
        fresh_XB=fresh.view(2 * groups, -1).to(DEVICE) if is_fresh else None,
    )
    assert tables.tolist() == want_tables
    check_history(case)
    check_inputs(case, out, want_tables, num_new, first, positions)


def check_inputs(
    case: Case, out: StepInputs, tables: Any, num_new: int, first: int, positions: int
) -> None:
    t, slots = 0, out.slots_gB.tolist()
    for b, (row, limit) in enumerate(zip(case.rows, case.limits, strict=True)):
        for j in range(num_new):
            newest = case.lens[row] - 1
            position = newest + first + j
            assert out.token_ids_B[t] == case.tokens[row][position]
            assert out.positions_B[t] == min(position, positions - 1)
            assert out.next_positions_B[t] == position + 1
            for group, table in enumerate(tables):
                at, block = position // SIZE, 0
                if position <= newest + limit and at < len(table[row]):
                    block = table[row][at]
                assert slots[group][t] == block * SIZE + position % SIZE, (b, j, group)
            t += 1
        assert out.seq_lens_B[b] == case.lens[row] + first + num_new - 1
    assert len(out.token_ids_B) == t


@each_kind
def test_entered_blocks(kind: str) -> None:
    tables = torch.zeros(2, 4, 3, dtype=torch.int32, device=DEVICE)
    fresh = whole([[7, -1, -1], [2, 0, 0], [-1, 8, -1], [1, 1, 0]])
    kernel(kind, "enter_blocks")(whole([3, 1, 0]), fresh, tables)
    want = torch.zeros(2, 4, 3, dtype=torch.int32)
    want[0, 3, 2], want[1, 1, 1] = 7, 8
    assert torch.equal(tables.cpu(), want)


# ---------------------------------------------------------------------------------- accept


def accept_lists(case: Case, ids: list[list[int]], sound: list[list[bool]]) -> list[list[int]]:
    """What the host should hear; the lists of the case become what the device should have."""
    told = []
    for row, limit, some, is_sound in zip(case.rows, case.limits, ids, sound, strict=True):
        tokens, length, found = case.tokens[row], case.lens[row], case.found[row]
        is_right = bool(found and is_sound[0] and some[0] == tokens[length])
        num = 1
        while num <= min(limit, found, len(some) - 1) and some[num - 1] == tokens[length + num - 1]:
            num += 1
        if not all(is_sound[:num]):
            num = 0
        told.append([num, found, int(is_right), *some[:num]])
        if row:
            tokens[length : length + num] = some[:num]
            case.lens[row] += num
            case.found[row] = 0
    return told


@each_kind
@each_seed
@pytest.mark.parametrize("num_new", [1, 2, 4, 6])
def test_what_comes_out(kind: str, seed: int, num_new: int) -> None:
    case = make_case(seed, letters=2)
    num = len(case.rows)
    ids = case.random(0, 2, num, num_new)
    is_sound = case.random(0, 12, num, num_new) > 0
    if seed == 0:  # all drafts are right
        is_sound[:] = True
        for b, row in enumerate(case.rows):
            at = case.lens[row]
            ids[b] = torch.tensor(case.tokens[row][at : at + num_new])
    wide = torch.full((num, num_new + 5 + seed % 2), -9, device=DEVICE)
    out = wide[:, 1:-1]
    rows, limits = case.on_device()
    want = accept_lists(case, ids.tolist(), is_sound.tolist())
    kernel(kind, "accept")(
        ids.flatten().to(DEVICE), is_sound.flatten().to(DEVICE), rows, limits, case.history, out
    )
    assert out.tolist() == [line + [-1] * (out.shape[1] - len(line)) for line in want]
    assert wide[:, 0].tolist() == wide[:, -1].tolist() == [-9] * num
    check_history(case)


@each_kind
def test_an_unsound_token_that_is_not_reached_harms_nobody(kind: str) -> None:
    history = make_history(3, 8, 3, DEVICE)
    history.lens_N[1:] = 2
    history.found_N[1:] = 2
    history.tokens_NL[1, :4] = torch.tensor([5, 6, 7, 8])
    history.tokens_NL[2, :4] = torch.tensor([5, 6, 7, 8])
    ids = whole([9, 8, 1, 7, 8, 1])
    is_sound = torch.tensor([True, False, False, True, False, True], device=DEVICE)
    out = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE)
    kernel(kind, "accept")(ids, is_sound, whole([1, 2]), whole([2, 2]), history, out)
    assert out.tolist() == [[1, 2, 0, 9, -1, -1], [0, 2, 1, -1, -1, -1]]
    assert history.lens_N.tolist() == [2, 3, 2]
    assert history.tokens_NL[1:, :4].tolist() == [[5, 6, 9, 8], [5, 6, 7, 8]]


@each_kind
def test_nothing_is_written_beyond_the_room(kind: str) -> None:
    whole_room = make_history(4, 6, 2, DEVICE)
    history = History(whole_room.tokens_NL[:3], whole_room.lens_N[:3], whole_room.found_N[:3])
    width = history.tokens_NL.shape[1]
    history.lens_N[1], history.lens_N[2] = width, width - 1
    rows, limits = whole([1, 2]), whole([2, 2])
    kernel(kind, "put_drafts")(whole([4, 4]), rows, history, 1)
    assert history.found_N.tolist() == [0, 0, 0]
    history.found_N[1:] = 2
    out = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE)
    is_sound = torch.ones(6, dtype=torch.bool, device=DEVICE)
    kernel(kind, "accept")(whole([0] * 6), is_sound, rows, limits, history, out)
    assert history.lens_N.tolist() == [2, width, width]
    run_look_up(kind, rows, history, LookupRule(1, 4, 2))
    assert history.found_N.tolist() == [0, 0, 0]
    assert not whole_room.tokens_NL.any()


@each_kind
@each_seed
def test_drafts_of_a_model(kind: str, seed: int) -> None:
    case = make_case(seed)
    rows, _ = case.on_device()
    for index in range(DRAFT_TOKENS):
        ids = case.random(100, 1 << 20, len(case.rows))
        kernel(kind, "put_drafts")(ids.to(DEVICE), rows, case.history, index)
        for row, token in zip(case.rows, ids.tolist(), strict=True):
            if row:
                case.tokens[row][case.lens[row] + index] = token
                case.found[row] = index + 1
    check_history(case)


@each_kind
def test_the_host_hears_how_many_were_found(kind: str) -> None:
    history = make_history(90, 8, 3, DEVICE)
    history.found_N[1:] = torch.arange(1, 90)
    told = torch.full((80, 3), -5, device=DEVICE)
    kernel(kind, "tell_found")(whole([*range(79, 0, -1), 0]), history, told[:, 1])
    assert told[:, 1].tolist() == [*range(79, 0, -1), 0]
    assert set(told[:, 0].tolist() + told[:, 2].tolist()) == {-5}


# ----------------------------------------------------------------------------- dispatching


def test_the_functions_choose_by_device() -> None:
    """A whole step by the public functions: two right drafts, then what follows is looked up."""
    history = make_history(2, 16, 4, DEVICE)
    history.tokens_NL[1, :6] = torch.tensor([4, 5, 6, 7, 4, 5])
    history.lens_N[1] = 6
    rule, room = LookupRule(2, 4, 3), make_lookup_buffers(DEVICE, 1)
    rows, limits = whole([1]), whole([2])
    tables = torch.zeros(1, 2, 4, dtype=torch.int32, device=DEVICE)
    lookup(rows, history, rule, room)
    assert history.tokens_NL[1, 6:9].tolist() == [6, 7, 4]
    out = make_step_inputs(1, 4, DEVICE)
    fresh = whole([[3], [1]])
    drafts.enter_blocks(rows, fresh, tables)
    inputs = first_inputs(out, 1, 4)
    drafts.draft_inputs(
        rows, limits, history, tables, inputs, SIZE, num_new=4, first=0, max_positions=16
    )
    assert inputs.token_ids_B.tolist() == [5, 6, 7, 4]
    assert inputs.slots_gB.tolist() == [[13, 14, 15, 0]]
    told = torch.zeros(1, 7, dtype=torch.int64, device=DEVICE)
    is_sound = torch.ones(4, dtype=torch.bool, device=DEVICE)
    drafts.accept(whole([6, 7, 4, 5]), is_sound, rows, limits, history, told)
    assert told.tolist() == [[3, 3, 1, 6, 7, 4, -1]]
    assert history.lens_N.tolist() == [PADDING_LENGTH, 9]
    drafts.tell_found(rows, history, told[:, 4])
    assert told.tolist() == [[3, 3, 1, 6, 0, 4, -1]]
    drafts.put_drafts(whole([1]), rows, history, 0)
    assert history.found_N.tolist() == [0, 1]
    assert history.tokens_NL[1, :10].tolist() == [4, 5, 6, 7, 4, 5, 6, 7, 4, 1]
