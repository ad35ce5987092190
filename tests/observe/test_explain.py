"""Does the explanation add up, and does it name the bottleneck that was put in?"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer, StepPrice
from ridgeline.cost.setup import Precision, Setup
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError
from ridgeline.observe.advice import findings
from ridgeline.observe.engine_header import header_of, read_setup, setup_record
from ridgeline.observe.event_log import LogFile, Recorder, read_event_log
from ridgeline.observe.evidence import Evidence, RunRecord, evidence_of
from ridgeline.observe.explain import (
    OwnReport,
    Report,
    decode_alone_s,
    explain,
    explain_own,
    prefill_alone_s,
)
from ridgeline.observe.requests import MAX_TENANTS, PARTS, Parts
from ridgeline.observe.run import CpuTime, Run, Totals
from ridgeline.observe.run_summary import run_summary, snapshot
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import ScheduledRequest, StepPlan, StepResult, StepShape
from tests.observe.priced import CONFIG, small_setup
from tests.observe.test_time_breakdown import Told


@dataclass
class Bench:
    """A device that takes exactly what its price says, times `slow`, and a host that takes
    `host_s` between steps."""

    clock: Told
    engine: Engine
    run_record: RunRecord
    slow: float = 1.0
    host_s: float = 0.0
    num_blocks: int = 0
    block_size: int = 16

    def submit(self, plan: StepPlan) -> _Done:
        return _Done(self, plan)

    def run(self, requests: list[Request]) -> Report:
        waiting = sorted(requests, key=lambda request: request.arrival_time)
        while waiting or not self.engine.is_idle:
            if self.engine.is_idle and waiting:
                self.clock.time = max(self.clock.time, waiting[0].arrival_time)
            while waiting and waiting[0].arrival_time <= self.clock.time:
                self.engine.add(waiting.pop(0))
            self.engine.step()
            self.clock.time += self.host_s
        return explain(self.run_record.evidence(self.clock.time))


@dataclass
class _Done:
    bench: Bench
    plan: StepPlan

    def result(self) -> StepResult:
        rows = sum(entry.samples for entry in self.plan.scheduled)
        price = self.bench.run_record.pricer.price(self.plan.shape, rows)
        self.bench.clock.time += self.bench.slow * price.expected_s
        return StepResult({e.request_id: (7,) for e in self.plan.scheduled if e.samples})


def bench(
    setup: Setup | None = None,
    *,
    num_blocks: int = 4096,
    max_num_seqs: int = 64,
    slow: float = 1.0,
    host_s: float = 0.0,
    prefix_caching: bool = True,
    chunk: int = 256,
    log: LogFile | None = None,
) -> Bench:
    found = setup or small_setup()
    clock = Told()
    scheduler = Scheduler(
        BlockManager(num_blocks, 16, prefix_caching=prefix_caching), FCFS(), chunk, max_num_seqs
    )
    header = header_of(
        scheduler, policy="fcfs", max_in_flight=1, model="m", setup=setup_record(found, CONFIG)
    )
    run_record = RunRecord(header, Pricer(found))
    made = Bench(clock, None, run_record, slow, host_s, num_blocks)  # type: ignore[arg-type]
    made.engine = Engine(scheduler, made, clock, 1)
    if log is not None:
        made.engine.listeners.append(Recorder(log.write, header, b"k"))
    made.engine.listeners.append(run_record)
    return made


def ask(i: int, num_prompt: int, num_output: int, arrival: float = 0.0) -> Request:
    rng = random.Random(i)
    prompt = tuple(rng.randrange(1000) for _ in range(num_prompt))
    return Request(f"r{i}", prompt, SamplingParams(max_tokens=num_output, seed=0), arrival)


def names(report: Report) -> list[str]:
    return [change.name for change in report.changes]


# ---------------------------------------------------------------------- it adds up


def test_one_request_alone_runs_at_its_floor() -> None:
    report = bench().run([ask(1, 300, 20)])
    [request] = report.requests
    assert request.parts.own_prefill == pytest.approx(request.floor.prefill_s, rel=1e-9)
    assert request.parts.decode == pytest.approx(request.floor.decode_s, rel=1e-9)
    assert request.latency_s == pytest.approx(request.floor.total_s, rel=1e-9)
    assert report.server.gap.unexplained_s == pytest.approx(0.0, abs=1e-12)


def test_floors_are_sums_of_single_steps() -> None:
    pricer = Pricer(small_setup())
    steps = sum(pricer.seconds(((1, 50 + i),)) for i in range(30))
    assert decode_alone_s(pricer, 50, 30) == pytest.approx(steps, rel=1e-9)
    assert decode_alone_s(pricer, 50, 0) == 0.0
    first = pricer.seconds_of(pricer.features(((100, 16),)), 0)
    chunks = first + pricer.seconds(((34, 116),))
    assert prefill_alone_s(pricer, 16, 150, 100) == pytest.approx(chunks)


@pytest.mark.parametrize("seed", range(4))
def test_parts_and_gap_sum(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    made = bench(num_blocks=60, max_num_seqs=4, slow=1.3, host_s=1e-4)
    requests = [
        ask(i, rng.randint(1, 300), rng.randint(1, 60), rng.random() * 0.02) for i in range(12)
    ]
    report = made.run(requests)
    assert len(report.requests) == 12
    for request in report.requests:
        parts = sum(getattr(request.parts, name) for name in PARTS)
        assert parts == pytest.approx(request.latency_s, abs=1e-9)
    assert report.whole.total == pytest.approx(sum(r.latency_s for r in report.requests))
    gap, server = report.server.gap, report.server
    whole = gap.ideal_s + gap.kernels_s + gap.unexplained_s + gap.host_s
    assert whole == pytest.approx(server.measured_s + gap.host_s, abs=1e-12)
    assert gap.unexplained_s == pytest.approx(0.3 * server.expected_s, rel=1e-6)
    assert sum(regime.num_steps for regime in server.regimes.values()) == server.num_steps
    assert sum(server.bound_s.values()) > 0


def test_a_live_request_is_explained_up_to_now() -> None:
    made = bench()
    made.engine.add(ask(1, 40, 50))
    for _ in range(10):
        made.engine.step()
    report = explain(made.run_record.evidence(made.clock.time))
    [request] = report.requests
    assert (request.end, request.num_output_tokens) == ("", 10)
    assert request.latency_s == pytest.approx(made.clock.time)
    assert request.latency_s == pytest.approx(request.floor.total_s)
    assert not made.run_record.requests.active["r1"].ended


def test_evidence_crosses_as_json(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "log"))
    made = bench(max_num_seqs=2, host_s=1e-5, log=log)
    live = made.run([ask(i, 30 + i, 5) for i in range(4)])
    log.close()
    evidence = made.run_record.evidence(made.clock.time)
    back = msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence)
    assert back == evidence
    assert explain(back) == live
    from_log = explain(evidence_of(read_event_log(tmp_path / "log")))
    assert from_log.requests == live.requests
    assert from_log.server == live.server
    assert json.loads(json.dumps(from_log.to_json()))["model"] == "m"


def changed(value: Any, draw: Random) -> Any:
    """Another value in its place, or somewhere inside it."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        rest = {name: its for name, its in value.items() if name != key}
        return rest if draw.random() < 0.3 else rest | {key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], changed(value[at], draw), *value[at + 1 :]]
    return draw.choice([None, "x", "", -1, 0, 1.5, 10**6, 1e300, float("nan"), [], {}, True])


