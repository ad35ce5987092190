"""A draft drafts what it would say alone, whatever became of its drafts before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ridgeline.attention.layout import DecodeLayout, ForwardBatch
from ridgeline.errors import ConfigError, InternalError
from ridgeline.kernels.cpu.recorder import Arena, record
from ridgeline.kernels.draw_rows import Draws
from ridgeline.speculation.draft_model import DraftModel, open_draft_model
from tests.captures import captures
from tests.conftest import TEST_DEVICE
from tests.speculation.scene import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB,
    Scene,
    alone,
    captured,
    make_cache,
    make_decoder,
    of_row,
    some_tokens,
    there,
)

pytestmark = captures
DRAFT: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
WINDOWS: dict[str, Any] = {"model_type": "mistral", "sliding_window": 9}
QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 2,
    "num_hidden_layers": 4,
}


def make(
    target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **options: Any
) -> tuple[Scene, DraftModel]:
    model = make_decoder(seed=0, **(target or {}), **options)
    scene = Scene(model, make_cache(model))
    vocab = model.spec.vocab_size
    shape = DRAFT if draft is None else draft
    small = make_decoder(seed=5, min_token_ids=vocab, **shape, **options)
    return scene, open_draft_model(
        small, model, scene.kv, max_draft_tokens=8, max_rows=6, max_logit_rows=24
    )


def check_drafts(
    scene: Scene, method: DraftModel, rows: list[int], k: int, draws: Draws | None = None
) -> None:
    """Of rows in a step with padding rows behind them."""
    padded = [*rows, 0, 0]
    method.draft(scene.step(padded, [k] * len(rows) + [0, 0], draws), k)
    for place, row in enumerate(rows):
        own = None if draws is None else of_row(draws, place)
        wanted, _ = alone(method.decoder, scene.tokens[row], k, own, scene.decoder.spec.vocab_size)
        assert scene.draft_tokens(row) == wanted, row


CASES = {
    "smaller": (None, DRAFT),
    "fewer ids": (None, DRAFT | {"vocab_size": VOCAB - 16}),
    "more ids": (None, DRAFT | {"vocab_size": VOCAB + 31}),
    "windows": (WINDOWS, WINDOWS | DRAFT),
    "windows and all": (QWEN, QWEN | {"hidden_size": 16, "head_dim": 32}),
    "a window in tables of all": (None, WINDOWS | DRAFT | {"sliding_window": 6}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_drawn", [False, True])
def test_whatever_became_of_the_drafts_before(case: str, is_drawn: bool) -> None:
    """Rows go on with some or all of their drafts and a token of the target's, step after step."""
    target, draft = CASES[case]
    scene, method = make(target, draft)
    keys = there([11, -5, 7, 0, 0])
    noisy = there([1.0, 0.0, 1.0, 0.0, 0.0])
    draws = Draws(keys, there([0.8, 1.0, 1.5, 1.0, 1.0]), noisy) if is_drawn else None
    vocab = min(scene.decoder.spec.vocab_size, method.decoder.spec.vocab_size)
    for row, length in ((1, 2), (3, 11), (4, 17)):
        scene.open(row, some_tokens(length, row, vocab), method)
    rng = random.Random(1)
    for k in (4, 1, 3, 2, 4):
        check_drafts(scene, method, [1, 3, 4], k, draws)
        for row in (1, 3, 4):
            num = k if row == 3 else rng.randint(0, k)
            scene.add(row, [*scene.draft_tokens(row)[:num], rng.randrange(vocab)])


def test_all_accepted_every_time() -> None:
    """The draft has never seen its last draft when it drafts again."""
    scene, method = make()
    scene.open(2, some_tokens(5, 0), method)
    for k in (3, 3, 1, 1, 2):
        check_drafts(scene, method, [2], k)
        scene.add(2, [*scene.draft_tokens(2), 7])


