"""Models with experts run in captured steps, and say what the CPU says of them."""

from __future__ import annotations

import random
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

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SHAPE: dict[str, Any] = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("experts") / "model", seed=5, **SHAPE)


def answers(model: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    llm = LLM(str(model), max_model_len=256, max_num_seqs=16, **options)
    try:
        if options.get("device") == "cuda" and not options.get("enforce_eager"):
            assert llm.resolved.max_captured_rows > 0
            assert llm.resolved.max_captured_tokens > 0
        return [result.token_ids for result in llm.generate(prompts, GREEDY)]
    finally:
        llm.close()


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 261) for _ in range(size)] for size in (1, 5, 17, 40, 90, 3)]


@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"speculate": "ngram:3"}, {"deterministic": True}]
)
def test_captured_steps_say_what_the_cpu_says(model: Path, options: dict[str, Any]) -> None:
    wanted = answers(model, prompts(), device="cpu", dtype="float32", speculate="off")
    got = answers(model, prompts(), device="cuda", dtype="float32", **options)
    assert got == wanted
    single = answers(model, prompts()[3:4], device="cuda", dtype="float32", **options)
    assert single == wanted[3:4]


@pytest.mark.parametrize("weight_format", ["plain", "fp8", "fp8-block", "int8", "int4"])
def test_weights_of_few_bits_are_captured_too(model: Path, weight_format: str) -> None:
    options = {"device": "cuda", "dtype": "bfloat16", "weight_format": weight_format}
    captured = answers(model, prompts(), **options)
    assert all(len(tokens) == 40 for tokens in captured)
