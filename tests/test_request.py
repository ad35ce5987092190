"""Bad sampling parameters name their field; good ones arrive normalised."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from ridgeline.errors import RequestFault
from ridgeline.request import (
    UNKNOWN_TOKEN,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    joined,
)

BAD: dict[str, tuple[object, ...]] = {
    "max_tokens": (0, -1, 1.5, True, "3", 1 << 40),
    "min_tokens": (-1, 17, "1"),
    "temperature": (-0.1, math.nan, math.inf, "hot", True, None),
    "top_k": (-2, 1.0, None),
    "top_p": (0, -1.0, 1.01, math.nan),
    "min_p": (-0.1, 2.0),
    "repetition_penalty": (0, -1.0, math.inf),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "logit_bias": (3, "x", {1: 101}, {-1: 1}, {"a": 1}, [1, 2], [(1,)], {1: math.nan}, None),
    "seed": (1 << 63, 0.5, "s"),
    "stop": (3, [""], "", ["a"] * 65, ["x" * 257], [1], None),
    "stop_token_ids": (3, "12", [-1], [1.0], [True], [[1]], range(2000), None),
    "ignore_eos": (1, None, "yes"),
    "n": (0, 9, 1.0),
    "best_of": (0, 9, "2"),
    "logprobs": (-1, 21, True),
    "prompt_logprobs": (-1, 21),
    "beam_width": (0, 9, None),
    "length_penalty": (math.nan, 11, "1"),
    "early_stopping": ("never", 1),
    "skip_special_tokens": (0, None),
    "structured_outputs": (3, {}, [], "{", "1", {"regex": "a", "choice": ["b"]}),
}


def test_every_field_is_checked() -> None:
    assert BAD.keys() == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_values_name_their_field(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(RequestFault) as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert caught.value.param == name, value
        assert str(caught.value).startswith(name), value


def test_no_value_raises_anything_else() -> None:
    seed = 3
    rng = random.Random(seed)
    strange: list[Any] = [None, True, -1, 0, 1, 3, 10**30, 0.5, math.nan, math.inf, "", "a", b"b"]
    strange += [[], [1], ["a"], [None], {}, {1: 1}, {"a": "b"}, {None: 1}, (), ((1, 2),), [[1]]]
    params = []
    for _ in range(3000):
        chosen = {name: rng.choice(strange) for name in rng.sample(sorted(BAD), 2)}
        try:
            SamplingParams(**chosen)
        except RequestFault as fault:  # anything else fails the test
            params.append((fault.param or "").partition(".")[0])
    assert set(params) <= BAD.keys(), f"seed {seed}"
    assert len(params) > 1000


def test_collections_are_normalised() -> None:
    sampling = SamplingParams(
        stop="end", stop_token_ids=iter([3, 3, 1]), logit_bias={7: 1.0, 2: -1}
    )
    assert sampling.stop == ("end",)
    assert sampling.stop_token_ids == frozenset({1, 3})
    assert sampling.logit_bias == ((2, -1), (7, 1.0))
    assert SamplingParams(logit_bias=((7, 1.0), (2, -1))) == SamplingParams(
        logit_bias={7: 1.0, 2: -1}
    )
    assert hash(sampling) == hash(sampling)


def test_numbers_of_numpy_are_numbers() -> None:
    sampling = SamplingParams(
        max_tokens=np.int64(7),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        ignore_eos=np.bool_(True),  # type: ignore[arg-type]
        stop=np.array(["a"]),
        stop_token_ids=np.array([3, 1]),
        logit_bias={np.int32(7): np.float32(1)},  # type: ignore[dict-item]
    )
    assert sampling == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        ignore_eos=True,
        stop="a",
        stop_token_ids=[1, 3],
        logit_bias={7: 1.0},
    )
    assert type(sampling.max_tokens) is int
    assert type(sampling.temperature) is float
    for wrong in (np.float64(3), np.array([3]), np.bool_(True)):
        with pytest.raises(RequestFault, match="max_tokens must be an integer"):
            SamplingParams(max_tokens=wrong)  # type: ignore[arg-type]


def test_combinations_that_contradict_are_refused() -> None:
    for chosen, name in (
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "beam_width": 2}, "n"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ):
        with pytest.raises(RequestFault) as caught:
            SamplingParams(**chosen)  # type: ignore[arg-type]
        assert caught.value.param == name


def test_end_tokens_join_the_stop_tokens_unless_ignored() -> None:
    sampling = SamplingParams(stop_token_ids=[5])
    assert sampling.resolved(9, 0, [2]).stop_token_ids == frozenset({2, 5})
    ignoring = SamplingParams(stop_token_ids=[5], ignore_eos=True)
    assert ignoring.resolved(9, 0, [2]).stop_token_ids == frozenset({5})


def test_what_is_resolved_equals_what_was_asked_but_for_what_was_open() -> None:
    sampling = SamplingParams(temperature=0.5, stop=["a"], logit_bias={7: 1.0}, n=2, min_p=0.1)
    resolved = sampling.resolved(9, 4, ())
    assert resolved == sampling.replace(max_tokens=9, seed=4)
    assert (sampling.max_tokens, sampling.seed) == (16, None)


def test_what_replaces_a_field_is_checked_too() -> None:
    sampling = SamplingParams(temperature=0.5, stop="a", logit_bias={7: 1.0})
    assert sampling.replace(stop=["b"], n=2) == SamplingParams(
        temperature=0.5, stop="b", logit_bias={7: 1.0}, n=2
    )
    with pytest.raises(RequestFault, match="n must be between 1 and 8"):
        sampling.replace(n=9)
    with pytest.raises(TypeError, match="has no field 'temprature'"):
        sampling.replace(temprature=1.0)


def test_how_far_a_request_has_got() -> None:
    request = Request("a", (1, 2, 3), SamplingParams(max_tokens=4), 0.0)
    assert (request.num_pending_tokens, request.num_known_tokens) == (3, 3)
    request.token_ids += [9, UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    request.num_computed_tokens = 4
    assert (request.num_pending_tokens, request.num_known_tokens) == (2, 4)
    assert request.max_num_tokens == 7
    assert request.prompt_token_ids == (1, 2, 3)
    with pytest.raises(RequestFault, match="max_tokens"):
        _ = Request("b", (1,), SamplingParams(max_tokens=None), 0.0).max_num_tokens


def test_outputs_that_are_joined_say_what_each_said() -> None:
    def entry(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, -1.0, 1, ())

    first = RequestOutput("a", (1,), None, (entry(1),), (entry(7),), 16, num_accepted=2)
    second = RequestOutput("a", (2, 3), None, (entry(2), entry(3)), num_accepted=1, num_rejected=4)
    last = RequestOutput("a", (), FinishReason.ERROR, error="why")
    assert joined([last]) is last
    assert joined([first, second, last]) == RequestOutput(
        "a",
        (1, 2, 3),
        FinishReason.ERROR,
        (entry(1), entry(2), entry(3)),
        (entry(7),),
        16,
        "why",
        num_accepted=3,
        num_rejected=4,
    )