@pytest.mark.parametrize("seed", range(4))
def test_a_log_that_was_changed_is_explained_or_refused(seed: int, tmp_path: Path) -> None:
    """Lines that are gone, twice there, in another order or with another value."""
    path, draw = tmp_path / "log", Random(seed)
    log = LogFile(str(path))
    bench(max_num_seqs=2, host_s=1e-5, log=log).run([ask(i, 30 + i, 5) for i in range(4)])
    log.close()
    whole = path.read_text().splitlines()
    refused = 0
    for _ in range(60):
        lines = list(whole)
        one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
        kind = draw.choice(["gone", "twice", "swapped", "value", "value", "value"])
        if kind == "gone":
            del lines[one]
        elif kind == "twice":
            lines.insert(other, lines[one])
        elif kind == "swapped":
            lines[one], lines[other] = lines[other], lines[one]
        else:
            lines[one] = json.dumps(changed(json.loads(lines[one]), draw))
        path.write_text("\n".join(lines) + "\n")
        with suppress(ConfigError):
            refused += 1
            json.dumps(explain(evidence_of(read_event_log(path))).to_json())
            refused -= 1
    assert 10 < refused < 55


def test_the_setup_crosses_as_json() -> None:
    setup = small_setup("mi300x")
    back = read_setup(json.loads(json.dumps(setup_record(setup, CONFIG))))
    shape = ((1, 100), (1, 7), (50, 20))
    assert Pricer(back).seconds(shape) == Pricer(setup).seconds(shape)
    with pytest.raises(ConfigError, match="could not price"):
        read_setup({})


