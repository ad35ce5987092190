"""Deterministic steps: every request a piece, captured by tokens, filters sampled row by row.

On a CPU the kernels' references answer, so this is about the wiring: tokens, not bits. That these
are the same in any batch, tests/gpu/test_deterministic.py shows.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.attention.layout import AttentionLayout, DecodeLayout, MixedLayout
from ridgeline.attention.paged import PagedAttention
from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.errors import InternalError
from ridgeline.executor.batch import SamplingRows, SamplingStep
from ridgeline.executor.batch_invariant import InvariantSampler, invariant_logprobs
from ridgeline.executor.rows import Row, Rows
from ridgeline.executor.transfer import transfer_to
from ridgeline.layers.decoder import Decoder
from ridgeline.quantization import open_weight_format
from ridgeline.quantization.plain import InvariantPlainWeights
from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import build_batch
from ridgeline.sampling.logprobs import token_logprobs
from ridgeline.sampling.sampler import Sampled, sample
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import NewRequest
from tests.executor.rig import VOCAB, Host, device, make_decoder, make_executor
from tests.executor.test_company import BLOCK_SIZE, SEED, Counting, expected, requests, serve


@cache
def decoder() -> Decoder:
    return make_decoder(
        seed=2,
        attention=PagedAttention(is_invariant=True),
        deterministic=True,
        hidden_size=24,
        head_dim=16,
        num_hidden_layers=2,
    )


@cache
def windowed_decoder() -> Decoder:
    return make_decoder(
        seed=3,
        attention=PagedAttention(is_invariant=True),
        deterministic=True,
        model_type="mistral",
        sliding_window=9,
        head_dim=16,
        num_hidden_layers=1,
    )


def make_engine(
    model: Decoder, *, num_blocks: int, in_flight: int, tokens: int
) -> tuple[Engine, Counting]:
    executor = Counting(
        make_executor(
            model,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_captured_rows=16,
            max_captured_tokens=tokens,
            deterministic=True,
        )
    )
    windows = tuple(layer.attention.window for layer in model.spec.layers[:1])
    blocks = BlockManager(num_blocks, BLOCK_SIZE, windows, True, key=b"test")
    scheduler = Scheduler(blocks, FCFS(), max_num_batched_tokens=64, max_num_seqs=16)
    return Engine(scheduler, executor, VirtualClock(), in_flight), executor


@pytest.mark.every_value
@pytest.mark.parametrize("tokens", [0, 16, 64], ids=["uncaptured", "some captured", "captured"])
@pytest.mark.parametrize("num_blocks", [50, 400], ids=["short of memory", "plenty"])
def test_random_company(num_blocks: int, tokens: int) -> None:
    print(f"seed {SEED}")
    engine, executor = make_engine(decoder(), num_blocks=num_blocks, in_flight=2, tokens=tokens)
    assert serve(engine, requests(), random.Random(SEED)) == expected(decoder())
    assert executor.inner.num_captured_steps >= (30 if tokens else 0)
    assert (executor.inner.num_captured_steps > 0) is (tokens > 0)
    assert executor.num_preempted > 5 or num_blocks == 400


def test_random_company_of_a_model_with_windows() -> None:
    engine, _ = make_engine(windowed_decoder(), num_blocks=60, in_flight=2, tokens=40)
    assert serve(engine, requests(), random.Random(SEED)) == expected(windowed_decoder())


def test_decodes_alone_are_captured_as_pieces() -> None:
    executor = make_executor(
        decoder(), max_captured_rows=16, max_captured_tokens=64, deterministic=True
    )
    host = Host(executor)
    for name in "abc":
        host.add(name, [5, 6, 7], SamplingParams(temperature=0.0))
    host.run(dict.fromkeys("abc", 3))
    before = executor.num_captured_steps
    host.decode("abc", 5, in_flight=2)
    assert executor.num_captured_steps == before + 5


def test_there_is_no_plan_with_decodes() -> None:
    backend, nothing = PagedAttention(is_invariant=True), torch.zeros(1)
    decodes = DecodeLayout(nothing, (nothing,), nothing, nothing, (nothing,), 4)
    with pytest.raises(InternalError, match="pieces of one token"):
        backend.plan_decodes(decodes, 0, None)
    mixed = MixedLayout(decodes, None, (nothing,), (nothing,), 1, 4)
    with pytest.raises(InternalError, match="pieces of one token"):
        backend.plan_mixed(mixed, 0, None)
    layout = AttentionLayout([1, 3, 600], [9, 3, 600], [0, 1, 4, 604], (nothing,), (nothing,), 4)
    plan = backend.plan(layout, 0, None)
    assert plan.decodes is None
    assert plan.long is None
    assert plan.prompts is not None
    assert plan.prompts.requests == (0, 1, 2)


def test_all_products_are_invariant() -> None:
    found = [linear.format for layer in decoder().layers for linear in layer.attention.linears]
    found += [linear.format for layer in decoder().layers for linear in layer.feed_forward.linears]
    assert all(isinstance(kind, InvariantPlainWeights) for kind in found)
    assert isinstance(decoder().lm_head.format, InvariantPlainWeights)
    assert type(open_weight_format("plain")) is not InvariantPlainWeights


def test_experts_add_the_same() -> None:
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1)).to(device().torch_device)
    plain, lone = (
        make_decoder(
            seed=4,
            attention=PagedAttention(is_invariant=deterministic),
            deterministic=deterministic,
            model_type="mixtral",
            architectures=["MixtralForCausalLM"],
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=16,
        )
        .layers[0]
        .feed_forward
        for deterministic in (False, True)
    )
    torch.testing.assert_close(lone.of(x), plain.of(x), rtol=1e-6, atol=1e-6)
    assert all(isinstance(linear.format, InvariantPlainWeights) for linear in lone.linears)


# ---------------------------------------------------------------------- sampling


KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1, temperature=0.7),
    SamplingParams(seed=2, top_k=9, top_p=0.9, logprobs=3),
    SamplingParams(seed=3, top_p=0.8, logit_bias={4: 1.0}, logprobs=0),
    SamplingParams(seed=4, min_p=0.05, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, presence_penalty=0.4, logprobs=7),
    SamplingParams(seed=5, top_k=3, min_tokens=9, stop_token_ids=[1, 2, 3]),
)


class Step:
    """Rows of these kinds, of which all sample."""

    def __init__(self, kinds: tuple[SamplingParams, ...]) -> None:
        self.transfer = transfer_to(device().torch_device)
        self.rows = Rows(1, 4, 64, VOCAB, self.transfer)
        made: list[Row] = []
        for i, params in enumerate(kinds):
            self.rows.open(NewRequest(f"r{i}", (5, 6, 7, 5), 3, params, ((1,),)))
            row = self.rows.get(f"r{i}")
            assert row is not None
            made.append(row)
        send, positions = self.transfer.send, np.arange(4, 4 + len(made))
        batch = build_batch([row.sampling for row in made], VOCAB, send)
        slots = send(np.array([row.slot for row in made], np.int64))
        names = [row.request_id for row in made]
        kept = SamplingRows(made, names, batch, slots, None, None, VOCAB)
        self.step = SamplingStep(kept, None, send(positions), positions)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num", [1, 4, len(KINDS)])
def test_rows_by_themselves_are_sampled_as_together(num: int, seed: int) -> None:
    made = Step(KINDS[-num:])
    step, counts = made.step, made.rows.counts
    noise = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num, VOCAB, generator=noise)).to(device().torch_device)
    logits[0, 3] = torch.inf
    lone = InvariantSampler(VOCAB, made.transfer)
    for _ in range(2):  # what is made for the rows is kept
        got = lone.sample(step, logits, counts)
        want = sample(logits, step.kept.batch, step.positions_R, step.host_positions, counts)
        assert got.token_ids_R[1:].tolist() == want.token_ids_R[1:].tolist()
        assert got.is_sound_R.tolist() == want.is_sound_R.tolist() == [False] + [True] * (num - 1)


def test_rows_without_filters_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(logits: torch.Tensor, *others: Any) -> Sampled:
        sizes.append(len(logits))
        return sample(logits, *others)

    monkeypatch.setattr("ridgeline.executor.batch_invariant.sample", watched)
    made = Step(KINDS)
    InvariantSampler(VOCAB, made.transfer).sample(
        made.step, torch.zeros(len(KINDS), VOCAB, device=device().torch_device), made.rows.counts
    )
    assert sizes == [3, 2, 2, 2, 2]  # each filtered row twice: see the module


def test_log_probabilities_show_as_many_as_each_row_asked_for() -> None:
    made = Step(KINDS)
    wanted = made.step.kept.batch.logprobs
    assert wanted is not None
    assert wanted.top_ks == (3, 0, 7)
    noise = torch.Generator().manual_seed(9)
    logits = torch.randn(len(KINDS), VOCAB, generator=noise).to(device().torch_device)
    ids = logits.argmin(-1)
    got = invariant_logprobs(logits, ids, wanted)
    want = token_logprobs(logits, ids[wanted.rows_L], 7, wanted.rows_L)
    torch.testing.assert_close(got.chosen_L, want.chosen_L)
    assert got.ranks_L.tolist() == want.ranks_L.tolist() == [VOCAB] * 3
    for i, top_k in enumerate(wanted.top_ks):
        assert got.top_ids_LK[i, :top_k].tolist() == want.top_ids_LK[i, :top_k].tolist()
        torch.testing.assert_close(got.top_LK[i, :top_k], want.top_LK[i, :top_k])
