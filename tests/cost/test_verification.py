"""What do checks of drafts cost, and steps by kernels that know their products?"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import (
    AttentionConstants,
    Calibration,
    HostConstants,
    default_calibration,
)
from ridgeline.cost.execution_mode import (
    OWN_ROWS,
    OWN_TOKENS,
    UNTUNED_ROWS,
    most_own_tokens,
    most_tokens_of,
    own_of,
)
from ridgeline.cost.fit import Point, fit, predict
from ridgeline.cost.hardware import find_device
from ridgeline.cost.ops import layer_products, step_ops
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import combine, is_lone, step_cost
from ridgeline.cost.setup import ONE_DEVICE, PLAIN, Precision, Setup
from ridgeline.cost.step_features import MOST_TOGETHER, step_features
from ridgeline.formats import AskedDrafts, read_speculate
from ridgeline.speculation.price import Drafter, DraftPrices, DraftSteps, draft_prices, drafter_of
from ridgeline.step import StepShape
from tests.cost.known_models import LLAMA_3_1B, LLAMA_3_8B

DEVICE = find_device("h200-sxm")
HOST = HostConstants(captured_tokens=512, captured_prompt_tokens=2048, captured_t0=0.6, own_t0=0.3)
OWN = tuple(sorted(layer_products(LLAMA_3_8B, ONE_DEVICE, PLAIN)))


def constants(**changes: object) -> Calibration:
    base = replace(default_calibration(DEVICE), host=HOST)
    return replace(base, **changes)  # type: ignore[arg-type]


def pricer(calibration: Calibration | None = None) -> Pricer:
    return Pricer(Setup(LLAMA_3_8B, DEVICE, calibration=calibration or constants()))


def asked() -> AskedDrafts:
    found = read_speculate("draft:any")
    assert found is not None
    return found


def named(shape: StepShape) -> set[str]:
    return {op.name for op in step_ops(LLAMA_3_8B, shape)}


# ---------------------------------------------------------------------- attention of a check


def test_a_few_tokens_behind_others_are_drafts() -> None:
    assert step_features((), ((5, 200), (1, 90))).is_verification
    assert not step_features((), ((5, 0),)).is_verification  # a prompt
    assert not step_features((), ((5, 200), (5, 0))).is_verification
    assert not step_features((), ((18, 200),)).is_verification
    assert not step_features((), ((1, 200),)).is_verification
    assert step_features((), ((5, 0),)).has_prompts
    assert not step_features((), ((5, 200),)).has_prompts


def test_records_of_the_form_before_are_read() -> None:
    record = constants().to_json()
    for entry in record["attention"].values():
        del entry["verify_token"]
        entry["check_way"] = 0.5
    found = Calibration.from_json(record)
    assert 0 < found.attention_for("bf16").verify_token < 0.2


def test_as_many_as_the_kernels_of_decodes_take() -> None:
    assert "check_attention" in named(((MOST_TOGETHER, 300),))
    assert "prefill_attention" in named(((MOST_TOGETHER + 1, 300),))
    assert "prefill_attention" in named(((4, 0),))


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_each_further_token_adds_a_share_of_a_decode(rows: int) -> None:
    def attention_s(new: int) -> float:
        cost = step_cost(pricer(known).setup, ((new, 1000),) * rows)
        return sum(one.expected_s for one in cost.ops if one.op.kind.endswith("_attention"))

    share = 0.1
    attention = replace(constants().attention_for("bf16"), verify_token=share)
    known = constants(attention={"bf16": attention})
    prices = [attention_s(new) for new in range(1, MOST_TOGETHER + 1)]
    for further, price in enumerate(prices):
        assert price == pytest.approx(prices[0] * (1 + share * further), rel=0.03)


@pytest.mark.parametrize("own", [(), OWN])
@pytest.mark.parametrize("shape", [((4, 100),), ((3, 50), (1, 9)), ((9, 700),) * 3, ((2, 5),) * 9])
def test_a_check_costs_the_same_both_ways(
    shape: StepShape, own: tuple[tuple[int, int], ...]
) -> None:
    fast = pricer(constants(own_products=own))
    slow = step_cost(fast.setup, shape, 7)
    assert fast.seconds(shape, 7) == pytest.approx(slow.expected_s, rel=1e-9)


# ---------------------------------------------------------------------- kernels of our own


def test_kernels_of_our_own_take_norms_and_gates_along() -> None:
    own = Setup(LLAMA_3_8B, DEVICE, calibration=constants(own_products=OWN))
    assert most_own_tokens(own) == OWN_ROWS
    assert most_own_tokens(replace(own, spec=LLAMA_3_1B)) == 0
    assert most_own_tokens(replace(own, precision=Precision("float32"))) == 0
    few, some, many = (
        {one.op.name: one for one in step_cost(own, ((1, 100),) * rows).ops}
        for rows in (OWN_TOKENS, OWN_ROWS, OWN_ROWS + 1)
    )
    assert few["norm"].expected_s == few["norm"].ideal_s < 0.2 * some["norm"].expected_s
    assert some["activation"].expected_s == some["activation"].ideal_s
    assert many["activation"].expected_s > 1.1 * many["activation"].ideal_s
    t0_s = own.constants.matmul_for("bf16").t0_s
    assert some["qkv"].expected_s - few["qkv"].expected_s >= 32 * 0.3 * t0_s
    prompt = {one.op.name: one for one in step_cost(own, ((OWN_TOKENS, 0),)).ops}
    assert prompt["qkv"].expected_s == few["qkv"].expected_s  # products do not know whose rows


def test_sizes_that_were_not_tuned_are_cut_by_a_rule() -> None:
    def of(spec: ModelSpec, **own: Any) -> int:
        return most_own_tokens(Setup(spec, DEVICE, calibration=constants(**own)))

    assert of(LLAMA_3_1B, own_least=1024) == of(LLAMA_3_1B, own_products=OWN, own_least=1024)
    assert of(LLAMA_3_1B, own_least=1024) == UNTUNED_ROWS
    assert of(LLAMA_3_1B, own_least=2049) == 0  # as its hidden states have 2,048 numbers
    assert of(LLAMA_3_8B, own_products=OWN, own_least=1024) == OWN_ROWS
    narrow, bits16 = {(512, 4096), (4096, 4096)}, Precision("bfloat16")
    assert most_tokens_of(narrow, bits16, OWN, 1024) == 0
    assert most_tokens_of(narrow, bits16, [(512, 4096)], 1024) == UNTUNED_ROWS
    assert most_tokens_of(narrow, Precision("float32"), [(512, 4096)], 1024) == 0
    setup = Setup(LLAMA_3_1B, DEVICE, calibration=constants(own_least=1024))
    some, many = (
        {one.op.name: one for one in step_cost(setup, ((1, 100),) * rows).ops}
        for rows in (UNTUNED_ROWS, UNTUNED_ROWS + 1)
    )
    assert some["activation"].expected_s == some["activation"].ideal_s
    assert many["activation"].expected_s > 1.1 * many["activation"].ideal_s


def test_products_of_more_rows_have_a_share_of_their_own() -> None:
    known = constants(own_products=OWN)
    setup = Setup(LLAMA_3_8B, DEVICE, calibration=known)
    sooner = replace(known, host=replace(known.host, own_rows_t0=0.1))
    shape = ((1, 100),) * OWN_ROWS
    before, after = (
        {one.op.name: one.expected_s for one in step_cost(replace(setup, calibration=c), shape).ops}
        for c in (known, sooner)
    )
    gained = 32 * (known.host.captured_t0 - 0.1) * known.matmul_for("bf16").t0_s
    assert before["qkv"] - after["qkv"] == pytest.approx(gained)
    assert before["norm"] == after["norm"]


# ---------------------------------------------------------------------- the host


def test_prompts_alone_wait_for_the_host() -> None:
    host = HostConstants(1e-4, 1e-6, lone_s=1e-3, lone_request_s=1e-5)
    assert combine(host, 0.002, 3, 0)[2] == pytest.approx(0.002)
    assert combine(host, 0.002, 3, 0, is_lone=True) == pytest.approx((0.002, 0.00103, 0.00303))
    least = replace(host, lone_least_s=0.005)
    assert combine(least, 0.002, 3, 0, is_lone=True)[2] == 0.005  # the device is done before
    assert combine(least, 0.007, 3, 0, is_lone=True)[2] == pytest.approx(0.00803)
    assert combine(least, 0.002, 3, 0)[2] == pytest.approx(0.002)
    old = replace(host, lone_s=0.0, lone_request_s=0.0)
    assert combine(old, 1e-5, 3, 0, is_lone=True) == combine(old, 1e-5, 3, 0)
    serial = replace(host, overlapped=False)
    assert combine(serial, 0.002, 3, 0, is_lone=True) == combine(serial, 0.002, 3, 0)
    assert is_lone(step_features((), ((40, 0), (30, 9))))
    assert not is_lone(step_features((), ((40, 0), (1, 9))))
    assert not is_lone(step_features((), ((4, 9),)))


@pytest.mark.parametrize("begin", [1, 2])
@pytest.mark.parametrize(("batch", "context", "num_drafts"), [(1, 100, 4), (8, 500, 1), (3, 1, 2)])
def test_a_draft_takes_as_long_as_its_passes(
    begin: int, batch: int, context: int, num_drafts: int
) -> None:
    draft = Pricer(replace(pricer().setup, spec=LLAMA_3_1B))
    drafts = DraftSteps(draft, begin)
    passes = list(drafts.passes(batch, context, num_drafts))
    whole = sum(draft.pass_seconds_of(draft.features(shape), batch) for shape in passes)
    assert drafts.seconds(batch, context, num_drafts) == pytest.approx(whole, rel=1e-9)
    last_new, last_start = passes[-1][0]
    assert (len(passes), last_new + last_start) == (num_drafts, context + num_drafts)


def test_drafts_and_their_check_are_one_step_of_the_host() -> None:
    idle = pricer(constants(host=replace(HOST, c0_s=1.0)))
    drafts = DraftSteps(Pricer(replace(idle.setup, spec=LLAMA_3_1B)), begin=2)
    prices = DraftPrices(idle, drafts)
    assert drafts.seconds(2, 300, 4) < 0.1
    assert prices.seconds(2, 300, 4) == pytest.approx(1.0)  # all hidden behind the host
    assert prices.seconds(2, 300, 0) == pytest.approx(1.0)
    busy = DraftPrices(pricer(), drafts)
    total = DraftPrices(pricer(), Drafter()).seconds(2, 300, 4) + drafts.seconds(2, 300, 4)
    assert busy.seconds(2, 300, 4) == pytest.approx(total)


def test_a_draft_model_catches_up_in_its_first_pass() -> None:
    setup = Setup(LLAMA_3_8B, DEVICE, calibration=constants())
    drafter = drafter_of(setup, asked(), LLAMA_3_1B)
    draft = Pricer(replace(setup, spec=LLAMA_3_1B))
    first = draft.pass_seconds_of(draft.features(((2, 399),)), 1)
    later = [draft.decode_run([400]).seconds(step) for step in (1, 2)]
    assert drafter.seconds(1, 400, 3) == pytest.approx(first + sum(later))
    assert drafter.seconds(1, 400, 0) == 0.0
    whole = draft_prices(Pricer(setup), asked(), LLAMA_3_1B)
    assert whole.seconds(1, 400, 3) > replace(whole, drafter=Drafter()).seconds(1, 400, 3)


def test_who_looks_drafts_up_does_so_in_every_step() -> None:
    looked_up = pricer(constants(host=replace(HOST, look_s=1e-3)))
    prices = draft_prices(looked_up, AskedDrafts("ngram", "", None), None)
    for k in (0, 4):
        longer_s = prices.seconds(1, 400, k) - replace(prices, drafter=Drafter()).seconds(1, 400, k)
        assert longer_s == pytest.approx(1e-3), k
    assert prices.plain_seconds(1, 400) == replace(prices, drafter=Drafter()).seconds(1, 400, 0)
    others = draft_prices(looked_up, asked(), LLAMA_3_1B)
    assert others.seconds(1, 400, 0) == replace(others, drafter=Drafter()).seconds(1, 400, 0)


# ---------------------------------------------------------------------- what is found of it


STEPS: dict[str, list[StepShape]] = {
    "decode_step": [((1, s),) * b for b in (1, 3, 8, 24, 64, 160) for s in (100, 900)],
    "check_step": [((k, s),) * b for b in (1, 4, 24) for k in (2, 4, 7) for s in (200, 2000)],
    "prefill_step": [((n, 0),) for n in (24, 200, 900, 1900)],
    "mixed_step": [((n, 0), *((1, 500),) * b) for n in (200, 800) for b in (8, 64)],
}
ATTENTION: dict[str, list[StepShape]] = {
    "decode_attention": [((1, s),) * b for b in (1, 8, 64) for s in (100, 1000, 8000)],
    "prefill_attention": [((n, b),) for n in (64, 512, 4096) for b in (0, 4096)],
}


def whole_steps() -> list[Point]:
    return [
        Point(
            what,
            "bf16",
            step_ops(LLAMA_3_1B, shape),
            0.0,
            len(shape),
            f"{what} {number}",
            captured=True,
            own=own_of(step_features((), shape), OWN_ROWS),
            is_lone=what in ("prefill_step", "mixed_step"),
        )
        for what, many in STEPS.items()
        for number, shape in enumerate(many)
    ]


def single_operators() -> list[Point]:
    found: list[Point] = []
    for tokens in (1, 4, 16, 64, 256, 1024):
        for op in step_ops(LLAMA_3_1B, ((1, 0),) * tokens):
            if not op.kind.endswith("attention") and op.name != "final_norm":
                one = (replace(op, count=1),)
                found.append(Point(op.kind, "bf16", one, 0.0, label=f"{op.name} {tokens}"))
    for what, many in ATTENTION.items():
        for number, shape in enumerate(many):
            (op,) = (op for op in step_ops(LLAMA_3_1B, shape) if op.kind == what)
            one = (replace(op, count=1),)
            found.append(Point(what, "bf16", one, 0.0, label=f"{what} {number}"))
    return found


def test_what_steps_show_of_checks_and_of_our_own_kernels_is_found() -> None:
    host = replace(HOST, c0_s=3e-4, c1_s=1e-6, captured_t0=0.7, own_t0=0.2, own_rows_t0=0.4)
    attention = AttentionConstants(0.9, 4e-6, 0.5, 0.25, 1.2e-5, verify_token=0.3)
    truth = constants(
        host=replace(host, lone_s=9e-4, lone_request_s=2e-5, lone_least_s=3e-3),
        attention={"bf16": attention},
    )
    rng = Random(3)
    print("seed 3")
    seen = [
        replace(point, seconds=predict(point, DEVICE, truth) * rng.uniform(0.99, 1.01))
        for point in (*whole_steps(), *single_operators())
    ]
    found = fit(seen, DEVICE, HostConstants(1e-5, 1e-7)).calibration
    assert found.host.own_t0 == pytest.approx(0.2, rel=0.3)
    assert found.host.own_rows_t0 == pytest.approx(0.4, rel=0.3)
    assert found.host.lone_least_s == pytest.approx(3e-3, rel=0.05)
    assert found.host.lone_s == pytest.approx(9e-4, rel=0.2)
    assert found.attention_for("bf16").verify_token == pytest.approx(0.3, rel=0.3)
