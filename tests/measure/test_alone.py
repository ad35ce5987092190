"""Do steps that are timed on the device alone become the points that the fit wants of them?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ridgeline.build import Built
from ridgeline.cost.constants import HostConstants, default_calibration
from ridgeline.cost.fit import ALONE, Point, predict
from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.devices import open_device
from ridgeline.errors import EngineFault
from ridgeline.measure import points, steps
from ridgeline.measure.models import CUDA, CUDA_QUICK, Grid
from ridgeline.measure.points import Effort, Progress, Session, StepPoints, faster, step_point
from ridgeline.measure.steps import StepBench, StepTimes, random_engine, step_bench
from ridgeline.measure.stopwatch import DeviceTimer, open_stopwatch
from ridgeline.speculation.price import DraftSteps, first_layers
from ridgeline.step import StepFuture, StepPlan
from tests.captures import records
from tests.measure.small import SAMPLE, SMALL, quiet
from tests.measure.timeline import Timeline

KERNELS, DEVICE_S = 10, 4e-6
OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "num_blocks": 200, "max_num_seqs": 8}
DRAFTED = replace(
    SAMPLE,
    prefills=(),
    decodes=((1, 20), (3, 30)),
    mixes=(),
    drafts=((2, 25, 2),),
    answers=(0, 0),
)


class Sending:
    """The executor inside, that sends as much to a device for every step."""

    def __init__(self, bench: StepBench, there: Timeline, host_s: float) -> None:
        self.inner, self.there, self.host_s = bench.synthetic.inner, there, host_s
        self.num_blocks, self.block_size = self.inner.num_blocks, self.inner.block_size

    def submit(self, plan: StepPlan) -> StepFuture:
        self.there.send(KERNELS, self.host_s, DEVICE_S)
        return self.inner.submit(plan)


def timed(bench: StepBench, host_s: float) -> Timeline:
    """The bench, on a device with a clock."""
    there = Timeline()
    bench.synthetic.inner = Sending(bench, there, host_s)
    bench.timer, bench.most_alone = DeviceTimer(there), 64
    return there


@pytest.fixture(scope="module")
def drafting() -> Iterator[Built]:
    with random_engine(SAMPLE.config, **OPTIONS, speculate="early:1") as built:
        yield built


def test_decodes_are_timed_one_by_one_on_the_device() -> None:
    with random_engine(SAMPLE.config, **OPTIONS) as built:
        bench = step_bench(built)
        assert bench.timer is None  # of a CPU
        assert bench.most_alone == 0
        there = timed(bench, host_s=1e-4)
        found = bench.alone(3, 40, 0, steps=5)
        assert found.seconds == pytest.approx([KERNELS * DEVICE_S] * 5)
        assert [new for new, _ in found.shape] == [1, 1, 1]
        assert all(40 <= before <= 60 for _, before in found.shape)
        assert len(there.pauses) == 5  # and no other step was held up
        assert bench.synthetic.timer is None
        assert bench.engine.is_idle
        assert len(bench.decode(2, 20, steps=3).seconds) == 3
        assert len(there.pauses) == 5
        bench.engine.scheduler.check_invariants()


def test_late_steps_are_done_again_and_given_up_in_the_end() -> None:
    with random_engine(SAMPLE.config, **OPTIONS) as built:
        bench = step_bench(built)
        there = timed(bench, host_s=1e-3)  # 10 ms a step
        found = bench.alone(1, 20, 0, steps=4)
        assert found.seconds == pytest.approx([KERNELS * DEVICE_S] * 4)
        assert len(there.pauses) == 4 + 3  # 2, 4, 8 and then 16 ms
        timed(bench, host_s=1.0)
        found = bench.alone(1, 20, 0, steps=4)
        assert found.seconds == ()
        assert len(found.shape) == 1
        assert bench.engine.is_idle


@records
@pytest.mark.parametrize("num_draft_tokens", [0, 2, 3])
def test_drafts_and_their_check_are_timed_together(drafting: Built, num_draft_tokens: int) -> None:
    bench = step_bench(drafting)
    chosen = drafting.engine.scheduler.draft_lengths
    timed(bench, host_s=1e-5)
    found = bench.alone(2, 30, num_draft_tokens, steps=4)
    assert len(found.seconds) == 4
    assert [new for new, _ in found.shape] == [num_draft_tokens + 1] * 2
    assert drafting.engine.scheduler.draft_lengths is chosen
    assert bench.engine.is_idle
    drafting.engine.executor = bench.synthetic.inner.inner  # type: ignore[attr-defined]
    drafting.engine.listeners[:] = [
        one for one in drafting.engine.listeners if not isinstance(one, StepBench)
    ]


class Broken(Sending):
    """A device on which steps with drafts fail."""

    def submit(self, plan: StepPlan) -> StepFuture:
        if any(new > 1 for new, _ in plan.shape):
            raise EngineFault("broken")
        return super().submit(plan)


def session_of(grid: Grid = SMALL, progress: Progress = quiet) -> Session:
    """On a CPU."""
    cpu = open_device("cpu")
    watch = open_stopwatch(cpu.torch_device, 1)
    return Session(cpu, watch, Effort(grid, ("float32",), 0.001), 1 << 20, 1, progress)


def session_points(
    monkeypatch: pytest.MonkeyPatch,
    host_s: float,
    *,
    is_broken: bool = False,
    said: list[str] | None = None,
    looks: int = 2,
) -> list[Point]:
    def opened(built: Built) -> StepBench:
        bench = step_bench(built)
        there = timed(bench, host_s)
        if is_broken:
            inner = bench.synthetic.inner.inner  # type: ignore[attr-defined]
            bench.synthetic.inner = inner
            bench.synthetic.inner = Broken(bench, there, host_s)
        return bench

    def progress(stage: str, done: int, total: int) -> None:
        if said is not None:
            said.append(stage)

    monkeypatch.setattr(points, "step_bench", opened)
    monkeypatch.setattr(points, "open_device_timer", lambda device: DeviceTimer(Timeline()))
    monkeypatch.setattr(points, "STEP_BUDGET_S", 0.01)
    grid = replace(
        SMALL, samples=(replace(DRAFTED, has_operators=False),), attention=(), looks=looks
    )
    session = session_of(grid, progress)
    session.run()
    return session.points


@records
def test_a_session_has_points_of_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = session_points(monkeypatch, host_s=1e-5)
    assert [point.what for point in found] == ["decode_step", "decode_device"] * 2 + [
        "draft_device"
    ]
    alone = [point for point in found if point.what in ALONE]
    assert all(point.num_requests is None for point in alone)
    assert [point.seconds for point in alone] == pytest.approx([KERNELS * DEVICE_S] * 3)
    assert [point.num_passes for point in found] == [0, 0, 0, 0, 2]
    assert found[-1].captured
    assert found[0].num_requests == 1


def test_points_that_a_slow_host_spoils_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = session_points(monkeypatch, host_s=1.0)
    assert [point.what for point in found] == ["decode_step"] * 2


def test_drafts_that_fail_do_not_take_the_rest_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found = session_points(monkeypatch, host_s=1e-5, is_broken=True, said=said)
    assert [point.what for point in found] == ["decode_step", "decode_device"] * 2
    assert any(stage.startswith("checks of drafts are not measured") for stage in said)


def test_of_two_measurements_the_one_is_kept_that_nobody_disturbed() -> None:
    def points(**seconds: float) -> StepPoints:
        return {
            int(name[1:]): Point("decode_step", "f32", (), value) for name, value in seconds.items()
        }

    found = faster(points(_0=2.0, _1=3.0, _3=4.0), points(_0=1.0, _1=5.0, _2=6.0))
    assert {number: point.seconds for number, point in found.items()} == {0: 1, 1: 3, 2: 6, 3: 4}
    assert list(found) == [0, 1, 2, 3]
    assert faster({}, points(_0=1.0)) == points(_0=1.0)


@records
def test_small_models_are_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    session_points(monkeypatch, host_s=1e-5, said=said)
    assert any(stage.endswith(", again") for stage in said)
    said.clear()
    session_points(monkeypatch, host_s=1e-5, said=said, looks=1)
    assert said
    assert not any(stage.endswith(", again") for stage in said)


@records
def test_a_choice_is_told_from_what_it_takes_beside_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU that says it is none."""
    session = session_of()
    session._choices(SAMPLE, "float32")
    assert session.choice_s is None
    times = iter([(9.0, 9.0), (5.0, 3.0), (4.0, 5.0), (3.5, 3.0)])  # the first one is a rehearsal
    monkeypatch.setattr(points, "CHOICE_ROUNDS", 3)
    monkeypatch.setattr(StepBench, "choosing", lambda bench, context, steps: next(times))
    other = SimpleNamespace(name="cpu", torch_device=SimpleNamespace(type="cuda"))
    session.device = other
    monkeypatch.setattr(Session, "_forget", lambda session: None)
    session._choices(SAMPLE, "float32")
    assert session.choice_s == 0.5


