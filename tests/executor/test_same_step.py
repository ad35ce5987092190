"""A prompt may read the blocks that another one fills in the very same step, on every path."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from ridgeline.attention import AttentionBackend
from ridgeline.attention.native import NativeAttention
from ridgeline.attention.paged import PagedAttention
from ridgeline.attention.reference import ReferenceAttention
from ridgeline.attention.sdpa import SdpaAttention
from ridgeline.kernels.cpu import native
from ridgeline.layers.decoder import Decoder
from ridgeline.request import SamplingParams
from tests.conftest import TEST_DEVICE
from tests.executor.rig import VOCAB, Host, alone, make_decoder, make_executor

GREEDY = SamplingParams(temperature=0.0)
SIZE = 4
SHARED = 16  # tokens
BACKENDS: dict[str, type[AttentionBackend]] = {
    "reference": ReferenceAttention,
    "sdpa": SdpaAttention,
    "triton": PagedAttention,
}
if TEST_DEVICE == "cpu" and native.library() is not None:
    BACKENDS["native"] = NativeAttention


@cache
def decoder(backend: str) -> Decoder:
    return make_decoder(
        seed=3, attention=BACKENDS[backend](), hidden_size=24, head_dim=16, num_hidden_layers=3
    )


def same_step(backend: str, lengths: list[int], **captured: Any) -> None:
    """`first` has the prefix to itself; each other prompt takes what another one fills."""
    rng = random.Random(7)
    host = Host(make_executor(decoder(backend), block_size=SIZE, **captured))
    host.add("old", [rng.randrange(VOCAB) for _ in range(9)], GREEDY)
    host.run({"old": 9})
    shared = [rng.randrange(VOCAB) for _ in range(SHARED)]
    work, before = {"old": 1}, ("first", SHARED)
    host.add("first", [*shared, *(rng.randrange(VOCAB) for _ in range(lengths[0]))], GREEDY)
    first = host.held["first"]
    first.tables = [[host._take() for _ in range(-(-len(first.prompt) // SIZE))]]
    work["first"] = len(first.prompt)
    for i, length in enumerate(lengths[1:]):
        source, num = host.held[before[0]], before[1]
        prompt = [*source.prompt[:num], *(rng.randrange(VOCAB) for _ in range(length))]
        host.add(f"r{i}", prompt, GREEDY)
        taker = host.held[f"r{i}"]
        taker.tables = [list(source.tables[0][: num // SIZE])]
        taker.tables[0] += [host._take() for _ in range(-(-length // SIZE))]
        taker.num_computed = num
        work[f"r{i}"] = length
        if length >= SIZE:  # the next takes this one's blocks too
            before = (f"r{i}", num + length // SIZE * SIZE)
    host.run(work)
    host.decode(list(work), 3)
    for name in work:
        got = host.output(name)
        assert got == alone(decoder(backend), host.held[name].prompt, GREEDY, len(got), name), name


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_what_a_step_fills_it_may_read(backend: str) -> None:
    same_step(backend, [5, 9, 1, 6, 3])


@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() & {"triton"}))
def test_in_captured_steps_too(backend: str) -> None:
    same_step(backend, [5, 9, 1, 6, 3], max_captured_rows=8, max_captured_tokens=64)


@pytest.mark.skipif(TEST_DEVICE == "cpu", reason="cuDNN answers long fresh prompts on a GPU")
def test_behind_a_long_fresh_prompt() -> None:
    """One that is answered by cuDNN, in a number format that it serves."""
    rng = torch.Generator(device="cpu").manual_seed(5)
    model = make_decoder(
        seed=3,
        attention=PagedAttention(),
        dtype=torch.bfloat16,
        hidden_size=64,
        head_dim=64,
        num_hidden_layers=3,
        max_model_len=4096,
    )
    prompt = torch.randint(0, VOCAB, (1600,), generator=rng).tolist()

    def last(taken: int) -> torch.Tensor:
        """Logits of the prompt's last token, where another fills `taken` tokens of it."""
        host = Host(make_executor(model, num_blocks=900, block_size=SIZE))
        host.add("a", prompt, SamplingParams(temperature=0.0, prompt_logprobs=0))
        work = {"a": len(prompt)}
        if taken:
            first = host.held["a"]
            first.tables = [[host._take() for _ in range(-(-len(prompt) // SIZE))]]
            host.add("b", prompt, SamplingParams(temperature=0.0, logprobs=20))
            taker = host.held["b"]
            taker.tables = [list(first.tables[0][: taken // SIZE])]
            taker.num_computed = taken
            work["b"] = len(prompt) - taken
        else:
            host.held["a"].sampling = SamplingParams(temperature=0.0, logprobs=20)
        result = host.run(work)
        top = result.logprobs["b" if taken else "a"][0].top
        return torch.tensor([value for _, value in top])

    for taken in (1200, 1536, 1596):
        torch.testing.assert_close(last(taken), last(0), atol=0.05, rtol=0.0)
