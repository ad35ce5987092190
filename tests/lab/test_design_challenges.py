"""Is the text's design judged as arithmetic by hand judges it, and is each obstacle named?"""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.lab.judge import SHEETS
from ridgeline.lab.page import Answer, read_inputs
from ridgeline.lab.pages.design_challenges import PAGE, Drawing


def judged(**inputs: Any) -> Answer[Drawing]:
    *progress, last = PAGE.answer(read_inputs(PAGE, inputs))  # type: ignore[misc]
    assert progress == sorted(progress)
    assert isinstance(last, Answer)
    return last


def figure(found: Answer[Drawing], name: str) -> float:
    return next(one.value for one in found.figures if one.name == name)


@pytest.fixture(scope="module")
def text_design() -> Answer[Drawing]:
    return judged()


def test_the_text_s_design_fails(text_design: Answer[Drawing]) -> None:
    """70B, 100 requests/s of 500 + 200 tokens on 4 x 8 H100 in fp8, batch 64: not 190 ms, seconds;
    not 100 requests/s: another's calibrated model gives 4 x 19.8."""
    drawing = text_design.drawing
    missed = {one.name for one in drawing.checks if not one.is_met}
    assert missed == {"requests a second", "whole answer, p99"}
    assert figure(text_design, "capacity") == pytest.approx(4 * 19.8, rel=0.16)
    assert figure(text_design, "whole answer, p99") > 3.0
    assert "the queue grows" in text_design.sentence
    late = [took for came, took in drawing.dots if came > 5]
    early = [took for came, took in drawing.dots if came < 1]
    assert sum(late) / len(late) > sum(early) / len(early) + 0.3


def test_its_floor_is_that_of_reading_the_weights(text_design: Answer[Drawing]) -> None:
    """70.6e9 bytes / 8 / 3.35 TB/s = 2.63 ms; (1 s - 30 ms) / 199 = 4.87 ms may be."""
    assert figure(text_design, "reading the weights once") == pytest.approx(2.63e-3, rel=0.03)
    assert figure(text_design, "time per token that may be") == pytest.approx(4.87e-3, rel=0.002)
    assert figure(text_design, "a lone request") > 1.0
    assert "even a lone request takes too long" in text_design.drawing.binding
    told = text_design.questions[0].answer
    assert "7 are needed" in told  # 100 / (64 / 4.01)
    assert "4.01 s" in told


def test_more_replicas_mend_the_queue_and_not_the_step() -> None:
    found = judged(replicas=7)
    met = {one.name: one.is_met for one in found.drawing.checks}
    assert met == {"requests a second": True, "whole answer, p99": False}


def test_drafts_and_small_batches_on_faster_memory_keep_it() -> None:
    found = judged(device="h200-sxm", replicas=12, max_num_seqs=16, drafts=4, acceptance=0.8)
    assert found.drawing.is_met
    assert found.drawing.binding == ""
    assert found.sentence.startswith("Met by 12 x 8")


@pytest.mark.parametrize(
    ("inputs", "binding"),
    [
        ({"weights": "bf16", "tp": 1, "replicas": 1}, "memory"),
        ({"challenge": 2, "device": "a100-80-sxm", "tp": 2, "weights": "bf16"}, "devices"),
        (
            {"challenge": 2, "device": "a100-80-sxm", "tp": 1, "replicas": 1, "weights": "bf16",
             "max_num_seqs": 4},
            "capacity",
        ),
        ({"challenge": 3, "tp": 1, "weights": "bf16", "max_num_seqs": 32}, "budget"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_is_named(inputs: dict[str, Any], binding: str) -> None:
    names = list(SHEETS)
    given = {"challenge": names[inputs.get("challenge", 0)]}
    found = judged(**{**inputs, **given})
    assert not found.drawing.is_met
    assert binding in found.drawing.binding
    parts = sum(one.bytes for one in found.drawing.parts)
    assert (parts > found.drawing.capacity_bytes * 0.9) == (binding == "memory")


def test_every_sheet_can_be_kept() -> None:
    """By some choice; the first one is kept above."""
    chosen: list[dict[str, Any]] = [
        {"replicas": 4},
        {"device": "a100-80-sxm", "tp": 1, "replicas": 1, "weights": "bf16"},
        {"device": "l40s", "tp": 1, "replicas": 4, "max_num_seqs": 32},
        {"tp": 1, "replicas": 4, "weights": "bf16", "max_num_batched_tokens": 2048},
    ]
    for name, inputs in zip(list(SHEETS)[1:], chosen, strict=True):
        found = judged(challenge=name, **inputs)
        assert found.drawing.is_met, found.sentence
