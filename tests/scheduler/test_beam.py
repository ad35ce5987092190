"""The choice of beams equals Transformers', and needs no more than the top of each row."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from ridgeline.request import SamplingParams
from ridgeline.scheduler.beams import BeamSearch, num_candidates

transformers = pytest.importorskip("transformers")

VOCAB = 40
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).eval()


def log_probs(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0, -1].float(), -1)


def search(model: Any, sampling: SamplingParams) -> BeamSearch:
    beams = BeamSearch(sampling)
    count = num_candidates(sampling)
    for _ in range(100):
        tops = []
        for hypothesis in beams.live:
            top = log_probs(model, [*PROMPT, *hypothesis.token_ids]).topk(count)
            values = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            tops.append(list(values))
        if not beams.advance(tops):
            return beams
    raise AssertionError("no end")


def expected(model: Any, sampling: SamplingParams) -> list[tuple[tuple[int, ...], float]]:
    config = transformers.GenerationConfig(
        num_beams=sampling.beam_width,
        num_return_sequences=sampling.n,
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens or None,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        eos_token_id=sorted(sampling.stop_token_ids) or None,
        pad_token_id=VOCAB - 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = torch.tensor([PROMPT])
    got = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    answers = []
    for sequence, score in zip(got.sequences.tolist(), got.sequences_scores.tolist(), strict=True):
        answer = sequence[len(PROMPT) :]
        ends = [i for i, token in enumerate(answer) if token in sampling.stop_token_ids]
        answers.append((tuple(answer[: ends[0] + 1] if ends else answer), score))
    return answers


def test_beams_equal_transformers(model: Any) -> None:
    seed = 7
    rng = random.Random(seed)
    num_stopped = 0
    for case in range(60):
        width = rng.randint(2, 5)
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 9),
            min_tokens=rng.choice([0, 0, 1]),
            beam_width=width,
            n=rng.randint(1, width),
            length_penalty=rng.choice([0.0, 1.0, 2.0, -1.0, 0.6]),
            early_stopping=rng.random() < 0.5,
            stop_token_ids=rng.sample(range(VOCAB - 1), rng.choice([0, 1, 4, 10])),
        )
        best = search(model, sampling).best()
        wanted = expected(model, sampling)
        assert [tuple(h.token_ids) for h in best] == [w[0] for w in wanted], f"{seed} {case}"
        assert [h.score for h in best] == pytest.approx([w[1] for w in wanted], abs=1e-4)
        num_stopped += sum(h.token_ids[-1] in sampling.stop_token_ids for h in best)
    assert num_stopped > 20


def test_scores_are_sums_of_the_reported_values(model: Any) -> None:
    sampling = SamplingParams(max_tokens=6, beam_width=3, n=3, length_penalty=0.0, logprobs=2)
    for hypothesis in search(model, sampling).best():
        assert hypothesis.score == pytest.approx(sum(t.logprob for t in hypothesis.logprobs))
        for i, token in enumerate(hypothesis.logprobs):
            before = [*PROMPT, *hypothesis.token_ids[:i]]
            assert token.token_id == hypothesis.token_ids[i]
            assert token.logprob == pytest.approx(float(log_probs(model, before)[token.token_id]))
            assert len(token.top) == 2
            assert token.top[0][1] >= token.logprob


def test_enough_is_reported_even_if_all_stop_tokens_lead() -> None:
    sampling = SamplingParams(beam_width=2, stop_token_ids=range(1, 6), max_tokens=9)
    beams = BeamSearch(sampling)
    count = num_candidates(sampling)
    assert count == 7
    top = [(token, -float(token)) for token in range(count)]
    assert beams.advance([top]) == [0, 0]
    assert [h.token_ids for h in beams.live] == [[0], [6]]
    assert [h.token_ids for h in beams.finished] == [[1]]


def test_live_beams_are_best_first_and_parents_match() -> None:
    beams = BeamSearch(SamplingParams(beam_width=3, max_tokens=9))
    assert beams.advance([[(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0), (5, -5.0), (6, -6.0)]]) == [
        0,
        0,
        0,
    ]
    parents = beams.advance([[(9, -5.0)] * 6, [(8, -0.1)] + [(9, -9.0)] * 5, [(7, -0.5)] * 6])
    assert parents == [1, 2, 2]
    assert all(a.score >= b.score for a, b in pairwise(beams.live))
    assert beams.live[0].token_ids == [2, 8]