def test_nothing_has_run_yet() -> None:
    report = explain(bench().run_record.evidence(0.0))
    assert (report.requests, report.changes, report.next_change) == ((), (), None)
    assert report.server.binds == "nothing has run yet"
    assert report.whole == Parts()
    assert (
        run_summary("all", bench().run_record.pricer, bench().run_record.totals).share_of_peak == 0
    )


# ---------------------------------------------------------------------- what binds


def large_setup(**changes: str) -> Setup:
    """Weights that take long to read: 8 requests do not hide it."""
    config = CONFIG | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8}
    spec = read_setup(setup_record(small_setup(), config)).spec
    return Setup(spec, find_device("h100-sxm"), precision=replace(Precision(), **changes))


def large_bench(setup: Setup, chunk: int = 256) -> Bench:
    made = bench(setup, chunk=chunk)
    config = CONFIG | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8}
    header = replace(made.run_record.header, setup=setup_record(setup, config))
    made.run_record.header = header
    return made


def test_the_host_is_named_and_overlap_is_the_way_out() -> None:
    report = bench(host_s=0.05).run([ask(i, 20, 30) for i in range(4)])
    assert report.server.binds.startswith("the host")
    assert report.next_change is not None
    assert report.next_change.name == "overlap with the host"
    gap = report.server.gap
    whole = gap.host_s + report.server.measured_s
    assert report.next_change.gain == pytest.approx(whole / report.server.measured_s)


def test_a_device_slower_than_its_price_is_named() -> None:
    report = bench(slow=5.0).run([ask(i, 20, 30) for i in range(4)])
    assert "does not know" in report.server.binds
    assert report.server.measured_s == pytest.approx(5 * report.server.expected_s)


def test_memory_is_named_and_smaller_weights_are_priced() -> None:
    report = large_bench(large_setup()).run([ask(i, 20, 100) for i in range(4)])
    assert report.server.binds.startswith("memory")
    gains = {change.name: change for change in report.changes}
    assert gains["int4 weights"].gain > gains["int8 weights"].gain > 1.2
    assert gains["int8 weights"].served_today
    assert "speculation" in gains
    full = large_bench(large_setup(dtype="float32")).run([ask(i, 20, 100) for i in range(4)])
    halved = {change.name: change for change in full.changes}["16-bit weights and cache"]
    assert halved.served_today
    assert 1.5 < halved.gain < 2.0
    assert full.next_change is not None
    assert full.next_change.name == "16-bit weights and cache"


def test_arithmetic_is_named_for_long_prompts() -> None:
    report = large_bench(large_setup(), 4096).run([ask(i, 2000, 1) for i in range(4)])
    assert report.server.binds.startswith("arithmetic")


