"""What texts on inference serving claim, shown by the real scheduler on a simulated device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from ridgeline.architectures import read_spec
from ridgeline.cost.hardware import find_device
from ridgeline.cost.setup import Setup
from ridgeline.cost.throughput import Load, saturation, static_waste
from ridgeline.router.policies import LeastLoaded, PrefixAware, RouterPolicy
from ridgeline.router.policies import Random as ByChance
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.report import Summary, mean_in_system
from ridgeline.simulator.simulation import Machine, Options, Simulation, SimulationReport
from ridgeline.simulator.sweep import Outcome, sweep
from ridgeline.simulator.workload import Arrival, Lengths, Workload, all_at_once, fixed, generate
from ridgeline.step import StepShape

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Linear:
    """A step takes 10 ms and 0.1 ms for each token; contexts cost nothing."""

    step_s: float = 0.010
    token_s: float = 0.0001

    def seconds(self, shape: StepShape) -> float:
        return self.step_s + self.token_s * sum(new for new, _ in shape)


ROOMY = Machine(Linear(), 1 << 16)


def simulate(
    workload: Workload, machine: Setup | Machine = ROOMY, **options: object
) -> SimulationReport:
    given = Options(**options)  # type: ignore[arg-type]
    return Simulation(machine, workload, given, rng=Random(1)).run()


def summary(workload: Workload, machine: Setup | Machine = ROOMY, **options: object) -> Summary:
    return simulate(workload, machine, **options).summary()


# ---------------------------------------------------------------------- batching


def test_a_static_batch_wastes_what_its_longest_answer_costs_the_others() -> None:
    """Seven answers of 20 tokens beside one of 500: 7 x (500 - 20) = 3,360 empty places, 84 %."""
    lengths = [20] * 7 + [500]
    got = summary(
        all_at_once([(8, length) for length in lengths]), static_batching=True, max_num_seqs=8
    )
    assert got.num_steps == 500
    assert got.num_idle_slot_steps == 3360 == static_waste(lengths)
    assert got.slot_share == pytest.approx(0.16)


def test_continuous_batching_fills_the_places_that_static_batching_leaves_empty() -> None:
    """Answers of log-uniform length, many more of them than places."""
    rng = Random(4)
    lengths = [round(math.exp(rng.uniform(math.log(10), math.log(500)))) for _ in range(200)]
    work = all_at_once([(16, length) for length in lengths])
    static = summary(work, static_batching=True, max_num_seqs=16)
    continuous = summary(work, max_num_seqs=16)
    assert static.num_finished == continuous.num_finished == 200
    assert static.slot_share < 0.4
    assert continuous.slot_share > 0.85
    assert continuous.output_tokens_per_s > 1.8 * static.output_tokens_per_s
    assert (continuous.e2e_s.p50 or 0) < (static.e2e_s.p50 or 0)


def test_a_static_batch_makes_those_who_come_later_wait() -> None:
    work = tuple(Arrival(0.1 * n, 16, 50, id=str(n)) for n in range(8))
    static = summary(work, static_batching=True, max_num_seqs=8)
    continuous = summary(work, max_num_seqs=8)
    assert (static.queue_s.max or 0) > 0.4
    assert (continuous.queue_s.max or 0) < 0.05


# ---------------------------------------------------------------------- laws


def test_littles_law_holds() -> None:
    """Requests in the system = arrivals a second x time in the system, in a long steady run."""
    work = generate(
        Random(5),
        rate=20.0,
        num_requests=4000,
        num_input=Lengths(10, 90),
        num_output=Lengths(5, 75),
    )
    report = simulate(work, max_num_seqs=64)
    begin, end = work[400].time_s, work[3600].time_s
    inside = [r for r in report.requests if begin <= r.arrival_s < end]
    mean_e2e_s = sum(r.e2e_s or 0.0 for r in inside) / len(inside)
    expected = len(inside) / (end - begin) * mean_e2e_s
    assert mean_in_system(report.requests, begin, end) == pytest.approx(expected, rel=0.02)
    assert 5 < expected < 64


@pytest.mark.parametrize(("num_input", "num_output"), [(64, 128), (1024, 32)])
def test_saturation_is_where_the_closed_form_says(num_input: int, num_output: int) -> None:
    """Short prompts with long answers, and the other way round; 24 places."""
    setup, places = Setup(read_spec(CONFIG), find_device("a100-80-sxm")), 24
    options = Options(max_num_seqs=places, max_num_batched_tokens=2048)

    def at(rate: float) -> Outcome:
        work = generate(
            Random(2),
            rate=rate,
            num_requests=400,
            num_input=fixed(num_input),
            num_output=fixed(num_output),
        )
        report = Simulation(setup, work, options).run()
        return Outcome(report.requests, report.summary())

    machine = Simulation(setup, (Arrival(0.0, num_input, num_output),), options).machine
    load = Load(1, num_input, num_output, options.max_num_batched_tokens)
    closed = saturation(machine.pricer, load, places).request_rate
    found = sweep(at, closed, fractions=(0.5, 0.8, 1.2))
    assert found.capacity == pytest.approx(closed, rel=0.1)
    assert [p.is_saturated for p in found.points] == [False, False, True, True]


# ---------------------------------------------------------------------- memory


def test_paging_makes_room_for_more_requests() -> None:
    """Without it each request reserves the longest context: 1,024 blocks are 16 of 1,024 tokens."""
    machine = Machine(Linear(), 1024)
    work = all_at_once([(100, 100)] * 64)
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64}
    paged, reserved = (
        summary(work, machine, **options),
        summary(work, machine, paging=False, **options),
    )
    assert paged.output_tokens_per_s > 2 * reserved.output_tokens_per_s
    assert simulate(work, machine, paging=False, **options).num_slots == 16
    assert reserved.kv_max_share < 0.25 < paged.kv_max_share


def test_a_cache_that_is_too_small_preempts_and_still_answers_all() -> None:
    work = all_at_once([(60, 200)] * 16)
    small, large = summary(work, Machine(Linear(), 100)), summary(work, Machine(Linear(), 1000))
    assert large.num_preemptions == 0 < small.num_preemptions
    assert small.num_finished == 16
    assert small.kv_max_share > 0.9
    assert small.output_tokens_per_s < large.output_tokens_per_s


def test_a_prompt_that_many_share_is_computed_once() -> None:
    work = tuple(Arrival(float(n), 600, 4, (7,), id=str(n)) for n in range(10))
    cached, plain = summary(work), summary(work, prefix_caching=False)
    assert cached.cached_share == pytest.approx(9 * 512 / 6000)
    assert plain.cached_share == 0.0
    assert (cached.ttft_s.p50 or 0) == pytest.approx(0.010 + 88 * 0.0001)
    assert (plain.ttft_s.p50 or 0) == pytest.approx(0.010 + 600 * 0.0001)


# ---------------------------------------------------------------------- prompts and drafts


def test_chunks_keep_long_prompts_from_stopping_everyone_else() -> None:
    """A prompt of 8,000 tokens comes while others are being answered."""
    work = (*all_at_once([(10, 100)] * 4), Arrival(0.3, 8000, 2, id="long"))
    chunked = simulate(work, max_num_batched_tokens=256)
    whole = simulate(work, max_num_batched_tokens=256, chunked_prefill=False)

    def longest_step(report: SimulationReport) -> float:
        return max((s.end_s - s.start_s) / s.num_steps for s in report.steps)

    assert longest_step(chunked) == pytest.approx(0.010 + 256 * 0.0001)
    assert longest_step(whole) > 0.8
    ttft = [r.requests[-1].ttft_s or 0.0 for r in (chunked, whole)]
    assert ttft[0] > ttft[1], "the price: the long prompt itself waits longer"


def test_drafts_that_are_right_make_a_lone_request_faster() -> None:
    """Three drafts, each right with 0.8: (1 - 0.8^4) / (1 - 0.8) = 2.95 tokens a step."""
    work = all_at_once([(10, 3000)])
    plain = summary(work, Machine(Linear(token_s=0.0), 1000))
    drafted = summary(
        work, Machine(Linear(token_s=0.0), 1000), speculation=Speculation.even(3, 0.8)
    )
    speedup = (plain.tpot_s.mean or 0) / (drafted.tpot_s.mean or 1)
    assert speedup == pytest.approx((1 - 0.8**4) / (1 - 0.8), rel=0.04)


# ---------------------------------------------------------------------- routers


def conversations(count: int, turns: int) -> Workload:
    """Each turn repeats the prompt before it and adds a block of 512 tokens."""
    rng, made = Random(9), []
    for who in range(count):
        start = rng.uniform(0, 20)
        for turn in range(turns):
            hashes = tuple(1000 * who + n for n in range(turn + 1))
            made.append(Arrival(start + 8.0 * turn, 512 * (turn + 1), 20, hashes))
    return tuple(sorted(made, key=lambda a: a.time_s))


def routed(policy: RouterPolicy) -> Summary:
    report = simulate(conversations(40, 6), Machine(Linear(), 4000), num_replicas=4, router=policy)
    return report.summary()


def test_prefix_aware_routing_finds_the_cache_that_others_miss() -> None:
    by_chance, by_load, by_prefix = routed(ByChance()), routed(LeastLoaded()), routed(PrefixAware())
    assert by_prefix.cached_share > 0.6
    assert by_prefix.cached_share > 1.5 * max(by_chance.cached_share, by_load.cached_share)
    assert (by_prefix.ttft_s.p90 or 0) < 0.7 * (by_load.ttft_s.p90 or 0)


def test_routing_by_load_beats_chance_at_the_tail() -> None:
    work = generate(
        Random(3), rate=40, num_requests=1500, num_input=fixed(64), num_output=Lengths(2, 120)
    )
    options: dict[str, Any] = {"num_replicas": 4, "max_num_seqs": 12}
    by_chance = summary(work, router=ByChance(), **options)
    by_load = summary(work, router=LeastLoaded(), **options)
    assert (by_load.ttft_s.p99 or 0) < 0.5 * (by_chance.ttft_s.p99 or 0)
