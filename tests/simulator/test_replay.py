"""The log of an engine, fed to a fresh one, gives the same decisions to the byte."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bench.simulator_comparison import Comparison, simulate
from bench.simulator_replay import decision_log, recorded_decisions, replay
from ridgeline.clock import VirtualClock
from ridgeline.cost.pricer import Pricer
from ridgeline.errors import RequestFault
from ridgeline.observe.engine_header import header_of, setup_record
from ridgeline.observe.event_log import Added, EventLog, Planned, Recorder, read_event_log
from ridgeline.observe.evidence import RunRecord, evidence_of
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.cache_shares import IDLE_POOLS
from ridgeline.scheduler.policies import make_policy
from ridgeline.scheduler.policies.base import PolicySetting
from ridgeline.scheduler.policies.step_times import LearnedPricer
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.simulator.executor import Answer, SimulatedExecutor, Speculation
from ridgeline.simulator.macro import LeapingEngine
from ridgeline.simulator.report import RequestTimeline
from ridgeline.simulator.simulation import Machine, Options, Simulation, SimulationReport
from ridgeline.simulator.workload import all_at_once
from ridgeline.step import StepPricer, StepShape
from tests.observe.priced import CONFIG, small_setup
from tests.simulated_world import World as CheckedWorld
from tests.simulator.worlds import LinearPricer, World, draw_world, single
from tests.thinning import slow

NUM_WORLDS = 12


def recorded_world(seed: int, path: Path) -> EventLog:
    """A world with forks, beams, drafts, aborts and failing steps, written down and read back."""
    world = CheckedWorld(seed)
    scheduler = world.scheduler
    header = header_of(scheduler, policy="fcfs", max_in_flight=world.case.max_in_flight)
    lines: list[str] = []
    world.engine.listeners.append(Recorder(lines.append, header, b"key"))
    world.run(300)
    path.write_text("".join(lines), encoding="utf-8")
    return read_event_log(path)


@pytest.fixture
def kept_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds empty the cache now and then, and forget idle tenants sooner, which no log says:
    engines never do."""
    monkeypatch.setattr(BlockManager, "clear_cache", lambda self: None)
    monkeypatch.setattr(CheckedWorld, "idle_pools", IDLE_POOLS)


@pytest.mark.usefixtures("kept_cache")
@pytest.mark.parametrize("num", [6, *slow(NUM_WORLDS)])
def test_a_replay_decides_the_same(tmp_path: Path, num: int) -> None:
    seeds = [seed for seed in range(60) if CheckedWorld(seed).case.policy == "fcfs"][:num]
    errors = aborts = empty = 0
    for seed in seeds:
        log = recorded_world(seed, tmp_path / f"{seed}.jsonl")
        outcome = replay(log)
        assert outcome.is_equal, f"seed {seed}: {outcome.stopped} {outcome.first_difference}"
        assert outcome.first_difference is None
        then, now = decision_log(recorded_decisions(log)), decision_log(outcome.replayed)
        assert then.encode() == now.encode(), f"seed {seed}"
        lines = (tmp_path / f"{seed}.jsonl").read_text(encoding="utf-8")
        errors += lines.count('"error":')
        aborts += lines.count('"event":"abort"')
        empty += sum(not e.plan.scheduled for e in log.events if isinstance(e, Planned))
    assert errors > 5
    assert aborts > 50
    assert empty > 5


@pytest.mark.usefixtures("kept_cache")
def test_a_replay_notices_another_decision(tmp_path: Path) -> None:
    """A log whose engine had one block more, and one in which a token was changed."""
    log = recorded_world(0, tmp_path / "log.jsonl")
    smaller = replace(log.header, num_blocks=log.header.num_blocks + 1)
    outcome = replay(EventLog(smaller, log.events))
    assert not outcome.is_equal
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record["event"] == "collect" and record.get("outputs") and "tokens" in record:
            row, ids = next(iter(record["tokens"].items()))
            record["tokens"][row] = [*ids, *ids]  # twice as many as could be
            lines[number] = json.dumps(record)
            break
    (tmp_path / "changed.jsonl").write_text("\n".join(lines), encoding="utf-8")
    changed = replay(read_event_log(tmp_path / "changed.jsonl"))
    assert not changed.is_equal
    assert changed.stopped


