"""With deterministic=True tokens and log-probabilities of a request are the same bits anywhere.

A few fixed requests run alone once, and then among random others: other lengths and samplers, steps
of other sizes, with and without a prefix cache, captured and not, short of memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.llm import GenerationResult
from tests.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = 20261121
MAX_MODEL_LEN = 256
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_num_batched_tokens": 48, "prefix_caching": False},
    {"num_blocks": 20},  # short of memory
    {"enforce_eager": True, "max_in_flight": 1, "max_num_batched_tokens": 200},
    {"block_size": 32, "max_num_seqs": 5, "kv_cache_memory_bytes": 64 << 20},
)
SHORT_OF_MEMORY = 2  # of the settings
SAMPLERS = (
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=1.0, seed=1, logprobs=2),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9, logprobs=0),
    SamplingParams(temperature=1.3, seed=3, top_k=20, top_p=0.95, logprobs=8),
    SamplingParams(seed=4, min_p=0.02, repetition_penalty=1.2, logit_bias={7: 1.5}, logprobs=1),
    SamplingParams(temperature=0.0, frequency_penalty=0.3, logprobs=3, prompt_logprobs=2),
)
NUM_TOKENS = (40, 30, 24, 50, 36, 20)
NUM_PROMPT = (3, 17, 64, 100, 129, 33)

# Which of SETTINGS, and batches of each: a few of all, or by `slow` a hundred for each model over
# its two dtypes.
amounts = pytest.mark.parametrize(
    ("settings", "num_batches"),
    [
        pytest.param(range(len(SETTINGS)), 2, id="few"),
        *(
            pytest.param((i,), 10, marks=pytest.mark.slow, id=f"setting{i}")
            for i in range(len(SETTINGS))
        ),
    ],
)
fewer = pytest.mark.parametrize(
    ("settings", "num_batches"),
    [
        pytest.param(range(len(SETTINGS)), 1, id="few"),
        pytest.param(range(len(SETTINGS)), 4, marks=pytest.mark.slow, id="many"),
    ],
)

Answer = tuple[list[int], Any, Any]


@contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    """Its memory is given back when the context ends."""
    llm = LLM(
        model,
        device="cuda",
        **({"deterministic": True, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 32} | options),
    )
    try:
        yield llm
    finally:
        llm.close()
        del llm
        torch.cuda.empty_cache()


def fixed(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(SEED)
    prompts = [[rng.randrange(5, vocab_size) for _ in range(n)] for n in NUM_PROMPT]
    return prompts, [long(s, n) for s, n in zip(SAMPLERS, NUM_TOKENS, strict=True)]


def long(sampling: SamplingParams, num: int) -> SamplingParams:
    return sampling.replace(max_tokens=num, ignore_eos=True)


def company(
    rng: random.Random, num: int, prompts: list[list[int]], vocab_size: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """`num` others, half of which begin as one of the fixed requests."""
    found, samplings = [], []
    for _ in range(num):
        head = rng.choice(prompts)[: rng.randint(0, 60)] if rng.random() < 0.5 else []
        tail = [rng.randrange(5, vocab_size) for _ in range(rng.randint(1, 120))]
        found.append(head + tail)
        samplings.append(long(rng.choice(SAMPLERS), rng.randint(1, 30)))
    return found, samplings


def answer(result: GenerationResult) -> Answer:
    """Numbers as they are: == of floats, not nearly equal."""
    assert result.error is None
    return result.token_ids, result.logprobs, result.prompt_logprobs


def alone(model: str, options: Mapping[str, Any]) -> list[Answer]:
    with engine(model, **options) as llm:
        prompts, samplings = fixed(llm.spec.vocab_size)
        return [
            answer(llm.generate([prompt], [sampling])[0])
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]


def assert_same_in_company(
    model: str, settings: Iterable[int], num_batches: int, **options: Any
) -> None:
    print(f"seed {SEED}")
    want = alone(model, options)
    for number in settings:
        setting, rng = SETTINGS[number], random.Random(SEED + 1 + number)
        preempted = captured = 0
        with engine(model, **(options | setting)) as llm:
            prompts, samplings = fixed(llm.spec.vocab_size)
            for batch in range(num_batches):
                num = 24 if number == SHORT_OF_MEMORY else rng.choice([1, 3, 8, 24])
                others, theirs = company(rng, num, prompts, llm.spec.vocab_size)
                mixed = [*enumerate(zip(prompts, samplings, strict=True))]
                mixed += [(-1, other) for other in zip(others, theirs, strict=True)]
                rng.shuffle(mixed)
                results = llm.generate([p for _, (p, _) in mixed], [s for _, (_, s) in mixed])
                for (index, _), result in zip(mixed, results, strict=True):
                    preempted += result.metrics.num_preemptions
                    if index >= 0:
                        assert answer(result) == want[index], (setting, batch, index)
            executor: Any = llm.engine.executor
            captured = executor.num_captured_steps
            can_capture = llm.resolved.max_captured_tokens > 0
            grows = all(layer.attention.window is None for layer in llm.spec.layers)
        assert number != SHORT_OF_MEMORY or preempted > 0 or not grows, "memory was not short"
        assert (captured > 0) is can_capture


@amounts
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["chat", "draft", "moe"])
def test_the_bundled_models(
    name: str, dtype: str, settings: Iterable[int], num_batches: int
) -> None:
    assert_same_in_company(f"demo:{name}", settings, num_batches, dtype=dtype)


@amounts
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["babyllama-char105", "babyllama-char105-moe4"])
def test_a_small_real_model(
    shared: Path, name: str, dtype: str, settings: Iterable[int], num_batches: int
) -> None:
    model = str(shared / "models" / name)
    assert_same_in_company(model, settings, num_batches, dtype=dtype)


@amounts
@pytest.mark.parametrize("weights", ["plain", "fp8"])
def test_weights_and_cache_in_e4m3(weights: str, settings: Iterable[int], num_batches: int) -> None:
    formats = {"weight_format": weights, "kv_cache_dtype": "fp8"}
    assert_same_in_company("demo:chat", settings, num_batches, dtype="bfloat16", **formats)


@fewer
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "changes",
    [
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 37,
        },
    ],
    ids=["norms of heads", "windows"],
)
def test_other_layers(
    tmp_path: Path,
    changes: dict[str, Any],
    dtype: str,
    settings: Iterable[int],
    num_batches: int,
) -> None:
    folder = make_tiny_model(
        tmp_path / "model",
        **({"hidden_size": 256, "intermediate_size": 8208, "head_dim": 64} | changes),
    )
    assert_same_in_company(str(folder), settings, num_batches, dtype=dtype)
