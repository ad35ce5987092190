"""Beam search gives the beams, order and scores of Transformers' generate(num_beams=...)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model

transformers = pytest.importorskip("transformers")

PROMPTS = ([7, 11, 200, 3], [1, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("beams"), seed=3, vocab_size=261)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.generation_config.pad_token_id = 0
    return model.to(TEST_DEVICE)


@pytest.fixture(scope="module", params=[1, 2], ids=["one in flight", "two in flight"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    # A small pool, so that beams meet preemption and copy-on-write.
    return LLM(
        str(folder),
        device=TEST_DEVICE,
        dtype="float32",
        num_blocks=40,
        max_model_len=128,
        block_size=4,
        max_in_flight=request.param,
    )


def end_tokens(llm: LLM, prompt: list[int]) -> list[int]:
    """Tokens that beams really meet, so that finished hypotheses matter."""
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    (free,) = llm.generate(prompt, sampling)
    assert free.logprobs is not None
    return [free.logprobs[4].top[1][0], free.logprobs[7].top[2][0]]


@pytest.mark.every_pair
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
def test_beams_equal_transformers(
    llm: LLM, reference: Any, width: int, early_stopping: bool, length_penalty: float
) -> None:
    for prompt in PROMPTS:
        ends = end_tokens(llm, prompt)
        wanted = reference.generate(
            torch.tensor([prompt], device=TEST_DEVICE),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            do_sample=False,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            eos_token_id=ends,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=12,
            beam_width=width,
            n=width,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            stop_token_ids=ends,
            ignore_eos=True,
        )
        (result,) = llm.generate(prompt, sampling)
        rows = [_cut(row[len(prompt) :].tolist(), ends) for row in wanted.sequences]
        assert [list(output.token_ids) for output in result.outputs] == rows
        scores = [output.cumulative_logprob for output in result.outputs]
        assert scores == pytest.approx(wanted.sequences_scores.tolist(), abs=1e-4)
    assert llm.engine.is_idle


def _cut(token_ids: list[int], ends: list[int]) -> list[int]:
    """Without the end token and what pads the row behind it."""
    for i, token in enumerate(token_ids):
        if token in ends:
            return token_ids[:i]
    return token_ids
