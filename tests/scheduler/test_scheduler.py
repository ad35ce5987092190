"""What is planned, in what order, and what happens when memory runs short."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ridgeline.errors import InternalError
from ridgeline.request import (
    UNKNOWN_TOKEN,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from ridgeline.scheduler.policies.priority import Priority
from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.step import StepPlan, StepResult
from tests.extensions.toy_policy import ShortestFirst
from tests.scheduler.rig import Rig, entries, make_request, tops

BEAMS = SamplingParams(beam_width=2, max_tokens=3)


def test_a_prompt_is_computed_in_chunks_beside_decodes() -> None:
    rig = Rig(budget=5)
    rig.add(make_request("a", 3, 9))
    rig.step()
    rig.add(make_request("b", 9, 2))
    shapes = [rig.step().shape for _ in range(4)]
    assert shapes == [((1, 3), (4, 0)), ((1, 4), (4, 4)), ((1, 5), (1, 8)), ((1, 6), (1, 9))]
    assert "b" not in rig.scheduler.requests


def test_decodes_go_before_chunks_of_older_prompts() -> None:
    rig = Rig(budget=4, num_blocks=40)
    rig.add(make_request("old", 30, 3))
    rig.step()
    rig.scheduler.finish("old")
    rig.add(make_request("young", 2, 9, arrival_time=1.0))
    rig.step()
    rig.add(make_request("early", 30, 3, arrival_time=0.5))
    for _ in range(3):
        plan = rig.step()
        assert entries(plan)["young"].num_tokens == 1
        assert entries(plan)["early"].num_tokens == 3


def test_only_a_whole_prompt_samples() -> None:
    rig = Rig(budget=3)
    request = make_request("a", 7, 2)
    rig.add(request)
    assert [rig.step().scheduled[0].samples for _ in range(4)] == [False, False, True, True]
    assert request.token_ids[7:] == [1, 1]


def test_the_last_token_is_never_computed() -> None:
    rig = Rig()
    request = make_request("a", 4, 3)
    rig.add(request)
    plans = rig.run()
    assert sum(entry.num_tokens for plan in plans for entry in plan.scheduled) == 4 + 2
    assert request.num_preemptions == 0


def test_unknown_tokens_stand_for_what_is_in_flight() -> None:
    rig = Rig()
    request = make_request("a", 4, 9)
    rig.add(request)
    rig.plan()
    rig.plan()
    assert request.token_ids[4:] == [UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    assert [plan.scheduled[0].start for plan in rig.plans] == [0, 4]
    rig.complete(7)
    assert request.token_ids[4:] == [7, UNKNOWN_TOKEN]


def test_with_drafts_in_flight_the_upper_bound_is_planned_and_lowered() -> None:
    rig = Rig(num_drafts=3, num_blocks=40)
    request = make_request("a", 4, 30)
    rig.add(request)
    rig.plan()
    assert rig.plan().scheduled[0].num_draft == 3  # the host does not know yet how many there are
    assert rig.plan().scheduled[0].start == 8
    assert request.num_computed_tokens == 12
    rig.complete(5)
    rig.complete(a=(6, 7))  # one of three drafts was right
    assert request.num_computed_tokens == 10
    assert request.num_done_tokens == 6
    assert request.token_ids[4:] == [5, 6, 7] + [UNKNOWN_TOKEN] * 4
    rig.complete(a=(8, 9, 10, 11))
    assert request.token_ids[4:] == [5, 6, 7, 8, 9, 10, 11]
    assert request.num_computed_tokens == 10
    assert request.num_pending_tokens == 1


def test_a_block_that_draft_tokens_fill_is_shared_at_once() -> None:
    rig = Rig(num_drafts=3, num_blocks=40)
    first = make_request("a", 4, 30)
    rig.add(first)
    rig.plan()
    rig.plan()
    rig.complete(5)
    rig.complete(a=(6, 7, 8, 9))
    rig.add(make_request("b", prompt=(*first.token_ids[:8], 77)))
    assert entries(rig.plan())["b"].start == 8


def test_when_nothing_is_in_flight_the_drafts_are_those_that_were_reported() -> None:
    rig = Rig(num_drafts=3)
    request = make_request("a", 4, 30)
    rig.add(request)
    rig.plan()
    rig.scheduler.update(rig.plans.pop(), StepResult({"a": (5,)}, {"a": (8, 9)}))
    assert rig.plan().scheduled[0].num_draft == 2


def test_tokens_behind_a_stop_token_are_cut() -> None:
    rig = Rig(num_drafts=3, num_blocks=40)
    sampling = SamplingParams(max_tokens=9, stop_token_ids={7})
    rig.add(make_request("a", sampling=sampling))
    rig.plan()
    rig.plan()
    rig.complete(5)
    (output,) = rig.complete(a=(6, 7, 8))
    assert output == RequestOutput("a", (6, 7), FinishReason.STOP, num_accepted=2, num_rejected=1)
    assert rig.blocks.num_free_blocks == 40


class Told(DraftLengths):
    """Always three, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(3)
        self.seen: list[dict[str, tuple[int, int]]] = []

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        self.seen.append(dict(verified))


