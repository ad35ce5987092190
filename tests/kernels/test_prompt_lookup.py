"""Is what stood before found again as a plain search says it should?"""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels import drafts
from ridgeline.kernels.cpu import native
from ridgeline.kernels.drafts import PADDING_LENGTH, first_inputs, make_history
from ridgeline.kernels.prompt_lookup import LookupRule, lookup_reference, make_lookup_buffers
from ridgeline.kernels.step_inputs import StepInputs, make_step_inputs
from tests.kernels.draft_case import (
    DEVICE,
    DRAFT_TOKENS,
    ROOM,
    SIZE,
    Case,
    check_history,
    each_kind,
    each_seed,
    gpu_room,
    kernel,
    make_case,
    run_look_up,
    whole,
)


def look_up_list(tokens: list[int], rule: LookupRule) -> list[int]:
    num, best = len(tokens), (0, 0)
    for end in range(1, num):
        match = 0
        while match < min(end, rule.max_match) and tokens[end - 1 - match] == tokens[-1 - match]:
            match += 1
        best = max(best, (match, end))
    match, end = best
    if match < rule.min_match:
        return []
    wanted = rule.drafts_per_match * match if rule.drafts_per_match else rule.max_draft_tokens
    longer = list(tokens)
    for i in range(min(wanted, rule.max_draft_tokens)):
        longer.append(longer[end + i])
    return longer[num:]


def check_look_up(kind: str, case: Case, rule: LookupRule) -> None:
    for row in {*case.rows} - {0}:
        num = case.lens[row]
        found = look_up_list(case.tokens[row][:num], rule)
        case.tokens[row][num : num + len(found)] = found
        case.found[row] = len(found)
    run_look_up(kind, case.on_device()[0], case.history, rule)
    check_history(case)


@pytest.mark.every_pair
@each_kind
@each_seed
@pytest.mark.parametrize("letters", [1, 2, 5, 30])
def test_what_came_next_before(kind: str, seed: int, letters: int) -> None:
    for rule in (
        LookupRule(2, 4, DRAFT_TOKENS),
        LookupRule(1, 32, DRAFT_TOKENS, 1),
        LookupRule(3, 7, 2, 2),
    ):
        check_look_up(kind, make_case(seed, letters=letters), rule)


@each_kind
def test_ends_of_what_is_looked_through(kind: str) -> None:
    """A match at the very beginning, one up to the newest token, rows too short for one."""
    history = make_history(6, 200, 4, DEVICE)
    lines = [[], [1, 2, *range(3, 150), 1, 2], [9] * 200, [5, 5], [5], [8, 7, 6, 7]]
    for row, line in enumerate(lines[1:], 1):
        history.tokens_NL[row, : len(line)] = torch.tensor(line)
        history.lens_N[row] = len(line)
    rows = whole([1, 2, 0, 3, 4, 5, 0])
    run_look_up(kind, rows, history, LookupRule(2, 4, 4))
    assert history.found_N.tolist() == [0, 4, 4, 0, 0, 0]
    assert history.tokens_NL[1, 151:155].tolist() == [3, 4, 5, 6]
    assert history.tokens_NL[2, 200:204].tolist() == [9] * 4
    run_look_up(kind, rows, history, LookupRule(1, 4, 4))
    assert history.found_N.tolist() == [0, 4, 4, 4, 0, 4]
    assert history.tokens_NL[3, 2:6].tolist() == [5] * 4
    assert history.tokens_NL[5, 4:8].tolist() == [6, 7, 6, 7]


@each_kind
def test_of_equals_the_most_recent(kind: str) -> None:
    history = make_history(2, 200, 3, DEVICE)
    line = [1, 2, 3] + [0] * 70 + [1, 2, 4] + [0] * 70 + [7, 1, 2, 5] + [0] * 3 + [1, 2]
    history.tokens_NL[1, : len(line)] = torch.tensor(line)
    history.lens_N[1] = len(line)
    run_look_up(kind, whole([1]), history, LookupRule(2, 2, 3))
    assert history.tokens_NL[1, len(line) : len(line) + 3].tolist() == [5, 0, 0]
    history.tokens_NL[1, 73] = 0  # now the first match is the longest but one
    history.tokens_NL[1, len(line) - 3] = 7
    run_look_up(kind, whole([1]), history, LookupRule(2, 3, 3))
    assert history.tokens_NL[1, len(line) : len(line) + 3].tolist() == [5, 0, 0]


