"""Does the planner find what is cheapest, say what stands in the way, and never print a number that
is none?"""

from __future__ import annotations

import random
from dataclasses import replace
from math import log
from typing import Any

import pytest

from ridgeline.asked import check_ranks
from ridgeline.cli.main import parse
from ridgeline.cli.serve import serve_config
from ridgeline.cli.simulate_case import make_case, make_options
from ridgeline.cost.constants import HostConstants, default_calibration
from ridgeline.cost.hardware import Device, find_device
from ridgeline.cost.setup import Layout
from ridgeline.errors import ConfigError
from ridgeline.formats import COLLECTIVES
from ridgeline.planner.estimate import DOES_NOT_FIT, INFEASIBLE, NO_PRICE
from ridgeline.planner.plan import Plan, commands, plan, promise_flags, reasons, settings
from ridgeline.planner.question import (
    MAX_LOAD,
    Grid,
    Hardware,
    Question,
    hardware_of,
    layouts,
    offer,
    rate_of_users,
)
from ridgeline.planner.sensitivity import NEAR, nearest
from ridgeline.simulator.simulation import Machine, Options, Simulation
from ridgeline.simulator.workload import Workload
from tests.planner.exhaustive import EXPERTS, LARGE, MEDIUM, SMALL

BELOW = [0.75, 0.5, 0.25]
GRID = Grid(
    token_budgets=(512, 2048),
    batch_limits=(8, 32, 128),
    weights=("plain", "int4"),
    kv=("auto",),
    tp=(1, 2),
    pp=(1,),
)


def device(
    known: str, dollars: float | None = None, **changes: object
) -> tuple[Device, float | None]:
    return replace(find_device(known), **changes), dollars  # type: ignore[arg-type]


def question(*devices: tuple[Device, float | None], **changes: object) -> Question:
    options = {
        "model": "some model",
        "spec": SMALL,
        "rate": 10.0,
        "num_input": 300,
        "num_output": 40,
        "ttft_s": 0.5,
        "tpot_s": 0.02,
        "offers": tuple(offer(one, dollars) for one, dollars in devices),
    } | changes
    return Question(**options)  # type: ignore[arg-type]


def ask(*devices: tuple[Device, float | None], **changes: object) -> Plan:
    return plan(question(*devices, **changes), lambda: random.Random(0), GRID)


# ---------------------------------------------------------------------- the answer


def test_of_two_equal_devices_the_cheaper_wins_and_the_price_that_flips_it_is_named() -> None:
    found = ask(device("l4", 1.0), device("l4", 0.6, name="other"))
    assert found.winner is not None
    assert found.winner.estimate.hardware.device.name == "other"
    assert found.runner_up is not None
    assert found.runner_up.estimate.hardware.device.name == "l4"
    prices = {flip.what: flip.at for flip in found.sensitivity if flip.unit == "$/h"}
    same = found.runner_up.replicas == found.winner.replicas
    assert same
    assert prices == {"price of l4": pytest.approx(0.6), "price of other": pytest.approx(1.0)}


def test_a_price_beyond_the_flip_changes_the_answer() -> None:
    first = ask(device("l4", 1.0), device("rtx-4090", 1.1))
    assert first.winner is not None
    winner = first.winner.estimate.hardware.device.name
    flip = next(f for f in first.sensitivity if f.what == f"price of {winner}")
    prices = {"l4": 1.0, "rtx-4090": 1.1} | {winner: 1.05 * flip.at}
    second = ask(*(device(name, price) for name, price in prices.items()))
    assert second.winner is not None
    assert second.winner.estimate.hardware.device.name != winner


def test_the_rate_decides_the_number_of_replicas_and_none_is_too_full() -> None:
    counts = []
    for rate in (5.0, 200.0, 2000.0):
        winner = ask(device("l4", 1.0), rate=rate).winner
        assert winner is not None
        assert winner.load <= MAX_LOAD + 1e-9
        assert winner.validation.keeps_promise
        counts.append(winner.replicas)
    assert counts[0] < counts[1] < counts[2]
    assert counts[2] == pytest.approx(10 * counts[1], rel=0.3)