def test_a_small_cache_is_named_and_a_larger_one_is_the_way_out() -> None:
    report = bench(num_blocks=18).run([ask(i, 60, 120) for i in range(6)])
    assert "too small" in report.server.binds
    assert report.whole.preemption > 0
    assert "a larger KV cache" in names(report)


def test_a_full_batch_is_named_and_a_larger_one_is_the_way_out() -> None:
    report = bench(max_num_seqs=2).run([ask(i, 10, 40) for i in range(20)])
    assert "queue" in report.server.binds
    assert report.next_change is not None
    assert report.next_change.name == "a larger batch"
    assert report.next_change.how == "--max-num-seqs 4"
    assert 1.5 < report.next_change.gain <= 2.0


def test_prompts_seen_before_ask_for_a_prefix_cache(tmp_path: Path) -> None:
    common = tuple(range(160))
    requests = [
        Request(f"r{i}", (*common, 500 + i, 1, 2), SamplingParams(max_tokens=2), 0.0)
        for i in range(8)
    ]
    found = []
    for caching in (False, True):
        path = tmp_path / f"log-{caching}"
        log = LogFile(str(path))
        bench(prefix_caching=caching, log=log).run(
            [Request(r.request_id, r.prompt_token_ids, r.sampling, 0.0) for r in requests]
        )
        log.close()
        found.append(evidence_of(read_event_log(path)))
    assert found[0].prompt_reuse == pytest.approx(7 * 160 / (8 * 163))
    off, on = (explain(evidence) for evidence in found)
    assert "prefix cache" in names(off)
    assert "prefix cache" not in names(on)


# ---------------------------------------------------------------------- what nobody expected


def test_no_advice_where_much_is_unexplained() -> None:
    near = bench(large_setup(), slow=1.2).run([ask(1, 64, 120)])
    assert near.server.unexplained_share == pytest.approx(0.2 / 1.2)
    assert near.changes
    assert near.findings == ()
    far = bench(large_setup(), slow=1.5).run([ask(1, 64, 120)])
    assert far.server.unexplained_share == pytest.approx(0.5 / 1.5)
    assert (far.changes, far.next_change) == ((), None)
    assert [finding.how for finding in far.findings] == ["ridgeline calibrate"]
    assert far.to_json()["findings"][0]["what"].startswith("not calibrated")
    quick = bench(large_setup(), slow=0.5).run([ask(1, 64, 120)])
    assert quick.server.unexplained_share == pytest.approx(1.0)
    assert quick.findings == far.findings  # prices that are too high say as little


def test_what_can_be_seen_is_named() -> None:
    """Of a calibrated CPU engine, with and without the processors to itself."""
    setup = small_setup()
    calibrated = replace(setup, calibration=replace(setup.constants, origin="calibrated"))
    made = bench(calibrated, slow=3.0)
    made.run([ask(1, 50, 120)])
    evidence = made.run_record.evidence(made.clock.time)
    cpu = replace(evidence.header, computes_in_submit=True, threads=2)

    def seen(found: Evidence, caveat: str = "") -> list[str]:
        constants = replace(calibrated.constants, caveat=caveat)
        return [finding.what for finding in findings(found, constants)]

    assert seen(evidence) == ["nothing that is recorded explains it"]
    idle = replace(evidence, header=cpu, cpu=CpuTime(48.0, 90.0))
    assert seen(idle) == ["nothing that is recorded explains it"]
    busy = replace(idle, cpu=CpuTime(48.0, 15.0))
    assert seen(busy, "measured on a busy machine") == [
        "measured on a busy machine",
        "the process had 15 CPU seconds in 48 seconds with requests, on 2 threads",
    ]
    few = replace(idle, totals=replace(idle.totals, num_steps=26))
    assert seen(few) == ["only 26 steps ran, and the first of a kind take longer"]


