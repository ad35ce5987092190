from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from ridgeline.errors import EngineFault, InternalError
from ridgeline.executor.local import LocalExecutor
from ridgeline.layers.decoder import Decoder
from ridgeline.request import SamplingParams, TokenLogprobs
from ridgeline.step import NewRequest, ScheduledRequest, StepPlan
from tests.executor.rig import VOCAB, Host, alone, make_decoder, make_executor, make_scorer

GREEDY = SamplingParams(temperature=0.0, max_tokens=50)
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SamplingParams(seed=3, temperature=1.5),
    "filtered": SamplingParams(seed=4, top_k=20, top_p=0.9, min_p=0.02),
    "penalised": SamplingParams(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "biased": SamplingParams(
        seed=5, logit_bias={3: 4.0, 9: -100.0}, min_tokens=6, stop_token_ids=[3]
    ),
}


@cache
def decoder() -> Decoder:
    return make_decoder()


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def expected(name: str, tokens: list[int], num: int) -> list[int]:
    return alone(decoder(), tokens, KINDS[name], num, name)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_one_request_equals_the_reference(name: str, in_flight: int) -> None:
    host = Host(make_executor(decoder()))
    tokens = prompt(1, 21)
    host.add(name, tokens, KINDS[name])
    host.run({name: 21})
    host.decode([name], 11, in_flight)
    want = expected(name, tokens, 12)
    assert host.output(name)[: len(want)] == want  # the reference ends at a stop token


@pytest.mark.parametrize("in_flight", [1, 2])
def test_all_kinds_in_one_batch_with_chunks_and_joins(in_flight: int) -> None:
    host = Host(make_executor(decoder()))
    prompts = {name: prompt(i, 5 + 7 * i) for i, name in enumerate(KINDS)}
    for name, tokens in prompts.items():
        host.add(name, tokens, KINDS[name])
    names = list(KINDS)
    host.run({names[0]: 5, names[1]: 6})
    host.run({names[0]: 1, names[1]: 6, names[2]: 1})
    host.run({names[2]: 17, names[0]: 1, names[1]: 1})
    host.decode(names[:3], 2, in_flight)
    host.run({names[3]: 3, names[4]: 32, names[1]: 1})
    host.run({names[4]: 1, names[3]: 23, names[0]: 1})
    host.decode([names[3], names[4], names[0]], 4, in_flight)
    host.decode(names, 5, in_flight)
    for name in names:
        got = host.output(name)
        want = expected(name, prompts[name], len(got))
        assert got[: len(want)] == want, name
        assert len(got) > 6


@pytest.mark.parametrize("name", KINDS)
def test_preempted_and_resumed_with_its_output(name: str) -> None:
    host = Host(make_executor(decoder()))
    tokens = prompt(2, 10)
    host.add(name, tokens, KINDS[name])
    host.add("other", prompt(3, 9), GREEDY)
    host.run({name: 10, "other": 9})
    host.decode([name, "other"], 5)
    host.preempt(name)
    host.decode(["other"], 3)
    host.run({name: 4, "other": 1})
    host.run({"other": 1, name: 12})
    host.decode(["other", name], 4)
    host.preempt(name)
    host.run({name: len(tokens) + len(host.output(name)), "other": 1})
    got = host.output(name)
    want = expected(name, tokens, len(got))
    assert got[: len(want)] == want
    assert len(got) == 12


@pytest.mark.parametrize("length", [11, 12, 13, 14])
def test_forks_share_blocks_and_copy_the_last(length: int) -> None:
    host = Host(make_executor(decoder()))
    tokens = prompt(4, length)
    host.add("seeded", tokens, KINDS["seeded"])
    host.run({"seeded": length})
    for name in ("filtered", "greedy"):
        host.fork(name, "seeded", KINDS[name])
    host.run({"filtered": 1, "seeded": 1, "greedy": 1})
    host.decode(["greedy", "seeded", "filtered"], 8)
    for name in ("seeded", "filtered", "greedy"):
        got = host.output(name)
        assert got == expected(name, tokens, len(got)), name


def test_windows_and_full_attention_have_tables_of_their_own() -> None:
    sizes: dict[str, Any] = {"model_type": "qwen2", "num_hidden_layers": 4, "head_dim": None}
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    }
    mixed = make_decoder(seed=5, **sizes, **window)
    host = Host(make_executor(mixed), num_groups=2)
    tokens = prompt(6, 19)
    host.add("greedy", tokens, GREEDY)
    host.run({"greedy": 8})
    host.run({"greedy": 11})
    host.decode(["greedy"], 9)
    assert host.output("greedy") == alone(mixed, tokens, GREEDY, 10)