def test_a_measured_device_needs_as_many_as_an_assumed_one_of_its_speed() -> None:
    """Although its record is of no engine, so that nothing is captured in it."""
    known, dollars = device("h100-sxm", 2.0)
    assumed = default_calibration(known)
    slow = HostConstants(per_launch_s=1e-3)
    measured = replace(assumed, origin="calibrated", host=slow)
    asked = question((known, dollars), rate=40.0)
    base = plan(asked, lambda: random.Random(0), GRID).winner
    offers = (offer(known, dollars, measured),)
    found = plan(replace(asked, offers=offers), lambda: random.Random(0), GRID).winner
    assert base is not None
    assert found is not None
    assert found.replicas == base.replicas
    assert found.estimate.throughput.tpot_s == pytest.approx(
        base.estimate.throughput.tpot_s, rel=0.1
    )


def test_shorter_promises_need_more() -> None:
    costs = []
    for tpot_s in (0.05, 0.009):
        winner = ask(device("l4", 1.0), rate=60.0, tpot_s=tpot_s, num_output=60).winner
        assert winner is not None
        costs.append(winner.cost)
    assert costs[1] > costs[0]


def test_without_prices_fewest_devices_win() -> None:
    found = ask(
        device("epyc-9654"), device("m3-ultra"), spec=SMALL, rate=1.0, tpot_s=0.2, ttft_s=5.0
    )
    assert found.winner is not None
    assert found.winner.dollars is None
    assert found.winner.estimate.hardware.device.name == "epyc-9654"  # Apple is not served yet


# ---------------------------------------------------------------------- the command


def test_the_commands_start_today() -> None:
    """One for each machine, with a replica for each of its 8 devices."""
    found = ask(device("rtx-4090", 1.0), rate=1000.0)
    assert found.winner is not None
    typed = commands(found.question, found.winner)
    counts = []
    for command in typed:
        words = command.replace("'some model'", "some-model").split()
        assert words[:2] == ["ridgeline", "serve"]
        config = serve_config(parse(words[1:]))
        candidate = found.winner.estimate.candidate
        assert config.engine.device == "cuda"
        assert config.engine.dtype == "bfloat16"
        assert config.engine.max_num_seqs == candidate.max_num_seqs
        assert config.engine.max_num_batched_tokens == candidate.max_num_batched_tokens
        assert config.engine.max_model_len == found.question.max_model_len
        counts.append(config.replicas)
    assert len(counts) > 1
    assert set(counts[:-1]) == {"8"}
    assert sum(map(int, counts)) == found.winner.replicas
    with_promise = f"{typed[0]} {promise_flags(found.question)}".replace("'some model'", "m")
    engine = serve_config(parse(with_promise.split()[1:])).engine
    assert (engine.policy, engine.ttft_slo_ms, engine.tpot_slo_ms) == ("slo", 500.0, 20.0)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(2), {"tp": 2, "replicas": 4}),
        (Layout(4, 2), {"tp": 4, "pp": 2}),
        (Layout(8, 2), {"tp": 8, "pp": 2, "launcher": "join", "join-address": "HOST:7070"}),
    ],
)
def test_one_replica_on_several_devices_is_a_command(
    layout: Layout, flags: dict[str, object]
) -> None:
    """With as many replicas as a machine has devices for; one that needs more than a machine waits
    for those of the others."""
    found = ask(device("epyc-9654", 1.0), tpot_s=0.2, ttft_s=5.0, rate=1.0)
    assert found.winner is not None
    estimate = found.winner.estimate
    hardware = replace(estimate.hardware, layout=layout)
    assert hardware.why_not_served == ""
    candidate = replace(estimate.candidate, hardware=hardware)
    spread = replace(found.winner, estimate=replace(estimate, candidate=candidate), replicas=4)
    machines = settings(found.question, spread)
    assert len(machines) == (1 if layout.devices == 2 else 4)
    assert {name: machines[0].get(name) for name in flags} == flags
    for command in commands(found.question, spread):
        config = serve_config(parse(command.replace("'some model'", "m").split()[1:]))
        assert config.engine.num_ranks == layout.devices
        check_ranks(config.engine)


