"""Captured steps sample every row themselves, and what they count follows the rows."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from ridgeline.attention.paged import PagedAttention
from ridgeline.executor import local
from ridgeline.executor.local import LocalExecutor
from ridgeline.kernels.sample_rows import COUNTS
from ridgeline.layers.decoder import Decoder
from ridgeline.request import SamplingParams
from ridgeline.sampling import controls
from tests.executor.rig import VOCAB, Host, alone, make_decoder, make_executor, make_scorer

PENALISED = SamplingParams(
    seed=6, repetition_penalty=1.4, frequency_penalty=0.4, presence_penalty=0.2, max_tokens=60
)
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=3, temperature=1.5),
    "filtered": SamplingParams(seed=4, top_k=20, top_p=0.9, min_p=0.02),
    "nucleus": SamplingParams(seed=8, top_p=0.7, temperature=1.3),
    "penalised": PENALISED.replace(temperature=0.0),
    "all": PENALISED.replace(top_k=30, logit_bias={3: 4.0, 9: -100.0, 50: 1.0}),
    "biased": SamplingParams(
        seed=5, logit_bias={3: 4.0, 9: -100.0}, min_tokens=6, stop_token_ids=[3]
    ),
}


@cache
def decoder() -> Decoder:
    return make_decoder(
        seed=2, attention=PagedAttention(), hidden_size=24, head_dim=16, num_hidden_layers=2
    )


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def start(kinds: dict[str, SamplingParams], captured: int = 8) -> Host:
    """Requests with their first token each; from here on all steps are captured."""
    host = Host(make_executor(decoder(), max_captured_rows=captured))
    for i, (name, sampling) in enumerate(kinds.items()):
        host.add(name, prompt(i, 5 + i), sampling)
    host.run({name: len(host.held[name].prompt) for name in kinds})
    return host


def check_output(host: Host, name: str, sampling: SamplingParams) -> None:
    got = host.output(name)
    want = alone(decoder(), host.held[name].prompt, sampling, len(got), name)
    assert got[: len(want)] == want, name  # the reference ends at a stop token


def counts_of(executor: LocalExecutor, name: str) -> torch.Tensor:
    row = executor._rows.get(name)
    assert row is not None
    return executor._rows.counts.counts_PV[row.sampling.counts_slot].cpu()


def histogram(host: Host, name: str) -> torch.Tensor:
    return torch.bincount(torch.tensor(host.output(name)), minlength=VOCAB)


@pytest.fixture
def no_sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and from then on nothing may be sampled outside of a captured step."""

    def never(*args: Any) -> None:
        raise AssertionError("sampled outside of the captured step")

    return lambda: monkeypatch.setattr(local, "sample", never)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_kind_is_sampled_inside(in_flight: int, no_sampler: Any) -> None:
    host = start(KINDS)
    no_sampler()
    host.decode(list(KINDS), 9, in_flight)
    host.decode(["filtered", "all"], 3, in_flight)
    host.decode(["greedy", "seeded"], 2, in_flight)  # by the other graphs
    host.decode(["all", "biased", "seeded"], 3, in_flight)
    for name, sampling in KINDS.items():
        check_output(host, name, sampling)


def test_counts_are_those_of_the_tokens() -> None:
    host = start({"a": PENALISED, "b": KINDS["all"], "c": KINDS["greedy"]})
    host.decode(["a", "b", "c"], 7)
    for name in ("a", "b"):
        assert torch.equal(counts_of(host.executor, name), histogram(host, name).int())
    host.preempt("a")
    host.decode(["b", "c"], 2)
    host.run({"a": len(host.held["a"].tokens), "b": 1})
    host.finish("b")
    host.add("d", prompt(9, 4), PENALISED)
    host.run({"d": 4, "a": 1})  # where the counts of b were
    host.decode(["d", "a"], 5)
    for name in ("a", "d"):
        assert torch.equal(counts_of(host.executor, name), histogram(host, name).int())
        check_output(host, name, PENALISED)