def test_more_rows_and_longer_tables_than_there_was_room_for() -> None:
    host = Host(make_executor(decoder(), num_blocks=600, block_size=2))
    names = [f"r{i}" for i in range(40)]
    prompts = {name: prompt(i, 3 + i % 5) for i, name in enumerate(names)}
    for name in names[:10]:
        host.add(name, prompts[name], KINDS["penalised"])
    host.run({name: len(prompts[name]) for name in names[:10]})
    for name in names[10:]:
        host.add(name, prompts[name], KINDS["penalised"])
    host.run({name: len(prompts[name]) for name in names[10:]})
    long = prompt(50, 150)
    host.add("long", long, GREEDY)
    host.run({"long": 150})
    host.decode([*names, "long"], 3)
    for name in (*names[::7], "long"):
        sampling = GREEDY if name == "long" else KINDS["penalised"]
        tokens = long if name == "long" else prompts[name]
        got = host.output(name)
        assert got == alone(decoder(), tokens, sampling, len(got), name)


# ---------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("chunks", [(30,), (1, 29), (7, 8, 15), (29, 1)])
def test_prompt_logprobs_whatever_the_chunks(chunks: tuple[int, ...], rows: int) -> None:
    host = Host(make_executor(decoder(), logits_chunk_bytes=rows * 4 * VOCAB))
    tokens = prompt(7, 30)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=2)
    host.add("other", prompt(8, 40), GREEDY)
    host.add("asks", tokens, sampling)
    got: list[TokenLogprobs] = []
    for chunk in chunks:
        got += host.run({"other": 3, "asks": chunk}).prompt_logprobs.get("asks", ())
    table = make_scorer(decoder()).logits(tokens).double().log_softmax(-1)
    assert [record.token_id for record in got] == tokens[1:]
    for position, record in enumerate(got, 1):
        row = table[position - 1]
        order = row.argsort(descending=True).tolist()
        assert record.logprob == pytest.approx(row[tokens[position]].item(), abs=1e-3)
        assert record.rank == order.index(tokens[position]) + 1
        assert [token for token, _ in record.top] == order[:3]
        assert [value for _, value in record.top] == pytest.approx(
            row[order[:3]].tolist(), abs=1e-3
        )
    assert "asks" not in host.run({"asks": 1}).prompt_logprobs


def test_logprobs_of_sampled_tokens() -> None:
    host = Host(make_executor(decoder()))
    sampling = SamplingParams(seed=9, temperature=2.0, logprobs=4, logit_bias={5: 3.0})
    host.add("asks", prompt(9, 8), sampling)
    host.add("greedy", prompt(9, 8), SamplingParams(temperature=0.0, logprobs=0))
    host.add("silent", prompt(9, 8), GREEDY)
    results = [host.run({"silent": 8, "asks": 8, "greedy": 8})]
    results += [host.run({"asks": 1, "silent": 1, "greedy": 1}) for _ in range(5)]
    for name in ("asks", "greedy"):
        tokens = host.held[name].tokens
        table = make_scorer(decoder()).logits(tokens).double().log_softmax(-1)
        for step, result in enumerate(results):
            (record,) = result.logprobs[name]
            row = table[7 + step]
            assert record.token_id == tokens[8 + step] == result.token_ids[name][0]
            assert record.logprob == pytest.approx(row[record.token_id].item(), abs=1e-3)
            best = row.argsort(descending=True).tolist()
            assert [token for token, _ in record.top] == best[: 4 if name == "asks" else 0]
            assert record.rank == best.index(record.token_id) + 1
    assert all("silent" not in result.logprobs for result in results)


# --------------------------------------------------------------------------------- faults


class Saboteur:
    """Stands in for a decoder's method and spoils calls when told to."""

    def __init__(self, executor: LocalExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nan_row: int | None = None
        self.error: Exception | None = None
        self._forward, self._logits = decoder().forward, decoder().logits
        monkeypatch.setattr(executor, "_decoder", self)

    def forward(self, *args: Any) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self._forward(*args)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden)
        if self.nan_row is not None:
            logits[self.nan_row, 7] = torch.nan
        return logits