def end_of_an_answer(rig: Rig, last: tuple[int, ...], right: int) -> None:
    """ "a" ends with the tokens of a step, while another is under way, and "b" goes on."""
    stops = SamplingParams(max_tokens=20, stop_token_ids={7})
    rig.add(make_request("a", sampling=stops), make_request("b", 4, 20))
    for _ in range(2):
        rig.plan()
    rig.complete(5)
    tokens = {"a": last, "b": (6, 6)}
    verified = {"a": (3 if right == 3 else right + 1, right), "b": (2, 1)}
    rig.plan()
    rig.scheduler.update(rig.plans.pop(0), StepResult(tokens, verified=verified))
    rig.plan()
    late = StepResult({"a": (1,), "b": (6, 6)}, verified={"a": (1, 0), "b": (2, 1)})
    rig.scheduler.update(rig.plans.pop(0), late)
    rig.scheduler.update(rig.plans.pop(0), StepResult({"b": (6, 6)}, verified={"b": (2, 1)}))


@pytest.mark.parametrize(
    ("last", "right", "heard"),
    [
        ((6, 7, 8, 9), 3, (2, 2)),  # a draft was the stop token, and right; what came behind is not
        ((6, 7, 8), 2, (2, 2)),
        ((6, 7), 1, (2, 1)),  # it was no draft
        ((7,), 0, (1, 0)),
    ],
)
def test_drafts_behind_the_end_of_an_answer_say_nothing(
    last: tuple[int, ...], right: int, heard: tuple[int, int]
) -> None:
    told = Told()
    end_of_an_answer(Rig(num_drafts=3, num_blocks=80, draft_lengths=told), last, right)
    assert told.seen == [{}, {"a": heard, "b": (2, 1)}, {"b": (2, 1)}, {"b": (2, 1)}]


def test_nor_do_those_of_a_request_that_was_given_up() -> None:
    told = Told()
    rig = Rig(num_drafts=3, num_blocks=80, draft_lengths=told)
    rig.add(make_request("a", 4, 20), make_request("b", 4, 20))
    for _ in range(2):
        rig.plan()
    rig.complete(5)
    rig.scheduler.finish("a")
    both = StepResult({"a": (6,), "b": (6, 6)}, verified={"a": (1, 0), "b": (2, 1)})
    rig.scheduler.update(rig.plans.pop(0), both)
    assert told.seen == [{}, {"b": (2, 1)}]


def test_seats_are_limited_and_a_beam_takes_one() -> None:
    rig = Rig(seats=3, num_blocks=60)
    rig.add(make_request("a"), make_request("b"), make_request("c", sampling=BEAMS))
    top = (10, -1.0), (11, -1.5), (12, -9.0), (13, -9.5)
    seen: list[int] = []
    outputs: list[RequestOutput] = []
    while rig.scheduler.requests:
        plan = rig.plan()
        rig.plans.pop()
        seen.append(len(plan.scheduled))
        outputs += rig.scheduler.update(plan, told(plan, *top, a=(1,), b=(1,)))
        rig.scheduler.check_invariants()
    assert max(seen) == 3
    [answer] = [output.new_token_ids for output in outputs if output.request_id == "c"]
    assert answer == (10, 10, 10)


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens() -> None:
    rig = Rig(num_blocks=4, block_size=2)
    old, young = make_request("old", 3, 5), make_request("young", 3, 5, arrival_time=1.0)
    rig.add(old, young)
    plans = rig.run()
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    names = [plan.preempted for plan in plans]
    assert names.count(("young",)) == 1
    again = next(n for plan in plans[1:] for n in plan.new)
    assert again.request_id == "young"
    assert len(again.token_ids) > again.num_prompt_tokens == 3
    assert len(young.token_ids) == 8