def test_logits_are_those_that_drafts_were_drawn_from() -> None:
    scene, method = make(None, DRAFT | {"vocab_size": VOCAB - 16})
    for row in (1, 2):
        scene.open(row, some_tokens(9, row, VOCAB - 16), method)
    draws = Draws(there([3, 4]), there([0.7, 1.0]), there([1.0, 1.0]))
    logits_BkV = method.draft(scene.step([1, 2], [3, 3], draws), 3)
    assert logits_BkV is not None
    assert logits_BkV.shape == (2, 3, VOCAB)
    assert logits_BkV[..., VOCAB - 16 :].isneginf().all()
    for place, row in enumerate((1, 2)):
        _, wanted = alone(method.decoder, scene.tokens[row], 3, of_row(draws, place))
        torch.testing.assert_close(logits_BkV[place, :, : VOCAB - 16], wanted)
    assert method.draft(scene.step([1, 2], [3, 3]), 3) is None


def test_ids_that_the_draft_has_not_are_zeros() -> None:
    """A target may say them, and the draft has to go on."""
    scene, method = make(None, DRAFT | {"vocab_size": VOCAB - 16})
    scene.open(1, [5, VOCAB - 1, 7, VOCAB - 3], method)
    check_drafts(scene, method, [1], 3)


def test_rows_with_less_room_get_drafts_and_leave_other_blocks_alone() -> None:
    scene, method = make()
    scene.open(1, some_tokens(2 * BLOCK_SIZE, 1), method)  # its newest token ends a block
    scene.open(2, some_tokens(9, 2), method)
    before = [store.clone() for store in method.kv.stores[0]]
    method.draft(scene.step([1, 2], [0, 3]), 3)
    wanted, _ = alone(method.decoder, scene.tokens[2], 3)
    assert scene.draft_tokens(2) == wanted
    # Row 1 has blocks here, which a limit of 0 says it has not.
    after = int(scene.tables_gNM[0, 1, 2])
    for was, now in zip(before, method.kv.stores[0], strict=True):
        torch.testing.assert_close(was[after], now[after])


def test_at_the_end_of_the_longest_row() -> None:
    scene, method = make()
    scene.open(1, some_tokens(MAX_MODEL_LEN - 1, 1), method)
    scene.open(2, some_tokens(6, 2), method)
    method.draft(scene.step([1, 2], [0, 4]), 4)
    assert scene.draft_tokens(1)[:1] == alone(method.decoder, scene.tokens[1], 1)[0]
    assert scene.draft_tokens(2) == alone(method.decoder, scene.tokens[2], 4)[0]


def test_following_what_is_computed_without_drafts() -> None:
    """Prompts in pieces, and single tokens as a captured step has them."""
    scene, method = make()
    for row in (1, 2):
        scene.open(row, some_tokens(13 + row, row))
    method.follow(scene.batch({1: (0, 5), 2: (0, 8)}))
    method.follow(scene.batch({1: (5, 13), 2: (8, 14)}))
    check_drafts(scene, method, [1, 2], 2)
    for _ in range(4):
        method.follow(one_token_each(scene, [1, 2]))
        for row in (1, 2):
            scene.add(row, some_tokens(1, row))
    check_drafts(scene, method, [1, 2], 3)


def test_one_token_need_not_be_followed_and_two_must() -> None:
    scene, method = make()
    draws = Draws(there([3]), there([1.0]), there([1.0]))

    def is_right() -> bool:
        logits_BkV = method.draft(scene.step([1], [1], draws), 1)
        assert logits_BkV is not None
        wanted = alone(method.decoder, scene.tokens[1], 1, draws)[1]
        return torch.allclose(logits_BkV[0], wanted, rtol=1e-3, atol=1e-3)

    scene.open(1, some_tokens(13, 1), method)
    scene.add(1, [4])
    assert is_right()
    scene.add(1, [5, 6])
    assert is_right()
    scene.add(1, [7, 8, 9])
    assert not is_right()


