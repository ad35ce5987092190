"""What is done before the first request is never done again, and leaves no trace."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from ridgeline.attention.paged import PagedAttention
from ridgeline.executor import warm_up
from ridgeline.executor.decode_graphs import Sampling
from ridgeline.executor.drafter import Drafting
from ridgeline.executor.local import LocalExecutor
from ridgeline.executor.warm_up import WarmUp
from ridgeline.layers.decoder import Decoder
from ridgeline.request import SamplingParams
from ridgeline.speculation.prompt_lookup import NGram
from tests.executor.rig import Host, alone, device, make_decoder, make_executor

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.5, seed=3)


@cache
def decoder() -> Decoder:
    return make_decoder(
        seed=2, attention=PagedAttention(), hidden_size=24, head_dim=16, num_hidden_layers=2
    )


def make(**changes: Any) -> LocalExecutor:
    return make_executor(decoder(), max_captured_rows=4, max_captured_tokens=16, **changes)


def serve(executor: LocalExecutor) -> None:
    """Prompts, then prompts beside decodes, then decodes, all as `alone` has them."""
    host = Host(executor)
    kinds = {"a": GREEDY, "b": GREEDY, "c": WARM}
    for i, (name, sampling) in enumerate(kinds.items()):
        host.add(name, range(i, i + 7), sampling)
    host.run({"a": 7})
    host.run({"a": 1, "b": 7})
    host.decode(["a", "b"], 3)
    host.run({"a": 1, "b": 1, "c": 7})
    host.decode(["a", "c"], 3)
    for name, sampling in kinds.items():
        got = host.output(name)
        assert got == alone(decoder(), host.held[name].prompt, sampling, len(got), name)
        host.finish(name)
    host.run({})


def test_no_step_is_captured_that_was_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make()
    warm = WarmUp(executor, max_tokens=24)
    warm.run(1e9)
    assert not warm.one()
    assert warm.text() == "11 of 11 foreseeable steps"
    assert executor.num_rows == 0

    def never(*args: Any) -> None:
        raise AssertionError("captured again")

    for graphs in (executor.decode_graphs, executor.mixed_graphs):
        monkeypatch.setattr(graphs, "_capture", never)
    serve(executor)


def test_numbers_of_drafts_are_warmed_up_in_the_order_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ngram = NGram(device().torch_device, 4, 4)
    executor = make(drafting=Drafting(ngram, max_verified_tokens=16))
    assert executor.drafter is not None
    graphs = executor.drafter.graphs
    prepared: list[tuple[int, int, Sampling]] = []
    monkeypatch.setattr(graphs, "prepare", lambda *key: prepared.append(key))
    WarmUp(executor, max_tokens=24, draft_tokens=(3, 1, 4)).run(1e9)
    for bucket, room in ((4, 3), (1, 4)):  # four rows check four tokens each at most
        wanted = [k for k in (3, 1, 4) if k <= room]
        for sampling in (Sampling.GREEDY, Sampling.TEMPERATURES):
            found = [k for b, k, how in prepared if (b, how) == (bucket, sampling) and k]
            assert found == wanted
            assert (bucket, 0, sampling) in prepared


def test_half_a_warm_up_does_no_harm() -> None:
    executor = make()
    warm = WarmUp(executor, max_tokens=24, max_mixed=8)
    warm.run(0.0)
    assert warm.text() == "0 of 11 foreseeable steps"
    for _ in range(3):
        assert warm.one()
    serve(executor)
    while warm.one():  # in idle moments
        pass
    serve(executor)


def test_the_bound_of_mixed_steps_is_that_of_what_is_foreseen() -> None:
    executor = make_executor(decoder(), max_captured_rows=4, max_captured_tokens=128)
    num_all = sum(1 for _ in warm_up.foreseen(executor, 512, None))
    num_bounded = sum(1 for _ in warm_up.foreseen(executor, 512, 60))
    assert num_all - num_bounded == 2  # 64 is the largest bucket that is needed: 96 and 128 go


def test_what_fails_is_said_and_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make()

    def fails(*args: Any) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(executor.decode_graphs, "_capture", fails)
    warm = WarmUp(executor, max_tokens=24)
    warm.run(1e9)
    assert not warm.one()
    assert "warm-up was given up" in caplog.text
    assert "no memory left" in caplog.text
