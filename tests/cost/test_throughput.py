"""Does the closed form say what stepping through the load gives?"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from random import Random

import pytest

from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.cost.throughput import (
    Load,
    closed_loop_rate,
    cycle,
    in_flight,
    mixed_shape,
    pipeline_bubble,
    prompt_seconds,
    replicas,
    request_seconds,
    saturation,
    static_waste,
    throughput,
)
from ridgeline.errors import ConfigError
from ridgeline.simulator.simulation import Options, Simulation
from ridgeline.simulator.workload import Arrival
from ridgeline.step import StepShape
from tests.cost.known_models import LLAMA_3_8B


@dataclass(slots=True)
class Line:
    """A step priced as weights, or arithmetic of its tokens when that is more, and cache reads."""

    weights_s: float = 0.01
    token_s: float = 5e-5
    read_s: float = 1e-8
    calls: int = 0

    def seconds(self, shape: StepShape) -> float:
        self.calls += 1
        new = sum(count for count, _ in shape)
        read = sum(before for _, before in shape)
        return max(self.weights_s, new * self.token_s) + read * self.read_s


@dataclass(slots=True)
class Row:
    arrived: float
    computed: int = 0
    answered: int = 0
    first: float = 0.0


def stepped(pricer: Line, load: Load, requests: int) -> tuple[float, float, float]:
    """(mean TTFT, mean TPOT, requests per second) of a closed loop: decodes first, then prompts."""
    # Places start one after the other, as they do when a server has run for long.
    rows: list[Row] = []
    starts = deque(range(0, load.num_output, max(1, load.num_output // load.batch)))
    done: list[tuple[float, float, float]] = []
    now, step = 0.0, 0
    while len(done) < requests:
        while len(rows) < load.batch and (not starts or step >= starts[0]):
            if starts:
                starts.popleft()
            rows.append(Row(now))
        budget, shape, work = load.max_num_batched_tokens, [], []
        for row in sorted(rows, key=lambda row: row.answered == 0):
            new = 1 if row.answered else min(budget, load.num_input - row.computed)
            if new and budget:
                shape.append((new, row.computed))
                work.append((row, new))
                budget -= new
        now, step = now + pricer.seconds(tuple(shape)), step + 1
        for row, new in work:
            row.computed += new
            if row.computed >= load.num_input:
                row.answered += 1
                row.first = row.first or now
            if row.answered == load.num_output:
                done.append((row.first - row.arrived, now - row.first, now))
                rows.remove(row)
    late = done[len(done) // 2 :]
    ttft = sum(first for first, _, _ in late) / len(late)
    tpot = sum(rest for _, rest, _ in late) / len(late) / max(1, load.num_output - 1)
    return ttft, tpot, (len(late) - 1) / (late[-1][2] - late[0][2])


@pytest.mark.parametrize(
    "load",
    [
        Load(1, 500, 100),
        Load(1, 5000, 20, 1024),  # in chunks
        Load(8, 300, 200),
        Load(32, 1000, 250),
        Load(64, 100, 400, 512),
        Load(16, 3000, 200, 1024),
        Load(32, 2000, 50, 2048),  # prompts fill the budget: requests wait
        Load(64, 1000, 20, 2048),
    ],
    ids=str,
)
def test_the_closed_form_is_what_stepping_gives(load: Load) -> None:
    found = throughput(Line(), load)
    ttft, tpot, rate = stepped(Line(), load, 30 * load.batch)
    assert found.request_rate == pytest.approx(rate, rel=0.12)
    assert found.tpot_s == pytest.approx(tpot, rel=0.15)
    assert found.e2e_s == pytest.approx(ttft + (load.num_output - 1) * tpot, rel=0.12)


@pytest.mark.parametrize("load", [Load(16, 500, 200), Load(32, 4000, 60)], ids=str)
def test_the_closed_form_is_what_the_real_scheduler_does(load: Load) -> None:
    """A queue that never runs dry, answers of half to one and a half times the mean length."""
    rng = Random(1)
    queue = [
        Arrival(1e-6 * i, load.num_input, round(load.num_output * rng.uniform(0.5, 1.5)))
        for i in range(12 * load.batch)
    ]
    setup = Setup(LLAMA_3_8B, find_device("h100-sxm"))
    options = Options(max_num_seqs=load.batch, max_in_flight=1, prefix_caching=False)
    done = Simulation(setup, queue, options, rng=Random(0)).run().requests
    ends = sorted(request.finished_s or 0.0 for request in done)[2 * load.batch : 10 * load.batch]
    rate = (len(ends) - 1) / (ends[-1] - ends[0])
    gaps = [request.tpot_s or 0.0 for request in done[2 * load.batch : 10 * load.batch]]
    found = throughput(Pricer(setup), load)
    assert found.request_rate == pytest.approx(rate, rel=0.06), "seed 1"
    assert found.tpot_s == pytest.approx(sum(gaps) / len(gaps), rel=0.06), "seed 1"


def test_one_request_alone_is_exact() -> None:
    load = Load(1, 2500, 101, 1000)
    line = Line(token_s=1e-5)
    found = throughput(line, load)
    prompt = 3 * 0.01 + (0 + 1000 + 2000) * 1e-8
    assert found.ttft_s == pytest.approx(prompt)
    assert found.prompt_alone_s == pytest.approx(prompt)
    mean_context = 2500 + 99 / 2
    assert found.tpot_s == pytest.approx(0.01 + mean_context * 1e-8, rel=1e-6)
    assert found.e2e_s == pytest.approx(found.ttft_s + 100 * found.tpot_s)


def test_a_prompt_of_thousands_of_chunks_takes_few_prices() -> None:
    line = Line()
    exact = sum(max(0.01, 16 * 5e-5) + start * 1e-8 for start in range(0, 100_000, 16))
    assert prompt_seconds(line, 100_000, 16) == pytest.approx(exact, rel=1e-3)
    assert line.calls < 50


def test_little_holds() -> None:
    found = throughput(Line(), Load(24, 700, 130))
    assert in_flight(found.request_rate, found.e2e_s) == pytest.approx(24)
    assert found.tokens_per_s == pytest.approx(found.request_rate * 130)


@pytest.mark.parametrize("batch", [1, 2, 7, 64, 500])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 50), (900, 1), (900, 2), (4000, 300)])
@pytest.mark.parametrize("budget", [512, 8192])
def test_every_token_of_a_cycle_is_computed_once(
    batch: int, lengths: tuple[int, int], budget: int
) -> None:
    load = Load(batch, *lengths, budget)
    found = cycle(load)
    assert found.mixed_steps * found.prompt_tokens == pytest.approx(batch * load.num_input)
    decodes = found.plain_steps * batch + found.mixed_steps * found.mixed_decodes
    assert decodes == pytest.approx(batch * (load.num_output - 1), abs=1e-6)
    assert found.mixed_decodes + found.prompt_tokens <= budget + 1e-6
    assert min(found.plain_steps, found.waiting_steps, found.mixed_decodes) >= 0
    assert abs(sum(new for new, _ in mixed_shape(load, found)) - found.prompt_tokens) <= batch + 1


def test_a_chunk_of_the_average_step_is_from_the_middle_of_its_prompt() -> None:
    load = Load(3, 3000, 100, 1002)
    shape = mixed_shape(load, cycle(load))
    assert shape == ((1000, 1000), (1, 3049), (1, 3049))


def test_more_requests_are_slower_each_and_faster_together() -> None:
    each = [throughput(Line(), Load(batch, 400, 200)) for batch in (1, 4, 16, 64, 256)]
    assert [p.tpot_s for p in each] == sorted(p.tpot_s for p in each)
    assert [p.tokens_per_s for p in each] == sorted(p.tokens_per_s for p in each)
    assert each[0].tokens_per_s_per_user > each[-1].tokens_per_s_per_user


def test_saturation_is_the_throughput_at_the_limit() -> None:
    load = Load(1, 400, 200, 512)
    assert saturation(Line(), load, 64) == throughput(Line(), replace(load, batch=64))
    assert saturation(Line(), load, 10_000).load.batch == 512  # each needs a token of the budget


def test_shares_of_prompts_and_answers() -> None:
    prompts = throughput(Line(), Load(16, 4000, 10))
    answers = throughput(Line(), Load(16, 10, 4000))
    assert prompts.prompt_share > 0.8
    assert answers.prompt_share < 0.05
    alone = throughput(Line(), Load(1, 400, 200))
    assert alone.prompt_share == pytest.approx(alone.ttft_s / alone.e2e_s, rel=1e-3)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    found = throughput(Line(), Load(4, 100, 1))
    assert found.tpot_s == 0
    assert found.e2e_s == found.ttft_s
    assert found.tokens_per_s_per_user == pytest.approx(1 / found.ttft_s)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (9000, 10, 10)])
def test_impossible_loads_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"at least 1|token budget"):
        Load(*wrong)


def test_laws() -> None:
    assert request_seconds(0.5, 0.02, 101) == pytest.approx(2.5)
    assert closed_loop_rate(10, 2.5) == pytest.approx(4)
    assert replicas(100, 26) == 4
    assert replicas(100, 26, headroom=0.3) == 6
    assert static_waste([5, 5, 5]) == 0
    assert static_waste([1, 2, 9]) == 15
    assert pipeline_bubble(1, 1) == 0
    assert pipeline_bubble(4, 1) == pytest.approx(3 / 4)
    with pytest.raises(ConfigError, match="headroom"):
        replicas(1, 1, headroom=1.0)
