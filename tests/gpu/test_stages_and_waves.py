"""Do stages of a pipeline, groups of ranks that share experts, and experts that change ranks give
on two GPUs the tokens of one? Each test prints what it has compared."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ridgeline import LLM
from ridgeline.executor.group import GroupExecutor
from tests.test_ranks import requests, serve
from tests.tiny_model import make_tiny_model

LIMIT_S = 60  # of a test that should take less than 20
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "speculate": "off", "block_size": 16,
    "max_model_len": 128, "num_blocks": 200, "max_num_seqs": 16, "warm_up": "off",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 4},
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 64, "head_dim": 16, "num_local_experts": 6,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
Answers = tuple[dict[str, list[int]], torch.Tensor]

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs"
    ),
]


@pytest.fixture(autouse=True)
def _limit() -> Iterator[None]:
    def end(*_: object) -> NoReturn:
        raise TimeoutError(f"more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(made / name, **changes) for name, changes in MODELS.items()}


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Answers]:
    return {}


def answers(llm: LLM) -> Answers:
    tokens = serve(llm.engine, requests(llm.spec.vocab_size), aborts=False)
    return tokens, llm.logits(llm.encode("Once upon a time there was a small house by the sea."))


def compare(llm: LLM, want: Answers) -> None:
    got = answers(llm)
    worst = (got[1] - want[1]).abs().max().item()
    same = sum(got[0][name] == tokens for name, tokens in want[0].items())
    shape = {name: getattr(llm.resolved, name) for name in ("tp", "ep", "dp", "stages")}
    print(f"\n{shape}: {same} of {len(want[0])} requests alike, logits off by {worst:.2e}")
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)
    assert got[0] == want[0]


@pytest.mark.parametrize(
    ("model", "weights", "shape"),
    [
        ("llama", "plain", {"pp": 2}),
        ("llama", "int4-g32", {"pp": 2}),
        ("mixtral", "plain", {"pp": 2}),
        ("mixtral", "plain", {"dp": 2}),
        ("mixtral", "plain", {"dp": 2, "ep": 2}),
        ("mixtral", "fp8", {"dp": 2, "ep": 2}),
        ("mixtral", "plain", {"dp": 2, "ep": 2, "collective": "gloo"}),
    ],
    ids=str,
)
def test_tokens_are_those_of_one(
    folders: dict[str, Path],
    known: dict[tuple[str, str], Answers],
    model: str,
    weights: str,
    shape: dict[str, Any],
) -> None:
    options = OPTIONS | {"weight_format": weights}
    if (model, weights) not in known:
        with LLM(folders[model], **options) as one:
            known[model, weights] = answers(one)
    with LLM(folders[model], **shape, **options) as two:
        compare(two, known[model, weights])


@pytest.mark.parametrize("weights", ["plain", "fp8", "int4-g32"])
def test_experts_change_cards(folders: dict[str, Path], weights: str) -> None:
    """One pair of each layer, between two runs."""
    options = OPTIONS | {"weight_format": weights}
    with LLM(folders["mixtral"], **options) as one:
        want = answers(one)
    with LLM(folders["mixtral"], tp=2, ep=2, expert_placement="load", **options) as two:
        compare(two, want)
        group = two.engine.executor
        assert isinstance(group, GroupExecutor)
        assert group.balance is not None
        due = [(0, [(0, 3)]), (1, [(1, 5), (2, 4)])]
        group.balance.next = lambda: due.pop() if due else None  # type: ignore[method-assign]
        compare(two, want)
        assert [layer.groups for layer in group.inner.experts] == [
            [1, 0, 0, 0, 1, 1], [0, 1, 1, 1, 0, 0]
        ]  # fmt: skip
        assert group.balance.done_so_far() == 3
