"""Are the steps that are timed the steps that were asked for?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest

from ridgeline.cost.setup import Precision
from ridgeline.measure.host import host_seconds, line_through
from ridgeline.measure.points import described, step_point
from ridgeline.measure.steps import (
    ANSWER_TOKENS,
    DRAFT_TOKENS,
    RIGHT_DRAFTS,
    StepBench,
    beside_steps,
    random_engine,
    step_bench,
)
from ridgeline.measure.stopwatch import ProcessorClock
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.step import StepRecord
from tests.captures import records
from tests.measure.small import SAMPLE


@pytest.fixture(scope="module")
def bench() -> Iterator[StepBench]:
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 200}
    with random_engine(SAMPLE.config, **options, max_num_seqs=8) as built:
        yield step_bench(built)


@pytest.mark.parametrize(("rows", "context"), [(1, 16), (3, 50), (8, 33)])
def test_decodes_have_their_rows_and_their_context(
    bench: StepBench, rows: int, context: int
) -> None:
    found = bench.decode(rows, context, steps=5)
    assert len(found.seconds) == 5
    assert min(found.seconds) > 0
    assert len(found.shape) == rows
    assert all(new == 1 for new, _ in found.shape)
    assert all(context <= before <= context + rows + 12 for _, before in found.shape)
    assert bench.engine.is_idle
    bench.engine.scheduler.check_invariants()


def test_a_prefill_reads_one_prompt_in_one_step(bench: StepBench) -> None:
    found = bench.prefill(45, repeats=3)
    assert found.shape == ((45, 0),)
    assert len(found.seconds) == 3


def test_a_mixed_step_has_both(bench: StepBench) -> None:
    found = bench.mixed(20, 3, 30, repeats=2)
    assert sorted(new for new, _ in found.shape) == [1, 1, 1, 20]
    assert (20, 0) in found.shape
    assert all(before >= 30 for new, before in found.shape if new == 1)


def test_no_prompt_is_served_from_the_prefix_cache(bench: StepBench) -> None:
    first, second = bench.prefill(64, repeats=2), bench.prefill(64, repeats=2)
    assert first.shape == second.shape == ((64, 0),)


def test_answers_are_whole_and_alone(bench: StepBench, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    tell = bench.on_step

    def count(record: StepRecord) -> None:
        plans.append(len(record.plan.scheduled))
        tell(record)

    monkeypatch.setattr(bench, "on_step", count)
    found = bench.answers(20, 3)
    assert len(found) == 3
    assert plans == [1] * (3 * ANSWER_TOKENS)
    assert bench.engine.is_idle


def test_begin_and_end_of_an_answer_are_told_from_its_middle() -> None:
    gaps = [2.0] * (ANSWER_TOKENS - 1)
    assert beside_steps(list(accumulate(gaps, initial=5.0))) == 0
    gaps[0], gaps[3], gaps[-1] = 7.0, 3.0, 4.0
    gaps[20] = 50.0  # something else, in the middle
    assert beside_steps(list(accumulate(gaps, initial=5.0))) == 5 + 1 + 2


def test_one_thread_is_timed_by_its_own_clock(bench: StepBench) -> None:
    assert isinstance(bench.engine.clock, ProcessorClock)


@records
def test_checks_have_their_drafts_and_none_is_right() -> None:
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 200}
    with random_engine(SAMPLE.config, **options, max_num_seqs=4, speculate=DRAFT_TOKENS) as built:
        bench = step_bench(built)
        chosen = built.engine.scheduler.draft_lengths
        found = bench.check(3, 40, 2, steps=6)
        assert [new for new, _ in found.shape] == [3, 3, 3]
        assert all(40 <= before <= 60 for _, before in found.shape)  # one token a step
        assert bench.engine.is_idle
        assert bench.engine.scheduler.draft_lengths is chosen
        assert {new for new, _ in bench.decode(2, 30, steps=3).shape} <= {1, 2, 3, 4, 5, 6, 7}


@records
def test_a_choice_is_timed_beside_as_many_drafts_that_nobody_chose() -> None:
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 200}
    with random_engine(SAMPLE.config, **options, max_num_seqs=4, speculate=RIGHT_DRAFTS) as built:
        bench = step_bench(built)
        chosen = built.engine.scheduler.draft_lengths
        assert isinstance(chosen, DraftLengthController)
        assert min(bench.choosing(20, 12)) > 0
        num_steps = chosen.times.num_steps
        assert num_steps > 0
        bench.choosing(20, 12)
        assert num_steps < chosen.times.num_steps
        assert bench.engine.scheduler.draft_lengths is chosen
        assert bench.engine.is_idle


def test_a_check_becomes_a_point_with_a_row_of_logits_for_each_draft() -> None:
    point = step_point("check_step", SAMPLE, "bfloat16", ((3, 30), (3, 32)), 0.5, captured=True)
    assert point.label == "tiny: check 2 x 31, 2 drafts"
    by_name = {op.name: op for op in point.ops}
    assert by_name["lm_head"].m == 6
    assert by_name["check_attention"].n == 3


def test_a_step_becomes_a_point_with_its_operators() -> None:
    shape = ((1, 19), (1, 29), (12, 0))
    point = step_point("mixed_step", SAMPLE, "bfloat16", shape, 0.5)
    assert point.num_requests == 3
    assert point.dtype == "bf16"
    assert point.label == "tiny: prefill 12, decode 2 x 25"
    kinds = {op.kind for op in point.ops}
    assert {"matmul", "decode_attention", "prefill_attention", "sampling"} <= kinds
    assert Precision("bfloat16").short_dtype == "bf16"
    assert described(((40, 3),)) == "prefill 40"
    assert described(((3, 30), (3, 32))) == "check 2 x 31, 2 drafts"


def test_the_loop_without_a_device_costs_more_for_more_requests() -> None:
    few, many = min(host_seconds(1, 32) for _ in range(3)), host_seconds(64, 32)
    assert 0 < few < many


def test_a_line_through_exact_points_is_that_line() -> None:
    found = line_through([(n, 3e-5 + 4e-6 * n) for n in (1, 16, 64)])
    assert list(found) == pytest.approx([3e-5, 4e-6])
    assert line_through([(1, 2e-5), (10, 1e-5)])[1] == 0.0  # never negative
    assert list(line_through([(4, 5e-5)])) == pytest.approx([5e-5, 0.0])
