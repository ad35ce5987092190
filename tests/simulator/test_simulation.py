"""The simulated engine loop: what waits for what, and what each option changes."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from ridgeline.architectures import read_spec
from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Setup
from ridgeline.errors import ConfigError, DoesNotFit
from ridgeline.router.policies import LeastLoaded, PrefixAware
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.simulation import Machine, Options, Simulation, SimulationReport
from ridgeline.simulator.workload import Arrival, Lengths, Workload, all_at_once, generate
from tests.observe.priced import CONFIG
from tests.simulator.worlds import LinearPricer
from tests.speculation.drafted import DRAFTED, PLAIN

SECOND = LinearPricer(1.0, 0.0, 0.0)  # every step takes a second
ROOMY = Machine(SECOND, 10_000)


def run(
    work: Workload, machine: Machine = ROOMY, seed: int = 1, **options: object
) -> SimulationReport:
    given = Options(**options)  # type: ignore[arg-type]
    return Simulation(machine, work, given, rng=random.Random(seed)).run()


def times(report: SimulationReport, number: int = 0) -> tuple[float | None, ...]:
    timeline = report.requests[number]
    return timeline.started_s, timeline.first_token_s, timeline.finished_s


# ---------------------------------------------------------------------- one request, by hand


@pytest.mark.parametrize(
    ("max_in_flight", "in_submit", "expected"),
    [
        (1, False, (0.0, 1.0, 4.0)),
        (2, False, (0.0, 1.0, 4.0)),
        (1, True, (0.0, 1.0, 4.0)),
        (2, True, (0.0, 2.0, 4.0)),  # the loop cannot collect while it computes the next step
    ],
)
def test_one_request(
    max_in_flight: int, in_submit: bool, expected: tuple[float, float, float]
) -> None:
    report = run(all_at_once([(5, 4)]), max_in_flight=max_in_flight, computes_in_submit=in_submit)
    assert times(report) == expected
    assert report.num_steps == 4
    assert report.requests[0].tpot_s == (expected[2] - expected[1]) / 3


def test_an_arrival_waits_for_the_loop_to_turn() -> None:
    work = (Arrival(0.0, 5, 9, id="a"), Arrival(2.5, 5, 2, id="b"))
    serial, ahead = (run(work, max_in_flight=n) for n in (1, 2))
    assert times(serial, 1) == (3.0, 4.0, 5.0)
    assert times(ahead, 1) == (3.0, 5.0, 6.0)  # a step was in flight already


def test_a_request_takes_its_time_to_come_in() -> None:
    report = run((Arrival(1.0, 5, 2, id="a"),), request_s=0.25)
    assert times(report) == (1.25, 2.25, 3.25)
    assert report.requests[0].ttft_s == 1.25


def test_what_can_never_be_served_is_refused() -> None:
    report = run(all_at_once([(5000, 5), (5, 5)]), Machine(SECOND, 100))
    assert "at most 1601" in report.requests[0].refused
    assert report.summary().num_refused == 1
    assert times(report, 1) == (0.0, 1.0, 5.0)


def test_the_report_counts_what_was_done() -> None:
    report = run(all_at_once([(16, 3), (16, 5)]), max_in_flight=1)
    assert report.num_steps == 5
    assert sum(s.num_tokens for s in report.steps) == 16 + 16 + 2 + 4
    assert sum(s.num_rows * s.num_steps for s in report.steps) == 3 + 5
    assert max(s.num_used_blocks for s in report.steps) == 4
    assert report.steps[-1].num_used_blocks == 0
    summary = report.summary()
    assert summary.output_tokens_per_s == pytest.approx(8 / 5)
    assert summary.duration_s == 5.0


# ---------------------------------------------------------------------- options


def test_a_static_batch_waits_for_its_longest() -> None:
    work = all_at_once([(4, 2), (4, 10), (4, 2)])
    moving = run(work, max_num_seqs=2, max_in_flight=1)
    static = run(work, max_num_seqs=2, max_in_flight=1, static_batching=True)
    assert times(moving, 2) == (2.0, 3.0, 4.0)
    assert times(static, 2) == (10.0, 11.0, 12.0)


def test_rows_of_a_static_batch_go_on_costing() -> None:
    machine = Machine(LinearPricer(0.0, 1.0, 0.0), 1000)  # a second for each token
    work = all_at_once([(1, 2), (1, 5)])
    moving = run(work, machine, max_in_flight=1)
    static = run(work, machine, max_in_flight=1, static_batching=True)
    assert times(moving, 1)[2] == 2 + 2 + 3 * 1
    assert times(static, 1)[2] == 5 * 2


def test_without_chunks_a_prompt_is_one_step() -> None:
    work = (Arrival(0.0, 10, 600, id="a"), Arrival(2.5, 1000, 4, id="b"))
    machine = Machine(LinearPricer(0.0, 0.01, 0.0), 1000)
    chunked = run(work, machine, max_num_batched_tokens=100, max_num_seqs=8)
    whole = run(work, machine, max_num_batched_tokens=100, max_num_seqs=8, chunked_prefill=False)
    assert max(s.num_tokens for s in chunked.steps if s.num_steps == 1) == 100
    assert max(s.num_tokens for s in whole.steps if s.num_steps == 1) == 1001
    assert whole.requests[1].ttft_s is not None
    assert chunked.requests[1].ttft_s is not None
    assert longest_step(whole) > 5 * longest_step(chunked)


def longest_step(report: SimulationReport) -> float:
    return max((s.end_s - s.start_s) / s.num_steps for s in report.steps)


def test_without_paging_each_seat_is_as_long_as_the_longest() -> None:
    work = all_at_once([(16, 4)] * 9 + [(90, 6)])
    machine = Machine(SECOND, 24)
    paged = run(work, machine)
    seated = run(work, machine, paging=False)
    assert max(s.num_running for s in paged.steps) == 10
    assert seated.num_slots == 24 // 6
    assert max(s.num_running for s in seated.steps) == 4
    ends = [max(r.finished_s or 0.0 for r in report.requests) for report in (paged, seated)]
    assert ends[0] < ends[1]


def test_a_seat_that_is_longer_than_the_pool() -> None:
    with pytest.raises(ConfigError, match="reserves 63 blocks, and there are 24"):
        run(all_at_once([(5, 5)]), Machine(SECOND, 24), paging=False, max_model_len=1000)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_equal_prefixes_are_found(prefix_caching: bool) -> None:
    work = tuple(Arrival(10.0 * i, 1000, 3, (4,), str(i)) for i in range(3))
    report = run(work, prefix_caching=prefix_caching)
    assert [r.num_cached for r in report.requests] == ([0, 512, 512] if prefix_caching else [0] * 3)


def test_drafts_shorten_answers_as_their_acceptance_says() -> None:
    work = all_at_once([(5, 401)])
    plain = run(work)
    sure = run(work, speculation=Speculation.even(3, 1.0))
    never = run(work, speculation=Speculation.even(3, 0.0))
    half = run(work, speculation=Speculation.even(3, 0.7))
    assert plain.num_steps == 401
    assert sure.num_steps == 101
    assert never.num_steps == 401
    assert 401 / half.num_steps == pytest.approx((1 - 0.7**4) / 0.3, rel=0.1)


@pytest.mark.parametrize(
    ("num_rows", "chance"),
    [(1, 0.8), (8, 0.6), (64, 0.8), pytest.param(128, 0.4, marks=pytest.mark.slow)],
)
def test_the_scheduler_checks_as_many_drafts_as_pay(num_rows: int, chance: float) -> None:
    """The whole engine, two steps in flight: as fast as with the best number, or nearly."""
    machine = Machine(PLAIN, 40_000)
    work = tuple(Arrival(0.0, 200, 160, id=str(i)) for i in range(num_rows))

    def speed(num_drafts: int | None) -> float:
        asked = Speculation(
            num_drafts or 8,
            (chance,) * 8,
            drafter=DRAFTED.drafter,
            is_chosen=num_drafts is None,
        )
        report = run(
            work, machine, max_num_seqs=128, speculation=asked if num_drafts != 0 else None
        )
        return 1 / max(r.finished_s or inf for r in report.requests)

    best = max(speed(k) for k in (0, 1, 2, 4, 6))
    assert speed(None) >= 0.94 * best  # seldom as many rows at the end as at the beginning
    assert speed(None) >= 0.98 * speed(0)


@pytest.mark.parametrize(("most", "steps"), [(64, 80), (512, 18)])
def test_no_step_checks_more_tokens_than_the_engine_would(most: int, steps: int) -> None:
    """Of 32 rows with 160 tokens to come: one draft of each, or eight where these are allowed."""
    asked = Speculation(
        8, (1.0,) * 8, drafter=DRAFTED.drafter, is_chosen=True, max_verified_tokens=most
    )
    work = tuple(Arrival(0.0, 200, 160, id=str(i)) for i in range(32))
    report = run(work, Machine(PLAIN, 40_000), max_num_seqs=32, speculation=asked)
    assert report.num_steps == pytest.approx(steps, rel=0.3)


def test_what_needs_chance_asks_for_it() -> None:
    work = all_at_once([(5, 5)])
    for options in (Options(router=LeastLoaded()), Options(speculation=Speculation.even(1, 0.5))):
        with pytest.raises(ConfigError, match="rng"):
            Simulation(ROOMY, work, options)
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        Options(max_num_seqs=0)


# ---------------------------------------------------------------------- replicas


def test_replicas_in_turn() -> None:
    report = run(all_at_once([(5, 5)] * 4), num_replicas=2, max_num_seqs=1)
    assert [r.replica for r in report.requests] == [0, 1, 0, 1]
    assert [times(report, n)[2] for n in range(4)] == [5.0, 5.0, 10.0, 10.0]


def test_the_least_loaded_replica_gets_the_next() -> None:
    work = (Arrival(0.0, 5, 50, id="a"), Arrival(1.0, 5, 3, id="b"), Arrival(20.0, 5, 3, id="c"))
    report = run(work, num_replicas=2, router=LeastLoaded())
    first = report.requests[0].replica
    assert [r.replica for r in report.requests] == [first, 1 - first, 1 - first]


def test_a_router_sees_prefixes_where_they_are() -> None:
    """Six conversations on three replicas: each stays where its beginning is cached."""
    work = tuple(
        Arrival(float(30 * turn + talk), 600, 3, (talk,), f"{talk}.{turn}")
        for turn in range(4)
        for talk in range(6)
    )
    report = run(work, num_replicas=3, router=PrefixAware())
    homes = [{r.replica for r in report.requests if r.id.startswith(f"{t}.")} for t in range(6)]
    assert all(len(home) == 1 for home in homes)
    assert sum(r.num_cached for r in report.requests) == 6 * 3 * 512


@pytest.mark.parametrize("in_submit", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_replicas_behind_a_router_leap_like_they_step(seed: int, in_submit: bool) -> None:
    rng = random.Random(seed)
    work = generate(
        rng, rate=3.0, num_requests=60, num_input=Lengths(1, 90), num_output=Lengths(1, 60)
    )
    machine = Machine(LinearPricer(0.02), 60)
    leaps, steps = (
        run(
            work,
            machine,
            num_replicas=3,
            router=LeastLoaded(),
            seed=seed,
            macro_steps=on,
            computes_in_submit=in_submit,
        )
        for on in (True, False)
    )
    assert leaps.num_leaps > 20
    assert leaps.requests == steps.requests


# ---------------------------------------------------------------------- a setup


def setup(device: str = "h100-sxm") -> Setup:
    config = dict(CONFIG) | {"sliding_window": None, "num_hidden_layers": 4}
    return Setup(read_spec(config), find_device(device))


def test_a_setup_becomes_a_machine() -> None:
    work = all_at_once([(300, 40)] * 20)
    simulation = Simulation(setup(), work, Options(max_num_seqs=32))
    assert simulation.machine.num_blocks == 32 * 22  # more could not be used: 340 tokens are 22
    report = simulation.run()
    assert report.num_leaps > 0
    single = Simulation(setup(), work, Options(max_num_seqs=32, macro_steps=False)).run()
    assert single.requests == report.requests
    given = Simulation(setup(), work, Options(num_blocks=70, max_num_seqs=32))
    assert given.machine.num_blocks == 70


def mixed_setup() -> Setup:
    """One layer sees everything, two have a window."""
    spec = read_spec(CONFIG)
    first = replace(spec.layers[0], attention=replace(spec.layers[0].attention, window=None))
    return Setup(replace(spec, layers=(first, *spec.layers[1:])), find_device("h100-sxm"))


def test_prices_of_leaps_are_those_of_steps_to_the_last_bit() -> None:
    rng = random.Random(6)
    lengths = Lengths(1, 90)
    work = generate(rng, rate=4000, num_requests=80, num_input=lengths, num_output=lengths)
    leaps, steps = (
        Simulation(mixed_setup(), work, Options(macro_steps=on)).run() for on in (True, False)
    )
    assert leaps.num_leaps > 20
    assert leaps.requests == steps.requests


def test_windows_come_from_the_model() -> None:
    windowed = Setup(read_spec(CONFIG), find_device("h100-sxm"))
    work = all_at_once([(300, 40)] * 4)
    leaps, steps = (
        Simulation(windowed, work, Options(num_blocks=400, macro_steps=on)) for on in (True, False)
    )
    assert leaps.machine.windows == (24,)
    assert leaps.run().requests == steps.run().requests


def test_one_step_at_a_time_pays_for_the_host() -> None:
    base = setup()
    host = replace(base.constants.host, c0_s=0.002, overlapped=True)
    base = replace(base, calibration=replace(base.constants, host=host))
    work = all_at_once([(100, 50)])
    serial, ahead = (
        Simulation(base, work, Options(max_in_flight=n)).run().requests[0].e2e_s for n in (1, 2)
    )
    assert serial is not None
    assert ahead is not None
    assert serial > ahead > 50 * 0.002 - 1e-9


def test_a_model_that_does_not_fit() -> None:
    large = dict(CONFIG) | {"hidden_size": 65536, "num_hidden_layers": 80, "head_dim": 4096}
    with pytest.raises(DoesNotFit):
        Simulation(Setup(read_spec(large), find_device("l4")), all_at_once([(5, 5)]))
