"""Stages and layers of a step against the whole step, bubbles against the published formula."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from ridgeline.architectures import read_spec
from ridgeline.architectures.catalogue import catalogue
from ridgeline.architectures.stages import stage_spec
from ridgeline.cost.communication import HOST_DEVICES
from ridgeline.cost.hardware import find_device
from ridgeline.cost.memory import needed_items
from ridgeline.cost.ops import stage_ops, step_ops
from ridgeline.cost.pipeline import ONE_REQUEST, Pipeline, StagePrices, micro_batches, with_cuts
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import step_cost
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.costing import unknown_device
from ridgeline.errors import ConfigError
from ridgeline.simulator.options import Options, priced_machine
from ridgeline.simulator.simulation import Simulation
from ridgeline.simulator.workload import Arrival

H100 = find_device("h100-sxm")
DECODES = ((1, 1000),) * 16


def setup(model: str, layout: Layout) -> Setup:
    return Setup(read_spec(catalogue()[model].config), H100, layout)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3.1-70b", Layout(tp=4, pp=2)),
        ("mixtral-8x7b", Layout(tp=8, ep=8)),
        ("deepseek-v3", Layout(tp=8, ep=8, pp=4)),
        ("llama-3.1-8b", Layout()),
    ],
)
@pytest.mark.parametrize("shape", [DECODES, ((512, 0), (1, 100))])
def test_stages_are_the_step(
    model: str, layout: Layout, shape: tuple[tuple[int, int], ...]
) -> None:
    spec, precision = setup(model, layout).spec, Precision()
    whole, parts = Counter(), Counter()  # type: ignore[var-annotated]
    for op in step_ops(spec, shape, layout, precision):
        whole[replace(op, count=1)] += op.count
    for stage in range(layout.pp):
        for op in stage_ops(spec, shape, layout, precision, stage):
            parts[replace(op, count=1)] += op.count
    assert parts == whole


def test_one_stage_and_one_micro_batch_are_the_step_cost() -> None:
    one = setup("llama-3.1-70b", Layout(tp=8))
    found = Pipeline(one).step([DECODES])
    assert found.total_s == pytest.approx(sum(op.expected_s for op in step_cost(one, DECODES).ops))
    assert found.bubble == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("stages", "micro"), [(4, 1), (4, 4), (2, 8)])
def test_the_bubble_is_the_published_one(stages: int, micro: int) -> None:
    """(p - 1) / (m + p - 1): 75 % of four stages with one batch, 43 % with four, 11 % of two with
    eight; the stages of 80 layers are equal but for the vocabulary."""
    found = Pipeline(setup("llama-3.1-70b", Layout(tp=8, pp=stages))).step(
        micro_batches(DECODES, micro)
    )
    assert found.bubble == pytest.approx((stages - 1) / (micro + stages - 1), abs=0.02)
    for stage in range(stages):
        own = [one for one in found.busy if one.stage == stage]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(own))


def test_a_layer_has_two_sums_over_devices() -> None:
    """Column-parallel, then row-parallel: one sum behind attention, one behind the feed-forward."""
    dense = Pipeline(setup("llama-3.1-70b", Layout(tp=8)))
    names = [one.op.name for one in dense.layer(0, DECODES)]
    assert names.count("all_reduce") == 2
    assert names[names.index("attention_out") + 1] == "all_reduce"
    assert names[-2:] == ["down", "all_reduce"]
    sparse = Pipeline(setup("mixtral-8x7b", Layout(tp=8, ep=8)))
    experts = [one.op.name for one in sparse.layer(0, DECODES)]
    assert experts.count("all_reduce") == 2
    assert experts[-2:] == ["experts_sum", "all_reduce"]


def test_micro_batches_need_requests() -> None:
    assert [len(part) for part in micro_batches(DECODES, 3)] == [5, 5, 6]
    with pytest.raises(ConfigError, match="16 requests make 1 to 16"):
        micro_batches(DECODES, 17)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(pp=3, starts=(10, 70))])
def test_prices_of_stages_are_that_of_the_step(layout: Layout) -> None:
    """With the messages between them, whatever the cuts; the tokens' way back is beside it."""
    whole = setup("llama-3.1-70b", layout)
    prices = StagePrices(whole)
    for shape in (DECODES, ((512, 0), (1, 100))):
        num_tokens = sum(new for new, _ in shape)
        times = [stage.seconds(shape) for stage in prices.stages]
        sent_s = (layout.pp - 1) * prices.sent_s(num_tokens)
        assert sum(times) + sent_s == pytest.approx(Pricer(whole).seconds(shape))
        slowest = layout.pp * max(times)
        back_s = prices.returned_s(len(shape))
        assert prices.seconds(shape) == max(sum(times) + sent_s + back_s, slowest)
    assert (layout.starts == ()) is (max(times) < 1.2 * min(times))


def test_steps_follow_each_other_as_they_are_priced() -> None:
    """Simulated with the real scheduler: long answers in two stages of different size that are far
    from each other, by messages or by work."""
    near = Setup(read_spec(catalogue()["llama-3.1-8b"].config), H100, Layout(pp=2, starts=(8,)))
    far = replace(
        near, device=replace(H100, link=None, host_link_bytes_per_s=0.0, network_latency_s=0.02)
    )
    for one, waits_for_messages in ((near, False), (far, True)):
        prices = StagePrices(one)
        machine = priced_machine(one, 10_000, (None,))
        work = [Arrival(0.0, 16, 200) for _ in range(8)]
        report = Simulation(machine, work, Options(max_num_seqs=8)).run()
        took_s = max(request.finished_s or 0.0 for request in report.requests)
        lane = prices.seconds(((1, 116),) * 4)
        assert took_s == pytest.approx(200 * lane, rel=0.05)
        assert (lane > 2 * max(s.seconds(((1, 116),) * 4) for s in prices.stages) + 0.03) is (
            waits_for_messages
        )


def test_cuts_are_by_price_among_those_that_fit() -> None:
    """The output matrix makes the second of equal stages the slower one."""
    whole = setup("llama-3.2-1b", Layout(pp=2))
    assert with_cuts(whole).layout.starts == (9,)

    def needed(layers: range) -> int:
        alone = replace(whole, spec=stage_spec(whole.spec, layers), layout=Layout())
        return sum(item.bytes for item in needed_items(alone, ONE_REQUEST))

    tight, short = ((needed(range(9)) - 1) / 0.9, needed(range(8)) / 0.9 - 1e6)
    for memory, start in ((tight, 8), (short, 9)):  # nothing fits into the last: the fastest
        device = replace(H100, memory_bytes=int(memory))
        assert with_cuts(replace(whole, device=device)).layout.starts == (start,)


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_of_a_cpu_are_cut_however_many_there_are(tp: int) -> None:
    """More stages than have a way to talk are never priced as if they had none."""
    cpu = unknown_device("", is_cpu=True, threads=1, memory_bytes=1 << 40)
    whole = replace(setup("llama-3.2-1b", Layout(tp=tp, pp=2)), device=cpu)
    assert whole.spec.num_layers * tp > HOST_DEVICES
    assert len(with_cuts(whole).layout.starts) == 1
