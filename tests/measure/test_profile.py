"""Do the kernels of a profile add up, and do they stand beside the right prices?"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.build import Built, build
from ridgeline.config import EngineConfig
from ridgeline.cost.roofline import step_cost
from ridgeline.errors import ConfigError
from ridgeline.measure.profile import Phase, Profile, kind_of, profile_steps
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return build(
        EngineConfig(
            model=str(folder), device=TEST_DEVICE, dtype="float32", num_blocks=64, max_num_seqs=4
        )
    )


def profiled(built: Built, **changed: Any) -> Profile:
    asked: dict[str, Any] = {"phase": "decode", "batch": 2, "num_input": 20, "num_steps": 4}
    return profile_steps(built, built.pricer.setup, **asked | changed)


@pytest.mark.parametrize(("phase", "batch", "new"), [("decode", 3, 1), ("prefill", 1, 20)])
def test_classes_add_up_and_have_prices(built: Built, phase: Phase, batch: int, new: int) -> None:
    found = profiled(built, phase=phase, batch=batch)
    assert len(found.shape) == batch
    assert all(tokens == new for tokens, _ in found.shape)
    assert sum(row.seconds for row in found.classes) == pytest.approx(found.kernels_s)
    assert 0 < found.kernels_s < 2 * found.wall_s
    by_kind = {row.kind: row for row in found.classes}
    assert {"matmul", "attention", "elementwise", "embedding"} <= by_kind.keys()
    assert by_kind["matmul"].seconds > 0
    assert by_kind["attention"].seconds > 0
    cost = step_cost(built.pricer.setup, found.shape)
    products = [price for price in cost.ops if price.op.kind == "matmul"]
    assert by_kind["matmul"].expected_s == sum(price.expected_s for price in products)
    assert by_kind["matmul"].flops == sum(p.op.count * p.op.flops for p in products)
    assert by_kind["matmul"].calls >= len(products)
    assert built.engine.is_idle


def test_kernels_come_longest_first(built: Built) -> None:
    seconds = [kernel.seconds for kernel in profiled(built).kernels]
    assert seconds == sorted(seconds, reverse=True)


def test_the_trace_is_what_a_browser_reads(built: Built, tmp_path: Path) -> None:
    profiled(built, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"batch": 5}, "max-num-seqs"),
        ({"num_input": 10**6}, "context"),
        ({"num_steps": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_run_is_said(built: Built, changed: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        profiled(built, **changed)
    assert built.engine.is_idle


def test_an_operator_within_attention_is_attention() -> None:
    outer = SimpleNamespace(name="aten::scaled_dot_product_attention", cpu_parent=None)
    product = SimpleNamespace(name="aten::bmm", cpu_parent=outer)
    assert kind_of(product) == "attention"
    assert kind_of(SimpleNamespace(name="aten::bmm", cpu_parent=None)) == "matmul"
    copy = SimpleNamespace(name="aten::copy_", cpu_parent=None)
    assert kind_of(copy) == "elementwise"
