"""The first layers draft what they would say alone, and the check finds its cache as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.kernels.draw_rows import Draws
from ridgeline.layers.decoder import Decoder
from ridgeline.speculation.draft_model import EarlyLayers
from tests.captures import captures
from tests.speculation.scene import (
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
from tests.speculation.test_draft_model import QWEN, WHOLE, WINDOWS

pytestmark = captures
MODELS = {"all": {"num_hidden_layers": 4}, "windows": WINDOWS, "windows and all": QWEN}


def cut(decoder: Decoder, num_layers: int, **changes: Any) -> Decoder:
    """A model of the first layers, with the same weights: tensors of the same names are equal."""
    small = make_decoder(seed=1, **changes)
    small.layers = decoder.layers[:num_layers]
    small.embedding, small.lm_head, small.norm = decoder.embedding, decoder.lm_head, decoder.norm
    return small


def make(num_layers: int, **changes: Any) -> tuple[Scene, EarlyLayers, Decoder]:
    """Rows whose prompts the model has computed, and the model of its first layers."""
    model = make_decoder(seed=0, **changes)
    scene = Scene(model, make_cache(model))
    method = EarlyLayers(
        model, scene.kv, num_layers=num_layers, max_draft_tokens=6, max_rows=4, max_logit_rows=16
    )
    vocab = model.spec.vocab_size
    for row, length in ((1, 3), (2, 11), (4, 18)):
        scene.open(row, some_tokens(length, row, vocab))
        model.forward(scene.batch({row: (0, length - 1)}), scene.kv)
    small = cut(model, num_layers, **changes | {"num_hidden_layers": num_layers})
    return scene, method, small


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_what_the_first_layers_say(name: str, num_layers: int, is_drawn: bool) -> None:
    changes = {"num_hidden_layers": 4} | MODELS[name]
    scene, method, small = make(num_layers, **changes)
    keys, noisy = there([3, 4, 5, 0]), there([1.0, 0.0, 1.0, 0.0])
    draws = Draws(keys, there([0.9, 1.0, 1.2, 1.0]), noisy) if is_drawn else None
    rows, k = [1, 2, 4], 4
    logits_BkV = method.draft(scene.step([*rows, 0], [k, k, k, 0], draws), k)
    for place, row in enumerate(rows):
        own = None if draws is None else of_row(draws, place)
        wanted, lines = alone(small, scene.tokens[row], k, own)
        assert scene.draft_tokens(row) == wanted
        if is_drawn:
            assert logits_BkV is not None
            torch.testing.assert_close(logits_BkV[place], lines)
        else:
            assert logits_BkV is None


def test_the_check_writes_the_same_numbers_again() -> None:
    """Drafts that are right leave the cache of their layers as it is."""
    scene, method, _ = make(1, num_hidden_layers=2)
    method.draft(scene.step([2], [3]), 3)
    begin = len(scene.tokens[2]) - 1
    scene.add(2, scene.draft_tokens(2))
    slots = scene.batch({2: (0, begin + 3)}).layout.slots_T[0]
    before = [scene.kv.layers[index].gather(slots).clone() for index in range(2)]
    scene.decoder.forward(scene.batch({2: (begin, begin + 3)}), scene.kv)
    after = [scene.kv.layers[index].gather(slots) for index in range(2)]
    torch.testing.assert_close(before[0], after[0])
    torch.testing.assert_close(before[1][:begin], after[1][:begin])
    assert not torch.equal(before[1][begin:], after[1][begin:])


def test_it_keeps_logits_alone() -> None:
    _, method, _ = make(1, num_hidden_layers=2)
    assert 16 * VOCAB * 4 < method.num_bytes < 16 * VOCAB * 4 + 4096
    assert not method.needs_tokens


@pytest.mark.parametrize("num_layers", [0, 2, 3, -1])
def test_no_layers_or_all_of_them(num_layers: int) -> None:
    model = make_decoder(num_hidden_layers=2)
    with pytest.raises(ConfigError, match="1 to 1 of the model's 2 layers"):
        EarlyLayers(
            model,
            make_cache(model),
            num_layers=num_layers,
            max_draft_tokens=2,
            max_rows=2,
            max_logit_rows=4,
        )


def test_captured_once_and_replayed() -> None:
    scene, method, _ = make(1, dtype=torch.bfloat16, **WHOLE | {"num_hidden_layers": 2})
    step = scene.step([0, 0], [0, 0])

    def run() -> None:
        method.draft(step, 3)

    replay = captured(run)
    step.rows_B.copy_(there([2, 4]))
    step.limits_B.fill_(3)
    replay()
    replayed = [scene.draft_tokens(row) for row in (2, 4)]
    assert [len(draft_tokens) for draft_tokens in replayed] == [3, 3]
    run()
    assert replayed == [scene.draft_tokens(row) for row in (2, 4)]
