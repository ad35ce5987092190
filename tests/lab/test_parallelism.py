"""Shares, messages, bubbles and memory, against published figures and arithmetic done by hand."""

from __future__ import annotations

import pytest

from ridgeline.errors import ConfigError
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.parallelism import PAGE, Drawing, Inputs, answer


def ask(**values: object) -> Answer[Drawing]:
    inputs = read_inputs(PAGE, values)
    assert isinstance(inputs, Inputs)
    return answer(inputs)


def figure(found: Answer[Drawing], name: str) -> float:
    return next(one.value for one in found.figures if one.name.startswith(name))


@pytest.mark.parametrize(("tp", "gigabytes"), [(1, 140), (2, 70), (4, 35), (8, 17.5)])
def test_weights_of_70b_are_those_that_texts_print(tp: int, gigabytes: float) -> None:
    """Of 70.0 billion; the model has 70.55."""
    held = figure(ask(model="llama-3-70b", tp=tp, batch=1), "weights on each")
    assert held == pytest.approx(gigabytes * 70.55 / 70, rel=0.002)


def test_a_sum_of_one_token_is_its_latency() -> None:
    """2 (N - 1) / N x 8192 x 2 B at 450 GB/s are 0.0546 us for 4 devices: the text's figure, which
    leaves the latency out. There are 160 in the layers and one behind the embedding."""
    found = ask(model="llama-3-70b", tp=4, batch=1)
    assert figure(found, "a sum over devices") * 1e6 == pytest.approx(0.0546, abs=5e-5)
    assert 5e-6 < figure(found, "with latency") < 15e-6
    assert figure(found, "sums in a step") == 161


def test_shares_tile_every_matrix() -> None:
    shown = [ask(gpu=gpu).drawing.matrices for gpu in range(8)]
    for parts in zip(*shown, strict=True):
        edges = [(one.first, one.last) for one in parts]
        assert edges == [(gpu / 8, (gpu + 1) / 8) for gpu in range(8)]
    roles = {one.role: one for one in shown[0]}
    assert roles["q"].split == roles["gate"].split == "rows"
    assert roles["o"].split == roles["down"].split == "columns"
    assert roles["q"].own_bytes == 8192 * 8192 * 2 / 8


def test_experts_go_whole_to_ranks() -> None:
    """8 experts over 8 ranks: one each; over 4 of 8 ranks two each, cut in half."""
    whole = {one.role: one for one in ask(model="mixtral-8x7b", ep=8, gpu=3).drawing.matrices}
    assert (whole["gate"].own, whole["gate"].expert, whole["gate"].shares) == (1, 3, 1)
    half = {one.role: one for one in ask(model="mixtral-8x7b", ep=4, gpu=3).drawing.matrices}
    assert (half["gate"].own, half["gate"].expert, half["gate"].shares) == (2, 2, 2)
    assert whole["gate"].own_bytes == half["gate"].own_bytes


def test_more_devices_than_kv_heads_hold_the_same_heads() -> None:
    """Qwen2.5 0.5B has 2 KV heads of 64 numbers; its 14 query heads allow up to 14 devices."""
    found = ask(model="qwen3-30b-a3b", tp=8, batch=1).drawing  # 4 KV heads
    keys = next(one for one in found.matrices if one.role == "k")
    assert keys.shares == 4
    queries = next(m for m in ask(model="qwen2.5-0.5b", tp=4).drawing.matrices if m.role == "q")
    assert (queries.first, queries.last) == (0, 3 / 14)


def test_bubbles_are_the_published_ones() -> None:
    found = ask(tp=8, pp=4, batch=16)
    assert figure(found, "bubble of equal stages") == 75
    assert found.drawing.bubble == pytest.approx(0.75, abs=0.02)
    filled = ask(tp=8, pp=4, batch=64, micro_batches=16).drawing
    assert filled.bubble == pytest.approx(3 / 19, abs=0.03)  # the last stage has the vocabulary
    assert len(filled.slots) == 4 * 16


def test_without_a_link_more_cards_are_slower() -> None:
    cards = {"model": "llama-3.1-8b", "device": "rtx-4090", "batch": 8}
    one, four = ask(**cards, tp=1).drawing, ask(**cards, tp=4).drawing
    assert four.step_s > one.step_s
    nvlink = [ask(tp=tp).drawing.step_s for tp in (1, 2, 4, 8)]
    assert nvlink == sorted(nvlink, reverse=True)


def test_the_grid_says_what_fits() -> None:
    """141 GB of weights do not fit in 72 GB a device; a quarter of them does."""
    table = ask().tables[0]
    fits = {str(row[0]): row[3] for row in table.rows}
    assert (fits["1 device"], fits["tp 2"], fits["tp 4"], fits["tp 8"]) == (
        "no",
        "no",
        "yes",
        "yes",
    )
    assert [row for row in table.rows if row[-1] == "*"]


def test_what_cannot_be_had_is_said_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="devices 0 to 7"):
        ask(gpu=8)
    with pytest.raises(ConfigError, match="no experts"):
        ask(ep=2)
    with pytest.raises(ConfigError, match="micro-batches"):
        ask(batch=2, micro_batches=3)
    for preset in PAGE.presets:
        assert ask(**preset.inputs).questions