def test_memory_that_is_coming_back_is_waited_for() -> None:
    rig = Rig(num_blocks=6, block_size=2)
    first, second, third = (
        make_request(name, 2, 9, arrival_time=float(i)) for i, name in enumerate("abc")
    )
    rig.add(first, second, third)
    rig.step()
    rig.plan()
    rig.scheduler.finish("b")  # its blocks are deferred while the step is in flight
    rig.plan()
    assert first.num_preemptions == third.num_preemptions == 0


def test_nobody_is_preempted_more_often_than_allowed() -> None:
    rig = Rig(num_blocks=10, block_size=1, max_preemptions=2)
    requests = [make_request(f"r{i}", 2, 7, arrival_time=float(i)) for i in range(6)]
    rig.add(*requests)
    rig.run()
    assert max(r.num_preemptions for r in requests) <= 2
    assert sum(r.num_preemptions for r in requests) > 0


def test_one_that_waits_for_its_own_token_is_not_readmitted() -> None:
    rig = Rig(num_blocks=11, block_size=1, num_drafts=3)
    young = make_request("young", 1, 2, arrival_time=1.0)
    rig.add(make_request("old", 2, 9), young)
    rig.plan()
    rig.plan()
    rig.plan()  # the old one needs 4 blocks and there are 3
    assert young.num_preemptions == 1
    assert young.token_ids[1:] == [UNKNOWN_TOKEN, UNKNOWN_TOKEN]
    rig.scheduler.finish("old")
    assert rig.blocks.num_free_blocks == 3  # enough for the young one, but what would it compute?
    assert not rig.plan().scheduled
    rig.complete(7)
    rig.complete(8)
    assert "young" not in rig.scheduler.requests


def test_a_result_of_an_older_life_has_no_place() -> None:
    rig = Rig()
    first = make_request("a", 4, 9)
    rig.add(first)
    rig.plan()
    rig.scheduler.finish("a")
    rig.add(make_request("a", 4, 9, prompt=(50, 51, 52, 53)))
    plan = rig.plan()
    assert plan.finished == ("a",)
    assert plan.new[0].token_ids == (50, 51, 52, 53)
    assert rig.complete(7) == []
    assert rig.scheduler.num_late_results == 1
    (output,) = rig.complete(8)
    assert output.new_token_ids == (8,)


def test_a_chunk_of_an_older_epoch_does_not_count() -> None:
    rig = Rig(budget=4, prefix_caching=False)
    request = make_request("a", 12, 2)
    rig.add(request)
    rig.plan()
    rig.scheduler.state.preempt(request, rig.now)
    rig.plan()
    rig.complete()  # of the first life
    assert request.num_done_tokens == 0
    rig.complete()
    assert request.num_done_tokens == 4


def test_what_a_faulty_request_wrote_is_found_by_nobody() -> None:
    rig = Rig(budget=4)
    rig.add(make_request("a", 9, 4))
    rig.step()
    assert rig.blocks.num_cached_blocks == 1
    plan = rig.plan()
    rig.plans.pop()
    (output,) = rig.scheduler.update(plan, StepResult({}, faults={"a": "NaN"}))
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "NaN")
    assert rig.blocks.num_cached_blocks == 0
    rig.scheduler.check_invariants()


def test_steps_retire_in_order_and_once() -> None:
    rig = Rig()
    rig.add(make_request("a", 4, 9))
    first, second = rig.plan(), rig.plan()
    with pytest.raises(InternalError, match="in order"):
        rig.scheduler.update(second, StepResult({"a": (1,)}))
    rig.scheduler.update(first, StepResult({"a": (1,)}))
    with pytest.raises(InternalError, match="in order"):
        rig.scheduler.update(first, StepResult({"a": (1,)}))


def test_cached_tokens_are_reported_once_with_the_first_output() -> None:
    rig = Rig()
    rig.add(make_request("a", 9, 1))
    rig.run()
    again = make_request("b", prompt=make_request("a", 9).prompt_token_ids, max_tokens=3)
    rig.add(again)
    outputs = []
    while rig.scheduler.requests:
        rig.plan()
        outputs += rig.complete()
    assert [output.num_cached_tokens for output in outputs] == [8, 0, 0]


def test_policies_rank_running_requests_too() -> None:
    rig = Rig(policy=Priority(), budget=4, num_blocks=40)
    rig.add(make_request("low", 9, 9, priority=1))
    rig.step()
    rig.add(make_request("high", 9, 9, arrival_time=1.0, priority=0))
    assert list(entries(rig.step())) == ["low"]  # the budget is spent before anybody is admitted
    assert [next(iter(entries(rig.step()))) for _ in range(2)] == ["low", "low"]


