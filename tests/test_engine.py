"""The engine's tokens are those that the prompt alone implies, whatever happens around it.

`RIDGELINE_SIM_STEPS` sets how many checked steps the simulated worlds run (100,000 by default).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.errors import EngineFault, RequestFault
from ridgeline.request import FinishReason, Request, RequestOutput, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import Listener, StepFuture, StepPlan, StepRecord, StepResult
from tests.simulated_world import run_seed
from tests.thinning import slow

NUM_STEPS = int(os.environ.get("RIDGELINE_SIM_STEPS", "100000"))
STEPS_PER_WORLD = 250
NUM_PARTS = 10
ROOT = Path(__file__).resolve().parents[1]

COUNTS: Counter[str] = Counter()


@pytest.mark.parametrize("part", [*range(4), *slow(*range(4, NUM_PARTS))])
def test_tokens_are_right_in_every_world(part: int) -> None:
    done, seed = 0, part * 1_000_000
    while done < NUM_STEPS / NUM_PARTS:
        world = run_seed(seed, STEPS_PER_WORLD)  # a violation names its seed
        done += world.device.num_steps
        COUNTS.update(world.counts)
        COUNTS["engine faults"] += world.device.num_faults
        COUNTS["row faults"] += world.device.num_row_faults
        COUNTS["draft_tokens"] += world.device.num_accepted
        COUNTS["early takers"] += world.device.num_early_takers
        COUNTS["spoiled takers"] += world.device.num_takers_spoiled
        COUNTS["late"] += world.scheduler.num_late_results
        seed += 1
    print(f"{done} steps, seeds {part * 1_000_000} to {seed - 1}")


def test_a_block_that_is_copied_is_not_handed_out_while_the_copy_may_run() -> None:
    """Another row gave it back in the plan that copies it: a world in which that happens."""
    run_seed(421, 300)


def test_who_finds_no_room_in_one_pool_asks_again_when_that_pool_has_more() -> None:
    """Another pool had the most free blocks before and after: a world in which that happens."""
    run_seed(1442, 400)


def test_the_worlds_were_eventful() -> None:
    """Silence would prove nothing: everything that can happen has happened."""
    if COUNTS["arrived"] < 5000:
        pytest.skip("runs after the whole test above")
    for what in (
        "preemptions",
        "veterans",
        "cached",
        "forks",
        "beams",
        "refused",
        "duplicates",
        "engine faults",
        "row faults",
        "draft_tokens",
        "early takers",
        "late",
        *(str(reason) for reason in FinishReason),
    ):
        assert COUNTS[what] > 50, what


def test_same_seed_same_history_in_another_process() -> None:
    code = (
        "import logging; logging.disable(); from tests.simulated_world import run_seed\n"
        "print([run_seed(s, 60, traced=True).trace.hexdigest() for s in range(900, 925)])"
    )
    histories = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("0", "1")
    }
    assert len(histories) == 1
    assert len(set(listed(histories.pop()))) == 25


def listed(text: str) -> list[str]:
    return text.strip("[]\n").split(", ")


# ---------------------------------------------------------------------- one thing at a time


class Future:
    def __init__(self, outcome: StepResult | EngineFault) -> None:
        self.outcome = outcome

    def result(self) -> StepResult:
        if isinstance(self.outcome, EngineFault):
            raise self.outcome
        return self.outcome


class Script:
    """Samples 5 for everybody; `fail_at` and `refuse_at` are step ids."""

    num_blocks, block_size = 40, 4

    def __init__(self, fail_at: int = 0, refuse_at: int = 0) -> None:
        self.fail_at, self.refuse_at = fail_at, refuse_at
        self.plans: list[StepPlan] = []
        self.faults: dict[str, str] = {}

    def submit(self, plan: StepPlan) -> StepFuture:
        self.plans.append(plan)
        if plan.step_id == self.refuse_at:
            raise EngineFault("no room on the bus")
        if plan.step_id == self.fail_at:
            return Future(EngineFault("a wire broke"))
        sampled: dict[str, tuple[int, ...]]
        sampled = {e.request_id: (5,) for e in plan.scheduled if e.samples}
        faults = {name: why for name, why in self.faults.items() if name in sampled}
        return Future(StepResult(sampled, faults=faults))


class Witness(Listener):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.outputs: list[tuple[float, RequestOutput]] = []
        self.aborted: list[str] = []
        self.seen: list[tuple[int, ...]] = []
        self.look: Callable[[], tuple[int, ...]] = tuple

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)
        self.seen.append(self.look())
        self.outputs += [(record.collected_at, output) for output in record.outputs]

    def on_abort(self, request_id: str, now: float) -> None:
        self.aborted.append(request_id)


def make_engine(script: Script, max_in_flight: int = 1, seats: int = 8) -> Engine:
    blocks = BlockManager(script.num_blocks, script.block_size)
    scheduler = Scheduler(blocks, FCFS(), 16, seats)
    return Engine(scheduler, script, VirtualClock(), max_in_flight)


def make_request(name: str, max_tokens: int = 4) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=max_tokens), 0.0)


def run(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(1000):
        if engine.is_idle:
            return outputs
        outputs += engine.step()
    raise AssertionError("no end")


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_life_of_a_request(max_in_flight: int) -> None:
    engine = make_engine(Script(), max_in_flight)
    engine.add(make_request("a"))
    outputs = run(engine)
    assert [output.new_token_ids for output in outputs] == [(5,)] * 4
    assert [output.finish_reason for output in outputs] == [None] * 3 + [FinishReason.LENGTH]
    assert engine.num_in_flight == 0


def test_as_many_steps_as_allowed_are_in_flight() -> None:
    engine = make_engine(Script(), 3)
    engine.add(make_request("a", 9))
    assert [engine.launch() is not None for _ in range(4)] == [True, True, True, False]
    assert engine.num_in_flight == 3
    assert len(engine.collect()) == 1
    assert engine.num_in_flight == 2


def test_nothing_to_do_is_no_error() -> None:
    engine = make_engine(Script())
    assert engine.launch() is None
    assert engine.collect() == engine.step() == []
    assert engine.is_idle


def test_abort_is_safe_in_every_state() -> None:
    engine = make_engine(Script(), 2)
    assert engine.abort("nobody") is None
    engine.add(make_request("waiting"))
    assert engine.abort("waiting") == RequestOutput("waiting", (), FinishReason.ABORT)
    engine.add(make_request("running"))
    engine.launch()
    engine.launch()
    assert engine.abort("running") is not None
    assert engine.abort("running") is None
    assert engine.collect() == engine.collect() == []
    assert engine.is_idle
    assert engine.scheduler.blocks.num_free_blocks == 40


def test_rows_of_aborted_requests_are_named_in_the_next_plan_and_only_once() -> None:
    script = Script()
    engine = make_engine(script)
    engine.add(make_request("a"))
    engine.add(make_request("b"))
    engine.step()
    engine.abort("a")
    engine.abort("b")
    assert engine.is_idle
    for i in range(100):  # come and go without ever getting a row
        engine.add(make_request(f"x{i}"))
        engine.abort(f"x{i}")
    assert engine.step() == []
    engine.add(make_request("c", 2))
    run(engine)
    assert [plan.finished for plan in script.plans[1:]] == [("a", "b"), ()]


def test_one_bad_request_harms_no_other() -> None:
    script = Script()
    script.faults["bad"] = "NaN in its logits"
    engine = make_engine(script, 2)
    engine.add(make_request("good"))
    engine.add(make_request("bad"))
    outputs = run(engine)
    (error,) = [output for output in outputs if output.request_id == "bad"]
    assert error.finish_reason is FinishReason.ERROR
    assert error.error == "NaN in its logits"
    assert sum(len(o.new_token_ids) for o in outputs if o.request_id == "good") == 4


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_failed_step_ends_what_was_in_flight_and_nothing_else(max_in_flight: int) -> None:
    script = Script(fail_at=2)
    engine = make_engine(script, max_in_flight, seats=2)
    for name in "abcd":
        engine.add(make_request(name))
    outputs = run(engine)
    ends = {o.request_id: (o.finish_reason, o.error) for o in outputs if o.finish_reason}
    assert ends == {
        "a": (FinishReason.ERROR, "a wire broke"),
        "b": (FinishReason.ERROR, "a wire broke"),
        "c": (FinishReason.LENGTH, None),
        "d": (FinishReason.LENGTH, None),
    }
    after = next(plan for plan in script.plans if plan.new and plan.step_id > 1)
    assert set(after.finished) == {"a", "b"}
    assert engine.scheduler.blocks.num_free_blocks == 40


def test_a_step_that_is_not_even_taken_fails_like_any_other() -> None:
    script = Script(refuse_at=1)
    engine = make_engine(script, 2, seats=1)
    engine.add(make_request("a"))
    engine.add(make_request("b", 2))
    outputs = run(engine)
    assert [o.request_id for o in outputs] == ["a", "b", "b"]
    assert outputs[0].error == "no room on the bus"


def test_rows_that_a_failed_plan_was_to_close_are_named_again() -> None:
    script = Script(fail_at=2)
    engine = make_engine(script)
    engine.add(make_request("a"))
    engine.step()
    engine.abort("a")
    engine.add(make_request("b"))
    run(engine)
    engine.add(make_request("c"))
    run(engine)
    assert script.plans[1].finished == ("a",)
    assert set(script.plans[2].finished) == {"a", "b"}


def test_a_duplicate_id_is_refused_and_harms_nobody() -> None:
    engine = make_engine(Script())
    engine.add(make_request("a"))
    with pytest.raises(RequestFault):
        engine.add(make_request("a"))
    assert len(run(engine)) == 4


def test_listeners_see_steps_and_outputs() -> None:
    witness, engine = Witness(), make_engine(Script(fail_at=3), 2)
    engine.listeners.append(witness)
    scheduler = engine.scheduler
    witness.look = lambda: (
        scheduler.num_running,
        scheduler.num_waiting,
        scheduler.blocks.num_blocks,
        scheduler.blocks.num_free_blocks,
        engine.num_in_flight,
    )
    engine.add(make_request("a", 9))
    engine.step()
    assert witness.records == []
    run(engine)
    first = witness.records[0]
    assert first.plan.shape == ((3, 0),)
    assert (first.num_new_tokens, first.plan.preempted) == (1, ())
    # Running, waiting, blocks, free ones and steps in flight, after its results were taken in.
    assert witness.seen[0] == (1, 0, 40, 39, 1)
    assert first.error is None
    assert [record.error for record in witness.records[2:]] == ["a wire broke", "a wire broke"]
    assert [output.finish_reason for _, output in witness.outputs][-1] is FinishReason.ERROR
    engine.add(make_request("b"))
    assert engine.abort("b") == RequestOutput("b", (), FinishReason.ABORT)
    assert witness.aborted == ["b"]


def test_what_a_listener_raises_reaches_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Witness):
        def on_step(self, record: StepRecord) -> None:
            raise ValueError("on_step")

        def on_plan(self, plan: StepPlan, now: float) -> None:
            raise ValueError("on_plan")

    witness, engine = Witness(), make_engine(Script())
    engine.listeners += [Broken(), witness]
    engine.add(make_request("a"))
    assert len(run(engine)) == 4
    assert len(witness.records) == len(witness.outputs) == 4
    assert "listener failed" in caplog.text