def test_padding_and_captures_count_for_nobody() -> None:
    kinds = {f"r{i}": PENALISED.replace(seed=i) for i in range(5)}
    host = start(kinds)
    host.decode(list(kinds), 2)
    host.decode(["r3", "r1", "r4"], 2)  # a bucket of four: the rows of the step before are there
    host.decode(["r0"], 1)
    rows, held = host.executor._rows, []
    for name in kinds:
        assert torch.equal(counts_of(host.executor, name), histogram(host, name).int())
        row = rows.get(name)
        assert row is not None
        held.append(row.sampling.counts_slot)
    others = [slot for slot in range(len(rows.counts.counts_PV)) if slot not in held]
    assert others
    assert not rows.counts.counts_PV[others].any()


def test_counts_that_move_are_found_again() -> None:
    kinds = {"r0": KINDS["filtered"]} | {f"r{i}": PENALISED.replace(seed=i) for i in range(1, 4)}
    host = start(kinds, captured=4)
    host.decode(list(kinds), 3)
    before = host.executor._rows.counts.counts_PV
    for i in range(4, 7):  # one more than there is room for
        host.add(f"r{i}", prompt(i, 6), PENALISED.replace(seed=i))
    host.run({"r4": 6, "r5": 6, "r6": 6})
    host.decode(["r1", "r6", "r5"], 4)
    host.decode(["r0", "r2", "r4"], 4)
    assert host.executor._rows.counts.counts_PV is not before
    for name in ("r1", "r2", "r4", "r5", "r6"):
        assert torch.equal(counts_of(host.executor, name), histogram(host, name).int())
        check_output(host, name, host.held[name].sampling)


def test_too_many_biases_are_sampled_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "MAX_ENTRIES", 2)
    host = start({"all": KINDS["all"], "greedy": KINDS["greedy"], "nucleus": KINDS["nucleus"]})
    host.decode(["all", "nucleus"], 3)
    host.decode(["greedy", "nucleus"], 3)
    host.decode(["all", "nucleus", "greedy"], 3)
    assert torch.equal(counts_of(host.executor, "all"), histogram(host, "all").int())
    for name in ("all", "greedy", "nucleus"):
        check_output(host, name, KINDS[name])


def test_bans_that_are_over_leave_the_other_graphs() -> None:
    host = start({"biased": SamplingParams(seed=5, min_tokens=3, stop_token_ids=[3])})
    modes = []
    graphs = host.executor._graphs
    assert graphs is not None
    for _ in range(4):
        host.decode(["biased"], 1)
        modes.append({at[2].value for at in graphs._graphs})
    assert modes == [{"controlled"}] * 2 + [{"controlled", "temperatures"}] * 2


@pytest.mark.parametrize("others", [{}, {"top_k": 9, "frequency_penalty": 0.3}])
def test_logprobs_of_captured_steps(others: dict[str, Any], no_sampler: Any) -> None:
    sampling = SamplingParams(seed=9, temperature=2.0, logprobs=4, **others)
    host = start({"silent": KINDS["filtered"] if others else KINDS["greedy"], "asks": sampling})
    no_sampler()
    results = [host.run({"silent": 1, "asks": 1}) for _ in range(5)]
    tokens = host.held["asks"].tokens
    table = make_scorer(decoder()).logits(tokens).double().log_softmax(-1)
    for step, result in enumerate(results):
        (record,) = result.logprobs["asks"]
        row = table[len(host.held["asks"].prompt) + step]
        best = row.argsort(descending=True).tolist()
        assert record.token_id == tokens[len(host.held["asks"].prompt) + 1 + step]
        assert record.logprob == pytest.approx(row[record.token_id].item(), abs=1e-3)
        assert [token for token, _ in record.top] == best[:4]
        assert record.rank == best.index(record.token_id) + 1
        assert "silent" not in result.logprobs


def test_what_is_sent_names_the_counts() -> None:
    host = start({"a": PENALISED, "b": KINDS["greedy"]})
    host.decode(["b", "a"], 1)
    graphs, row = host.executor._graphs, host.executor._rows.get("a")
    assert graphs is not None
    assert row is not None
    sent = graphs._controls._controls
    assert sent is not None
    assert sent.whole_5R[COUNTS].tolist() == [-1, row.sampling.counts_slot, *[-1] * 6]
