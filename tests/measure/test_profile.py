"""Do the kernels of a profile add up, and do they stand beside the right prices?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.build import Built, build
from ridgeline.config import EngineConfig
from ridgeline.cost.roofline import step_cost
from ridgeline.errors import ConfigError
from ridgeline.measure.profile import ClassTime, Phase, Profile, kind_of, profile_steps
from ridgeline.request import Request
from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.step import PricedStep
from tests.captures import captures
from tests.conftest import TEST_DEVICE
from tests.observe.test_time_breakdown import ToldOf
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
    assert by_kind["matmul"].expected_s == pytest.approx(sum(p.expected_s for p in products))
    assert by_kind["matmul"].flops == pytest.approx(sum(p.op.count * p.op.flops for p in products))
    assert by_kind["matmul"].calls >= len(products)
    assert built.engine.is_idle


def test_kernels_come_longest_first(built: Built) -> None:
    seconds = [kernel.seconds for kernel in profiled(built).kernels]
    assert seconds == sorted(seconds, reverse=True)


def test_the_trace_is_what_a_browser_reads(built: Built, tmp_path: Path) -> None:
    profiled(built, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_a_trace_that_cannot_be_written_is_said(built: Built, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        profiled(built, trace=tmp_path)
    assert not list(tmp_path.iterdir())
    assert built.engine.is_idle


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    folder = tmp_path_factory.mktemp("drafting")
    make_tiny_model(folder, head_dim=16)  # the least that a GPU captures

    def make(speculate: str) -> Built:
        return build(
            EngineConfig(
                model=str(folder),
                device=TEST_DEVICE,
                dtype="float32",
                num_blocks=64,
                max_num_seqs=4,
                speculate=speculate.replace("MODEL", str(folder)),
            )
        )

    return make


class Scripted(DraftLengths):
    """In the place of the choice: so many drafts by the number of the step."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(max(counts))
        self.counts, self.number = counts, 0

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        if not decoding:
            return 0
        self.number += 1
        return self.counts[self.number % len(self.counts)]


@captures
def test_each_step_is_priced_with_its_own_drafts(drafting: Callable[[str], Built]) -> None:
    built = drafting("early:1")
    built.engine.scheduler.draft_lengths = Scripted((1, 3))
    priced: list[PricedStep] = []
    built.run_record.listeners.append(ToldOf(priced))
    found = profiled(built, batch=1)
    assert sorted(found.draft_tokens) == [1, 1, 3, 3]
    ran = priced[-found.num_steps :]
    assert [step.plan.shape for step in ran] == list(found.shapes)
    assert found.num_tokens == 3
    expected = sum(step.price.expected_s for step in ran) / len(ran)
    assert found.cost.expected_s == pytest.approx(expected, rel=0.01)
    expected_s = sum(step.drafting_s for step in ran) / len(ran)
    assert found.cost.draft_s == pytest.approx(expected_s, rel=0.01)
    assert found.cost.draft_s > 0


def matmuls(found: Profile) -> ClassTime:
    return next(row for row in found.classes if row.kind == "matmul")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@captures
def test_prices_hold_the_passes_of_a_draft_model(
    drafting: Callable[[str], Built], phase: Phase
) -> None:
    """Of as many layers as the model here: three drafts are three more passes."""
    plain = profiled(drafting("off"), phase=phase, batch=1)
    found = profiled(drafting("draft:MODEL:3"), phase=phase, batch=1)
    assert matmuls(found).flops > 1.5 * matmuls(plain).flops
    assert matmuls(found).calls > 1.5 * matmuls(plain).calls
    assert found.cost.draft_s > 0
    assert set(found.draft_tokens) == ({3} if phase == "decode" else {0})


@captures
def test_right_drafts_that_fill_the_context_are_said(drafting: Callable[[str], Built]) -> None:
    built = drafting("synthetic:1:3")
    steps = (built.resolved.max_model_len - 20) // 3
    with pytest.raises(ConfigError, match="--speculate off"):
        profiled(built, batch=1, num_steps=steps // 2)
    assert built.engine.is_idle


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
