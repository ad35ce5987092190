"""On a GPU every KV format is read in place, and says what the same cache says when gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Of 160 tokens. This model has random weights: a code that is the next one is enough for another
# token, and those of 4 bits are far apart.
LEAST = {"auto": 150, "fp8": 140, "int8": 140, "int4": 115}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
RANKS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv", ["auto", "fp8", "int8", "int4"])
def test_in_place_is_as_gathered(
    tmp_path: Path, kv: str, head_dim: int, deterministic: bool
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = str(make_tiny_model(tmp_path, head_dim=head_dim, **sizes))
    prompts = [[3 + i, *range(5, 60 + 40 * i)] for i in range(4)]
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "num_blocks": 200, "kv_cache_dtype": kv,
    }  # fmt: skip
    with LLM(folder, deterministic=deterministic, **options) as llm:
        answers = llm.generate(prompts, GREEDY)
        again = llm.generate(prompts, GREEDY)
    if deterministic:
        assert [one.token_ids for one in answers] == [one.token_ids for one in again]
    whole = [(*p, *one.token_ids) for p, one in zip(prompts, answers, strict=True)]
    with LLM(folder, attention_backend="sdpa", **options) as llm:
        results = llm.generate(whole, RANKS)
    found = []
    for prompt, result in zip(prompts, results, strict=True):
        assert result.prompt_logprobs is not None
        found += [entry is not None and entry.rank == 1 for entry in
                  result.prompt_logprobs[len(prompt) :]]  # fmt: skip
    assert len(found) == 160
    assert sum(found) >= LEAST[kv], f"{sum(found)} of 160 tokens"
