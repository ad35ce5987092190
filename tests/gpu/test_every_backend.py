"""On a GPU every attention backend gives the same tokens in float32: of the small real models those
of their reference, of the bundled models each other's; with captured steps and without them, with
one step under way and with two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.attention import ATTENTION_BACKENDS, choose_backend
from ridgeline.demo import folder
from ridgeline.errors import ConfigError
from ridgeline.loader.folder import read_config
from tests.test_models import MODELS, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
WAYS: dict[str, dict[str, Any]] = {
    "captured, overlapped": {"max_in_flight": 2},
    "captured": {"max_in_flight": 1},
    "overlapped": {"enforce_eager": True, "max_in_flight": 2},
    "one by one": {"enforce_eager": True, "max_in_flight": 1},
}


# Who serves float32 on a GPU: heads of any size, and those of the bundled models.
ANY_HEADS = ("reference", "sdpa")
WIDE_HEADS = (*ANY_HEADS, "triton")


def engine(model: str, backend: str, way: str, serve: Sequence[str]) -> LLM:
    """Skips what a backend cannot serve, unless it is one of those that `serve` this."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_blocks": 300}
    try:
        llm = LLM(model, attention_backend=backend, max_num_seqs=16, **options, **WAYS[way])
    except ConfigError as error:
        if backend in serve:
            raise
        pytest.skip(str(error))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert llm.resolved.attention_backend == backend
    return llm


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_real_models_answer_as_their_reference(
    shared: Path, name: str, backend: str, way: str
) -> None:
    prompts = expected(name)["prompts"]
    with engine(str(shared / "models" / name), backend, way, ANY_HEADS) as llm:
        results = llm.generate(
            [p["prompt_ids"] for p in prompts], SamplingParams(temperature=0.0, max_tokens=200)
        )
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == prompt["greedy_ids"], prompt["text"]


def bundled_answers(name: str, backend: str, way: str) -> list[list[int]]:
    prompts = ["Once upon a time", "The dog", "Sort these numbers: 3, 1, 2", "Hello! " * 30]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with engine(f"demo:{name}", backend, way, WIDE_HEADS) as llm:
        return [r.token_ids for r in llm.generate(prompts, sampling, progress=False)]


@cache
def by_definition(name: str) -> list[list[int]]:
    return bundled_answers(name, "reference", "one by one")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("name", ["chat", "draft", "moe"])
def test_bundled_models_answer_as_by_definition(name: str, backend: str, way: str) -> None:
    assert bundled_answers(name, backend, way) == by_definition(name)


def test_our_own_kernels_serve_all_but_odd_head_sizes() -> None:
    """That the tests above are not all skipped."""
    spec = read_spec(read_config(folder("chat")))
    for name in ("triton", "sdpa", "reference"):
        assert choose_backend(name, spec, torch.float32, CUDA).name == name
