"""What does a step of several groups of ranks cost, and is that what real ranks do and send?"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM
from ridgeline.cost.ops import COLLECTIVES, Op, output_ops, step_ops, token_ops
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import step_cost
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.cost.step_features import dealt
from ridgeline.distributed.gloo import Gloo
from ridgeline.request import Request, SamplingParams
from ridgeline.simulator.options import Options
from ridgeline.simulator.simulation import Simulation
from ridgeline.simulator.workload import Arrival
from ridgeline.step import Listener, StepPlan, StepShape, WaveCutter
from tests.cost.random_setups import DEEPSEEK_V3, device, spec_of
from tests.test_expert_parallel import MIXTRAL
from tests.test_ranks import OPTIONS
from tests.tiny_model import make_tiny_model

DECODES: StepShape = tuple((1, 100 * n) for n in range(1, 41))
MIXED: StepShape = ((700, 0), (64, 512), *DECODES)


def setup(layout: Layout) -> Setup:
    return Setup(spec_of(DEEPSEEK_V3), device("h200-sxm"), layout, Precision.named("fp8"))


@pytest.mark.parametrize("shape", [DECODES, MIXED, ((1, 9),), ((300, 0),)], ids=len)
@pytest.mark.parametrize("layout", [Layout(dp=8, ep=8), Layout(4, dp=2), Layout(2, dp=4, ep=4)])
def test_the_price_is_that_of_the_operators(layout: Layout, shape: StepShape) -> None:
    pricer = Pricer(setup(layout))
    cost = step_cost(setup(layout), shape)
    assert pricer.seconds(shape) == pytest.approx(cost.expected_s, rel=1e-9)
    if all(new == 1 for new, _ in shape):
        contexts = tuple(before for _, before in shape)
        assert pricer.decodes_seconds(contexts) == pytest.approx(cost.expected_s, rel=1e-9)
        assert pricer.decode_run(contexts).seconds(0) == pytest.approx(cost.expected_s, rel=1e-9)


def test_a_wave_lasts_as_long_as_its_slowest_group() -> None:
    pricer = Pricer(setup(Layout(dp=4, ep=4)))
    even = dealt(DECODES, 4)
    assert [len(part) for part in even] == [10] * 4
    assert pricer.wave_seconds(even) == pricer.seconds(DECODES)
    rest = tuple(one for part in even[1:] for one in part)
    uneven = (*even[0], *rest[:15]), rest[15:20], rest[20:25], rest[25:]
    assert pricer.wave_seconds(uneven) > 1.02 * pricer.wave_seconds(even)
    assert pricer.wave_seconds(uneven) == pricer.wave_seconds(uneven[::-1])
    # Whoever has no request waits for the others all the same.
    alone = pricer.wave_seconds((DECODES[:10], (), (), ()))
    assert alone < pricer.wave_seconds((DECODES[:10],) * 4)


def test_work_is_that_of_all_devices() -> None:
    """Groups read their attention's weights each, and the experts' once for all of them."""
    wide, deep = Pricer(setup(Layout(dp=8, ep=8))), Pricer(setup(Layout(8, ep=8)))
    found, other = wide.price(MIXED, 42), deep.price(MIXED, 42)
    assert found.flops == pytest.approx(other.flops, rel=0.2)
    assert found.bytes > other.bytes
    whole = Pricer(setup(Layout())).price(MIXED, 42)
    assert found.flops == pytest.approx(whole.flops, rel=0.02)


def sent_by_kind(ops: tuple[Op, ...]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.kind in COLLECTIVES:
            found[op.kind] += op.count * op.sent_bytes
    return found


def num_last(part: list[tuple[int, int, bool]]) -> int:
    """Tokens that go through all of the last layer: those that sample, and a lone chunk of a prompt
    that does not, whole."""
    if len(part) == 1 and not part[0][2]:
        return part[0][0]
    return sum(samples for _, _, samples in part)


class Seen(Listener):
    """The parts of each step, as (new tokens, context, whether it samples) of each request."""

    def __init__(self, groups: int) -> None:
        self.cutter = WaveCutter(groups)
        self.steps: list[list[list[tuple[int, int, bool]]]] = []

    def on_plan(self, plan: StepPlan, now: float) -> None:
        parts = self.cutter.cut(plan)
        if plan.scheduled:
            self.steps.append(
                [[(e.num_tokens, e.start, e.samples) for e in part.scheduled] for part in parts]
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **MIXTRAL)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, ep=2)], ids=lambda one: one.text)
def test_real_ranks_take_the_steps_and_send_the_bytes(
    folder: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, groups = random.Random(5), layout.dp
    lengths = [(rng.randint(1, 60), rng.randint(1, 20)) for _ in range(20)]
    limits: dict[str, Any] = {"num_blocks": 24, "max_num_batched_tokens": 48, "max_num_seqs": 12}
    sent: dict[str, float] = defaultdict(float)

    def noted(name: str, share: float) -> None:
        real = getattr(Gloo, name)

        def call(self: Any, x: torch.Tensor) -> Any:
            if x.is_floating_point():  # how many tokens each has is said before, in a few bytes
                sent[name] += share * x.nbytes
            return real(self, x)

        monkeypatch.setattr(Gloo, name, call)

    noted("all_gather", groups - 1)
    noted("all_reduce", 2 * (groups - 1) / groups)
    asked = {"dp": groups, "ep": layout.ep, "collective": "gloo", **limits, **OPTIONS}
    with LLM(folder, **asked) as llm:
        spec, seen = llm.spec, Seen(groups)
        sent.clear()
        llm.engine.listeners.append(seen)
        for n, (num_prompt, num_answer) in enumerate(lengths):
            sampling = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
            prompt = tuple(rng.randrange(5, 261) for _ in range(num_prompt))
            llm.engine.add(Request(str(n), prompt, sampling, 0.0))
        while not llm.engine.is_idle:
            llm.engine.step()
        in_flight, mixed = llm.resolved.max_in_flight, llm.resolved.max_num_mixed_tokens
    priced = Setup(spec, device(), layout, Precision("float32"))
    want: dict[str, float] = defaultdict(float)
    for parts in seen.steps:
        whole = [one for part in parts for one in part]
        wave = sum(new for new, _, _ in whole), sum(map(num_last, parts))
        fullest = max(parts, key=len)
        shape = tuple((new, before) for new, before, _ in fullest)
        ops = step_ops(spec, shape, layout, priced.precision, num_last(fullest), wave)
        want["all_reduce"] += sent_by_kind(ops)["all_reduce"]
        # As many tokens of each group as the fullest has: in the last layer it may be another.
        counts = [(sum(new for new, _, _ in part), num_last(part)) for part in parts]
        new, last = (max(numbers) for numbers in zip(*counts, strict=True))
        for some in (
            token_ops(spec, new, layout, priced.precision),
            output_ops(spec, last, layout, priced.precision),
        ):
            want["all_gather"] += sent_by_kind(tuple(some))["all_gather"]
    assert len(seen.steps) > 20
    assert {len(part) > 0 for parts in seen.steps for part in parts} == {True, False}
    assert dict(sent) == pytest.approx(dict(want), rel=1e-9)
    # The simulator's machine: the same steps, one after the other.
    options = Options(
        max_in_flight=in_flight,
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        max_num_mixed_tokens=mixed,
        max_model_len=OPTIONS["max_model_len"],
        block_size=OPTIONS["block_size"],
        num_blocks=limits["num_blocks"],
        computes_in_submit=True,
    )
    work = [Arrival(0.0, *both) for both in lengths]
    simulated = Seen(groups)
    Simulation(priced, work, options, listener_of=lambda number, scheduler: simulated).run()
    assert simulated.steps == seen.steps
