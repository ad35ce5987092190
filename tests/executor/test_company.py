"""Does a request give the same tokens in any batch as alone?

Through the real engine and scheduler: shared prefixes, forks, chunks, preemptions, cache hits and
steps in flight on one side, a full forward pass for each token on the other.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.attention.layout import ForwardBatch
from ridgeline.attention.paged import PagedAttention
from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.executor.future import NOT_FINITE
from ridgeline.executor.local import LocalExecutor
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.request import FinishReason, Request, SamplingParams
from ridgeline.scheduler.beams import BeamSearch, num_candidates
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import StepFuture, StepPlan
from tests.executor.rig import VOCAB, alone, make_decoder, make_executor, make_scorer

NUM_REQUESTS = 200
SEED = 20240607
BLOCK_SIZE = 4


class Counting:
    """An executor that remembers how many tokens were computed and how many rows preempted."""

    def __init__(self, inner: LocalExecutor) -> None:
        self.inner = inner
        self.num_blocks, self.block_size = inner.num_blocks, inner.block_size
        self.num_tokens = 0
        self.num_preempted = 0
        self.num_copies = 0

    def submit(self, plan: StepPlan) -> StepFuture:
        self.num_tokens += sum(entry.num_tokens for entry in plan.scheduled)
        self.num_preempted += len(plan.preempted)
        self.num_copies += len(plan.copies)
        return self.inner.submit(plan)


@cache
def decoder() -> Decoder:
    return make_decoder(hidden_size=24, num_hidden_layers=2)


@cache
def windowed_decoder() -> Decoder:
    return make_decoder(seed=1, model_type="mistral", sliding_window=9, num_hidden_layers=1)


@cache
def captured_decoder() -> Decoder:
    """Our own attention, which can be captured: on a CPU its reference, called again and again."""
    return make_decoder(
        seed=2, attention=PagedAttention(), hidden_size=24, head_dim=16, num_hidden_layers=2
    )


@cache
def captured_windowed_decoder() -> Decoder:
    return make_decoder(
        seed=3,
        attention=PagedAttention(),
        model_type="mistral",
        sliding_window=9,
        head_dim=16,
        num_hidden_layers=1,
    )


def sampling_for(rng: random.Random) -> SamplingParams:
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 14),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        seed=rng.randrange(1 << 62),
        stop_token_ids=rng.sample(range(VOCAB), 2),
    )
    if rng.random() < 0.3:
        sampling = sampling.replace(top_k=rng.randint(1, 40), top_p=rng.uniform(0.5, 1.0))
    if rng.random() < 0.2:
        sampling = sampling.replace(repetition_penalty=1.3, frequency_penalty=0.2)
    if rng.random() < 0.2:
        sampling = sampling.replace(min_tokens=sampling.max_tokens or 0, min_p=0.01)
    return sampling


@cache
def requests(num: int = NUM_REQUESTS) -> tuple[Request, ...]:
    """Prompts of 1 to 80 tokens, most of them with one of four beginnings; some are forks."""
    rng = random.Random(SEED)
    heads = [[rng.randrange(VOCAB) for _ in range(rng.randint(8, 40))] for _ in range(4)]
    made: list[Request] = []
    for i in range(num):
        head = rng.choice(heads)[: rng.randint(0, 40)] if rng.random() < 0.8 else []
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        prompt, fork_of = tuple(head + tail), None
        if made and rng.random() < 0.15:
            parent = made[-1]
            prompt, fork_of = parent.prompt_token_ids, parent.request_id
        made.append(Request(f"r{i}", prompt, sampling_for(rng), float(i), fork_of=fork_of))
    return tuple(made)


@cache
def expected(model: Decoder) -> dict[str, list[int]]:
    return {
        r.request_id: alone(
            model, r.prompt_token_ids, r.sampling, r.sampling.max_tokens or 0, r.request_id
        )
        for r in requests()
    }


def make_engine(
    model: Decoder,
    *,
    num_blocks: int,
    in_flight: int,
    prefix_caching: bool,
    budget: int,
    captured: int = 0,
    captured_tokens: int = 0,
) -> tuple[Engine, Counting]:
    executor = Counting(
        make_executor(
            model,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_captured_rows=captured,
            max_captured_tokens=captured_tokens,
        )
    )
    windows = tuple(group.window for group in kv_groups(model.spec))
    blocks = BlockManager(num_blocks, BLOCK_SIZE, windows, prefix_caching, key=b"test")
    scheduler = Scheduler(blocks, FCFS(), max_num_batched_tokens=budget, max_num_seqs=16)
    return Engine(scheduler, executor, VirtualClock(), in_flight), executor


def serve(engine: Engine, work: tuple[Request, ...], rng: random.Random) -> dict[str, list[int]]:
    tokens, errors = serve_all(engine, work, rng)
    assert not errors
    return tokens


def serve_all(
    engine: Engine, work: tuple[Request, ...], rng: random.Random
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """All outputs and all errors; requests come in small groups while others run."""
    errors: dict[str, str] = {}
    tokens: dict[str, list[int]] = {r.request_id: [] for r in work}
    waiting = [
        Request(r.request_id, r.prompt_token_ids, r.sampling, r.arrival_time, fork_of=r.fork_of)
        for r in work
    ]
    while waiting or not engine.is_idle:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 5]))):
            engine.add(waiting.pop(0))
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is FinishReason.ERROR:
                errors[output.request_id] = output.error or ""
    engine.scheduler.check_invariants()
    return tokens, errors


@pytest.mark.every_pair
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("num_blocks", [50, 400], ids=["short of memory", "plenty"])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_random_company(in_flight: int, prefix_caching: bool, num_blocks: int, budget: int) -> None:
    print(f"seed {SEED}")
    engine, executor = make_engine(
        decoder(),
        num_blocks=num_blocks,
        in_flight=in_flight,
        prefix_caching=prefix_caching,
        budget=budget,
    )
    got = serve(engine, requests(), random.Random(SEED + budget))
    assert got == expected(decoder())
    assert executor.inner.num_rows <= 16
    assert executor.num_copies > 0
    if num_blocks == 50 and budget == 64:
        assert executor.num_preempted > 5
    num_prompt = sum(len(r.prompt_token_ids) for r in requests())
    if prefix_caching and num_blocks == 400:
        assert executor.num_tokens < 0.8 * num_prompt + sum(map(len, got.values()))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_random_company_of_a_model_with_windows(in_flight: int) -> None:
    print(f"seed {SEED}")
    engine, _ = make_engine(
        windowed_decoder(), num_blocks=60, in_flight=in_flight, prefix_caching=True, budget=40
    )
    assert serve(engine, requests(), random.Random(SEED)) == expected(windowed_decoder())


@pytest.mark.every_value
@pytest.mark.parametrize("captured", [5, 16], ids=["up to 5 rows", "up to 16 rows"])
@pytest.mark.parametrize("num_blocks", [50, 400], ids=["short of memory", "plenty"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_random_company_in_captured_steps(in_flight: int, num_blocks: int, captured: int) -> None:
    print(f"seed {SEED}")
    engine, executor = make_engine(
        captured_decoder(),
        num_blocks=num_blocks,
        in_flight=in_flight,
        prefix_caching=True,
        budget=64,
        captured=captured,
    )
    got = serve(engine, requests(), random.Random(SEED))
    assert got == expected(captured_decoder())
    assert executor.inner.num_captured_steps > 10


@pytest.mark.every_pair
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("num_blocks", [50, 400], ids=["short of memory", "plenty"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_random_company_in_captured_prompts(in_flight: int, num_blocks: int, tokens: int) -> None:
    print(f"seed {SEED}")
    engine, executor = make_engine(
        captured_decoder(),
        num_blocks=num_blocks,
        in_flight=in_flight,
        prefix_caching=True,
        budget=64,
        captured=16,
        captured_tokens=tokens,
    )
    got = serve(engine, requests(), random.Random(SEED))
    assert got == expected(captured_decoder())
    assert executor.inner.num_captured_steps > 20


def test_random_company_in_captured_steps_with_windows() -> None:
    engine, executor = make_engine(
        captured_windowed_decoder(),
        num_blocks=60,
        in_flight=2,
        prefix_caching=True,
        budget=40,
        captured=8,
        captured_tokens=40,
    )
    got = serve(engine, requests(), random.Random(SEED))
    assert got == expected(captured_windowed_decoder())
    assert executor.inner.num_captured_steps > 10


def test_more_rows_than_there_was_room_for_are_captured_anew() -> None:
    """Sixty-odd requests where there was room for 16: the rows' tensors are replaced on the way."""
    engine, executor = make_engine(
        captured_decoder(),
        num_blocks=900,
        in_flight=2,
        prefix_caching=True,
        budget=640,
        captured=8,
    )
    engine.scheduler.max_num_seqs = engine.scheduler.capacity.max_num_seqs = 64
    got = serve(engine, requests(), random.Random(SEED))
    assert got == expected(captured_decoder())
    assert executor.inner.num_captured_steps > 5


