"""Does a request give the same tokens in any batch, drafted or not, as alone?

Through the real engine and scheduler: shared prefixes, forks, chunks, preemptions, cache hits, two
steps in flight, and drafts of which some are right and as many are checked as a coin says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.executor.draft_graphs import DraftGraphs
from ridgeline.executor.drafter import Drafting
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.request import Request, RequestOutput, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import DraftLengths, Scheduler
from ridgeline.speculation.contract import DraftMethod
from ridgeline.speculation.draft_model import EarlyLayers, open_draft_model
from ridgeline.speculation.prompt_lookup import Suffix
from ridgeline.step import StepShape
from tests.executor.rig import device, make_executor, make_scorer
from tests.executor.test_company import (
    BLOCK_SIZE,
    SEED,
    Counting,
    captured_decoder,
    captured_windowed_decoder,
    expected,
    requests,
    serve,
)
from tests.executor.test_drafts import Told
from tests.thinning import slow

MOST, ROWS = 4, 16
Method = Callable[[Decoder, KVCache], DraftMethod]


class Coin(DraftLengths):
    """Any number of drafts, and remembers what came of them."""

    def __init__(self, most: int = MOST, seed: int = SEED) -> None:
        super().__init__(most)
        self.most, self.rng = most, random.Random(seed)
        self.num_verified = self.num_right = 0

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        return self.rng.choice([0, 1, self.most, self.most])

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        for num_verified, num_right in verified.values():
            self.num_verified += num_verified
            self.num_right += num_right


class Wishes(FCFS):
    """For each row another number of drafts."""

    def __init__(self) -> None:
        self.rng = random.Random(SEED + 1)

    def num_drafts(self, request: Request, shape: StepShape) -> int | None:
        return self.rng.randint(0, MOST)


@cache
def answers(model: Decoder) -> dict[tuple[int, ...], list[int]]:
    """What comes after a prompt and what has been said, for every request and place."""
    found: dict[tuple[int, ...], list[int]] = {}
    for request in requests():
        prompt, said = list(request.prompt_token_ids), expected(model)[request.request_id]
        for i in range(len(said)):
            found.setdefault(tuple(prompt + said[:i]), said[i:])
    return found


def told(model: Decoder, kv: KVCache) -> DraftMethod:
    return Told(lambda known: answers(model).get(tuple(known), []), 0.25, SEED)


def looked_up(model: Decoder, kv: KVCache) -> DraftMethod:
    return Suffix(device().torch_device, ROWS, MOST)


def early(model: Decoder, kv: KVCache) -> DraftMethod:
    return EarlyLayers(
        model, kv, num_layers=1, max_draft_tokens=MOST, max_rows=ROWS, max_logit_rows=ROWS * MOST
    )


def drafted(model: Decoder, kv: KVCache) -> DraftMethod:
    """The same weights, so that every draft is right that sees all of its row."""
    return open_draft_model(
        model, model, kv, max_draft_tokens=MOST, max_rows=ROWS, max_logit_rows=ROWS * MOST
    )


def make_engine(
    model: Decoder, method: Method, *, num_blocks: int, in_flight: int, budget: int = 64
) -> tuple[Engine, Counting, Coin]:
    executor = Counting(
        make_executor(
            model,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_captured_rows=ROWS,
            is_captured=method is not told,
            make_drafting=lambda model, kv: Drafting(method(model, kv), ROWS * 3),
        )
    )
    windows = tuple(group.window for group in kv_groups(model.spec))
    blocks = BlockManager(num_blocks, BLOCK_SIZE, windows, True, key=b"test")
    coin = Coin()
    scheduler = Scheduler(
        blocks,
        Wishes(),
        max_num_batched_tokens=budget,
        max_num_seqs=ROWS,
        num_drafts=MOST,
        draft_lengths=coin,
        finds_drafts=method is looked_up,
    )
    return Engine(scheduler, executor, VirtualClock(), in_flight), executor, coin


@pytest.mark.every_value
@pytest.mark.parametrize("num_blocks", [60, 400], ids=["short of memory", "plenty"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_random_company(in_flight: int, num_blocks: int) -> None:
    print(f"seed {SEED}")
    engine, executor, coin = make_engine(
        captured_decoder(), told, num_blocks=num_blocks, in_flight=in_flight
    )
    got = serve(engine, requests(), random.Random(SEED))
    assert got == expected(captured_decoder())
    assert executor.inner.num_captured_steps > 10
    assert coin.num_verified > 100
    assert 0.4 < coin.num_right / coin.num_verified < 0.9
    if num_blocks == 60:
        assert executor.num_preempted > 5


@pytest.mark.every_value
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("method", [looked_up, drafted], ids=["suffix", "draft"])
def test_random_company_of_each_method(method: Method, in_flight: int) -> None:
    print(f"seed {SEED}")
    engine, _, coin = make_engine(captured_decoder(), method, num_blocks=100, in_flight=in_flight)
    got = serve(engine, requests(), random.Random(SEED))
    assert got == expected(captured_decoder())
    assert coin.num_verified > 20
    if method is drafted:
        assert coin.num_right > 0.5 * coin.num_verified


@pytest.mark.every_value
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("method", [told, looked_up, drafted, early])
def test_steps_may_have_room_for_more_drafts_than_any_row_has(
    method: Method, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def largest(graphs: DraftGraphs, num_rows: int, wanted: int) -> int:
        return graphs.most_drafts(num_rows) if wanted else 0

    monkeypatch.setattr(DraftGraphs, "captured_for", largest)
    engine, _, coin = make_engine(captured_decoder(), method, num_blocks=100, in_flight=in_flight)
    assert serve(engine, requests(), random.Random(SEED)) == expected(captured_decoder())
    assert coin.num_verified > 20


@pytest.mark.parametrize(
    ("device_type", "wanted", "captured"),
    [
        ("cuda", 0, 0),
        ("cuda", 1, 1),
        ("cuda", 5, 6),
        ("cuda", 7, 8),
        ("cuda", 9, 10),
        ("cpu", 7, 7),
    ],
)
def test_a_gpu_s_steps_are_captured_for_few_numbers_of_drafts(
    device_type: str, wanted: int, captured: int
) -> None:
    graphs = SimpleNamespace(
        most_drafts=lambda num_rows: 10,
        _decoder=SimpleNamespace(device=torch.device(device_type)),
    )
    assert DraftGraphs.captured_for(graphs, 3, wanted) == captured  # type: ignore[arg-type]


@pytest.mark.parametrize("in_flight", [*slow(1), 2])
def test_random_company_with_windows(in_flight: int) -> None:
    print(f"seed {SEED}")
    model = captured_windowed_decoder()
    engine, _, coin = make_engine(model, told, num_blocks=120, in_flight=in_flight)
    assert serve(engine, requests(), random.Random(SEED)) == expected(model)
    assert coin.num_right > 30


@pytest.mark.parametrize("in_flight", [*slow(1), 2])
def test_early_layers_write_where_the_check_does(in_flight: int) -> None:
    engine, _, coin = make_engine(captured_decoder(), early, num_blocks=100, in_flight=in_flight)
    assert serve(engine, requests(), random.Random(SEED)) == expected(captured_decoder())
    assert coin.num_verified > 50


def test_beams_go_their_way_beside_rows_with_drafts() -> None:
    """A beam search has no drafts; the requests beside it have."""
    model = captured_decoder()
    engine, _, coin = make_engine(model, told, num_blocks=300, in_flight=2)
    work, rng = list(requests()[:40]), random.Random(SEED)
    prompts = [requests()[i].prompt_token_ids for i in range(60, 64)]
    sampling = SamplingParams(temperature=0.0, beam_width=3, n=3, max_tokens=7)
    got: dict[str, list[int]] = {r.request_id: [] for r in work}
    beams: dict[str, RequestOutput] = {}
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"beam{i}", prompt, sampling, 0.0))
    while work or not engine.is_idle:
        if work and rng.random() < 0.5:
            r = work.pop(0)
            engine.add(Request(r.request_id, r.prompt_token_ids, r.sampling, 0.0))
        for output in engine.step():
            if output.request_id in got:
                got[output.request_id] += output.new_token_ids
            elif output.finish_reason is not None:
                beams[output.request_id] = output
    assert all(got[name] == expected(model)[name] for name in got)
    assert coin.num_verified > 10
    scorer = make_scorer(model)
    for i, prompt in enumerate(prompts):
        output = beams[f"beam{i}"]
        assert len(output.beams) == 3
        for tokens, score, *_ in output.beams:
            logits = scorer.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
            total = sum(logits[at, token].item() for at, token in enumerate(tokens))
            assert score == pytest.approx(total / len(tokens), abs=1e-3)
