"""A pipeline: tokens come back some steps later, prompts follow each other, decodes are divided."""

from __future__ import annotations

from fractions import Fraction

import pytest

from ridgeline.errors import InternalError
from ridgeline.simulator.simulation import Machine, Options, Simulation
from ridgeline.simulator.workload import Arrival
from ridgeline.step import StepPlan, StepShape
from tests.scheduler.rig import Rig, make_request


def rows(plan: StepPlan) -> list[str]:
    return [entry.request_id for entry in plan.scheduled]


def test_a_row_waits_until_its_token_has_come_back() -> None:
    rig = Rig(stages=2, num_blocks=64)
    rig.add(*(make_request(name, 4, 9) for name in "abc"))
    assert rows(rig.plan()) == ["a", "b", "c"]  # prompts
    assert rows(rig.plan()) == []  # their tokens are with the last stage
    rig.complete()
    assert rows(rig.plan()) == ["a", "b"]  # the host knows them, and half of three are two
    assert rows(rig.plan()) == ["c"]
    assert rows(rig.plan()) == ["a", "b"]  # two steps later, though nothing was collected
    assert rows(rig.plan()) == ["c"]


def test_a_prompt_is_read_in_consecutive_steps_beside_them() -> None:
    rig = Rig(stages=3, num_blocks=64, budget=4)
    rig.add(make_request("long", 10, 2))
    assert [rig.plan().scheduled[0].num_tokens for _ in range(3)] == [4, 4, 2]
    assert rows(rig.plan()) == []
    for _ in range(3):
        rig.complete()
    assert rows(rig.plan()) == ["long"]


def test_no_drafts_are_verified() -> None:
    with pytest.raises(InternalError, match="no drafts over stages"):
        Rig(stages=2, num_drafts=1)


class OneSecond:
    def seconds(self, shape: StepShape) -> float:
        return 1.0


def bubble(stages: int, num_prompt: int, rows: int, num_out: int) -> Fraction:
    """Share of the stages' seconds in which they wait, with steps of one second a stage."""
    machine = Machine(OneSecond(), 10_000, stages=(OneSecond(),) * stages)
    work = [Arrival(0.0, num_prompt, num_out) for _ in range(rows)]
    report = Simulation(machine, work, Options(max_num_batched_tokens=8, block_size=4)).run()
    whole = round(max(one.finished_s or 0.0 for one in report.requests))
    return 1 - Fraction(report.num_steps, whole)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2, 5, 16])
def test_the_bubble_follows_from_the_rule(stages: int, chunks: int) -> None:
    """A prompt in m chunks is m steps that follow each other: (p - 1) / (m + p - 1) of the stages'
    time is lost while the first and the last of them pass."""
    want = Fraction(stages - 1, chunks + stages - 1)
    assert bubble(stages, 8 * chunks, 1, 1) == want


@pytest.mark.parametrize(("stages", "rows"), [(2, 1), (4, 1), (4, 3), (4, 4), (3, 7)])
def test_fewer_rows_than_stages_leave_some_idle(stages: int, rows: int) -> None:
    """Of a long answer: a row has a token every p steps, and at most p of them are on the way."""
    lanes = min(rows, stages)
    lost = bubble(stages, 1, rows, 1000)
    assert abs(lost - (1 - Fraction(lanes, stages))) < Fraction(1, 100)
