"""Are speeds tokens delivered over time, and bytes those of the steps that ran?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.benchmark import speed
from ridgeline.benchmark.run import JobTimes, Run, StepSeen
from ridgeline.benchmark.speed import VERIFYING_ALONE, Bench
from tests.captures import captures
from tests.tiny_model import make_tiny_model


def bench(monkeypatch: pytest.MonkeyPatch, runs: Sequence[Run]) -> Bench:
    """One whose runs, behind the first that warms up, are these."""
    coming = iter([runs[0], *runs])
    monkeypatch.setattr(speed, "run_jobs", lambda *_: next(coming))
    llm: Any = SimpleNamespace(
        engine=None,
        spec=SimpleNamespace(vocab_size=100),
        resolved=SimpleNamespace(max_num_seqs=4, max_model_len=4096),
        run_record=None,
    )
    return Bench(llm, read_bytes_per_s=1000.0, repeats=len(runs))


def run_of(
    counts: Sequence[int],
    rows: int = 1,
    step_s: float = 0.5,
    moved: float | None = 200.0,
    *,
    drafts: bool = False,
) -> Run:
    """A step that reads the prompt and then steps that give so many tokens each."""
    run = Run(0.0)
    for index, count in enumerate([rows, *counts]):
        read = 9999.0 if index == 0 else moved
        drafted = drafts and index > 0
        run.steps.append(StepSeen(1.0 + index * step_s, count, rows, read, drafted))
    times = [step.ended_s for step in run.steps for _ in range(step.num_tokens // rows)]
    run.jobs = [JobTimes(0.0, times) for _ in range(rows)]
    return run


def test_a_step_with_right_drafts_counts_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [4, 2, 3, 1, 5]
    found = bench(monkeypatch, [run_of(counts)]).decode(1, 8, 16)
    assert found.tokens_per_s == pytest.approx(15 / 2.5)
    assert found.tokens_per_step == pytest.approx(3.0)
    assert found.step_ms.p50 == pytest.approx(500.0)
    assert found.bytes_per_step == pytest.approx(200.0)
    assert found.achieved_bytes_per_s == pytest.approx(400.0)
    assert found.share_of_bandwidth == pytest.approx(0.4)
    assert found.note == ""


def test_both_workloads_say_the_same_of_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of([4, 2, 3, 1, 5])
    decode = bench(monkeypatch, [run]).decode(1, 8, 16)
    split = bench(monkeypatch, [run]).split(8, 16)
    assert split.decode_tokens_per_s == pytest.approx(decode.tokens_per_s)
    assert split.achieved_bytes_per_s == pytest.approx(decode.achieved_bytes_per_s)
    assert split.share_of_bandwidth == pytest.approx(decode.share_of_bandwidth)


def test_several_requests_and_the_median_of_the_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [run_of([2, 4, 2, 4], rows=2, step_s=step_s) for step_s in (0.5, 0.25, 1.0)]
    found = bench(monkeypatch, runs).decode(2, 8, 16)
    assert found.tokens_per_s == pytest.approx(6.0)
    assert found.achieved_bytes_per_s == pytest.approx(400.0)


def test_bytes_that_nobody_knows_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = bench(monkeypatch, [run_of([1] * 5, moved=None)]).decode(1, 8, 6)
    assert decode.tokens_per_s == pytest.approx(2.0)
    assert (decode.bytes_per_step, decode.share_of_bandwidth) == (None, None)
    split = bench(monkeypatch, [run_of([1] * 5, moved=None)]).split(8, 6)
    assert (split.achieved_bytes_per_s, split.share_of_bandwidth) == (None, None)
    one = bench(monkeypatch, [run_of([])]).split(8, 1)
    assert (one.decode_tokens_per_s, one.achieved_bytes_per_s) == (0.0, None)


def test_that_bytes_are_without_the_drafts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of([4, 2, 3, 1, 5], drafts=True)
    assert bench(monkeypatch, [run]).decode(1, 8, 16).note == VERIFYING_ALONE
    assert bench(monkeypatch, [run]).split(8, 16).note == VERIFYING_ALONE


def test_too_few_steps_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench(monkeypatch, [run_of([4, 4])]).decode(1, 8, 9)
    assert (found.tokens_per_s, found.bytes_per_step) == (0.0, None)
    assert found.note == "too few steps with the whole batch"


@captures
def test_an_engine_whose_drafts_are_all_right(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False, weights=False, head_dim=16)
    with LLM(
        str(folder), load_format="random", num_blocks=200, max_num_seqs=4, speculate="synthetic:1:3"
    ) as llm:
        found = Bench(llm, read_bytes_per_s=1e9, repeats=1).decode(2, 8, 40)
        alone = llm.run_record.pricer.price(((1, 8), (1, 8)), 2).bytes
        checks = llm.run_record.pricer.price(((4, 44), (4, 44)), 8).bytes
    assert found.tokens_per_step == pytest.approx(8.0, abs=0.5)
    assert found.bytes_per_step is not None
    assert alone < found.bytes_per_step < checks