@records
def test_look_ups_are_told_from_what_the_device_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = session_of()
    session._look_ups(SAMPLE, "float32")
    assert session.looks_s == [], "a CPU has no clock of its own"
    monkeypatch.setattr(points, "open_device_timer", lambda device: DeviceTimer(Timeline()))
    took: dict[str, tuple[float, ...]] = {"off": (5.0,) * 3, "ngram": (7.0,) * 3}
    asked: list[str] = []

    def alone(
        bench: StepBench, rows: int, context: int, draft_tokens: int, steps: int
    ) -> StepTimes:
        assert (rows, draft_tokens) == (1, 0)
        method = "off" if bench.engine.scheduler.draft_lengths is None else "ngram"
        asked.append(method)
        return StepTimes(((1, context),), took[method])

    monkeypatch.setattr(StepBench, "alone", alone)
    session._look_ups(SAMPLE, "float32")
    assert asked == ["off", "off", "ngram", "ngram"], "the first of each is a rehearsal"
    assert session.look_s == 2.0
    took["ngram"] = ()  # a host that was too late
    session._look_ups(SAMPLE, "float32")
    assert session.looks_s == [2.0]


def test_a_cpu_has_none_of_them() -> None:
    session = session_of()
    assert [who for _, who in session._drafted(DRAFTED)] == []