def test_a_policy_sets_the_budget_and_the_number_of_drafts() -> None:
    rig = Rig(policy=ShortestFirst(), num_drafts=3, num_blocks=60)
    rig.add(*(make_request(f"r{i}", 2, 20 - i) for i in range(4)))
    rig.step()
    rig.plan()
    assert sum(entry.num_tokens for entry in rig.plans[-1].scheduled) <= 4
    assert all(entry.num_draft <= 1 for entry in rig.plans[-1].scheduled)
    assert rig.plans[-1].scheduled[0].request_id == "r3"


# ---------------------------------------------------------------------- forks


def test_a_fork_waits_for_the_prompt_and_computes_only_its_last_token() -> None:
    rig = Rig(budget=4)
    parent = make_request("p", 10, 6)
    child = make_request("c", prompt=parent.prompt_token_ids, fork_of="p", arrival_time=1.0)
    other = make_request("o", 4, 2, arrival_time=2.0)
    rig.add(parent, child, other)
    assert set(entries(rig.step())) == {"p"}
    assert rig.scheduler.num_waiting == 2
    rig.step()
    assert set(entries(rig.step())) == {"p", "o"}  # the fork does not block those behind it
    plan = rig.step()
    entry = entries(plan)["c"]
    assert (entry.start, entry.num_tokens, entry.samples) == (9, 1, True)
    (copy,) = plan.copies
    assert (copy.request_id, copy.index) == ("c", 2)
    assert child.block_ids[0][:2] == parent.block_ids[0][:2]
    assert child.block_ids[0][2] != parent.block_ids[0][2]
    assert child.num_cached_tokens == 9


def test_a_fork_of_one_that_is_gone_is_served_like_any_other() -> None:
    rig = Rig(budget=4)
    parent = make_request("p", 10, 6)
    child = make_request("c", prompt=parent.prompt_token_ids, fork_of="p")
    rig.add(parent, child)
    rig.step()
    rig.scheduler.finish("p")
    assert entries(rig.step())["c"].start == 4  # found in the prefix cache
    orphan = make_request("d", 3, fork_of="nobody")
    rig.add(orphan)
    rig.run()
    assert len(orphan.token_ids) == 7


@pytest.mark.parametrize("change", ["prompt", "salt", "prompt_logprobs", "beams"])
def test_what_cannot_share_does_not_wait(change: str) -> None:
    rig = Rig(budget=64, num_blocks=60, prefix_caching=False)
    parent = make_request("p", 10, 6)
    child = make_request("c", prompt=parent.prompt_token_ids, fork_of="p")
    if change == "prompt":
        child = make_request("c", 10, fork_of="p")
    elif change == "salt":
        child.cache_salt = b"x"
    elif change == "prompt_logprobs":
        child.sampling = SamplingParams(max_tokens=4, prompt_logprobs=1)
    else:
        child.sampling = BEAMS
    rig.add(parent, child)
    assert entries(rig.plan())["c"].num_tokens == 10


def test_a_fork_can_be_aborted_while_it_is_parked() -> None:
    rig = Rig(budget=4)
    parent = make_request("p", 10, 2)
    rig.add(parent, make_request("c", prompt=parent.prompt_token_ids, fork_of="p"))
    rig.step()
    assert rig.scheduler.finish("c")
    rig.run()
    assert parent.token_ids[10:] == [1, 1]


def test_a_fork_whose_parent_lost_the_prompt_waits_for_it_again() -> None:
    rig = Rig(num_blocks=6, block_size=2, seats=2, prefix_caching=False)
    old = make_request("old", 2, 8)
    parent = make_request("p", 4, 5, arrival_time=1.0)
    child = make_request("c", prompt=parent.prompt_token_ids, fork_of="p", arrival_time=2.0)
    rig.add(old, parent, child)
    while not parent.num_preemptions:
        rig.step()
        assert rig.now < 20, "the parent is preempted"
    rig.scheduler.finish("old")
    assert set(entries(rig.step())) == {"p"}  # computes the whole prompt in this step
    plan = rig.step()
    assert set(entries(plan)) == {"p", "c"}
    assert entries(plan)["c"].start == 3


# ---------------------------------------------------------------------- log-probabilities


