"""Is every slot of every step told, once, and as it was?"""

from __future__ import annotations

import pytest

from ridgeline.cost.throughput import static_waste
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.simulator.lanes import Lanes
from ridgeline.simulator.simulation import Machine, Options, Simulation, SimulationReport
from ridgeline.simulator.workload import Arrival, Workload, all_at_once
from tests.simulator.worlds import OneSecond, draw_world


def lanes_of(
    work: Workload, blocks: int = 1000, **options: object
) -> tuple[Lanes, SimulationReport]:
    found: list[Lanes] = []

    def journal(number: int, scheduler: Scheduler) -> Lanes:
        found.append(Lanes(scheduler))
        return found[0]

    given = Options(**{"max_in_flight": 1, **options})  # type: ignore[arg-type]
    simulation = Simulation(Machine(OneSecond(), blocks), work, given, listener_of=journal)
    return found[0], simulation.run()


def drawn(lanes: Lanes) -> list[str]:
    """A letter a slot and second: digits for the request's answer, p its prompt, - held, . idle."""
    marks = {"prompt": "p", "again": "a", "held": "-", "idle": "."}
    end = round(max(piece.end_s for piece in lanes.pieces))
    rows = [[" "] * end for _ in range(lanes.num_slots)]
    for piece in lanes.pieces:
        for second in range(round(piece.start_s), round(piece.end_s)):
            assert rows[piece.slot][second] == " ", "told once"
            rows[piece.slot][second] = marks.get(piece.kind, piece.request)
    return ["".join(row) for row in rows]


WORK = all_at_once([(4, 2), (4, 5), (4, 3)])  # request 0, 1, 2, for two slots


def test_a_static_batch_waits_for_its_longest_answer() -> None:
    """By hand: the step that reads a prompt gives the first token."""
    lanes, report = lanes_of(WORK, max_num_seqs=2, static_batching=True)
    assert drawn(lanes) == ["p0...p22", "p1111..."]
    assert lanes.count("idle") == 6 == report.summary().num_idle_slot_steps


def test_a_free_slot_is_taken_at_once() -> None:
    lanes, report = lanes_of(WORK, max_num_seqs=2)
    assert drawn(lanes) == ["p0p22", "p1111"]
    assert lanes.count("idle") == 0 == report.summary().num_idle_slot_steps


def test_the_textbook_batch_wastes_3360_slot_steps() -> None:
    """Seven answers of 20 tokens beside one of 500."""
    lengths = [20] * 7 + [500]
    lanes, _ = lanes_of(
        all_at_once([(8, n) for n in lengths]), max_num_seqs=8, static_batching=True
    )
    assert lanes.count("idle") == 7 * (500 - 20) == static_waste(lengths)


def test_a_prompt_in_chunks_is_read_beside_an_answer() -> None:
    """A step has room for 4 tokens: 3 of the prompt beside the answer of the other."""
    work = (Arrival(0.0, 2, 6, id="0"), Arrival(0.5, 7, 2, id="1"))
    lanes, _ = lanes_of(work, max_num_seqs=2, max_num_batched_tokens=4)
    assert drawn(lanes) == ["p00000", ".ppp1."]


def test_a_preempted_request_computes_its_tokens_again() -> None:
    """Four blocks of 4 tokens: two answers grow until one has to go and start again."""
    lanes, report = lanes_of(
        all_at_once([(4, 8), (4, 8)]), 4, max_num_seqs=2, block_size=4, prefix_caching=False
    )
    assert len(lanes.preemptions) == report.summary().num_preemptions == 1
    assert lanes.preemptions[0][1] == "1"
    assert lanes.count("again") == 1
    assert [r.finished_s is not None for r in report.requests] == [True, True]


@pytest.mark.parametrize("seed", range(12))
def test_every_slot_of_every_step_is_told(seed: int) -> None:
    """Slots times steps, on random engines that often have too few blocks."""
    world, found = draw_world(seed), list[Lanes]()

    def journal(number: int, scheduler: Scheduler) -> Lanes:
        found.append(Lanes(scheduler))
        return found[-1]

    report = Simulation(world.machine, (), world.options, listener_of=journal).run_jobs(
        world.jobs()
    )
    lanes = found[0]
    assert sum(piece.num_steps for piece in lanes.pieces) == report.num_steps * lanes.num_slots
    assert len(lanes.preemptions) == sum(r.num_preemptions for r in report.requests)
    for piece in lanes.pieces:
        assert (piece.request == "") == (piece.kind == "idle")