def test_what_is_seen_of_drafts_is_what_steps_with_drafts_are_priced_by() -> None:
    """The point's price and that of speculation are one."""
    gpu, shape, k = find_device("h200-sxm"), ((5, 200),) * 3, 4
    host = HostConstants(
        captured_tokens=512, captured_t0=0.7, captured_s=9e-6, pass_s=5e-6, c0_s=1.0
    )
    known = replace(default_calibration(gpu), host=host)
    sample = next(sample for sample in CUDA.samples if sample.drafts)
    point = step_point("draft_device", sample, "bfloat16", shape, 1.0, captured=True)
    assert point.num_passes == k
    assert point.num_requests is None
    pricer = Pricer(Setup(sample.spec, gpu, calibration=known))
    spec = first_layers(sample.spec, points.DRAFT_LAYERS)
    drafts = DraftSteps(Pricer(Setup(spec, gpu, calibration=known)))
    whole_s = pricer.cost(shape, 15).device_s + drafts.seconds(3, 200, k)
    assert predict(point, gpu, known) == pytest.approx(whole_s, rel=1e-3)
    none = replace(known, host=replace(host, captured_s=0.0, pass_s=0.0))
    assert predict(point, gpu, known) - predict(point, gpu, none) == pytest.approx(9e-6 + k * 5e-6)


def test_small_models_are_seen_with_drafts_on_every_gpu() -> None:
    for grid in (CUDA, CUDA_QUICK):
        drafted = [sample for sample in grid.samples if sample.drafts]
        assert len(drafted) >= 2
        assert {s.spec.num_layers for s in drafted} >= {2, 8}
        assert all(s.spec.num_layers > points.DRAFT_LAYERS for s in drafted)
        assert all(rows * (k + 1) <= 512 for s in drafted for rows, _, k in s.drafts)
    num_steps = points.ALONE_STEPS + steps.MOST_LATE + steps.WARM_UP
    assert num_steps * 9 + 64 + 160 < 512  # tokens that there is room for