def test_cpu_seconds_count_while_there_are_requests(tmp_path: Path) -> None:
    """Not while the server is idle; a log of the same run says the same."""
    log = LogFile(str(tmp_path / "log"))
    made = bench(log=log)
    recorder, run_record = made.engine.listeners[0], made.run_record
    assert isinstance(recorder, Recorder)
    recorder._cpu_s = run_record._read_cpu_s = lambda: (
        made.clock.time / 4
    )  # a quarter of the processor
    made.run([ask(1, 50, 10)])
    first = made.run_record.evidence(made.clock.time).cpu
    assert first is not None
    made.clock.time += 100.0
    made.run([ask(2, 50, 10, made.clock.time), ask(3, 50, 20, made.clock.time)])
    found = made.run_record.evidence(made.clock.time + 100.0)
    log.close()
    assert found.cpu is not None
    assert first.wall_s < found.cpu.wall_s < 100.0
    assert found.cpu.cpu_s == pytest.approx(found.cpu.wall_s / 4)
    again = msgspec.json.decode(msgspec.json.encode(found), type=Evidence)
    assert again.cpu == found.cpu
    logged = evidence_of(read_event_log(tmp_path / "log")).cpu
    assert logged is not None
    assert logged.wall_s == pytest.approx(found.cpu.wall_s)
    assert logged.cpu_s == pytest.approx(found.cpu.cpu_s, abs=1e-3)
    assert bench().run([ask(1, 50, 10)]).server.cpu is None


# ---------------------------------------------------------------------- the read-out


def test_the_read_out_is_of_the_steps_between_two_snapshots() -> None:
    made = bench(slow=2.0, host_s=1e-5)
    made.run([ask(1, 50, 10)])
    totals = made.run_record.totals
    before = snapshot(totals)
    nothing = run_summary("x", made.run_record.pricer, totals, before)
    assert (nothing.num_steps, nothing.measured_s, nothing.expected_ratio) == (0, 0.0, 0.0)
    made.run([ask(2, 60, 5)])
    found = run_summary("x", made.run_record.pricer, totals, before)
    assert found.num_steps == 5
    assert found.expected_ratio == pytest.approx(2.0)
    assert 0 < found.share_of_bandwidth <= found.ideal_s / found.measured_s * (1 + 1e-9) < 0.5
    assert 0 < found.host_share < 1
    assert found.origin == "assumed"
    said = dict(found.lines())
    assert "not calibrated: ridgeline calibrate" in said["time"]
    assert "2.00x" not in said["time"]
    calibrated = dict(replace(found, origin="calibrated", note="a busy machine").lines())
    assert "2.00x of the expected time (calibrated)" in calibrated["time"]
    assert calibrated["note"] == "a busy machine"
    assert said["steps"] == "5 (4 decode, 1 prompt)"
    assert "of the bandwidth" in said["memory"]
    unknown = dict(replace(found, is_assumed_device=True).lines())
    assert "of the bandwidth" not in unknown["memory"]
    assert "of the peak" not in unknown["compute"]


def test_a_step_that_cannot_be_priced_or_fails_harms_no_other() -> None:
    def price(shape: StepShape, num_logits: int) -> StepPrice:
        if shape == ((1, 6),):
            raise ConfigError("no price for this one")
        return StepPrice(1.0, 0.5, 1.0, 1.0)

    made = bench()
    run = Run(price)
    made.engine.listeners[:] = [run]
    made.run([ask(1, 5, 5)])
    assert run.totals.num_steps == 4
    assert run.running is None
    broken = plan_of(99)
    run.on_plan(broken, 1e6)
    run.on_collect(broken, None, [], "it broke", 2e6)
    assert run.totals.num_steps == 4


def plan_of(step_id: int) -> StepPlan:
    return StepPlan(step_id, (ScheduledRequest("a", 0, 3, ((),), True),))


# ---------------------------------------------------------------------- tenants

ALICE, BOB = b"a" * 32, b"b" * 32


