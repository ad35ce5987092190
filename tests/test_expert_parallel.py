"""Do ranks that divide the experts of a model say what one process says? In real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.cost.memory_items import rank_share
from ridgeline.cost.setup import Layout, Precision
from ridgeline.distributed.links import Ranks
from ridgeline.distributed.messages import Built
from ridgeline.errors import ConfigError, EngineLost
from ridgeline.executor.group import GroupExecutor
from ridgeline.executor.local import LocalExecutor
from ridgeline.formats import KV_FORMATS, WEIGHT_FORMATS
from tests.layers.reference_models import ReferenceModel
from tests.layers.test_agreement import CONFIGS
from tests.test_families import CHOSEN, PROMPTS
from tests.test_pipeline import LITTLE, check_engine
from tests.test_ranks import OPTIONS, requests, serve
from tests.tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
WITH_EXPERTS = (
    "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared",
    "mixtral", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
MIXTRAL: dict[str, Any] = {  # of 5 experts one rank has 2 and the other 3
    "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip

SPREAD = (Layout(2, 2), Layout(2, 2, 2), Layout(dp=2), Layout(2, dp=2, ep=2))
FEW = 16  # blocks of each of several pools: enough for the longest request
SHAPES: tuple[dict[str, Any], ...] = (
    {"tp": 4, "ep": 2},
    {"tp": 2, "pp": 2, "ep": 2},
    {"dp": 3},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "collective": "gloo"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), **MIXTRAL)


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def want(one: LLM) -> dict[str, list[int]]:
    return serve(one.engine, requests(one.spec.vocab_size), aborts=False)


def test_two_groups_of_experts(folder: Path, one: LLM, want: dict[str, list[int]]) -> None:
    with LLM(folder, tp=2, ep=2, **LITTLE, **OPTIONS) as llm:
        check_engine(llm, want)
        whole = {row.what: row for row in one.memory}["weights"]
        share = {row.what: row for row in llm.memory}["weights"]
        assert share.measured is not None
        assert share.measured <= share.predicted < 0.62 * whole.predicted
        said = {decision.field: decision.got for decision in llm.resolved.decisions}
        assert (said["tp"], said["ep"]) == ("2", "2")


def test_two_groups_of_ranks(folder: Path, one: LLM, want: dict[str, list[int]]) -> None:
    """Each attends for requests of its own; both have blocks of their own."""
    with LLM(folder, dp=2, ep=2, **LITTLE, **OPTIONS) as llm:
        check_engine(llm, want)
        said = {decision.field: decision.got for decision in llm.resolved.decisions}
        assert (said["dp"], said["ep"]) == ("2", "2")
        ids = one.encode("Once upon a time there was a small house by the sea.")
        torch.testing.assert_close(llm.logits(ids), one.logits(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [{"tp": 4, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"dp": 3}, {"dp": 2, "tp": 2, "ep": 2}],
    ids=str,
)
def test_experts_beside_other_shares(
    folder: Path, shape: dict[str, Any], want: dict[str, list[int]]
) -> None:
    little = LITTLE | {"num_blocks": LITTLE["num_blocks"] if "dp" not in shape else FEW}
    with LLM(folder, **shape, **little, **OPTIONS) as llm:
        check_engine(llm, want)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 2, "ep": 3}, r"ep is 3; it must divide tp \(2\)"),
        ({"ep": 2}, r"ep is 2; it must divide tp \(1\)"),
        ({"tp": 4, "ep": 4, "num_local_experts": 3}, "ep is 4; 3 experts cannot be divided among"),
        ({"tp": 2, "ep": 2, "model_type": "llama"}, "ep is 2; this model has no experts to divide"),
        ({"dp": 2, "model_type": "llama"}, "dp is 2; this model has no experts to divide"),
        ({"dp": 2, "ep": 3}, r"ep is 3; it must divide tp x dp \(2\)"),
        ({"dp": 2, "pp": 2}, "dp 2 and pp 2 are not served together yet; use dp 1 or pp 1"),
        ({"tp": 2, "expert_placement": "load"}, "with ep 1 every rank has a share of each expert"),
        ({"expert_placement": "load"}, "expert_placement is load, and with ep 1"),
        (
            {"tp": 2, "pp": 2, "ep": 2, "expert_placement": "load"},
            "expert_placement load and pp 2 are not served together yet",
        ),
        ({"dp": 2, "speculate": "ngram"}, "no captured step knows how .* leave out dp"),
    ],
)
def test_what_experts_cannot_have(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.build.start_ranks", lambda config: pytest.fail("a rank started"))
    asked = {name: value for name, value in options.items() if hasattr(EngineConfig, name)}
    of_model = {name: value for name, value in options.items() if name not in asked}
    make_tiny_model(tmp_path, **MIXTRAL | of_model)
    with pytest.raises(ConfigError, match=words):
        LLM(tmp_path, **OPTIONS | asked)


@pytest.mark.parametrize("family", [family for family in CHOSEN if family in WITH_EXPERTS])
@pytest.mark.parametrize("shape", [{"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"dp": 2}], ids=str)
@pytest.mark.slow
def test_every_family(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    reference = ReferenceModel(CONFIGS[CHOSEN[family]], seed=3)
    (tmp_path / "config.json").write_text(json.dumps(reference.config))
    tensors = {name: tensor.contiguous() for name, tensor in reference.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path, **shape, **OPTIONS | {"block_size": 4}) as llm:
        got = llm.generate(PROMPTS, GREEDY, progress=False)
    want = [reference.greedy(prompt, 24) for prompt in PROMPTS]
    assert [list(one.token_ids) for one in got] == want


SKEW = 8.0  # times as large are the router's numbers of the first experts


@pytest.mark.parametrize(
    ("shape", "weights"),
    [({"tp": 2}, "auto"), ({"dp": 2}, "int4-g32")],
    ids=str,
)
def test_experts_change_ranks(shape: dict[str, Any], weights: str, tmp_path: Path) -> None:
    """Of a router that likes two experts of one rank: tokens are those of one process before and
    after, and the fullest rank has less to do."""
    make_tiny_model(tmp_path, **MIXTRAL | {"num_local_experts": 6, "max_position_embeddings": 128})
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            tensor[:2] *= SKEW
    save_file(tensors, tmp_path / "model.safetensors")
    options = OPTIONS | {"weight_format": weights}
    with LLM(tmp_path, **options) as llm:
        want = serve(llm.engine, requests(llm.spec.vocab_size), aborts=False)
    little = LITTLE | ({"num_blocks": FEW} if "dp" in shape else {})
    with LLM(tmp_path, **shape, ep=2, expert_placement="load", **little, **options) as llm:
        group = llm.engine.executor
        assert isinstance(group, GroupExecutor)
        balance, local = group.balance, group.inner
        assert balance is not None
        assert isinstance(local, LocalExecutor)
        before = [list(layer.groups) for layer in local.experts]
        assert serve(llm.engine, requests(llm.spec.vocab_size), aborts=False) == want
        assert balance.done_so_far() == 0  # so few steps decide nothing
        local.expert_load.counts()
        full = local.expert_load.fullest()
        balance.period = 10
        assert serve(llm.engine, requests(llm.spec.vocab_size), aborts=False) == want
        assert balance.done_so_far() > 0
        assert [list(layer.groups) for layer in local.experts] != before
        local.expert_load.counts()
        now = local.expert_load.fullest()
        assert max(full) > 1.15
        assert max(now) < max(full) - 0.1


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_while_experts_change_ranks(folder: Path, end: signal.Signals) -> None:
    """In the middle of it: both have said how much they send. The group ends, and says which rank
    it was."""
    with LLM(folder, tp=2, ep=2, expert_placement="load", **LITTLE, **OPTIONS) as llm:
        group, ranks = llm.engine.executor, llm.built.ranks
        assert isinstance(group, GroupExecutor)
        assert ranks is not None
        assert group.balance is not None
        hello = ranks._members[1].hello
        assert hello is not None
        pid, collective = hello.pid, group.inner.experts[0].placement.collective
        assert collective is not None
        broadcast, ranks.overdue_s = collective.broadcast, 1.0

        def ends(x: torch.Tensor, source: int) -> torch.Tensor:
            os.kill(pid, end)
            return broadcast(x, source)

        collective.broadcast = ends  # type: ignore[method-assign]
        group.balance.next = lambda: (0, [(0, 3)])  # type: ignore[method-assign]
        words = r"rank 1 \(host .*, pid \d+\) (has ended \(exit code -9\)|does not answer)"
        with pytest.raises(EngineLost, match=words):
            llm.generate([[5, 6, 7]], GREEDY, progress=False)


WHOLE = {"dp": 2, "ep": 2}  # attention and each expert are whole: every format rounds as one rank
GROUPED = {"dp": 2}  # experts are cut, into whole groups of 32
FORMATS = [
    *[(WHOLE, name, "auto") for name in WEIGHT_FORMATS if name not in ("auto", "checkpoint")],
    *[(WHOLE, "int4", name) for name in KV_FORMATS if name != "auto"],
    *[(GROUPED, name, "auto") for name in ("plain", "int4-g32", "int4-g32-asym")],
    (GROUPED, "plain", "int8"),
]
FAST = (WHOLE, "fp8", "auto"), (GROUPED, "int4-g32", "auto"), (WHOLE, "int4", "int8")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of whole groups and blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_local_experts": 4}
    return make_tiny_model(tmp_path_factory.mktemp("wide"), **MIXTRAL | sizes)


@pytest.mark.parametrize(
    ("shape", "weights", "kv"),
    [
        pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow], id=str(case))
        for case in FORMATS
    ],
)
def test_groups_of_ranks_in_every_format(
    wide: Path, shape: dict[str, Any], weights: str, kv: str
) -> None:
    options = OPTIONS | {"weight_format": weights, "kv_cache_dtype": kv, "num_blocks": 64}
    prompts = [[1 + number * 7 % 250, 5, 9, 2 + number] for number in range(6)]
    with LLM(wide, **options) as llm:
        want = llm.generate(prompts, GREEDY, progress=False)
    with LLM(wide, **shape, **options) as llm:
        got = llm.generate(prompts, GREEDY, progress=False)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]


@pytest.mark.parametrize(
    "layout",
    [Layout(2), Layout(dp=2, ep=2), *(pytest.param(one, marks=pytest.mark.slow) for one in SPREAD)],
    ids=lambda one: one.text,
)
def test_each_rank_holds_what_inspect_says(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike shares: of 3 KV heads and of 5 experts. What the others hold they say themselves."""
    heads = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3}
    make_tiny_model(tmp_path, **MIXTRAL | heads)
    said: list[list[Any]] = []
    wait = Ranks.wait

    def noted(ranks: Ranks, kind: type[Any]) -> list[Any]:
        said.append(wait(ranks, kind))
        return said[-1]

    monkeypatch.setattr(Ranks, "wait", noted)
    asked: dict[str, Any] = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep}
    with LLM(tmp_path, **asked, num_blocks=FEW, **OPTIONS) as llm:
        stages = tuple(first for first, _ in llm.resolved.stages[1:])
        first = {row.what: row.measured for row in llm.memory}
    (others,) = [answers for answers in said if isinstance(answers[0], Built)]
    layout, precision = replace(layout, starts=stages), Precision("float32")
    size = OPTIONS["block_size"]
    want = [rank_share(llm.spec, layout, precision, rank, size) for rank in range(layout.devices)]
    assert [one.weights for one in others] == [one.weights for one in want[1:]]
    assert [one.cache for one in others] == [(FEW + 1) * one.block_bytes for one in want[1:]]
    if layout.pp == 1:
        assert first["weights"] == want[0].weights
        assert first["KV cache"] == (FEW + 1) * want[0].block_bytes
    assert len({one.weights for one in want}) > 1 or layout == Layout(dp=2)
