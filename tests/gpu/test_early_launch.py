"""Kernels that begin before the one before them has ended give the same bits as in turn.

The same requests run twice through an engine: as they are, and with no kernel launched early. What
a kernel reads too soon, or writes too soon, would show in tokens or log-probabilities.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.kernels import nvrtc
from ridgeline.kernels.launching import launches_early
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not launches_early(torch.device("cuda", 0)),
        reason="needs a CUDA device that launches early",
    ),
]

SEED = 20261122
# These ask whether a kernel of CUDA C++ can run at all; how it is launched is decided below them.
ASK_MORE = ("ridgeline.kernels.stream_linear", "ridgeline.kernels.tile_linear")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"weight_format": "fp8"},
    "fp8 cache": {"weight_format": "fp8", "kv_cache_dtype": "fp8"},
    "eager": {"enforce_eager": True},
    "deterministic": {"deterministic": True},
    "float16": {"dtype": "float16"},
}
SAMPLERS = (
    SamplingParams(temperature=0.0, logprobs=4, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=1, temperature=1.1, logprobs=1, max_tokens=30, ignore_eos=True),
    SamplingParams(
        seed=2, top_p=0.9, top_k=50, frequency_penalty=0.4, max_tokens=50, ignore_eos=True
    ),
)


NUMBERS = (1, 7, 36)  # of requests


def answers(model: str, options: dict[str, Any], numbers: tuple[int, ...] = NUMBERS) -> list[Any]:
    rng = random.Random(SEED)
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_in_flight": 1}
    limits = {"num_blocks": 9 * max(numbers), "max_model_len": 256, "max_num_seqs": max(numbers)}
    with LLM(model, **(common | limits | options)) as llm:
        vocab = llm.spec.vocab_size
        found = []
        for num in numbers:
            prompts = [[rng.randrange(5, vocab) for _ in range(n % 90 + 1)] for n in range(num)]
            sampling = [SAMPLERS[i % len(SAMPLERS)] for i in range(num)]
            for result in llm.generate(prompts, sampling, progress=False):
                assert result.error is None
                found.append((result.token_ids, result.logprobs))
        return found


def count_launches(monkeypatch: pytest.MonkeyPatch, *, may_be_early: bool) -> list[bool]:
    """Of kernels in CUDA C++: whether each is early, as it is launched."""
    launch, seen = nvrtc.Kernel.launch, []

    def launched(self: nvrtc.Kernel, *args: Any, pdl: bool = False, **options: Any) -> None:
        seen.append(pdl and may_be_early)
        launch(self, *args, pdl=pdl and may_be_early, **options)

    monkeypatch.setattr(nvrtc.Kernel, "launch", launched)
    return seen


def launch_in_turn(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of modules with kernels in Triton that no longer launch early."""
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("ridgeline.kernels.")
        and name != launches_early.__module__
        and name not in ASK_MORE
        and getattr(module, "launches_early", None) is launches_early
    ]
    for module in users:
        monkeypatch.setattr(module, "launches_early", lambda _: False)
    return len(users)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_as_in_turn(way: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    changes: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = str(make_tiny_model(tmp_path / "model", **(changes | sizes | heads)))
    early = assert_same_bits(model, WAYS[way], NUMBERS)
    assert any(early) or way in ("deterministic", "fp8 cache"), "none is in CUDA C++"


def assert_same_bits(model: str, options: dict[str, Any], numbers: tuple[int, ...]) -> list[bool]:
    with pytest.MonkeyPatch.context() as patch:
        early = count_launches(patch, may_be_early=True)
        want = answers(model, options, numbers)
    with pytest.MonkeyPatch.context() as patch:
        in_turn = count_launches(patch, may_be_early=False)
        assert launch_in_turn(patch) >= 5
        assert answers(model, options, numbers) == want
    assert not any(in_turn)
    return early


@pytest.mark.parametrize("way", ["plain", "fp8"])
def test_the_same_bits_by_kernels_of_the_table(way: str, tmp_path: Path) -> None:
    """Sizes that the table of tiles knows on an H200, at which kernels for the next product and the
    one after it are there while one runs."""
    changes: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 4}
    model = str(make_tiny_model(tmp_path / "model", **(changes | sizes | heads)))
    assert any(assert_same_bits(model, WAYS[way], (1, 8, 30, 120, 250)))
