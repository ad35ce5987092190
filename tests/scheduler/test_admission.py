"""What can never be served is refused at once, and the message names the number that decides."""

from __future__ import annotations

import pytest

from ridgeline.errors import InternalError, RequestFault
from ridgeline.request import SamplingParams
from ridgeline.scheduler.beams import BEAM_MARK
from ridgeline.scheduler.policies.base import Overloaded
from tests.extensions.toy_policy import ShortestFirst
from tests.scheduler.rig import Rig, make_request

BEAMS = SamplingParams(beam_width=3, max_tokens=4)


def test_the_longest_request_is_served_and_one_token_more_is_not() -> None:
    rig = Rig(num_blocks=4, block_size=4)
    assert rig.scheduler.max_servable_tokens == 17
    with pytest.raises(RequestFault, match="at most 17") as caught:
        rig.add(make_request("a", 10, 8))
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    with pytest.raises(RequestFault, match="4 blocks of 4 tokens") as caught:
        rig.add(make_request("a", 17, 1))
    assert caught.value.param == "prompt"
    rig.add(make_request("a", 10, 7))
    assert sum(len(plan.scheduled) for plan in rig.run()) == 7


def test_a_window_lets_long_requests_in() -> None:
    rig = Rig(num_blocks=5, block_size=4, windows=(4,), budget=8)
    rig.add(make_request("a", 60, 20))
    rig.run()
    with pytest.raises(RequestFault):
        Rig(num_blocks=5, block_size=4, windows=(None,), budget=8).add(make_request("a", 60, 20))


def test_beams_that_do_not_fit_side_by_side_are_refused() -> None:
    rig = Rig(num_blocks=6, block_size=4)
    rig.add(make_request("a", 8, 5, sampling=BEAMS.replace(max_tokens=5)))  # 2 + 3 * 1 blocks
    with pytest.raises(RequestFault, match="need 8 blocks") as caught:
        rig.add(make_request("b", 8, 6, sampling=BEAMS.replace(max_tokens=6)))
    assert caught.value.param == "beam_width"
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_k", 3),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {1: 2.0}),
        ("stop", "x"),
        ("prompt_logprobs", 0),
    ],
)
def test_what_a_beam_search_would_ignore_is_refused(field: str, value: object) -> None:
    sampling = SamplingParams(beam_width=3, max_tokens=4, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(RequestFault, match=field) as caught:
        Rig().add(make_request("a", sampling=sampling))
    assert caught.value.param == field
    assert caught.value.code == "unsupported_parameter"


def test_beams_within_their_limits_are_taken() -> None:
    rig = Rig(num_blocks=40, seats=8)
    most = BEAMS.replace(beam_width=8, temperature=0.0, min_tokens=2, logprobs=3, top_k=-1)
    rig.add(make_request("a", sampling=most.replace(stop_token_ids=range(12))))
    with pytest.raises(RequestFault, match="at most 12 stop_token_ids"):
        rig.add(make_request("b", sampling=most.replace(stop_token_ids=range(13))))
    with pytest.raises(RequestFault, match="max_num_seqs"):
        Rig(seats=2).add(make_request("c", sampling=BEAMS))


def test_ids_are_used_once_and_not_like_our_own() -> None:
    rig = Rig()
    request = make_request("a")
    rig.add(request)
    with pytest.raises(RequestFault, match="is being served"):
        rig.add(make_request("a"))
    with pytest.raises(RequestFault) as caught:
        rig.add(make_request(f"a{BEAM_MARK}1"))
    assert caught.value.param == "request_id"
    rig.scheduler.finish("a")
    with pytest.raises(InternalError, match="added once"):
        rig.add(request)
    rig.add(make_request("a"))


def test_empty_prompts_and_open_ends_are_refused() -> None:
    with pytest.raises(RequestFault) as caught:
        Rig().add(make_request("a", prompt=()))
    assert caught.value.code == "empty_input"
    with pytest.raises(RequestFault, match="max_tokens"):
        Rig().add(make_request("a", sampling=SamplingParams(max_tokens=None)))


def test_a_refused_request_leaves_no_trace() -> None:
    rig = Rig(num_blocks=2)
    for bad in (make_request("a", 30), make_request("b", sampling=BEAMS.replace(top_k=2))):
        with pytest.raises(RequestFault):
            rig.add(bad)
    assert not rig.scheduler.requests
    assert rig.scheduler.num_waiting == 0
    rig.scheduler.check_invariants()


def test_a_policy_may_turn_work_away() -> None:
    rig = Rig(num_blocks=2000, policy=ShortestFirst())
    with pytest.raises(Overloaded, match=r"at night; try again in 2\.5 s") as caught:
        rig.add(make_request("a", 4, 1001))
    assert caught.value.retry_after_s == 2.5
    assert caught.value.code == "overloaded"
    assert not rig.scheduler.requests
    rig.add(make_request("a", 4, 1000))