def owned(tenant: bytes, *requests: Request) -> list[Request]:
    return [replace(request, tenant=tenant) for request in requests]


def own(made: Bench, tenant: bytes) -> OwnReport:
    return explain_own(made.run_record.evidence(made.clock.time, tenant.hex()))


def test_what_others_ask_changes_nothing_in_a_tenants_report() -> None:
    """Not even by what is missing: the latest of all are 256, and bob asks more than that."""
    made = bench()
    made.run(owned(ALICE, ask(1, 50, 3), ask(2, 80, 5)))
    before = own(made, ALICE)
    assert [request.request_id for request in before.requests] == ["r1", "r2"]
    made.run(owned(BOB, *[ask(i, 20, 1, made.clock.time) for i in range(1000, 1300)]))
    assert own(made, ALICE) == before
    assert len(own(made, BOB).requests) == 256
    assert len(explain(made.run_record.evidence(made.clock.time)).requests) == 256


def test_a_tenant_is_told_how_long_it_waited_and_not_for_what() -> None:
    """Alone its time is its own; beside others it sums to its latency, without what they did."""
    made = bench(max_num_seqs=4, num_blocks=40, host_s=1e-6)
    alice = [ask(i, 60, 30) for i in range(2)]
    bob = [ask(i, 200, 40, i * 1e-5) for i in range(10, 20)]
    whole = made.run(owned(ALICE, *alice) + owned(BOB, *bob))
    full = {request.request_id: request for request in whole.requests}
    assert any(full[name].parts.others_prefill > 0 for name in ("r0", "r1"))
    assert sum(request.num_preemptions or 0 for request in whole.requests) > 0
    report = own(made, ALICE)
    assert [request.request_id for request in report.requests] == ["r0", "r1"]
    for request in report.requests:
        parts, known = request.parts, full[request.request_id].parts
        assert parts.total == pytest.approx(request.latency_s, rel=1e-12)
        assert (parts.own_prefill, parts.decode) == (known.own_prefill, known.decode)
        assert (parts.others_prefill, parts.preemption, parts.host) == (0.0, 0.0, 0.0)
        assert request.num_preemptions is None
    assert report.whole.total == pytest.approx(sum(r.latency_s for r in report.requests))


def test_what_leaves_the_engine_for_a_tenant_holds_nothing_of_others() -> None:
    made = bench()
    made.run(owned(BOB, *[ask(i, 37, 11) for i in range(50, 60)]))
    made.engine.add(owned(ALICE, ask(1, 50, 5, made.clock.time))[0])
    made.engine.add(owned(BOB, ask(61, 37, 5, made.clock.time))[0])
    made.engine.step()
    told = asdict(made.run_record.evidence(made.clock.time, ALICE.hex()))
    del told["header"], told["now"]
    [breakdown] = told.pop("active")
    assert breakdown["request_id"] == "r1"
    assert told.pop("totals") == asdict(Totals())
    assert not any(told.values())


def test_what_the_engine_gathers_is_bounded() -> None:
    """The next step waits for it."""
    made = bench()
    for i in range(600):
        made.engine.add(owned(BOB, ask(i, 5, 5))[0])
    made.engine.add(owned(ALICE, ask(600, 5, 5))[0])
    made.engine.step()
    evidence = made.run_record.evidence(made.clock.time)
    assert [breakdown.request_id for breakdown in evidence.active] == [f"r{i}" for i in range(256)]
    [request] = own(made, ALICE).requests
    assert request.request_id == "r600"


def test_the_tenants_whose_requests_are_kept_are_bounded() -> None:
    made = bench()
    for i in [*range(MAX_TENANTS + 2), 2]:
        made.engine.add(owned(b"%d" % i, ask(i, 3, 1, made.clock.time))[0])
        made.engine.step()
    assert [len(own(made, b"%d" % i).requests) for i in (0, 1, 2, 3)] == [0, 0, 2, 1]
