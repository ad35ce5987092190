"""Backends that are packages of their own agree with the definition in float64 on ragged, poisoned
steps."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.attention import ATTENTION_BACKENDS, AttentionBackend
from ridgeline.registry import load
from tests.attention.cases import Case, Shape, make_case, naive, random_shape

PACKAGES = {"flashinfer": "flashinfer", "flash_attention": "flash_attn.cute"}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # what these packages say of each other as they compile
]


@pytest.fixture(scope="module", params=PACKAGES)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    name: str = request.param
    pytest.importorskip(PACKAGES[name])
    if name == "flashinfer" and shutil.which("nvcc") is None:
        pytest.skip("FlashInfer compiles with nvcc")
    made: AttentionBackend = load(ATTENTION_BACKENDS, name, "attention backend")()
    return made


def case_of(seed: int, head_dim: int, dtype: torch.dtype) -> Case:
    rng = random.Random(seed)
    shape = random_shape(rng)
    spec = replace(shape.spec, head_dim=head_dim, window=None)
    return make_case(Shape(shape.lengths, spec, rng.choice((1, 8, 16, 32))), seed, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_is_at_most_twice_that_of_pytorch(
    backend: AttentionBackend, head_dim: int, dtype: torch.dtype
) -> None:
    for seed in range(40):
        case = case_of(seed, head_dim, dtype)
        plan = backend.plan(case.layout, 0, None)
        exact = naive(case)
        for _ in range(2):  # the second layer finds the plan
            got = backend.attend(case.q_THD, case.layer_kv, plan, case.shape.spec)
            ours = (got.cpu().double() - exact).norm().item()
            theirs = (naive(case, dtype).double() - exact).norm().item()
            floor = torch.finfo(dtype).eps * exact.norm().item() / 2
            assert ours <= max(2 * theirs, floor), f"seed {seed}: {ours} vs {theirs} {case.shape}"


def test_plans_that_take_turns_keep_their_numbers(backend: AttentionBackend) -> None:
    """More of them than have a place, and in any order."""
    cases = [case_of(seed, 64, torch.bfloat16) for seed in range(8)]
    plans = [backend.plan(case.layout, 0, None) for case in cases]
    order = [*range(8), *random.Random(3).choices(range(8), k=40)]
    got = {
        index: backend.attend(
            cases[index].q_THD, cases[index].layer_kv, plans[index], cases[index].shape.spec
        )
        for index in order
    }
    for index, case in enumerate(cases):
        error = (got[index].cpu().double() - naive(case)).norm() / naive(case).norm()
        assert error < 1e-2


def test_a_long_prompt_and_a_long_answer(backend: AttentionBackend) -> None:
    """Several tiles of new tokens, and many blocks before one."""
    spec = replace(case_of(0, 128, torch.bfloat16).shape.spec, num_heads=8, num_kv_heads=2)
    case = make_case(Shape(((0, 700), (3000, 1), (900, 200)), spec, 16), 9, torch.bfloat16, "cuda")
    got = backend.attend(case.q_THD, case.layer_kv, backend.plan(case.layout, 0, None), spec)
    error = (got.cpu().double() - naive(case)).norm() / naive(case).norm()
    assert error < 1e-2


def test_an_engine_answers_as_with_our_own_kernels(backend: AttentionBackend) -> None:
    """Up to near ties: the first tokens of most answers are the same."""
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = ["Once upon a time", "The dog", "Sort these numbers: 3, 1, 2", "Hello! " * 40]
    answers = []
    for name in (backend.name, "triton"):
        options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "attention_backend": name}
        with LLM("demo:chat", num_blocks=200, max_num_seqs=4, **options) as llm:
            assert llm.resolved.attention_backend == name
            answers.append([r.token_ids for r in llm.generate(prompts, sampling, progress=False)])
    same = [a[:4] == b[:4] for a, b in zip(*answers, strict=True)]
    assert sum(same) >= 3, answers
