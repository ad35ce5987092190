"""Through the real engine, with drafts and without: do three tokens come out with the odds that
plain sampling gives them, whatever is asked of it?

Each request is a sample. The exact law is that of the target's logits after each of the 7 + 49
beginnings, by rules of sampling that are written down in the tests of the sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.executor.drafter import Drafting
from ridgeline.executor.future import Answers
from ridgeline.kernels import verified_rows as rule
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import DraftLengths, Scheduler
from ridgeline.speculation.draft_model import EarlyLayers, open_draft_model
from ridgeline.speculation.prompt_lookup import Suffix
from ridgeline.step import StepResult
from tests.captures import captures
from tests.executor.rig import device, make_decoder, make_executor, make_scorer
from tests.sampling.test_distributions import expected
from tests.speculation.table_models import p_value

VOCAB, NUM_NEW, MOST, ROWS = 7, 4, 3, 32
PROMPT = (1, 5, 2, 1, 5)
LEAST_P = 1e-3
PARAMS: dict[str, SamplingParams] = {
    "temperature 1": SamplingParams(),
    "temperature 0.5": SamplingParams(temperature=0.5),
    "temperature 1.7, top-p 0.8": SamplingParams(temperature=1.7, top_p=0.8),
    "top-k 3": SamplingParams(top_k=3),
    "penalties": SamplingParams(
        repetition_penalty=1.6, presence_penalty=0.4, frequency_penalty=0.7
    ),
}


@cache
def decoder() -> Decoder:
    return make_decoder(seed=6, vocab_size=VOCAB, head_dim=16)


@cache
def other() -> Decoder:
    """Another model, whose drafts are right now and then."""
    return make_decoder(seed=8, vocab_size=VOCAB, num_hidden_layers=1, head_dim=16)


@cache
def logits_after(output: tuple[int, ...]) -> tuple[float, ...]:
    scorer = make_scorer(decoder())
    return tuple(scorer.logits([*PROMPT, *output])[-1].tolist())


@cache
def exact_law(name: str) -> torch.Tensor:
    """[V ** 3] of the tokens that drafts may reach: the first comes with the prompt."""
    law = torch.ones(1, dtype=torch.float64)
    for length in range(NUM_NEW - 1):
        odds = [
            expected(logits_after(output), PARAMS[name], PROMPT, output).double()
            for output in product(range(VOCAB), repeat=length)
        ]
        law = (law.unsqueeze(1) * torch.stack(odds)).flatten()
    return law


def drafting(method: str, model: Decoder, kv: KVCache) -> Drafting:
    sizes: dict[str, Any] = {
        "max_draft_tokens": MOST,
        "max_rows": ROWS,
        "max_logit_rows": ROWS * MOST,
    }
    if method == "draft":
        return Drafting(open_draft_model(other(), model, kv, **sizes), ROWS * 4)
    if method == "early":
        return Drafting(EarlyLayers(model, kv, num_layers=1, **sizes), ROWS * 4)
    return Drafting(Suffix(device().torch_device, ROWS, MOST), ROWS * 4)


class Always(DraftLengths):
    """The same number of drafts; counts what came of them."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.num_right = self.num_verified = 0

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        for num_verified, num_right in verified.values():
            self.num_verified += num_verified
            self.num_right += num_right


def observed(name: str, method: str | None, num: int, num_draft_tokens: int) -> torch.Tensor:
    """How often each continuation came. Batches of a full step, so that all rows draft at once."""
    always = Always(num_draft_tokens)
    executor = make_executor(
        decoder(),
        num_blocks=400,
        max_captured_rows=ROWS,
        make_drafting=None if method is None else lambda m, kv: drafting(method, m, kv),
    )
    windows = tuple(group.window for group in kv_groups(decoder().spec))
    scheduler = Scheduler(
        BlockManager(400, 4, windows, True, key=b"test"),
        FCFS(),
        max_num_batched_tokens=1024,
        max_num_seqs=ROWS,
        num_drafts=0 if method is None else MOST,
        draft_lengths=None if method is None else always,
        finds_drafts=method == "suffix",
    )
    engine = Engine(scheduler, executor, VirtualClock(), 1 if num_draft_tokens == MOST else 2)
    sampling = PARAMS[name].replace(max_tokens=NUM_NEW - 1)
    answers: dict[str, list[int]] = {}
    for begin in range(0, num, ROWS):
        for i in range(begin, begin + ROWS):
            answers[f"{name}{i}"] = []
            engine.add(Request(f"{name}{i}", PROMPT, sampling, 0.0))
        while not engine.is_idle:
            for output in engine.step():
                answers[output.request_id] += output.new_token_ids
    if method is not None:
        assert always.num_verified > num / 4
        assert always.num_right > 0.02 * always.num_verified
    ids = torch.tensor(list(answers.values()))
    places = (ids * torch.tensor([VOCAB ** (NUM_NEW - 2 - i) for i in range(NUM_NEW - 1)])).sum(1)
    return torch.bincount(places, minlength=VOCAB ** (NUM_NEW - 1))


def check_law(name: str, method: str | None, num: int, num_draft_tokens: int = MOST) -> None:
    p = p_value(observed(name, method, num, num_draft_tokens), exact_law(name))
    print(f"{name}, {method}, {num_draft_tokens} drafts, {num} samples: p = {p:.3g}")
    assert p > LEAST_P


@pytest.mark.every_value
@captures
@pytest.mark.parametrize("method", ["draft", "early", "suffix"])
@pytest.mark.parametrize("name", ["temperature 1", "penalties"])
def test_three_tokens_have_the_odds_of_plain_sampling(name: str, method: str) -> None:
    check_law(name, method, 2048)


@captures
def test_so_have_those_of_plain_sampling() -> None:
    check_law("temperature 1", None, 2048)


@captures
@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
@pytest.mark.parametrize("method", ["draft", "early", "suffix"])
@pytest.mark.parametrize("name", PARAMS)
def test_the_same_with_any_parameters(name: str, method: str, num_draft_tokens: int) -> None:
    check_law(name, method, 12288, num_draft_tokens)


@captures
def test_drafts_that_are_always_kept_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(
        logits_TV: torch.Tensor,
        positions_T: torch.Tensor,
        draws: Draws | None,
        odds: rule.DraftOdds | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids_T, is_sound_T = plain(logits_TV, positions_T, draws, odds, **options)
        if odds is not None:
            ids_T = ids_T.clone()
            ids_T.view(len(odds.drafts_Bk), -1)[:, :-1] = odds.drafts_Bk
        return ids_T, is_sound_T

    plain = rule.verified_rows
    monkeypatch.setattr("ridgeline.executor.draft_graphs.verified_rows", keeps)
    p = p_value(observed("temperature 1", "draft", 1024, MOST), exact_law("temperature 1"))
    assert p < LEAST_P / 10


@captures
def test_a_token_that_does_not_follow_the_last_draft_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last token of a fully accepted run is dropped, as if there were no bonus."""
    taken = Answers.take

    def drops(self: Answers, names: list[str], result: StepResult) -> None:
        taken(self, names, result)
        for name, limit in zip(names, self.limits, strict=True):
            tokens = result.token_ids.get(name, ())
            if limit and len(tokens) == limit + 1:
                result.token_ids[name] = (*tokens[:-1], (tokens[-1] + 1) % VOCAB)

    monkeypatch.setattr(Answers, "take", drops)
    p = p_value(observed("temperature 1", "draft", 2048, 1), exact_law("temperature 1"))
    assert p < LEAST_P / 10