def one_token_each(scene: Scene, rows: list[int]) -> ForwardBatch:
    newest = there([len(scene.tokens[row]) - 1 for row in rows])
    ids = there([scene.tokens[row][-1] for row in rows])
    slots = scene.tables_gNM[0, rows, newest // BLOCK_SIZE].long() * BLOCK_SIZE
    layout = DecodeLayout(
        there(rows),
        tuple(scene.tables_gNM),
        (newest + 1).int(),
        there(range(len(rows) + 1)).int(),
        (slots + newest % BLOCK_SIZE,),
        BLOCK_SIZE,
    )
    return ForwardBatch(ids, newest, layout)


def test_copied_blocks_have_the_draft_in_them() -> None:
    """Two rows share the blocks of a prompt until the second gets its own."""
    scene, method = make()
    scene.open(1, some_tokens(11, 1), method)
    scene.open(2, scene.tokens[1])
    sources, targets = (scene.tables_gNM[0, row, :3].long() for row in (1, 2))
    method.copy_blocks(sources, targets)
    check_drafts(scene, method, [2], 3)


def test_what_it_keeps() -> None:
    _, method = make()
    parts = method.decoder.num_bytes, method.kv.num_bytes
    assert sum(parts) + 24 * VOCAB * 4 < method.num_bytes < sum(parts) + 24 * VOCAB * 4 + 4096


def test_too_many_drafts_at_once() -> None:
    scene, method = make()
    draws = Draws(there([0] * 6), there([1.0] * 6), there([1.0] * 6))
    with pytest.raises(InternalError, match="room for the logits"):
        method.draft(scene.step([0] * 6, [5] * 6, draws), 5)


def test_a_draft_for_shorter_rows() -> None:
    model = make_decoder()
    small = make_decoder(max_model_len=MAX_MODEL_LEN - 1, **DRAFT)
    with pytest.raises(ConfigError, match=r"max_model_len 63.* 64"):
        open_draft_model(
            small, model, make_cache(model), max_draft_tokens=4, max_rows=4, max_logit_rows=16
        )


# ------------------------------------------------------------------------ captured, or recorded

WHOLE: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("is_drawn", [False, True])
@pytest.mark.parametrize("draft_ids", [128, 96])
def test_captured_once_and_replayed(is_drawn: bool, draft_ids: int) -> None:
    options = {"dtype": torch.bfloat16}
    scene, method = make(WHOLE, WHOLE | {"vocab_size": draft_ids}, **options)
    keys = there([3, 4, 0])
    draws = Draws(keys, there([1.0] * 3), there([1.0, 1.0, 0.0])) if is_drawn else None
    for row in (1, 2):
        scene.open(row, some_tokens(9 + row, row, draft_ids), method)
    step = scene.step([0, 0, 0], [0, 0, 0], draws)
    replay = captured(lambda: discard(method.draft(step, 3)))
    for round_ in range(3):
        step.rows_B.copy_(there([1, 2, 0]))
        step.limits_B.copy_(there([3, 3, 0]))
        replay()
        replayed = [scene.draft_tokens(row) for row in (1, 2)]
        assert all(len(draft_tokens) == 3 for draft_tokens in replayed)
        fresh = scene.step([1, 2, 0], [3, 3, 0], draws)
        scene.history.found_N.zero_()
        method.draft(fresh, 3)
        assert replayed == [scene.draft_tokens(row) for row in (1, 2)]
        scene.add(1, [*replayed[0], 5])
        scene.add(2, [*replayed[1][:round_], 9])


@pytest.mark.skipif(TEST_DEVICE != "cpu", reason="calls of a CPU are recorded")
def test_following_single_tokens_is_recorded() -> None:
    scene, method = make(WHOLE, WHOLE, dtype=torch.bfloat16)
    scene.open(1, some_tokens(9, 1, 128), method)
    batch = one_token_each(scene, [1])
    assert len(record(lambda: method.follow(batch), Arena())) > 0


def discard(_: object) -> None:
    """A recorded step returns nothing."""
