"""Which prompts are refused, with what words, and what the engine is asked for an answer."""

from __future__ import annotations

import random
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from ridgeline.answer import Answer, check_prompt, resolve_sampling, sample_seed
from ridgeline.errors import RequestFault
from ridgeline.request import SamplingParams

VOCAB = 100


class Known(IntEnum):
    BEGIN = 7


def test_a_prompt_comes_back_as_a_tuple_of_the_same_ids() -> None:
    assert check_prompt([0, 5, VOCAB - 1], VOCAB) == (0, 5, VOCAB - 1)
    assert check_prompt((3,), VOCAB) == (3,)
    assert check_prompt([4, Known.BEGIN, 5], VOCAB) == (4, 7, 5)
    served = check_prompt([np.int64(4), np.uint8(7), 5], VOCAB)
    assert served == (4, 7, 5)
    assert {type(token_id) for token_id in served} == {int}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (True, " is not an integer"),
        (2.0, " is not an integer"),
        ("a", " is not an integer"),
        (None, " is not an integer"),
        (np.float64(5), " is not an integer"),
        (np.bool_(True), " is not an integer"),
        (np.int64(VOCAB), ": token id 100 is not in 0..99"),
        (-1, ": token id -1 is not in 0..99"),
        (VOCAB, ": token id 100 is not in 0..99"),
        (1 << 70, f": token id {1 << 70} is not in 0..99"),
        (-(1 << 70), f": token id {-(1 << 70)} is not in 0..99"),
    ],
)
def test_the_first_wrong_id_is_named(wrong: Any, why: str) -> None:
    seed = 5
    rng = random.Random(seed)
    for place in (0, 1, 40, 41):
        ids: list[Any] = [rng.randrange(VOCAB) for _ in range(42)]
        ids[place] = wrong
        ids[place + 1 :] = [rng.choice([n, wrong]) for n in ids[place + 1 :]]
        with pytest.raises(RequestFault) as caught:
            check_prompt(ids, VOCAB)
        assert str(caught.value) == f"prompt[{place}]{why}", f"seed {seed}"
        assert (caught.value.param, caught.value.code) == (f"prompt[{place}]", "invalid_token_id")


def test_no_prompt() -> None:
    with pytest.raises(RequestFault, match="the prompt is empty") as caught:
        check_prompt([], VOCAB)
    assert (caught.value.param, caught.value.code) == ("prompt", "empty_input")


def asked(**fields: Any) -> list[SamplingParams]:
    """Of each request, for an answer with these fields."""
    sampling = resolve_sampling(
        SamplingParams(**{"max_tokens": 4, "seed": 11} | fields),
        3,
        max_model_len=64,
        vocab_size=VOCAB,
        end_token_ids=[9],
    )
    answer = Answer(
        "a",
        (1, 2, 3),
        sampling,
        tokenizer=None,
        end_token_ids=frozenset({9}),
        arrival_time=0.0,
    )
    return [request.sampling for request in answer.requests]


def test_one_sample_is_asked_for_as_it_stands() -> None:
    (one,) = asked(prompt_logprobs=2)
    assert (one.n, one.seed, one.logprobs, one.prompt_logprobs) == (1, 11, None, 2)
    assert one.stop_token_ids == frozenset({9})
    (beams,) = asked(beam_width=3, n=2)
    assert (beams.n, beams.beam_width, beams.seed) == (2, 3, 11)


def test_samples_differ_in_their_seeds_and_the_first_reads_the_prompt() -> None:
    samples = asked(n=2, best_of=3, prompt_logprobs=2)
    assert [s.seed for s in samples] == [sample_seed(11, i) for i in range(3)]
    assert len({s.seed for s in samples}) == 3
    assert [(s.n, s.best_of, s.logprobs) for s in samples] == [(1, None, 0)] * 3  # to rank them by
    assert [s.prompt_logprobs for s in samples] == [2, None, None]