def simulated_log(world: World, path: Path) -> EventLog:
    """A simulated run, written down and read back."""
    lines: list[str] = []
    options = world.options

    def listener_of(number: int, scheduler: Scheduler) -> Recorder:
        header = header_of(
            scheduler,
            policy=options.policy,
            max_in_flight=options.max_in_flight,
            computes_in_submit=options.computes_in_submit,
        )
        return Recorder(lines.append, header, b"key")

    Simulation(world.machine, (), options, listener_of=listener_of).run_jobs(world.jobs())
    path.write_text("".join(lines), encoding="utf-8")
    return read_event_log(path)


@pytest.mark.parametrize("seed", range(12))
def test_leaps_write_the_log_of_single_steps(seed: int, tmp_path: Path) -> None:
    world = draw_world(seed)
    paths = tmp_path / "leaps.jsonl", tmp_path / "steps.jsonl"
    log = simulated_log(world, paths[0])
    simulated_log(single(world), paths[1])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    outcome = replay(log)
    assert outcome.is_equal, f"{outcome.stopped} {outcome.first_difference}"


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_drafts_that_were_chosen_are_those_of_the_log(max_in_flight: int, tmp_path: Path) -> None:
    """How many pay follows from what was right and from times, so a replay takes it from the log;
    a comparison chooses anew, with the acceptance of the log at each position."""
    lines: list[str] = []
    setup = setup_record(small_setup(), CONFIG)

    def listener_of(number: int, scheduler: Scheduler) -> Recorder:
        header = header_of(
            scheduler,
            policy="fcfs",
            max_in_flight=max_in_flight,
            setup=setup,
            speculate="early:1",
        )
        return Recorder(lines.append, header, b"key")

    simulation = Simulation(
        Machine(Pricer(small_setup()), 900, (24,)),
        all_at_once([(20 + 7 * i, 40 + i) for i in range(6)]),
        Options(
            max_num_seqs=4,
            max_in_flight=max_in_flight,
            speculation=Speculation(8, (0.8, 0.7, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4), is_chosen=True),
        ),
        rng=random.Random(2),
        listener_of=listener_of,
    )
    simulation.run()
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    log = read_event_log(path)
    plans = [event.plan for event in log.events if isinstance(event, Planned)]
    chosen = {max([e.num_draft for e in plan.scheduled], default=0) for plan in plans}
    assert len(chosen) > 2, chosen
    outcome = replay(log)
    assert outcome.is_equal, f"{outcome.stopped} {outcome.first_difference}"
    foreseen = simulate(log, rng=random.Random(3))
    assert all(r.finished_s is not None for r in foreseen.predicted.requests)
    report = evidence_of(log).totals.drafts
    assert report.num_accepted > 0
    assert report.drafting_s > 0


@pytest.mark.parametrize("seed", range(12))
def test_a_true_price_foresees_the_run(seed: int, tmp_path: Path) -> None:
    """Under the prices that made the log, its arrivals lead to the timelines that are in it."""
    world = draw_world(seed)
    has_room = world.options.max_num_seqs > 2  # else few plans wait, which nobody can see
    ahead_s = (None, 0.0, 0.004)[seed % 3] if has_room else None
    options = replace(world.options, static_batching=False, plans_ahead_s=ahead_s)
    world = replace(world, options=options)
    comparison = simulate(simulated_log(world, tmp_path / "log.jsonl"), LinearPricer())
    pairs = zip(comparison.measured.requests, comparison.predicted.requests, strict=True)
    assert comparison.measured.requests
    for measured, predicted in pairs:
        assert times(predicted) == pytest.approx(times(measured), abs=1e-9)
        for name in ("id", "num_input", "num_output", "num_preemptions", "num_cached"):
            assert getattr(predicted, name) == getattr(measured, name), name
    assert all(abs(error) < 1e-9 for error in comparison.errors().values())
    busy = [sum(s.end_s - s.start_s for s in r.steps) for r in both(comparison)]
    if not world.options.computes_in_submit:
        assert busy[0] == pytest.approx(busy[1])


def test_a_wrong_price_is_seen(tmp_path: Path) -> None:
    log = simulated_log(draw_world(3), tmp_path / "log.jsonl")
    slow = LinearPricer(0.022, 0.0014, 2.6e-6)
    errors = simulate(log, slow).errors()
    assert errors["tpot_p50"] == pytest.approx(1.0, abs=0.3)
    assert errors["output_tokens_per_s"] < -0.1