def test_nan_harms_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make_executor(decoder())
    host, saboteur = Host(executor), Saboteur(executor, monkeypatch)
    names = list(KINDS)[:4]
    prompts = {name: prompt(20 + i, 6) for i, name in enumerate(names)}
    for name in names:
        host.add(name, prompts[name], KINDS[name])
    host.run(dict.fromkeys(names, 6))
    saboteur.nan_row = 2
    bad = host.submit(dict.fromkeys(names, 1))
    saboteur.nan_row = None
    behind = host.submit(dict.fromkeys(names, 1))  # planned before anybody knew
    result = host.take_in(bad.result())
    assert set(result.faults) == {names[2]}
    assert "NaN" in result.faults[names[2]]
    assert set(result.token_ids) == set(names) - {names[2]}
    del host.take_in(behind.result()).token_ids[names[2]]
    host.finish(names[2])
    rest = [name for name in names if name != names[2]]
    host.decode(rest, 6)
    for name in rest:
        assert host.output(name) == expected(name, prompts[name], 9), name


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("first line\nand a long story"), "RuntimeError: first line"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of device memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of device"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_failed_step_takes_its_rows_and_no_others(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    executor = make_executor(decoder())
    host, saboteur = Host(executor), Saboteur(executor, monkeypatch)
    tokens = {name: prompt(30 + i, 9) for i, name in enumerate(("seeded", "greedy", "filtered"))}
    for name in tokens:
        host.add(name, tokens[name], KINDS[name])
    host.run({"seeded": 9, "greedy": 9})
    saboteur.error = error
    failed = host.submit({"seeded": 1, "filtered": 4})
    saboteur.error = None
    behind = host.submit({"seeded": 1})
    with pytest.raises(EngineFault, match=says) as caught:
        failed.result()
    assert "\n" not in str(caught.value)
    with pytest.raises(EngineFault, match="earlier failed step"):
        behind.result()
    assert executor.num_rows == 1
    host.decode(["greedy"], 3)
    del host.held["seeded"].tokens[-2:]
    for name in ("seeded", "filtered"):
        host.preempt(name)
    host.run({"seeded": len(host.held["seeded"].tokens), "filtered": 9, "greedy": 1})
    host.decode(["seeded", "filtered", "greedy"], 4)
    for name in tokens:
        got = host.output(name)
        assert got == expected(name, tokens[name], len(got)), name


def test_rows_go_when_requests_do() -> None:
    executor = make_executor(decoder())
    host = Host(executor)
    for i in range(50):
        host.add(f"r{i}", prompt(i, 5), KINDS["penalised"])
        host.run({f"r{i}": 5})
        host.finish(f"r{i}")
    host.add("last", prompt(1, 5), KINDS["penalised"])
    host.run({"last": 5})
    assert executor.num_rows == 1
    assert executor.submit(StepPlan(99, (), finished=("last", "nobody"))).result().token_ids == {}
    assert executor.num_rows == 0


def test_a_row_may_be_closed_and_opened_in_one_plan() -> None:
    host = Host(make_executor(decoder()))
    tokens = prompt(40, 8)
    host.add("greedy", tokens, GREEDY)
    host.run({"greedy": 8})
    host.decode(["greedy"], 2)
    held = host.held["greedy"]
    chosen = [*held.tokens[:-1], 11]  # as the beams of a beam search do
    new = NewRequest("greedy", tuple(chosen), 8, GREEDY, (tuple(held.tables[0]),))
    entry = ScheduledRequest("greedy", 10, 1, ((),), samples=True)
    plan = StepPlan(77, (entry,), (new,), finished=("greedy",))
    result = host.executor.submit(plan).result()
    want = make_scorer(decoder()).logits(chosen)[-1].argmax().item()
    assert result.token_ids == {"greedy": (want,)}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_draft": 1},
        {"num_tokens": 0},
        {"num_tokens": 9},
        {"samples": False},
        {"num_tokens": 7},
        {"request_id": "nobody"},
        {"new_block_ids": ((),)},
    ],
    ids=str,
)
def test_a_plan_that_breaks_its_promises(changes: dict[str, Any]) -> None:
    entry: dict[str, Any] = {
        "request_id": "r",
        "start": 0,
        "num_tokens": 8,
        "new_block_ids": ((1, 2),),
        "samples": True,
    }
    new = NewRequest("r", tuple(range(8)), 8, GREEDY, ((),))
    plan = StepPlan(1, (ScheduledRequest(**(entry | changes)),), (new,))
    with pytest.raises(InternalError):
        make_executor(decoder()).submit(plan)


def test_an_empty_plan_gives_an_empty_result() -> None:
    result = make_executor(decoder()).submit(StepPlan(1, ())).result()
    assert result.token_ids == {}
    assert result.faults == {}


def test_only_the_newest_token_may_be_unknown() -> None:
    host = Host(make_executor(decoder()))
    host.add("r", prompt(1, 6), GREEDY)
    host.run({"r": 6})
    host.decode(["r"], 3)
    for start, num in ((6, 1), (7, 3)):
        entry = ScheduledRequest("r", start, num, ((),), samples=start + num == 10)
        with pytest.raises(InternalError, match="newest"):
            host.executor.submit(StepPlan(50, (entry,)))
