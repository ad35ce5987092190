"""How fast does one model decode one request on this machine, written in several ways?

From every token computed again for each new one, to the engine with everything on. Each way reads
the same weights for each token, so tokens a second say how many bytes a second it gets out of the
memory that they lie in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ridgeline.attention.native import NativeAttention
from ridgeline.attention.sdpa import SdpaAttention
from ridgeline.kernels.cpu import native
from ridgeline.llm import LLM
from ridgeline.measure.machine import measure_bandwidth
from ridgeline.traced import TracedModel

FIRST_ID = 100  # of the prompt's tokens; which they are does not matter
REPEATS = 3  # of the engine's answer, of which the fastest counts
BUDGET_S, LEAST_TOKENS = 1.5, 4  # a way that takes longer than this says no more than so many


@dataclass(frozen=True, slots=True)
class Way:
    """`token_s`: seconds of each new token (of a slow way
    the first few) but the first, which comes out of the prompt's pass of
    `prompt_s`. `weight_bytes` are read for each."""

    name: str
    does: str
    weight_bytes: int
    prompt_s: float
    token_s: tuple[float, ...]

    @property
    def typical_s(self) -> float:
        return median(self.token_s)

    @property
    def bytes_per_s(self) -> float:
        """Of weights, through the median token."""
        return self.weight_bytes / self.typical_s


Told = float | Way  # share of the work that is done, or a result


def stepwise(
    model: TracedModel, prompt: Sequence[int], num_tokens: int, *, is_cached: bool
) -> Iterator[tuple[float, int]]:
    """Seconds and token of each pass; without a cache each is over all tokens so far."""
    model.next_token(prompt)  # what happens only once
    tokens, start = list(prompt), 0
    for _ in range(num_tokens):
        begun = time.perf_counter()
        token = model.next_token(tokens[start:], start)
        yield time.perf_counter() - begun, token
        start = len(tokens) if is_cached else 0
        tokens.append(token)


def decode_ways(folder: Path, num_prompt: int, num_tokens: int) -> Iterator[Told]:
    """One after the other, with the progress of all in between."""
    room = num_prompt + num_tokens + 1
    prompt = range(FIRST_ID, FIRST_ID + num_prompt)
    plain = TracedModel(folder, room, attention=SdpaAttention())
    ways: list[tuple[str, str, TracedModel, bool]] = [
        ("naive", "PyTorch, float32, all tokens again each time", plain, False),
        ("KV cache", "PyTorch, float32, the new token alone", plain, True),
    ]
    if native.library() is not None:
        fused = TracedModel(folder, room, attention=NativeAttention(), dtype=torch.bfloat16)
        ways.append(("native", "the engine's layers with its own kernels, bfloat16", fused, True))
    parts = len(ways) + 1
    for number, (name, does, model, is_cached) in enumerate(ways):
        seconds = list[float]()
        for taken, _ in stepwise(model, prompt, num_tokens, is_cached=is_cached):
            seconds.append(taken)
            if sum(seconds) > BUDGET_S and len(seconds) >= LEAST_TOKENS:
                break
            yield (number + len(seconds) / num_tokens) / parts
        yield Way(name, does, model.weight_bytes, seconds[0], tuple(seconds[1:]))
    yield _engine(folder, prompt, num_tokens, ways[-1][2].weight_bytes)


def _engine(folder: Path, prompt: Sequence[int], num_tokens: int, weight_bytes: int) -> Way:
    """Its steps are recorded; times are means, as it gives tokens out together."""
    longest = len(prompt) + num_tokens + 1
    with LLM(
        folder, max_model_len=longest, max_num_seqs=1, speculate="off", prefix_caching=False
    ) as llm:
        sampling = llm.sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        found = [llm.generate([list(prompt)], sampling)[0].metrics for _ in range(REPEATS)]
    best = min(found, key=lambda one: one.tpot_s or float("inf"))
    each = best.tpot_s or 0.0
    does = "the whole engine: scheduler, recorded steps, sampling"
    return Way("engine", does, weight_bytes, best.ttft_s or 0.0, (each,) * (num_tokens - 1))


def bandwidths(num_bytes: int) -> tuple[float, float]:
    """Bytes a second that this machine reads from a buffer as large as the weights, which may stay
    in its last cache, and from one that cannot."""
    device = torch.device("cpu")
    near, far = measure_bandwidth(device, num_bytes), measure_bandwidth(device)
    return near.read_bytes_per_s, far.read_bytes_per_s
