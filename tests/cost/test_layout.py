"""Spreading a model, and naming number formats: what is accepted and what is refused."""

from __future__ import annotations

import pytest

from ridgeline.cost.hardware import catalogue, find_device
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.errors import ConfigError
from tests.cost.random_setups import DEEPSEEK_V3, LLAMA_8B, device, spec_of

ONE_GROUP = {"n_group": 1, "topk_group": 1}


def test_layouts_count_devices() -> None:
    assert Layout().devices == 1
    assert (Layout(4, 2).devices, Layout(4, 2, replicas=3).all_devices) == (8, 24)
    assert Layout().text == "1 device"
    assert Layout(8, 2, 4, 3).text == "tp 8, pp 2, ep 4, replicas 3"
    assert Layout(16).text == "tp 16"


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (lambda: Layout(tp=0), "tp is 0"),
        (lambda: Layout(replicas=-1), "replicas is -1"),
        (lambda: Layout(tp=4, ep=3), r"ep is 3; it must divide tp \(4\)"),
    ],
)
def test_impossible_layouts(layout: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (
            LLAMA_8B,
            Layout(tp=64),
            "tp is 64; 32 attention heads cannot be divided among 64 ranks, use at most 32",
        ),
        (LLAMA_8B, Layout(pp=33), "pp is 33; the model has only 32 layers"),
        (LLAMA_8B, Layout(tp=2, ep=2), "no experts to divide"),
        (LLAMA_8B | {"intermediate_size": 6}, Layout(tp=8), "6 rows of the feed-forward"),
        (
            DEEPSEEK_V3 | ONE_GROUP | {"n_routed_experts": 8},
            Layout(16, ep=16),
            "8 experts cannot be divided among 16",
        ),
        (DEEPSEEK_V3 | {"moe_intermediate_size": 6}, Layout(tp=8), "6 rows of an expert"),
    ],
)
def test_models_that_cannot_be_split_so(
    config: dict[str, object], layout: Layout, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Setup(spec_of(config), device(), layout)


def test_models_that_can() -> None:
    Layout(tp=16, pp=32).check(spec_of(LLAMA_8B))  # two ranks for each KV head
    Layout(tp=8, ep=8).check(spec_of(DEEPSEEK_V3))
    Layout(tp=3).check(spec_of(LLAMA_8B | {"intermediate_size": 14337}))
    Layout(tp=6, ep=3).check(spec_of(DEEPSEEK_V3 | ONE_GROUP | {"n_routed_experts": 100}))


@pytest.mark.parametrize(
    ("weights", "kv", "expected"),
    [
        ("bf16", "auto", Precision("bfloat16", "plain", "auto")),
        ("bf16", "bf16", Precision("bfloat16", "plain", "auto")),
        ("fp16", "bf16", Precision("float16", "plain", "auto")),
        ("fp32", "auto", Precision("float32", "plain", "auto")),
        ("fp8", "fp8", Precision("bfloat16", "fp8", "fp8")),
        ("int4", "int8", Precision("bfloat16", "int4", "int8")),
    ],
)
def test_the_users_names(weights: str, kv: str, expected: Precision) -> None:
    assert Precision.named(weights, kv) == expected
    assert Precision.named(*expected.names) == expected


@pytest.mark.parametrize(
    ("weights", "kv"), [("fp7", "auto"), ("bf16", "fp7"), ("fp32", "bf16"), ("bf16", "fp32")]
)
def test_unknown_names(weights: str, kv: str) -> None:
    with pytest.raises(ConfigError):
        Precision.named(weights, kv)


def test_what_is_computed_and_what_is_served() -> None:
    assert Precision.named("fp8").compute_dtype == "fp8"
    assert Precision.named("int4").compute_dtype == "bf16"  # unpacked first
    assert Precision.named("fp32").compute_dtype == "fp32"
    assert Precision.named("bf16").served_today
    assert Precision.named("fp8", "fp8").served_today
    assert Precision.named("int4").served_today
    assert Precision.named("int4").fast_on("cpu")
    assert not Precision.named("int4").fast_on(*find_device("a100-80-sxm").traits)
    assert Precision.named("int4").fast_on(*find_device("h200-sxm").traits)
    assert Precision.named("bf16").fast_on("tpu")
    for kv in ("fp8", "int8", "int4"):
        assert Precision.named("bf16", kv).served_today
        assert Precision.named("bf16", kv).fast_on("gpu")
        assert Precision.named("bf16", kv).fast_on("cpu")
    assert Precision.named("int4").weight_bits == 4.125
    every = catalogue().values()
    assert all(one.peak(Precision.named("fp8").compute_dtype) > 0 for one in every)