def prompt_values(start: int, num_tokens: int, num_prompt: int) -> tuple[TokenLogprobs, ...]:
    last = min(start + num_tokens, num_prompt - 1)
    return tuple(TokenLogprobs(p, -float(p), 1) for p in range(start + 1, last + 1))


def test_prompt_logprobs_come_once_and_ignore_the_prefix_cache() -> None:
    rig = Rig(num_blocks=6, block_size=2, budget=3)
    prompt = make_request("x", 6).prompt_token_ids
    rig.add(make_request("x", 6, 1))
    rig.run()
    sampling = SamplingParams(max_tokens=4, prompt_logprobs=1)
    old = make_request("old", 2, 7, arrival_time=-1.0)
    request = make_request("a", prompt=prompt, sampling=sampling)
    rig.add(old, request)
    got: list[int] = []
    while "a" in rig.scheduler.requests:
        plan = rig.plan()
        rig.plans.pop()
        values = {
            e.request_id: prompt_values(e.start, e.num_tokens, 6)
            for e in plan.scheduled
            if e.request_id == "a"
        }
        sampled: dict[str, tuple[int, ...]] = {
            e.request_id: (1,) for e in plan.scheduled if e.samples
        }
        for output in rig.scheduler.update(plan, StepResult(sampled, prompt_logprobs=values)):
            got += [item.token_id for item in output.prompt_logprobs]
    assert got == [1, 2, 3, 4, 5]
    assert request.num_preemptions > 0
    assert request.num_cached_tokens == 0


# ---------------------------------------------------------------------- beams


def report(rig: Rig, *pairs: tuple[int, float]) -> list[RequestOutput]:
    """The oldest step is over; every beam in it reports the same likeliest tokens."""
    plan = rig.plans.pop(0)
    outputs = rig.scheduler.update(plan, told(plan, *pairs))
    rig.scheduler.check_invariants()
    return outputs


def told(plan: StepPlan, *pairs: tuple[int, float], **others: tuple[int, ...]) -> StepResult:
    """Every beam that samples has the same likeliest tokens; `others` are no beams."""
    names = [e.request_id for e in plan.scheduled if e.samples and e.request_id not in others]
    sampled = {e.request_id for e in plan.scheduled if e.samples}
    tokens = {name: new for name, new in others.items() if name in sampled}
    tokens |= dict.fromkeys(names, (pairs[0][0],))
    return StepResult(tokens, logprobs=tops(names, *pairs))


def test_beams_share_fork_and_end_together() -> None:
    rig = Rig(block_size=4)
    rig.add(make_request("a", 5, sampling=BEAMS))
    (new,) = rig.plan().new
    assert new.sampling.logprobs == 4
    assert new.sampling.beam_width == 2
    assert report(rig, (10, -1.0), (11, -1.5), (12, -9.0), (13, -9.5)) == []
    plan = rig.plan()
    assert plan.finished == ("a",)  # opened again with the tokens that were chosen
    assert sorted(new.token_ids[5:] for new in plan.new) == [(10,), (11,)]
    assert len(plan.copies) == 1
    assert [e.num_tokens for e in plan.scheduled] == [1, 1]
    assert report(rig, (20, -0.1), (21, -0.2), (22, -9.0), (23, -9.9)) == []
    assert {new.token_ids[5:] for new in rig.plan().new} == {(10, 20), (10, 21)}
    (output,) = report(rig, (30, -0.1), (31, -0.3), (32, -9.0), (33, -9.9))
    assert [beam[0] for beam in output.beams] == [(10, 20, 30)]
    assert output.beams[0][1] == pytest.approx(-1.2 / 3)
    assert output.new_token_ids == (10, 20, 30)
    assert output.finish_reason is FinishReason.LENGTH
    assert rig.blocks.num_free_blocks == rig.blocks.num_blocks
    assert rig.plan().finished == ()  # nothing is planned, so nothing is sent yet
    rig.add(make_request("b"))
    assert len(rig.plan().finished) == 2


def test_an_aborted_beam_search_closes_all_rows() -> None:
    rig = Rig(block_size=4)
    rig.add(make_request("a", 5, sampling=BEAMS))
    rig.plan()
    report(rig, (10, -1.0), (11, -1.5), (12, -9.0), (13, -9.5))
    names = set(entries(rig.plan()))
    assert len(names) == 2
    rig.scheduler.finish("a")
    assert report(rig, (10, -1.0), (11, -1.5), (12, -9.0), (13, -9.5)) == []
    rig.add(make_request("b"))
    assert set(rig.plan().finished) == names
    rig.scheduler.check_invariants()


