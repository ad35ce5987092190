"""Are steps that nobody runs priced with the launches of an engine that would run them?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.captured import as_served, can_capture, captured_chunk
from ridgeline.cost.constants import Calibration, HostConstants, default_calibration
from ridgeline.cost.execution_mode import is_captured
from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Precision, Setup
from ridgeline.cost.step_features import attention_kinds, step_features
from ridgeline.costing import engine_host
from ridgeline.formats import WEIGHT_FORMATS
from ridgeline.step import StepShape
from tests.cost.known_models import DEEPSEEK_V3, LLAMA_3_1B, LLAMA_3_8B
from tests.planner.exhaustive import EXPERTS
from tests.test_resolve import GB, LLAMA_8B, FakeDevice, done

H200 = find_device("h200-sxm")
MEASURED = HostConstants(c0_s=1e-4, per_launch_s=2e-4)  # as a record has it: of no engine
STEPS: tuple[StepShape, ...] = (
    ((1, 100),),
    ((1, 100),) * 256,
    ((500, 0),),
    ((2048, 0),),
    ((1, 100),) * 100 + ((1500, 0),),
    ((3000, 0),),
    ((8192, 0),),
)


def record() -> Calibration:
    return replace(default_calibration(H200), origin="calibrated", host=MEASURED)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_of_a_gpu_are_captured_as_the_engine_does(dtype: str) -> None:
    resolved, _ = done(LLAMA_8B, FakeDevice("cuda:0", 80 * GB), dtype=dtype)
    engine = engine_host(MEASURED, resolved)
    served = as_served(record(), LLAMA_3_8B, H200, Precision(dtype))
    assert served is not None
    kinds = tuple(attention_kinds(LLAMA_3_8B))
    captured = [is_captured(served.host, step_features(kinds, step)) for step in STEPS]
    assert captured == [is_captured(engine, step_features(kinds, step)) for step in STEPS]
    assert set(captured) == {True, False}
    assert (served.host.c0_s, served.host.per_launch_s) == (1e-4, 2e-4)


def test_a_step_is_one_launch() -> None:
    """What a launch costs is measured; 261 of them were added to each step of an 8B model."""
    bare = Pricer(Setup(LLAMA_3_8B, H200, calibration=record()))
    served = as_served(record(), LLAMA_3_8B, H200, Precision())
    there = Pricer(Setup(LLAMA_3_8B, H200, calibration=served))
    assumed = Pricer(Setup(LLAMA_3_8B, H200))
    step = ((1, 500),)
    assert bare.seconds(step) > 0.04
    assert there.seconds(step) == pytest.approx(assumed.seconds(step), rel=0.1)


@pytest.mark.parametrize("spec", [EXPERTS, DEEPSEEK_V3])
@pytest.mark.parametrize(("weights", "is_captured"), [("plain", True), ("int8-outliers", False)])
def test_steps_with_experts_are_where_their_products_are_grouped(
    spec: ModelSpec, weights: str, is_captured: bool
) -> None:
    """Prompts of latent attention are not: their kernels take no work that is fixed."""
    served = as_served(record(), spec, H200, Precision(weights=weights))
    assert served is not None
    assert (served.host.captured_tokens > 0) is is_captured
    assert (served.host.captured_prompt_tokens > 0) is (is_captured and spec is EXPERTS)
    assert can_capture(spec, "cpu", WEIGHT_FORMATS[weights]) is is_captured
    assert not can_capture(spec, "cpu", WEIGHT_FORMATS[weights], "float32")


def test_longer_prompts_of_a_small_model_are() -> None:
    served = as_served(record(), LLAMA_3_1B, H200, Precision())
    assert served is not None
    assert served.host.captured_prompt_tokens > 2048


@pytest.mark.parametrize(
    ("precision", "rows"),
    [
        (Precision("bfloat16"), 64),
        (Precision("bfloat16", kv="int8"), 64),
        (Precision("bfloat16", kv="int4"), 0),
        (Precision("float32"), 0),
    ],
)
def test_a_cpu_records_what_its_kernels_do_from_end_to_end(precision: Precision, rows: int) -> None:
    cpu = replace(H200, kind="cpu")
    served = as_served(record(), LLAMA_3_8B, cpu, precision)
    assert served is not None
    assert (served.host.captured_tokens, served.host.captured_prompt_tokens) == (rows, 0)


def test_assumed_constants_stay_as_they_are() -> None:
    assert as_served(None, LLAMA_3_8B, H200, Precision()) is None


@pytest.mark.parametrize(
    ("least", "most", "taken"),
    [(584, 8192, 640), (570, 8192, 512), (584, 512, 512), (3, 64, 8), (584, 0, 584)],
)
def test_steps_with_prompts_are_as_long_as_captured_ones(least: int, most: int, taken: int) -> None:
    assert captured_chunk(least, most) == taken