def test_a_repeated_prompt_computes_at_most_one_block() -> None:
    model = make_decoder(max_model_len=2100, num_hidden_layers=1)
    engine, executor = make_engine(
        model, num_blocks=600, in_flight=1, prefix_caching=True, budget=512
    )
    rng = random.Random(3)
    prompt = tuple(rng.randrange(VOCAB) for _ in range(2048))
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    first = serve(engine, (Request("a", prompt, sampling, 0.0),), rng)
    assert executor.num_tokens == 2048
    again = serve(engine, (Request("b", prompt, sampling, 1.0),), rng)
    assert executor.num_tokens - 2048 <= BLOCK_SIZE
    assert again["b"] == first["a"] == alone(model, prompt, sampling, 1)


class Breaking:
    """A decoder that fails now and then, and now and then gives NaN for the first row."""

    def __init__(self, inner: Decoder) -> None:
        self.inner = inner
        self.num_calls = 0

    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        self.num_calls += 1
        hidden = self.inner.forward(batch, kv)
        if self.num_calls % 20 == 7:
            raise RuntimeError("device lost")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.inner.logits(hidden)
        if self.num_calls % 20 == 17:
            logits[0, 3] = torch.nan
        return logits


@pytest.mark.parametrize("in_flight", [1, 2])
def test_failed_steps_and_nan_harm_nobody_else(
    monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    engine, executor = make_engine(
        decoder(), num_blocks=50, in_flight=in_flight, prefix_caching=True, budget=40
    )
    monkeypatch.setattr(executor.inner, "_decoder", Breaking(decoder()))
    got, errors = serve_all(engine, requests(), random.Random(SEED))
    assert any("device lost" in reason for reason in errors.values())
    assert NOT_FINITE in errors.values()
    assert 10 < len(errors) < NUM_REQUESTS - 10
    want = expected(decoder())
    for name in want.keys() - errors.keys():
        assert got[name] == want[name]
    for name in errors:
        assert got[name] == want[name][: len(got[name])]


def test_beams_are_those_of_a_search_without_engine_or_cache() -> None:
    scorer = make_scorer(decoder())
    engine, _ = make_engine(decoder(), num_blocks=80, in_flight=2, prefix_caching=True, budget=30)
    for i, prompt in enumerate([r.prompt_token_ids for r in requests(12)][::2]):
        sampling = SamplingParams(
            temperature=0.0, beam_width=3, n=3, max_tokens=7, stop_token_ids=[5, 6, 7]
        )
        search = BeamSearch(sampling)
        while search.live:
            tops = []
            for hypothesis in search.live:
                logprobs = scorer.logits([*prompt, *hypothesis.token_ids])[-1].log_softmax(-1)
                values, ids = logprobs.topk(num_candidates(sampling))
                tops.append(tuple(zip(ids.tolist(), values.tolist(), strict=True)))
            search.advance(tops)
        engine.add(Request(f"beam{i}", prompt, sampling, 0.0))
        outputs = []
        while not engine.is_idle:
            outputs += engine.step()
        (output,) = outputs
        assert [list(beam[0]) for beam in output.beams] == [h.token_ids for h in search.best()]
        want = [h.score for h in search.best()]
        assert [beam[1] for beam in output.beams] == pytest.approx(want, abs=1e-3)
