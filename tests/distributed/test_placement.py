"""What each rank holds, and that several ranks together are one model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.architectures import read_spec
from ridgeline.architectures.shares import (
    fullest,
    fullest_queries,
    kv_shard,
    query_shard,
    shard,
)
from ridgeline.distributed.placement import Collective, Placement, Shard
from ridgeline.errors import ConfigError, InternalError
from tests.layers.driving import Driver, TensorDict, build_decoder
from tests.layers.reference_models import ReferenceModel, tiny_config

PROMPTS = {"a": [3, 14, 15, 92, 65, 35], "b": [8, 9, 79]}


class Threads:
    """Ranks as threads of one process: each brings its tensor, then all see all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.brought: list[torch.Tensor | None] = [None] * size

    def of(self, rank: int) -> ThreadCollective:
        return ThreadCollective(self, rank)


class ThreadCollective(Collective):
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads = threads
        self.rank = rank

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.threads.brought[self.rank] = x
        self.threads.barrier.wait(timeout=60)
        found = [tensor for tensor in self.threads.brought if tensor is not None]
        self.threads.barrier.wait(timeout=60)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(x.clone())).sum(0)


def on_ranks(size: int, work: Callable[[Placement], Any]) -> list[Any]:
    """`work` on every rank at once; the first error of any rank is raised."""
    threads, answers = Threads(size), [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            answers[rank] = work(Placement(rank, size, threads.of(rank)))
        except Exception as error:
            errors.append(error)
            threads.barrier.abort()

    workers = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    if errors:
        raise errors[0]
    return answers


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "config",
    [
        tiny_config("llama", attention_bias=True, mlp_bias=True),
        tiny_config("llama", tie_word_embeddings=True),
        tiny_config("mixtral"),
        tiny_config("qwen2"),
        tiny_config("qwen3"),
    ],
    ids=lambda c: str(c["model_type"]),
)
def test_ranks_together_are_one_model(config: dict[str, Any], size: int) -> None:
    """With 4 ranks two of them hold the same one of 2 KV heads; 97 rows of the vocabulary are
    split unevenly."""
    model = ReferenceModel(config)
    spec = read_spec(config)

    def work(placement: Placement) -> list[dict[str, torch.Tensor]]:
        decoder = build_decoder(spec, max_model_len=64, placement=placement)
        decoder.load(TensorDict(model.tensors))
        driver = Driver(decoder, num_kv_heads=placement.shard_heads(2).length)
        first = driver.step(PROMPTS)
        return [first, driver.step({"a": [1], "b": [2]})]

    whole = work(Placement())
    for answer in on_ranks(size, work):
        for got, want in zip(answer, whole, strict=True):
            for name in PROMPTS:
                assert (got[name] - want[name]).abs().max().item() < 1e-4


def test_random_models_are_the_same_however_they_are_split() -> None:
    spec = read_spec(tiny_config("mixtral"))

    def work(placement: Placement) -> torch.Tensor:
        decoder = build_decoder(spec, max_model_len=64, placement=placement)
        decoder.randomize(3)
        driver = Driver(decoder, num_kv_heads=placement.shard_heads(2).length)
        return driver.step({"a": PROMPTS["a"]})["a"]

    whole = work(Placement())
    for answer in on_ranks(2, work):
        assert (answer - whole).abs().max().item() < 1e-5


def test_logits_of_captured_steps_are_gathered() -> None:
    """Into a row that has fewer columns than the vocabulary too."""
    spec = read_spec(tiny_config("llama"))

    def work(placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        decoder = build_decoder(spec, max_model_len=64, placement=placement)
        decoder.randomize(3)
        states = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(1))
        states, few = states.to(decoder.device), torch.empty(5, 60, device=decoder.device)
        decoder.lm_head.logits_into(decoder.norm(states), few)
        return few, decoder.logits(states)

    few, whole = work(Placement())
    assert torch.equal(few, whole[:, :60])
    for size in (2, 3):
        for some, every in on_ranks(size, work):
            torch.testing.assert_close(some, few)
            torch.testing.assert_close(every, whole)


def test_shares() -> None:
    rank = Placement(2, 4, Threads(4).of(2))
    assert rank.shard(8, "x") == Shard(4, 2)
    assert rank.shard(7, "x") == Shard(3, 2)
    assert rank.shard(29_568, "x", 128) == Shard(115 * 128, 58 * 128)
    assert rank.shard(200, "x", 128) == Shard(128, 64)  # of units of 64, as there are four ranks
    assert rank.shard_heads(8) == Shard(4, 2)
    assert rank.shard_heads(2) == rank.shard_heads(3) == Shard(1, 1)
    assert [rank.shard_queries(14, 2), rank.shard_queries(12, 3)] == [Shard(7, 3), Shard(4, 4)]
    assert rank.shard_rows(97) == Shard(50, 25)
    assert Placement(3, 4, Threads(4).of(3)).shard_rows(97) == Shard(75, 22)
    assert Placement(3, 4, Threads(4).of(3)).shard_rows(3) == Shard(3, 0)
    with pytest.raises(
        ConfigError, match=r"x \(3\) cannot be divided among 4 ranks; use at most 3"
    ):
        rank.shard(3, "x")
    with pytest.raises(ConfigError, match=r"num_attention_heads \(2\) cannot be divided among 4"):
        rank.shard_queries(2, 1)


def test_shares_of_experts() -> None:
    ranks = [Placement(rank, 4, Threads(4).of(rank), ep=2) for rank in range(4)]
    assert [rank.shard_experts(5) for rank in ranks] == [Shard(0, 2)] * 2 + [Shard(2, 3)] * 2
    assert [(rank.of_experts.rank, rank.of_experts.size) for rank in ranks] == [(0, 2), (1, 2)] * 2
    with pytest.raises(ConfigError, match="ep is 2; 1 experts"):
        ranks[0].shard_experts(1)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 40), st.sampled_from([1, 2, 4, 16]))
def test_shares_are_all_there_is_and_differ_by_a_unit(
    num_kv_heads: int, group: int, size: int, unit: int
) -> None:
    heads = num_kv_heads * group
    size = min(size, heads)
    inner = [shard(heads, rank, size, unit) for rank in range(size)]
    assert max(one.length for one in inner) == fullest(heads, size, unit)
    queries = [query_shard(heads, num_kv_heads, rank, size, unit) for rank in range(size)]
    assert max(one.length for one in queries) == fullest_queries(heads, num_kv_heads, size, unit)
    assert min(one.length for one in queries) > 0
    for shares in (inner, queries):
        assert [n for s in shares for n in range(s.start, s.start + s.length)] == [*range(heads)]
    full = [one.length // unit for one in inner[:-1]]
    assert not full or max(full) - min(full) <= 1
    for rank, own in enumerate(queries):
        kv = kv_shard(num_kv_heads, rank, size)
        asked = {query // group for query in range(own.start, own.start + own.length)}
        assert asked == set(range(kv.start, kv.start + kv.length))


def test_alone_nothing_is_said() -> None:
    x = torch.ones(2)
    assert Placement().all_reduce(x) is x
    side_by_side = torch.empty(1, 2)
    Placement().gather_columns(x[None], side_by_side)
    assert torch.equal(side_by_side, x[None])
    with pytest.raises(InternalError, match="more than one rank can talk"):
        Placement(0, 2)
    with pytest.raises(InternalError, match="rank lies inside size"):
        Placement(1, 1)
