"""How much of its prefix cache is left to a calm tenant while another floods the server?"""

from __future__ import annotations

import pytest

from ridgeline.request import Request, SamplingParams
from ridgeline.simulator.executor import Answer
from ridgeline.simulator.report import RequestTimeline
from ridgeline.simulator.simulation import Job, Machine, Options, Simulation
from tests.simulator.worlds import LinearPricer

NUM_BLOCKS, SIZE = 200, 4


def job(name: str, when: float, prompt: tuple[int, ...], tenant: bytes) -> Job:
    request = Request(name, prompt, SamplingParams(max_tokens=6), when, tenant=tenant)
    timeline = RequestTimeline(name, when, len(prompt), 6)
    return Job(request, Answer(len(prompt), filler=7), timeline)


def calm_jobs() -> list[Job]:
    """Four conversations of 20 blocks each, 80 of the 100 blocks that are its share, in turn."""
    made = []
    for i in range(60):
        first = 1_000 * (i % 4 + 1)
        prompt = (*range(first, first + 20 * SIZE), i)
        made.append(job(f"calm {i}", 2.0 * i, prompt, b"calm"))
    return made


def hit_rate(others: list[Job]) -> float:
    """Share of the calm tenant's prompt tokens that were found."""
    jobs = sorted([*calm_jobs(), *others], key=lambda job: job.request.arrival_time)
    options = Options(block_size=SIZE, max_num_seqs=16, max_num_batched_tokens=256)
    machine = Machine(LinearPricer(), NUM_BLOCKS)
    report = Simulation(machine, (), options).run_jobs(jobs)
    calm = [r for r in report.requests if r.id.startswith("calm")]
    assert len(report.requests) == len(jobs)
    return sum(r.num_cached or 0 for r in calm) / sum(r.num_input for r in calm)


@pytest.mark.parametrize(("flooder", "least", "most"), [(b"flood", 0.9, 1.0), (b"calm", 0.0, 0.3)])
def test_a_flood_leaves_the_hit_rate_of_a_calm_tenant(
    flooder: bytes, least: float, most: float
) -> None:
    """As near as that, the flooder being told apart; else next to nothing."""
    flood = [
        job(f"flood {i}", i / 10, tuple(range(10_000 + 100 * i, 10_000 + 100 * i + 48)), flooder)
        for i in range(1200)
    ]
    alone = hit_rate([])
    assert alone > 0.9
    assert least <= hit_rate(flood) / alone <= most
