"""Does a run offer each job at its time and count every token and step?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.benchmark.compare import BatchingResult, compare_batching, compare_caching
from ridgeline.benchmark.jobs import Job
from ridgeline.benchmark.run import _Driver, run_jobs, run_static
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.request import FinishReason, RequestOutput
from tests.captures import captures
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny_model(tmp_path_factory.mktemp("m"), tokenizer=False, weights=False)
    with LLM(str(folder), load_format="random", num_blocks=200, max_num_seqs=4) as engine:
        yield engine


def test_every_job_gets_exactly_its_tokens(llm: LLM) -> None:
    jobs = [Job((1, 2, 3), length) for length in (1, 5, 9, 2, 7, 3)]
    run = run_jobs(llm.engine, jobs)
    assert [len(times.token_s) for times in run.jobs] == [1, 5, 9, 2, 7, 3]
    assert sum(step.num_tokens for step in run.steps) == run.num_tokens == 27
    assert run.most_running == 4
    assert run.ended_s >= run.steps[-1].ended_s >= run.jobs[2].token_s[-1] - 1.0
    assert llm.engine.is_idle
    assert not any(isinstance(listener, _Driver) for listener in llm.engine.listeners)


def test_what_each_step_had_to_move_is_what_the_engine_priced(llm: LLM) -> None:
    run_record = llm.run_record
    before = run_record.totals.bytes
    run = run_jobs(llm.engine, [Job((1, 2, 3), 6), Job((4, 5), 3)], run_record)
    moved = [step.bytes for step in run.steps]
    assert None not in moved
    assert sum(filter(None, moved)) == pytest.approx(run_record.totals.bytes - before)
    assert [step.num_rows for step in run.steps] == [2, 2, 2, 1, 1, 1]
    assert not any(isinstance(listener, _Driver) for listener in run_record.listeners)
    unpriced = run_jobs(llm.engine, [Job((1, 2, 3), 2)])
    assert {step.bytes for step in unpriced.steps} == {None}


@pytest.mark.parametrize(("speculate", "drafts"), [("synthetic:1:3", False), ("early:1:3", True)])
@captures
def test_rows_of_steps_with_drafts(tmp_path: Path, speculate: str, drafts: bool) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False, weights=False, head_dim=16)
    with LLM(
        str(folder), load_format="random", num_blocks=200, max_num_seqs=4, speculate=speculate
    ) as engine:
        run = run_jobs(engine.engine, [Job((1, 2, 3), 13)], engine.run_record)
    assert {step.num_rows for step in run.steps if step.num_tokens} == {1}
    assert sum(step.num_tokens for step in run.steps) == 13
    assert any(step.drafts for step in run.steps) == drafts
    if not drafts:
        assert max(step.num_tokens for step in run.steps) == 4


def test_end_tokens_do_not_end_a_job(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path, tokenizer=False, weights=False, eos_token_id=list(range(261))
    )
    with LLM(str(folder), load_format="random", num_blocks=20) as engine:
        assert run_jobs(engine.engine, [Job((1, 2), 10)]).num_tokens == 10


def test_arrivals_are_kept_and_waits_count_from_them(llm: LLM) -> None:
    jobs = [Job((4, 5), 2, arrival_s=0.02), Job((6, 7), 2)]
    run = run_jobs(llm.engine, jobs)
    by_due = sorted(times.due_s - run.started_s for times in run.jobs)
    assert by_due == [pytest.approx(0.0), pytest.approx(0.02)]
    assert all(times.token_s[0] >= times.due_s for times in run.jobs)


def test_a_static_batch_waits_for_its_longest(llm: LLM) -> None:
    lengths = [2, 9, 3, 4, 8, 1]
    jobs = [Job((1, 2), length) for length in lengths]
    static = run_static(llm.engine, jobs, 2)
    continuous = run_jobs(llm.engine, jobs)
    assert static.num_tokens == continuous.num_tokens == sum(lengths)
    assert len(static.steps) == 9 + 4 + 8
    assert static.most_running == 2
    assert len(static.jobs) == 6


def test_a_fault_is_not_taken_for_a_result(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: object) -> list[RequestOutput]:
        return [RequestOutput("x", (), FinishReason.ERROR, error="the device is gone")]

    monkeypatch.setattr(type(llm.engine), "step", step)
    with pytest.raises(EngineFault, match="the device is gone"):
        run_jobs(llm.engine, [Job((1, 2), 2)])
    monkeypatch.undo()
    assert llm.engine.scheduler.requests == {}


def test_batching_needs_the_engine_of_its_places(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="runs 4 at once, not 16"):
        compare_batching(llm, num_requests=4, slots=16, low=10, high=1000, seed=0)


def batching(folder: Path, num_requests: int, low: int, high: int) -> BatchingResult:
    make_tiny_model(
        folder, tokenizer=False, weights=False, hidden_size=8, max_position_embeddings=high + 8
    )
    with LLM(str(folder), load_format="random", max_num_seqs=16) as engine:
        return compare_batching(
            engine, num_requests=num_requests, slots=16, low=low, high=high, seed=0
        )


def test_continuous_batching_saves_steps(tmp_path: Path) -> None:
    found = batching(tmp_path, 240, 1, 100)
    assert (found.shortest, found.longest, found.note) == (1, 100, "")
    assert found.step_ratio > 2.5
    assert found.static_idle_slot_steps > 3 * found.continuous_idle_slot_steps


@pytest.mark.slow
def test_continuous_batching_takes_a_third_of_the_steps(tmp_path: Path) -> None:
    """320 answers of 10 .. 1000 tokens in 16 places."""
    assert batching(tmp_path, 320, 10, 1000).step_ratio > 3.0


def test_modes_may_be_left_out(llm: LLM, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False, weights=False)

    def opener(**options: Any) -> LLM:
        return LLM(str(folder), load_format="random", **({"num_blocks": 50} | options))

    [paged] = compare_caching(opener, ["paged"], prompt_len=4, output_len=4, crowd=3, seed=0)
    assert (paged.mode, paged.output_len, paged.crowd) == ("paged", 4, 3)