def test_ranks_of_one_replica_are_an_answer_where_they_are_served() -> None:
    """Two processors have tokens sooner than one, and so alone keep the promise."""
    one = ask(device("epyc-9654", 1.0), spec=MEDIUM, rate=0.2, tpot_s=0.03, ttft_s=5.0)
    assert one.winner is not None
    assert one.winner.estimate.hardware.layout == Layout(2)
    command = commands(one.question, one.winner)[0]
    assert "--tp 2" in command


def test_one_replica_takes_the_device_and_the_usual_port() -> None:
    found = ask(device("rtx-4090", 1.0), rate=1.0)
    assert found.winner is not None
    (command,) = commands(found.question, found.winner)
    assert "--device cuda " in command
    assert "--port" not in command


def test_every_part_of_the_answer_has_a_reason() -> None:
    found = ask(device("l4", 1.0), device("rtx-4090", 1.0))
    whats = [reason.what for reason in reasons(found)]
    assert whats == [
        *("device", "replicas", "formats"),
        *("max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    ]
    assert reasons(ask(device("l4", 1.0), tpot_s=1e-4)) == ()


# ---------------------------------------------------------------------- where there is nothing


def test_what_does_not_fit_says_so() -> None:
    found = ask(device("rtx-4090", 1.0, memory_bytes=8 << 30), spec=LARGE)
    assert found.winner is None
    assert found.why_none.startswith("does not fit: on rtx-4090")
    assert "GB" in found.why_none
    assert {one.kind for one in found.out} == {DOES_NOT_FIT}


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"tpot_s": 1e-4}, "a token"), ({"ttft_s": 1e-3, "num_input": 4000}, "one prompt alone")],
)
def test_a_promise_that_nobody_can_keep(changes: dict[str, object], words: str) -> None:
    found = ask(device("l4", 1.0), device("rtx-4090", 1.0), **changes)
    assert found.winner is None
    assert found.why_none.startswith("infeasible because on rtx-4090")  # the nearest miss
    assert words in found.why_none
    assert {one.kind for one in found.out} == {INFEASIBLE}
    assert found.num_validations == 0


def test_a_budget_that_is_too_small_says_what_it_takes() -> None:
    found = ask(device("l4", 1.0), rate=300.0, budget=2.5)
    assert found.winner is None
    assert "takes $" in found.why_none
    assert "carries" in found.why_none
    enough = ask(device("l4", 1.0), rate=300.0, budget=100.0)
    assert enough.winner is not None
    assert enough.winner.cost <= 100.0


def test_a_device_without_price_is_named_when_others_have_one() -> None:
    found = ask(device("l4", 1.0), device("a10g"))
    assert {(one.hardware.device.name, one.kind) for one in found.out} == {("a10g", NO_PRICE)}
    assert "--price a10g=" in found.out[0].because


def test_devices_that_this_version_does_not_serve_are_no_answer() -> None:
    found = ask(device("m3-ultra", 0.1), tpot_s=0.1, ttft_s=5.0)
    assert found.winner is None
    assert "serves none of these devices" in found.why_none


# ---------------------------------------------------------------------- what is not served yet


def test_all_shows_what_would_be_cheaper_and_never_answers_with_it() -> None:
    found = ask(
        device("h200-sxm", 5.0),
        device("rtx-5090", 0.5),
        spec=MEDIUM,
        rate=20.0,
        include_unserved=True,
    )
    assert found.winner is not None
    assert not found.winner.estimate.hardware.why_not_served
    assert found.unserved is not None
    assert found.unserved.estimate.hardware.why_not_served
    assert found.unserved.cost <= found.winner.cost
    assert ask(device("rtx-5090", 0.5), spec=MEDIUM).unserved is None


