"""Does a model that several ranks share say the same as on one? In real processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.build import warm_up_of
from ridgeline.build_ranks import check_cards
from ridgeline.config import EngineConfig
from ridgeline.devices import Device
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError
from ridgeline.executor.group import GroupExecutor, GroupWarmUp
from ridgeline.request import FinishReason, Request
from tests.tiny_model import make_tiny_model

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "speculate": "off", "threads": 1, "block_size": 8,
    "max_model_len": 128,
}  # fmt: skip
SEED = 20261128
NUM_REQUESTS = 40
SHORT = 24  # blocks: requests wait for each other, and lose theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    """With little memory, so that requests are preempted."""
    with LLM(
        folder, tp=2, num_blocks=SHORT, max_num_batched_tokens=64, max_num_seqs=12, **OPTIONS
    ) as llm:
        yield llm


def requests(vocab_size: int) -> list[Request]:
    """Prompts with common beginnings; some are forks, most are sampled."""
    rng = random.Random(SEED)
    heads = [[rng.randrange(vocab_size) for _ in range(24)] for _ in range(3)]
    made: list[Request] = []
    for number in range(NUM_REQUESTS):
        tail = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        prompt = tuple(rng.choice(heads)[: rng.randint(0, 24)] + tail)
        fork_of = None
        if made and rng.random() < 0.15:
            prompt, fork_of = made[-1].prompt_token_ids, made[-1].request_id
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 30),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            seed=rng.randrange(1 << 60),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logprobs=rng.choice([None, 2]),
            ignore_eos=True,
        )
        name = f"r{number}"
        made.append(Request(name, prompt, sampling, float(number), fork_of=fork_of))
    return made


def serve(engine: Engine, work: list[Request], aborts: bool) -> dict[str, list[int]]:
    """Requests come while others run; with `aborts` some are ended early."""
    rng = random.Random(SEED + 1)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in work}
    waiting = list(work)
    while waiting or not engine.is_idle:
        for _ in range(min(len(waiting), rng.choice([0, 1, 4]))):
            engine.add(waiting.pop(0))
        for output in engine.step():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            tokens[output.request_id] += output.new_token_ids
        if aborts and rng.random() < 0.1:
            engine.abort(f"r{rng.randrange(NUM_REQUESTS)}")
    engine.scheduler.check_invariants()
    return tokens


def test_ranks_give_the_tokens_of_one(one: LLM, two: LLM) -> None:
    """In random batches: shared prefixes, chunks, preemptions, forks, aborts."""
    assert isinstance(two.engine.executor, GroupExecutor)
    work = requests(one.spec.vocab_size)
    want = serve(one.engine, requests(one.spec.vocab_size), aborts=False)
    assert serve(two.engine, work, aborts=False) == want
    got = serve(two.engine, requests(one.spec.vocab_size), aborts=True)
    cut = [name for name in want if got[name] != want[name]]
    assert 0 < len(cut) < NUM_REQUESTS
    assert all(got[name] == want[name][: len(got[name])] for name in cut)
    assert two.engine.scheduler.num_preemptions > 3


def test_every_rank_does_what_can_be_foreseen(two: LLM) -> None:
    group = two.engine.executor
    assert isinstance(group, GroupExecutor)
    warm_up = GroupWarmUp(warm_up_of(two.resolved, group.inner, is_alone=False), group._ranks)
    warm_up.run(60.0)
    assert not warm_up.one()
    done, _, foreseen = warm_up.text().partition(" of ")
    assert int(done) == int(foreseen.split()[0]) > 0


def test_ranks_give_the_logits_of_one(one: LLM, two: LLM) -> None:
    ids = one.encode("Once upon a time there was a small house by the sea.")
    torch.testing.assert_close(two.logits(ids), one.logits(ids), rtol=1e-4, atol=1e-4)


def test_memory_is_that_of_a_rank(one: LLM, two: LLM) -> None:
    whole = {row.what: row for row in one.memory}
    shares = {row.what: row for row in two.memory}
    for what in ("weights", "KV cache"):
        assert shares[what].measured == shares[what].predicted
    assert 0.5 < shares["weights"].predicted / whole["weights"].predicted < 0.53  # full panels
    blocks = one.resolved.num_blocks + 1, two.resolved.num_blocks + 1
    each = [
        row["KV cache"].predicted / num for row, num in zip((whole, shares), blocks, strict=True)
    ]
    assert each[1] == each[0] / 2
    said = {decision.field: decision.got for decision in two.resolved.decisions}
    assert said["tp"] == "2"
    assert (said["launcher"], said["collective"]) == ("local", "shared")


def _nobody_starts_one(config: EngineConfig) -> NoReturn:
    raise AssertionError("a rank was started for what is refused")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"launcher": "join"}, "launcher join needs join_address"),
        ({"join_address": "h:1"}, "launcher join needs join_address"),
        ({"launcher": "join", "join_address": "nowhere"}, "is no address; write HOST:PORT"),
        ({"launcher": "join", "tp": 1, "join_address": "h:1"}, "give tp 2 or more"),
        ({"device": "cuda:1"}, "device cuda:1 is one GPU and tp 2 is more; use device cuda"),
        ({"collective": "smoke"}, "unknown collective 'smoke'; use auto or one of gloo, shared"),
        ({"collective": "nccl"}, "collective nccl is not for device cpu; use auto"),
        ({"tp": 0}, "tp"),
        ({"tp": 99}, "cannot be divided among 99 ranks"),
        ({"implementation": "transformers"}, "tp 2 needs native layers"),
    ],
)
def test_what_ranks_cannot_have(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.build.start_ranks", _nobody_starts_one)
    with pytest.raises(ConfigError, match=words):
        LLM(**{**OPTIONS, "tp": 2, **options})


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("auto", "launcher local starts all 4 ranks on this machine, where each needs a GPU"),
        ("local", "launcher local starts all 4 .* there are 2; .* launcher join, or .* ray"),
        ("join", ""),
        ("ray", ""),
    ],
)
def test_only_ranks_of_this_machine_need_its_gpus(
    launcher: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other launchers count theirs themselves."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(model="m", tp=4, launcher=launcher)
    device = cast(Device, SimpleNamespace(name="cuda:0"))
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        check_cards(config, device)
    check_cards(config, cast(Device, SimpleNamespace(name="cpu")))
