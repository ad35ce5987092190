"""Do the cases call what their operators say, over inputs of the sizes that they say?"""

from __future__ import annotations

import pytest
import torch

from ridgeline.cost.ops import step_ops
from ridgeline.cost.setup import Precision
from ridgeline.devices import open_device
from ridgeline.measure.models import grid_for
from ridgeline.measure.operators import (
    Bench,
    Case,
    attention_cases,
    matmul_series,
    open_attention,
    ragged,
    shapes,
    stream_series,
)
from ridgeline.measure.stopwatch import CpuStopwatch, open_stopwatch, typical
from tests.measure.small import SAMPLE, SMALL


@pytest.fixture(params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(open_device("cpu"), request.param, 1 << 14)


def run(case: Case) -> object:
    with torch.inference_mode():
        case.call(1)
        return case.call(0)


def test_products_have_the_shape_of_their_operator(bench: Bench) -> None:
    names = set()
    for series in matmul_series(bench, SAMPLE.spec, SMALL.tokens):
        assert [case.ops[0].m for case in series] == list(SMALL.tokens)
        for case in series:
            (op,) = case.ops
            found = run(case)
            assert isinstance(found, torch.Tensor)
            assert found.shape == (op.m, op.n)
            assert found.dtype == bench.torch_dtype
            names.add(op.name)
    assert names == {"qkv", "attention_out", "gate_up", "down", "lm_head"}


def test_every_pass_over_memory_is_there(bench: Bench) -> None:
    names = set()
    for series in stream_series(bench, SAMPLE.spec, SMALL.tokens):
        for case in series:
            run(case)
            assert case.dtype == bench.precision.short_dtype
            assert case.ops[0].count == 1
            names.add(case.ops[0].name)
    assert names == {"norm", "rope_and_cache", "activation", "embedding", "sampling"}


def test_weights_take_turns(bench: Bench) -> None:
    copies = bench.copies(32, 32)
    assert 1 < len(copies) <= 64
    assert sum(w.numel() * w.element_size() for w in copies) >= bench.cold_bytes
    assert len({w.data_ptr() for w in copies}) == len(copies)
    assert len(bench.copies(1 << 10, 1 << 5)) == 1


def test_attention_runs_every_shape_of_the_grid(bench: Bench) -> None:
    opened = open_attention(bench, SMALL.attention[0], SMALL)
    cases = list(attention_cases(opened, SMALL))
    assert len(cases) == len(shapes(SMALL))
    for case, (what, shape, _) in zip(cases, shapes(SMALL), strict=True):
        found = run(case)
        assert isinstance(found, torch.Tensor)
        assert found.shape == (sum(new for new, _ in shape), 4, 8)
        assert torch.isfinite(found).all()
        assert case.what == what
        wanted = {"mixed_attention": {"decode_attention", "prefill_attention"}}
        assert {op.kind for op in case.ops} == wanted.get(what, {what})
        assert all(op.mixed == (what == "mixed_attention") for op in case.ops)


def test_what_does_not_fit_is_left_out(bench: Bench) -> None:
    opened = open_attention(bench, SMALL.attention[0], SMALL)
    assert opened.fits(((1, 10),))
    assert not opened.fits(((1, 16 * opened.cache.num_blocks),))


def test_ragged_contexts_have_their_mean_and_their_spread() -> None:
    shape = ragged(5, 100, 0.2)
    assert [before + 1 for _, before in shape] == [80, 90, 100, 110, 120]
    assert ragged(1, 64, 0.5) == ((1, 63),)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("is_quick", [False, True])
def test_grids_cover_the_ridge_and_every_class(kind: str, is_quick: bool) -> None:
    grid = grid_for(kind, is_quick=is_quick)
    assert grid.tokens[0] == 1
    assert len([n for n in grid.tokens if 64 <= n <= 512]) >= 2
    assert {what for what, _, _ in shapes(grid)} == {
        "decode_attention",
        "prefill_attention",
        "mixed_attention",
    }
    for sample in grid.samples:
        ops = step_ops(sample.spec, ((1, 5),), precision=Precision())
        assert {op.kind for op in ops} >= {"matmul", "elementwise", "sampling"}
        assert sample.prefills
        assert sample.decodes
    assert any(sample.mixes for sample in grid.samples)


def test_a_stopwatch_times_as_often_as_there_is_time() -> None:
    calls: list[int] = []
    times = CpuStopwatch(1).times(calls.append, 0.0)
    assert len(times) == 3
    assert calls == [0, 1, 2, 3]  # the first one warms up
    assert all(seconds >= 0 for seconds in times)
    assert isinstance(open_stopwatch(torch.device("cpu"), 2), CpuStopwatch)


def test_typical_is_the_lower_quartile() -> None:
    assert typical([9.0, 1.0, 2.0, 3.0, 100.0]) == 2.0
    assert typical([4.0]) == 4.0