def test_what_is_not_served_says_why() -> None:
    asked = question(device("h100-sxm", 3.0), device("mi300x", 2.0), include_unserved=True)
    for hardware in hardware_of(asked, GRID):
        layout, precision = hardware.layout, hardware.precision
        alone = layout.devices == 1 or ("nccl" in COLLECTIVES and layout.pp == layout.dp == 1)
        plain = alone and precision.weights == "plain" and precision.kv == "auto"
        is_served = plain and hardware.device.name == "h100-sxm"
        assert (hardware.why_not_served == "") is is_served
    drafting = Hardware(asked.offers[0], num_drafts=2)
    assert drafting.why_not_served == "a draft head of one layer, which nobody has trained"


def test_layouts_divide_the_model() -> None:
    found = [(one.tp, one.pp, one.ep) for one in layouts(SMALL, find_device("h100-sxm"))]
    assert (8, 2, 1) in found
    assert all(16 % tp == 0 and ep == 1 for tp, _, ep in found)
    experts = {one.ep for one in layouts(EXPERTS, find_device("h100-sxm"))}
    assert experts == {1, 2, 4, 8}
    assert {one.tp for one in layouts(SMALL, find_device("h100-pcie"))} == {1, 2}
    groups = [one for one in layouts(EXPERTS, find_device("h100-sxm")) if one.dp > 1]
    assert {(one.tp, one.dp) for one in groups} == {(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)}
    assert {one.pp for one in groups} == {1}
    assert {one.ep for one in groups} == {1, 2, 4, 8}


def test_groups_that_attend_for_themselves_are_a_command() -> None:
    """Each has blocks of its own."""
    grid = replace(GRID, dp=(2,), tp=(1,), pp=(1,))
    asked = question(device("epyc-9654", 1.0), spec=EXPERTS, rate=0.01, tpot_s=5.0, ttft_s=100.0)
    spread = [one for one in hardware_of(asked, grid) if one.layout.dp > 1]
    assert [one.layout for one in spread] == [Layout(dp=2), Layout(dp=2, ep=2)]
    assert [one.why_not_served for one in spread] == ["", ""]
    found = plan(asked, lambda: random.Random(0), grid)
    assert found.winner is not None
    estimate = next(e for e in found.estimates if e.hardware.layout == Layout(dp=2, ep=2))
    assert estimate.room == 2 * (estimate.memory.num_blocks // estimate.priced.blocks_each)
    (machine,) = settings(asked, replace(found.winner, estimate=estimate, replicas=1))
    assert (machine["dp"], machine["ep"]) == (2, 2)
    (command,) = commands(asked, replace(found.winner, estimate=estimate, replicas=1))
    config = serve_config(parse(command.replace("'some model'", "m").split()[1:]))
    assert (config.engine.dp, config.engine.ep, config.engine.num_ranks) == (2, 2, 2)
    check_ranks(config.engine)


def test_drafts_make_tokens_faster_for_few_requests() -> None:
    grid = replace(GRID, drafts=(3,), weights=("plain",), tp=(1,))
    asked = question(
        device("h100-sxm", 3.0), spec=MEDIUM, rate=1.0, tpot_s=0.004, include_unserved=True
    )
    found = plan(asked, lambda: random.Random(0), grid)
    assert found.winner is None  # reading the weights alone takes longer
    assert found.unserved is None  # and so nothing is tried with drafts
    slower = replace(asked, tpot_s=0.012)
    found = plan(slower, lambda: random.Random(0), grid)
    with_drafts = [e for e in found.estimates if e.hardware.num_drafts]
    plain = [e for e in found.estimates if not e.hardware.num_drafts]
    assert max(e.planned for e in with_drafts) != max(e.planned for e in plain)


# ---------------------------------------------------------------------- the question


def test_users_become_a_rate_by_littles_law() -> None:
    assert rate_of_users(100, 15.0, 5.0) == 5.0
    assert rate_of_users(100, 0.0, 5.0) == 20.0
    with pytest.raises(ConfigError, match="users"):
        rate_of_users(0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate": 0.0}, "rate"),
        ({"num_input": 200_000}, "context"),
        ({"budget": -1.0}, "budget"),
        ({"offers": ()}, "no device"),
        ({"tpot_s": float("nan")}, "tpot_s"),
    ],
)
def test_questions_without_sense_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        question(device("l4", 1.0), **changes)


