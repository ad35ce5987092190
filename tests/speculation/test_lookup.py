"""Do look-up methods draft what came next before, step after step, also when they are recorded?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ridgeline.devices import open_device
from ridgeline.errors import InternalError
from ridgeline.kernels.cpu.recorder import Arena, Replay, record
from ridgeline.kernels.drafts import (
    History,
    accept,
    draft_inputs,
    enter_blocks,
    first_inputs,
    make_history,
    put_drafts,
)
from ridgeline.kernels.step_inputs import make_step_inputs
from ridgeline.speculation.contract import DraftMethod, DraftStep
from ridgeline.speculation.prompt_lookup import NGram, Suffix
from tests.captures import captures
from tests.conftest import TEST_DEVICE

DEVICE = torch.device(TEST_DEVICE)
DRAFT_TOKENS, SIZE = 4, 4


def step_for(history: History, rows: list[int], limits: list[int]) -> DraftStep:
    tables = torch.zeros(1, len(history.lens_N), 50, dtype=torch.int32, device=DEVICE)
    return DraftStep(whole(rows), whole(limits), history, tables, SIZE, None)


def whole(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def recorded(launch: Callable[[], None]) -> Callable[[], None]:
    """As a step of this device is; on a CPU all of it must be native calls."""
    if TEST_DEVICE != "cpu":
        return open_device(TEST_DEVICE).capture(launch)
    recording = record(launch, Arena())
    assert len(recording) == 5
    return Replay(recording)


def methods() -> list[DraftMethod]:
    return [NGram(DEVICE, 4, DRAFT_TOKENS), Suffix(DEVICE, 4, DRAFT_TOKENS)]


def write(history: History, row: int, tokens: list[int]) -> None:
    history.tokens_NL[row, : len(tokens)] = torch.tensor(tokens)
    history.lens_N[row] = len(tokens)


def drafts_of(history: History, row: int) -> list[int]:
    num, found = int(history.lens_N[row]), int(history.found_N[row])
    tokens: list[int] = history.tokens_NL[row, num : num + found].tolist()
    return tokens


def test_what_they_say_of_themselves() -> None:
    ngram, suffix = methods()
    assert (ngram.name, suffix.name) == ("ngram", "suffix")
    for method in (ngram, suffix):
        assert method.looks_ahead
        assert not method.needs_tokens
        assert method.max_draft_tokens == DRAFT_TOKENS
        assert (method.num_bytes > 0) == (TEST_DEVICE != "cpu"), "scratch of a GPU"
    with pytest.raises(InternalError, match="drafts"):
        NGram(DEVICE, 4, 0)


def test_a_long_match_is_trusted_farther_and_preferred() -> None:
    passage = [1, 2, 3, 4, 5, 6, 7, 8]
    history = make_history(4, 60, DRAFT_TOKENS, DEVICE)
    write(history, 1, [*passage, 0, 3, 4, 5, 6, 20, 21, 0, 9, 1, 2, 3, 4, 5, 6])
    write(history, 2, [*passage, 0, 5, 6])
    write(history, 3, [*passage, 0, 6])
    ngram, suffix = methods()
    step = step_for(history, [1, 2, 3, 0], [9, 9, 9, 9])
    assert ngram.draft(step, 3) is None
    ngram.look_ahead(step)
    # Four tokens match in both places, and the second is the more recent.
    assert drafts_of(history, 1) == [20, 21, 0, 9]
    assert drafts_of(history, 2) == [7, 8, 0, 5]
    assert drafts_of(history, 3) == []
    suffix.look_ahead(step)
    assert drafts_of(history, 1) == [7, 8, 0, 3]
    assert drafts_of(history, 2) == [7, 8]
    assert drafts_of(history, 3) == [7]


def loop(method: DraftMethod, text: list[int], history: History, launch: Callable[[], None]) -> int:
    """Decode a text that is known; returns in how many steps."""
    step = step_for(history, [1], [DRAFT_TOKENS])
    method.look_ahead(step)
    steps = 0
    while int(history.lens_N[1]) < len(text):
        launch()
        steps += 1
        num = int(history.lens_N[1])
        assert history.tokens_NL[1, :num].tolist() == text[:num]
    return steps


@pytest.mark.parametrize("index", [0, 1])
def test_a_text_that_repeats_itself_takes_few_steps(index: int) -> None:
    """What comes out is the text whatever is drafted."""
    verse = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(index)).tolist()
    text = verse * 4 + [7, 7, 7, 7, 7, 7, 7, 7, 3]
    method = methods()[index]
    history = make_history(2, len(text) + DRAFT_TOKENS + 1, DRAFT_TOKENS, DEVICE)
    write(history, 1, verse)
    step = step_for(history, [1], [DRAFT_TOKENS])
    told = whole([[0] * (DRAFT_TOKENS + 4)])
    is_sound = torch.ones(DRAFT_TOKENS + 1, dtype=torch.bool, device=DEVICE)

    def launch() -> None:
        num = int(history.lens_N[1])
        ids = whole([*text, *[0] * DRAFT_TOKENS][num : num + DRAFT_TOKENS + 1])
        accept(ids, is_sound, step.rows_B, whole([len(text) - 1 - num]), history, told)
        assert int(told[0, 0]) >= 1
        method.look_ahead(step)

    assert loop(method, text, history, launch) < 60


@captures
@pytest.mark.parametrize("index", [0, 1])
def test_a_recorded_step_is_replayed_on_what_is_there_then(index: int) -> None:
    """All kernels of a step, recorded on padding and replayed twice on a row."""
    method = methods()[index]
    history = make_history(3, 60, DRAFT_TOKENS, DEVICE)
    write(history, 2, [5, 6, 7, 8, 5, 6])
    sent = whole([[0, 0], [0, 0], [-1, -1], [-1, -1]])
    tables = torch.zeros(1, 3, 20, dtype=torch.int32, device=DEVICE)
    out = make_step_inputs(1, 8, DEVICE)
    ids, told = whole([0] * 6), whole([[0] * 7] * 2)
    is_sound = torch.ones(6, dtype=torch.bool, device=DEVICE)
    step = DraftStep(sent[0], sent[1], history, tables, SIZE, None)
    inputs = first_inputs(out, 2, 3)

    def launch() -> None:
        enter_blocks(sent[0], sent[2:], tables)
        draft_inputs(
            sent[0], sent[1], history, tables, inputs, SIZE,
            num_new=3, first=0, max_positions=60, fresh_XB=sent[2:],
        )  # fmt: skip
        accept(ids, is_sound, sent[0], sent[1], history, told[:, :-1])
        put_drafts(ids[:2], sent[0], history, 0)
        method.look_ahead(step)

    replay = recorded(launch)
    assert history.lens_N.tolist() == [2, 0, 6]
    assert not history.tokens_NL[0].any()
    method.look_ahead(step_for(history, [2], [0]))
    assert drafts_of(history, 2)[:2] == [7, 8]
    sent.copy_(whole([[2, 0], [2, 0], [9, -1], [1, 0]]))
    ids[:3] = whole([7, 1, 2])
    replay()
    assert told[0, :6].tolist() == [2, DRAFT_TOKENS if index == 0 else 2, 1, 7, 1, -1]
    assert history.tokens_NL[2, :8].tolist() == [5, 6, 7, 8, 5, 6, 7, 1]
    assert inputs.token_ids_B[:3].tolist() == [6, 7, 8]
    assert inputs.slots_gB[0, :3].tolist() == [9 * SIZE + 1, 9 * SIZE + 2, 9 * SIZE + 3]
    assert drafts_of(history, 2) == []
    sent[2] = -1
    ids[:3] = whole([6, 0, 0])
    replay()
    assert told[0, :6].tolist() == [1, 0, 0, 6, -1, -1]
    assert int(history.lens_N[2]) == 9
    assert drafts_of(history, 2) == ([] if index == 0 else [7])