def test_beams_leave_blocks_to_a_request_that_may_not_be_preempted_again() -> None:
    rig = Rig(num_blocks=8, block_size=1, max_preemptions=1)
    rig.add(make_request("a", 4, sampling=BEAMS, arrival_time=-1.0))
    young = make_request("young", 3, 5)
    rig.add(young)
    rig.plan()
    pairs = ((10, -1.0), (11, -1.5), (12, -9.0), (13, -9.5))
    plan = rig.plans.pop(0)
    rig.scheduler.update(plan, told(plan, *pairs, young=(1,)))
    rig.plan()
    assert young.num_preemptions == 1
    report(rig, *pairs)
    assert not len(rig.scheduler.state.running)


def test_preempted_beams_come_back_and_share_their_prompt_again() -> None:
    rig = Rig(num_blocks=6, block_size=2)
    sampling = SamplingParams(beam_width=2, max_tokens=5)
    rig.add(make_request("old", 1, 8, arrival_time=-1.0))
    rig.step()
    request = make_request("a", 4, sampling=sampling)
    rig.add(request)
    pairs = ((10, -1.0), (11, -1.1), (12, -9.0), (13, -9.5))
    outputs: list[RequestOutput] = []
    while rig.scheduler.requests:
        plan = rig.plan()
        rig.plans.pop()
        outputs += rig.scheduler.update(plan, told(plan, *pairs, old=(1,)))
        rig.scheduler.check_invariants()
    assert request.num_preemptions == 2
    (answer,) = [output for output in outputs if output.request_id == "a"]
    assert answer.beams[0][0] == (10, 10, 10, 10, 10)


def test_a_preemption_between_two_reports_changes_nothing() -> None:
    rig = Rig(budget=1, num_blocks=40, block_size=4)
    request = make_request("a", 4, sampling=BEAMS)
    rig.add(request)
    for _ in range(4):
        rig.plan()
        report(rig, (10, -1.0), (11, -1.5), (12, -9.0), (13, -9.5))
    rig.plan()
    report(rig, (20, -0.1), (21, -0.2), (22, -9.0), (23, -9.5))  # one of two
    assert len(rig.scheduler.requests) == 1  # which holds nothing while it waits for the other
    [other] = rig.scheduler.requests.values()
    rig.scheduler.state.preempt(other, rig.now)
    outputs: list[RequestOutput] = []
    while rig.scheduler.requests:
        rig.plan()
        outputs += report(rig, (30, -0.05), (31, -0.2), (32, -9.0), (33, -9.5))
    assert outputs[0].new_token_ids == (10, 20, 30)
    assert request.num_preemptions == 1
    assert rig.blocks.num_free_blocks == rig.blocks.num_blocks


def test_one_beam_goes_on_in_place_and_others_copy_the_last_block() -> None:
    """A half-filled block that several beams continue is copied for all but the last."""
    rig = Rig(block_size=4)
    rig.add(make_request("a", 6, sampling=SamplingParams(beam_width=3, max_tokens=4)))
    rig.plan()
    top = [(token, -1.0 - token / 100) for token in range(10, 16)]
    assert report(rig, *top) == []
    plan = rig.plan()
    assert [len(new.token_ids) for new in plan.new] == [7, 7, 7]
    assert [entry.num_tokens for entry in plan.scheduled] == [1, 1, 1]
    assert len(plan.copies) == 2
    assert len({new.block_ids[0][0] for new in plan.new}) == 1


def test_a_fault_of_one_beam_ends_its_search_with_one_error() -> None:
    rig = Rig(block_size=4)
    rig.add(make_request("a", 5, sampling=BEAMS), make_request("b"))
    rig.plan()
    plan = rig.plans.pop()
    top = (10, -1.0), (11, -1.5), (12, -9.0), (13, -9.5)
    rig.scheduler.update(plan, told(plan, *top, b=(1,)))
    plan = rig.plan()
    result = told(plan, *top, b=(1,))
    bad = next(name for name in entries(plan) if name != "b")
    del result.token_ids[bad]
    result.faults[bad] = "NaN"
    outputs = rig.scheduler.update(plan, result)
    assert {output.request_id: output.error for output in outputs} == {"a": "NaN", "b": None}
    assert set(rig.scheduler.requests) == {"b"}
    rig.scheduler.check_invariants()
