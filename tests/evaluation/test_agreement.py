"""Do agreement and accepted length equal those of speculative decoding done step by step?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ridgeline import LLM, ConfigError, SamplingParams
from ridgeline.evaluation.agreement import agreement_rows, check_pair, matches, num_steps
from ridgeline.evaluation.answers import Answered, Question, ask
from ridgeline.evaluation.problems import Message, Problem
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model

K = 4
PROMPTS = ("abc", "hello there", "q", "12 + 34", "once upon", "xyz xyz")


def noisy(source: Path, folder: Path, scale: float) -> Path:
    """The model of `source`, a little off: a draft that is often right."""
    make_tiny_model(folder, weights=False)
    noise = torch.Generator().manual_seed(1)
    tensors = load_file(str(source / "model.safetensors"))
    for name, values in sorted(tensors.items()):
        tensors[name] = values + scale * torch.randn(values.shape, generator=noise)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def open_tiny(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device=TEST_DEVICE, max_num_seqs=8, num_blocks=200, **options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    top = tmp_path_factory.mktemp("pair")
    target = make_tiny_model(top / "target")
    return open_tiny(target), open_tiny(noisy(target, top / "draft", 0.03))


@pytest.fixture(scope="module")
def answered(pair: tuple[LLM, LLM]) -> list[Answered]:
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    asked = [
        Question(
            Problem("even" if i % 2 == 0 else "odd", (Message("user", text),), ""),
            tuple(pair[0].encode(text)),
            sampling,
        )
        for i, text in enumerate(PROMPTS)
    ]
    return ask(pair[0], asked, progress=False)


def greedy(llm: LLM, ids: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(int(llm.logits([*ids, *made])[-1].argmax()))
    return made


def speculate(draft: LLM, one: Answered) -> int:
    """Steps of speculative decoding, each draft really made by the draft."""
    prompt, answer = list(one.question.prompt_token_ids), list(one.token_ids)
    position = steps = 0
    while position < len(answer):
        draft_tokens = greedy(draft, prompt + answer[:position], K)
        right = 0
        while right < K and answer[position + right : position + right + 1] == [
            draft_tokens[right]
        ]:
            right += 1
        position, steps = position + right + 1, steps + 1
    return steps


def test_steps_of_known_matches() -> None:
    yes, no = True, False
    assert num_steps(()) == 0
    assert num_steps((no,)) == num_steps((yes,)) == 1
    assert num_steps((yes,) * 4) == num_steps((yes,) * 5) == 1
    assert num_steps((yes,) * 6) == num_steps((yes,) * 10) == 2
    assert num_steps((no,) * 7) == 7
    # 2 drafted and a bonus token, then 0 and a bonus token, then 4 and a bonus token
    assert num_steps((yes, yes, no, no, yes, yes, yes, yes, no)) == 3


def test_matches_are_the_drafts_own_choices(
    pair: tuple[LLM, LLM], answered: list[Answered]
) -> None:
    draft = pair[1]
    found = matches(draft, answered, progress=False)
    for one, line in zip(answered, found, strict=True):
        prompt, answer = list(one.question.prompt_token_ids), list(one.token_ids)
        chosen = draft.logits(prompt + answer).argmax(-1).tolist()[len(prompt) - 1 : -1]
        assert line == tuple(a == b for a, b in zip(chosen, answer, strict=True))
    share = sum(map(sum, found)) / sum(map(len, found))
    assert 0.1 < share < 0.95  # so that the test below means something


def test_accepted_length_equals_real_speculation(
    pair: tuple[LLM, LLM], answered: list[Answered]
) -> None:
    rows = list(agreement_rows(answered, matches(pair[1], answered, progress=False)))
    assert [(row.task, row.metric) for row in rows] == [
        (task, metric)
        for task in ("even", "odd")
        for metric in ("draft_agreement", "accepted_length_k4")
    ]
    for task, first in (("even", 0), ("odd", 1)):
        group = answered[first::2]
        steps = sum(speculate(pair[1], one) for one in group)
        tokens = sum(len(one.token_ids) for one in group)
        share, length = (row for row in rows if row.task == task)
        assert (share.n, length.n) == (tokens, steps)
        assert length.value == pytest.approx(tokens / steps)
        assert length.low is not None
        assert length.high is not None
        assert length.low <= length.value <= length.high


def test_a_model_agrees_with_itself(pair: tuple[LLM, LLM], answered: list[Answered]) -> None:
    rows = list(agreement_rows(answered, matches(pair[0], answered, progress=False)))
    assert [row.value for row in rows] == [1.0, 5.0, 1.0, 5.0]  # 40 tokens in 8 steps each


def test_what_the_draft_cannot_hold_is_cut(answered: list[Answered], tmp_path: Path) -> None:
    short = open_tiny(make_tiny_model(tmp_path / "m"), max_model_len=16)
    found = matches(short, answered, progress=False)
    lengths = [max(0, 15 - len(one.question.prompt_token_ids)) for one in answered]
    assert [len(line) for line in found] == lengths
    assert matches(short, [], progress=False) == []


def test_another_vocabulary_is_refused(
    pair: tuple[LLM, LLM], answered: list[Answered], tmp_path: Path
) -> None:
    check_pair(*pair, answered)
    other = open_tiny(make_tiny_model(tmp_path / "m", vocab_size=270))
    with pytest.raises(ConfigError, match="share its tokenizer"):
        check_pair(pair[0], other, answered)