def test_the_room_of_a_gpu_is_left_as_it_was() -> None:
    """Another launch would count on from what the one before has left."""
    run = kernel("triton", "lookup")
    room = gpu_room(ROOM + 3)
    for seed in range(3):
        case = make_case(seed)
        run(case.on_device()[0], case.history, LookupRule(2, 4, DRAFT_TOKENS), room, span=16)
        assert not room.arrivals_B.any()
        for row in {*case.rows} - {0}:
            found = look_up_list(case.tokens[row][: case.lens[row]], LookupRule(2, 4, DRAFT_TOKENS))
            assert case.history.found_N[row] == len(found)


def test_room_is_only_taken_where_it_is_used() -> None:
    assert make_lookup_buffers(torch.device("cpu"), 99).num_bytes == 0


@each_kind
def test_many_rows_and_long_ones(kind: str) -> None:
    """More rows than a program of any kernel has lanes; enough tokens to share between threads."""
    num, most, num_new = 140, 1500, 3
    generator = torch.Generator().manual_seed(1)
    ours, want = (make_history(num, most, DRAFT_TOKENS, DEVICE) for _ in range(2))
    tokens = torch.randint(0, 40, tuple(ours.tokens_NL.shape), generator=generator)
    lens = torch.randint(2, most, (num,), generator=generator)
    lens[0] = PADDING_LENGTH
    for history in (ours, want):
        history.tokens_NL.copy_(tokens)
        history.lens_N.copy_(lens)
    rows = torch.cat((torch.randperm(num, generator=generator), torch.zeros(9))).long().to(DEVICE)
    limits = torch.randint(0, 3, (len(rows),), generator=generator).to(DEVICE)
    rule = LookupRule(1, 32, DRAFT_TOKENS, 2)
    lookup_reference(rows, want, rule)
    threads = torch.get_num_threads()
    native.set_threads(2)
    run_look_up(kind, rows, ours, rule, span=1024)
    native.set_threads(threads)
    assert torch.equal(ours.found_N, want.found_N)
    assert torch.equal(ours.tokens_NL, want.tokens_NL)
    tables = torch.randint(1, 99, (2, num, most // SIZE), generator=generator).int().to(DEVICE)
    whole_out = [make_step_inputs(2, len(rows) * num_new, DEVICE) for _ in range(2)]
    outs = [first_inputs(out, len(rows), num_new) for out in whole_out]
    runs = kernel(kind, "draft_inputs"), drafts.draft_inputs_reference
    for run, out in zip(runs, outs, strict=True):
        run(
            rows, limits, want, tables, out, SIZE,
            num_new=num_new, first=0, max_positions=most,
        )  # fmt: skip
    for field in StepInputs.__slots__:
        assert torch.equal(getattr(outs[0], field), getattr(outs[1], field)), field
    ids, is_sound = outs[0].token_ids_B, torch.ones_like(outs[0].token_ids_B, dtype=torch.bool)
    told = torch.zeros(2, len(rows), num_new + 3, dtype=torch.int64, device=DEVICE)
    kernel(kind, "accept")(ids.roll(-1), is_sound, rows, limits, ours, told[0])
    drafts.accept_reference(ids.roll(-1), is_sound, rows, limits, want, told[1])
    assert torch.equal(told[0], told[1])
    assert {0, 1, 2, 3} >= set(told[0, :, 0].tolist()) > {1, 2}
    assert torch.equal(ours.lens_N, want.lens_N)
    assert torch.equal(ours.tokens_NL, want.tokens_NL)
