"""How much of what a step reads is still in the last cache, and what do the prices make of it?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ridgeline.architectures import read_spec
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import Calibration, HostConstants, default_calibration
from ridgeline.cost.execution_mode import (
    LEVELS,
    SINGLE,
    ExecutionModes,
    Footprint,
    Own,
    sent_tokens,
    still_there,
)
from ridgeline.cost.hardware import find_device
from ridgeline.cost.ops import step_ops
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import step_cost
from ridgeline.cost.setup import PLAIN, Setup
from ridgeline.cost.step_features import attention_kinds, step_features
from ridgeline.measure.models import config
from ridgeline.step import StepShape
from tests.cost.known_models import LLAMA_3_8B

DEVICE = find_device("h200-sxm")
SMALL = read_spec(config(384, 6, 6, 2, 1152, 4096))
HOST = HostConstants(captured_tokens=512, captured_prompt_tokens=2048, warm_t0=0.5)


def known(**changes: Any) -> Calibration:
    return replace(default_calibration(DEVICE), host=replace(HOST, **changes))


def warm_of(spec: ModelSpec, shape: StepShape) -> float:
    setup = Setup(spec, DEVICE, calibration=known())
    features = step_features(tuple(attention_kinds(setup.spec)), shape)
    return ExecutionModes(setup).of(features).warm


def test_parts_of_what_does_not_fit_are_driven_out() -> None:
    assert still_there(0.0, 100) == still_there(50.0, 100) == 1.0
    assert still_there(125.0, 100) == still_there(1e9, 100) == still_there(0.0, 0) == 0.0
    between = [still_there(float(read), 100) for read in range(50, 126)]
    assert between == sorted(between, reverse=True)
    assert {share * LEVELS % 1 for share in between} == {0.0}


def test_a_step_reads_weights_keys_and_values() -> None:
    shape = ((1, 999),) * 3
    features = step_features(tuple(attention_kinds(SMALL)), shape)
    found = Footprint.of(SMALL, PLAIN)
    ops = step_ops(SMALL, shape)
    assert found.weight_bytes == sum(op.count * op.weight_bytes for op in ops)
    cached = sum(op.count * op.kv_bytes for op in ops if op.kind == "decode_attention")
    assert [size * features.attention[0].decode_keys for size in found.key_bytes] == [cached]


def test_small_models_with_few_requests_are_warm() -> None:
    assert warm_of(SMALL, ((1, 300),)) == 1.0
    assert 0.0 < warm_of(SMALL, ((1, 300),) * 20) < 1.0
    assert warm_of(SMALL, ((1, 300),) * 60) == 0.0
    assert warm_of(SMALL, ((3, 300),)) == 1.0
    assert warm_of(LLAMA_3_8B, ((1, 1),)) == 0.0


def test_only_captured_steps_are() -> None:
    setup = Setup(SMALL, DEVICE, calibration=known(captured_tokens=0))
    features = step_features(tuple(attention_kinds(SMALL)), ((1, 300),))
    assert ExecutionModes(setup).of(features) is SINGLE
    assert ExecutionModes(replace(setup, calibration=known())).of(features).own is Own.NONE


@pytest.mark.parametrize("rows", [1, 20, 60])
@pytest.mark.parametrize("new", [1, 4])
def test_prices_agree_however_warm_a_step_is(rows: int, new: int) -> None:
    pricer = Pricer(Setup(SMALL, DEVICE, calibration=known()))
    shape = ((new, 300),) * rows
    assert pricer.seconds(shape) == pytest.approx(pricer.cost(shape).expected_s, rel=1e-9)
    if new == 1:
        assert pricer.decode_run([300] * rows).seconds(0) == pricer.seconds(shape)
    cold = Pricer(Setup(SMALL, DEVICE, calibration=known(warm_t0=1.0)))
    is_cold = warm_of(SMALL, shape) == 0.0
    assert (pricer.seconds(shape) == cold.seconds(shape)) == is_cold


@pytest.mark.parametrize(
    ("num_tokens", "sent"),
    [(9, 16), (547, 640), (640, 640), (641, 768), (1990, 1990), (3000, 3000)],
)
def test_a_captured_step_with_prompts_computes_the_size_it_was_captured_in(
    num_tokens: int, sent: int
) -> None:
    """Attention takes what there is; of sizes that are not captured nothing is added."""
    host = {"captured_tokens": 512, "captured_prompt_tokens": 2000}
    setup = Setup(LLAMA_3_8B, DEVICE, calibration=known(**host))
    shape = ((num_tokens - 3, 0), *((1, 100),) * 3)
    features = step_features(tuple(attention_kinds(setup.spec)), shape)
    mode = ExecutionModes(setup).of(features)
    assert sent_tokens(setup.constants.host, mode, features) == sent
    cost, same = step_cost(setup, shape), {}
    for one in step_cost(setup, ((sent - 3, 0), *((1, 100),) * 3)).ops:
        if one.op.m == sent:
            same[one.op.name] = one
    assert Pricer(setup).seconds(shape) == pytest.approx(cost.expected_s, rel=1e-9)
    for one in cost.ops:
        if one.op.kind == "matmul" and one.op.m == num_tokens:
            other = same.pop(one.op.name)
            assert one.expected_s == pytest.approx(other.expected_s, rel=1e-9)
            assert one.ideal_s <= other.ideal_s
    assert not {"qkv", "attention_out", "gate_up", "down"} & set(same), "all were looked at"
    plain = replace(setup, calibration=known(captured_tokens=0, captured_prompt_tokens=0))
    features = step_features(tuple(attention_kinds(setup.spec)), shape)
    assert (
        sent_tokens(plain.constants.host, ExecutionModes(plain).of(features), features)
        == num_tokens
    )


@pytest.mark.parametrize("shape", [((1, 100),) * 33, ((5, 100),) * 33])
def test_decodes_and_checks_are_priced_by_what_there_is(shape: StepShape) -> None:
    """Their sizes lie closer together, and calibrations measure some between them."""
    setup = Setup(LLAMA_3_8B, DEVICE, calibration=known())
    features = step_features(tuple(attention_kinds(setup.spec)), shape)
    mode = ExecutionModes(setup).of(features)
    assert mode.captured
    assert sent_tokens(setup.constants.host, mode, features) == features.num_tokens


def test_what_is_part_of_products_is_a_set() -> None:
    """An enum's value that is an empty tuple is lost by Python 3.11.2."""
    assert [set(own.value) for own in Own] == [set(), {"activation"}, {"norm", "activation"}]
    assert all(isinstance(own.value, frozenset) for own in Own)