def test_the_longest_request_is_within_the_context() -> None:
    asked = question(device("l4"), num_input=100_000, num_output=20_000)
    assert asked.max_model_len == 131072
    assert (1 + asked.spread) * 120_000 <= 131072 + 1
    assert question(device("l4")).max_model_len == 512  # half as long again as 340, in steps


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (ask(device("l4", 1.0), device("rtx-4090", 1.0)) for _ in range(2))
    assert first.winner == second.winner
    assert first.sensitivity == second.sensitivity


@pytest.mark.parametrize("name", ["h100-sxm", "epyc-9654"])
def test_a_trial_runs_steps_as_an_engine_that_is_started_with_its_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound that `simulate` takes for the same device, model and limits."""
    seen: list[Options] = []

    class Watched(Simulation):
        def __init__(self, setup: Machine, work: Workload, options: Options, *, rng: Any) -> None:
            seen.append(options)
            super().__init__(setup, work, options, rng=rng)

    monkeypatch.setattr("ridgeline.planner.search.Simulation", Watched)
    asked = question(device(name, 1.0), rate=1.0, tpot_s=0.5, ttft_s=5.0)
    winner = plan(asked, lambda: random.Random(0), replace(GRID, tp=(1,))).winner
    assert winner is not None
    limits = winner.estimate.candidate
    words = ["simulate", "demo:chat", "--device", name, "--rate", "1"]
    words += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens)]
    case = make_case(parse(words))
    setup = replace(case.setup, spec=SMALL)
    told = make_options(case.args, setup, 4096, case.workload)
    tried = [o for o in seen if o.max_num_batched_tokens == limits.max_num_batched_tokens]
    assert tried
    for options in tried:
        assert options.max_num_mixed_tokens == told.max_num_mixed_tokens
        assert options.computes_in_submit == told.computes_in_submit
    assert (told.max_num_mixed_tokens is None) == told.computes_in_submit == (name != "h100-sxm")


@pytest.mark.parametrize("at", [0.2501, 0.37, 0.74, 0.98])
def test_a_change_is_found_within_two_percent(at: float) -> None:
    """Between those that are tried, on both sides of what is now."""
    for factors, place in ((BELOW, at), ([1 / f for f in BELOW], 1 / at)):

        def other(factor: float, place: float = place) -> str | None:
            return "far" if abs(log(factor)) > abs(log(place)) else None

        flip = nearest(factors, other)
        assert flip is not None
        assert flip[1] == "far"
        assert 0 < abs(log(flip[0])) - abs(log(place)) <= log(NEAR)


def test_of_several_answers_the_nearest_one_is_named() -> None:
    def other(factor: float) -> str | None:
        return None if factor > 0.6 else "middle" if factor > 0.55 else "far"

    flip = nearest(BELOW, other)
    assert flip is not None
    assert flip[1] == "middle"
    assert flip[0] == pytest.approx(0.6, rel=NEAR - 1)
    assert nearest(BELOW, lambda _: None) is None


def test_what_lies_beyond_a_flip_is_the_answer_there_and_not_before() -> None:
    devices = (device("l4", 0.5), device("h100-sxm", 4.0))
    found = ask(*devices, rate=1.0, tpot_s=0.02, ttft_s=2.0)
    flip = next(f for f in found.sensitivity if f.what == "TPOT promise" and f.at < f.now)
    assert flip.answer.startswith("h100-sxm")
    beyond = ask(*devices, rate=1.0, tpot_s=0.8 * flip.at / 1e3, ttft_s=2.0).winner
    before = ask(*devices, rate=1.0, tpot_s=1.3 * flip.at / 1e3, ttft_s=2.0).winner
    assert beyond is not None
    assert before is not None
    assert beyond.estimate.hardware.device.name == "h100-sxm"
    assert before.estimate.hardware.device.name == "l4"
