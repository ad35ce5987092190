"""On a GPU a prompt that is a whole captured step is answered as one that is not captured, up to
near ties: its attention is cuDNN's then, over keys that were gathered first."""

from __future__ import annotations

from random import Random

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.executor.local import LocalExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1024, 1025, 1300, 1536, 1900, 2000)  # buckets to their end, and with padding
FIRST_TOKEN_ID, NUM_TOP = 3, 20
NEAR = 0.06  # of log-probabilities in bfloat16


def first_tokens(prompts: list[list[int]], *, is_eager: bool) -> tuple[LLM, list[dict[int, float]]]:
    """The likeliest first tokens of each answer, asked for one after the other."""
    llm = LLM(
        "demo:chat",
        device="cuda",
        dtype="bfloat16",
        speculate="off",
        prefix_caching=False,
        kv_cache_memory_bytes=200_000_000,
        enforce_eager=is_eager,
    )
    wanted = SamplingParams(temperature=0.0, max_tokens=1, logprobs=NUM_TOP, ignore_eos=True)
    found = []
    for prompt in prompts:
        result = llm.generate([prompt], wanted, progress=False)[0]
        assert result.error is None
        assert result.logprobs is not None
        found.append(dict(result.logprobs[0].top))
    return llm, found


def test_a_whole_prompt_is_answered_as_without_a_captured_step() -> None:
    random = Random(5)
    prompts = [[random.randrange(FIRST_TOKEN_ID, 500) for _ in range(n)] for n in LENGTHS]
    captured, got = first_tokens(prompts, is_eager=False)
    executor = captured.engine.executor
    assert isinstance(executor, LocalExecutor)
    mixed = executor.mixed_graphs
    assert mixed is not None
    assert mixed.num_steps >= len(prompts)
    assert LENGTHS[0] in mixed._whole, "cuDNN takes the heads of this model"
    plain, want = first_tokens(prompts, is_eager=True)
    for length, mine, theirs in zip(LENGTHS, got, want, strict=True):
        best = max(theirs.values())
        for token, logprob in theirs.items():
            if logprob > best - 3:
                assert mine[token] == pytest.approx(logprob, abs=NEAR), (length, token)
    captured.close()
    plain.close()
