"""The small real models answer exactly as the reference did, by every way in.

expected.json of each model was made with Transformers (see its SOURCE.md); the 464-character text
of stories260K is what llama2.c itself requires of that checkpoint.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from tests.conftest import TEST_DEVICE, find_shared

SHARED = find_shared()
MODELS = ("stories260K", "babyllama-char105", "babyllama-char105-moe4", "babyllama-char105-partner")


@cache
def load(name: str) -> LLM:
    assert SHARED is not None
    return LLM(str(SHARED / "models" / name), device=TEST_DEVICE, dtype="float32", max_num_seqs=16)


@cache
def expected(name: str) -> dict[str, Any]:
    assert SHARED is not None
    text = (SHARED / "models" / name / "expected.json").read_text()
    return dict(json.loads(text))


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 200} | changes))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_text_equal_the_reference(shared: Path, name: str) -> None:
    prompts = expected(name)["prompts"]
    results = load(name).generate([p["prompt_ids"] for p in prompts], greedy())
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == prompt["greedy_ids"], prompt["text"]
        assert result.finish_reason == ("length" if prompt["stopped_on"] is None else "stop")


@pytest.mark.parametrize("name", MODELS)
def test_text_prompts_become_the_expected_ids_and_text(shared: Path, name: str) -> None:
    prompts = expected(name)["prompts"]
    results = load(name).generate([p["text"] for p in prompts], greedy())
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.prompt_token_ids) == prompt["prompt_ids"]
        # The reference shows <unk> as U+2047, which skipping special tokens takes away.
        shown = prompt["greedy_text"].replace("\u2047", "").replace(" ", "")
        assert result.text.replace("\u2047", "").replace(" ", "") == shown


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_within_1e4(shared: Path, name: str) -> None:
    check = expected(name)["logits_check"]
    logits = load(name).logits(check["prompt_ids"]).double()
    for want in check["positions"]:
        row = logits[want["position"]]
        # Figures in the file are rounded: sums to 4 digits, logsumexp and logits to 5.
        assert abs(row.logsumexp(0).item() - want["logsumexp"]) < 1e-4
        assert abs(row.norm().item() - want["l2"]) < 2e-3
        assert abs(row.sum().item() - want["sum"]) < 1e-4 * len(row)
        values, ids = row.topk(5)
        assert ids.tolist() == [token for token, _ in want["top5"]]
        assert values.tolist() == pytest.approx([logit for _, logit in want["top5"]], abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities(shared: Path, name: str) -> None:
    check = expected(name)["logprob_check"]
    sampling = greedy(max_tokens=1, prompt_logprobs=0)
    ids = check["ids"]
    llm = load(name)
    # A story of exactly the context's length leaves no room to generate; score all but its end.
    head = ids[: llm.resolved.max_model_len - 1]
    (result,) = llm.generate([head], sampling)
    assert result.prompt_logprobs is not None
    got = [entry.logprob for entry in result.prompt_logprobs if entry is not None]
    assert got[:16] == pytest.approx(check["first_16_token_logprobs"], abs=1e-4)
    table = torch.log_softmax(llm.logits(ids).double(), -1)
    every = [table[i, token].item() for i, token in enumerate(ids[1:])]
    assert sum(every) == pytest.approx(check["sum_logprob"], abs=1e-2)
    assert got == pytest.approx(every[: len(got)], abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_generated_log_probabilities_sum_to_the_reference(shared: Path, name: str) -> None:
    prompt = expected(name)["prompts"][0]
    (result,) = load(name).generate([prompt["prompt_ids"]], greedy(logprobs=2))
    assert result.logprobs is not None
    total = sum(entry.logprob for entry in result.logprobs)
    assert total == pytest.approx(prompt["sum_logprob"], abs=1e-2)
    for entry in result.logprobs:
        assert entry.rank == 1
        assert entry.top[0][0] == entry.token_id
        assert entry.top[0][1] == pytest.approx(entry.logprob)


def test_the_text_that_llama2c_requires(shared: Path) -> None:
    want = expected("stories260K")["llama2c_own_expectation"]
    llm = load("stories260K")
    (result,) = llm.generate([want["prompt_ids"]], greedy(max_tokens=want["new_tokens"]))
    assert result.text.lstrip() == want["text"]
    assert len(want["text"]) == 464
    pieces = "".join(d.text for d in llm.stream(want["prompt_ids"], greedy(max_tokens=200)))
    assert pieces == result.text


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_corpus_loss(shared: Path, name: str) -> None:
    import gzip

    llm, want = load(name), expected(name)["corpus_nll"]
    text = gzip.decompress(
        (shared / "data" / "tinystories-sample" / "tinystories_sample.txt.gz").read_bytes()
    ).decode()
    stories = [story.strip() for story in text.split("<|endoftext|>")][1000:1060]
    total = count = 0.0
    for story in stories:
        ids = llm.encode(story)[:256]
        table = torch.log_softmax(llm.logits(ids).double(), -1)
        total -= sum(table[i, token].item() for i, token in enumerate(ids[1:]))
        count += len(ids) - 1
    assert count == pytest.approx(want["tokens"], rel=0.05)
    assert total / count == pytest.approx(want["mean_nll_nats_per_token"], abs=2e-3)