def times(timeline: RequestTimeline) -> list[float]:
    values = (timeline.started_s, timeline.first_token_s, timeline.finished_s)
    assert None not in values
    return [timeline.arrival_s, *(value for value in values if value is not None)]


def both(comparison: Comparison) -> tuple[SimulationReport, SimulationReport]:
    return comparison.measured, comparison.predicted


@pytest.mark.usefixtures("kept_cache")
def test_what_cannot_be_foreseen_is_left_out(tmp_path: Path) -> None:
    """Beam searches and requests that never got a token; aborted ones end where they ended."""
    seed = next(
        s
        for s in range(60)
        if CheckedWorld(s).case.policy == "fcfs" and CheckedWorld(s).case.num_drafts
    )
    log = recorded_world(seed, tmp_path / "log.jsonl")
    comparison = simulate(log, LinearPricer(), rng=random.Random(0))
    assert comparison.left_out > 0
    assert len(comparison.predicted.requests) > 10
    finished = [r for r in comparison.predicted.requests if not r.refused]
    assert all(r.finished_s is not None for r in finished)
    assert len(finished) > 10


class Noisy:
    """Twice the price, more or less, and half a millisecond."""

    def __init__(self, pricer: StepPricer) -> None:
        self.pricer, self.rng = pricer, random.Random(4)

    def seconds(self, shape: StepShape) -> float:
        return self.rng.uniform(1.8, 2.2) * self.pricer.seconds(shape) + 5e-4


def slo_log(path: Path, *, in_submit: bool) -> EventLog:
    """An engine as it is built for service: its policy learns what steps take while it runs."""
    real, clock = Pricer(small_setup()), VirtualClock()
    learned = LearnedPricer(real)
    setting = PolicySetting(
        max_num_seqs=16,
        max_num_batched_tokens=256,
        num_cache_tokens=4000,
        pricer=learned,
        ttft_slo_s=0.004,
        tpot_slo_s=0.0012,
    )
    scheduler = Scheduler(BlockManager(250, 16, (24,)), make_policy("slo", setting), 256, 16)
    executor = SimulatedExecutor(Noisy(real), clock, 250, 16, in_submit)
    engine = LeapingEngine(scheduler, executor, clock, 2)
    record = setup_record(small_setup(), CONFIG)
    header = replace(
        header_of(
            scheduler, policy="slo", max_in_flight=2, setup=record, computes_in_submit=in_submit
        ),
        ttft_slo_s=setting.ttft_slo_s,
        tpot_slo_s=setting.tpot_slo_s,
    )
    lines: list[str] = []
    run_record = RunRecord(header, real)
    run_record.listeners.append(learned)
    engine.listeners += [Recorder(lines.append, header, b"key"), run_record]
    rng, coming = random.Random(5), 0.0
    for index in range(150):
        coming += rng.expovariate(1500)
        while executor.spans and executor.spans[0].end_s < coming:
            clock.advance_to(executor.spans[0].end_s)
            engine.collect()
            engine.launch()
        clock.advance_to(coming)
        prompt = tuple(rng.randrange(900) for _ in range(rng.randint(1, 300)))
        sampling = SamplingParams(max_tokens=rng.randint(1, 40))
        request = Request(f"r{index}", prompt, sampling, coming)
        executor.answers[f"r{index}"] = Answer(len(prompt), filler=index)
        with suppress(RequestFault):
            engine.add(request)
        engine.launch()
    path.write_text("".join(lines), encoding="utf-8")
    return read_event_log(path)


@pytest.mark.parametrize("in_submit", [False, True])
def test_a_policy_that_learned_while_it_ran(tmp_path: Path, in_submit: bool) -> None:
    """Its budgets and refusals follow from the times it saw, so these are played back as well."""
    log = slo_log(tmp_path / "log.jsonl", in_submit=in_submit)
    refused = [e for e in log.events if isinstance(e, Added) and e.refused]
    assert 10 < len(refused) < 140
    outcome = replay(log)
    assert outcome.is_equal, f"{outcome.stopped} {outcome.first_difference}"
    without = replay(EventLog(replace(log.header, policy="fcfs"), log.events))
    assert not without.is_equal
