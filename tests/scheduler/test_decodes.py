"""Decodes and checks of drafts take a shorter way: do they say and do what the long one would?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
from msgspec import structs

from ridgeline.request import Request, RequestOutput
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.base import InFlight
from ridgeline.scheduler.results import ResultTaker
from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.step import Decodes, ScheduledRequest, StepFuture, StepPlan, StepResult
from tests.fake_device import FakeFuture
from tests.scheduler.rig import Rig, make_request
from tests.simulated_world import World
from tests.thinning import slow


def what_it_says(plan: StepPlan) -> Decodes | None:
    """The columns of a plan, read off its rows."""
    rows = plan.scheduled
    if plan.new or plan.copies:
        return None
    if any(e.num_tokens != 1 or e.num_draft or not e.samples for e in rows):
        return None
    opened = tuple(i for i, e in enumerate(rows) if any(e.new_block_ids))
    return Decodes(tuple(e.request_id for e in rows), tuple(e.start for e in rows), opened)


@pytest.mark.parametrize("seed", [*range(12), *slow(*range(12, 40))])
def test_columns_say_what_the_rows_say(seed: int) -> None:
    world = World(seed)
    seen: list[bool] = []
    submit = world.engine.executor.submit

    class Reader:
        num_blocks, block_size = world.device.num_blocks, world.device.block_size

        def submit(self, plan: StepPlan) -> FakeFuture:
            seen.append(plan.decodes is not None)
            assert plan.decodes == what_it_says(plan), f"seed {seed}"
            assert plan.shape == tuple((e.num_tokens, e.start) for e in plan.scheduled)
            assert plan.shape is plan.shape
            return submit(plan)  # type: ignore[return-value]

    world.engine.executor = Reader()
    world.run(120)
    assert seen


class Choosy(DraftLengths):
    """Another number of drafts in each step, often none, and never any of some rows."""

    def __init__(self, seed: int) -> None:
        super().__init__(9)
        self._random = Random(seed)

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        for row in decoding:
            row.has_drafts = row.has_drafts and row.order % 3 > 0
        return self._random.choice([0, 0, 1, 2, 9])


@dataclass(frozen=True, slots=True)
class Silent:
    """Says nothing of drafts to come, as a draft model does."""

    future: FakeFuture

    def result(self) -> StepResult:
        return structs.replace(self.future.result(), draft_token_ids={})


def seen_with_drafts(seed: int, *, finds: bool) -> tuple[list[StepPlan], list[RequestOutput]]:
    """What a world plans and delivers whose number of drafts changes from step to step. `finds`:
    results say how many there are."""
    world = World(seed)
    world.scheduler.draft_lengths, world.scheduler.finds_drafts = Choosy(seed), finds
    plans: list[StepPlan] = []
    outputs: list[RequestOutput] = []
    submit, tell = world.engine.executor.submit, world.on_output

    class Reader:
        num_blocks, block_size = world.device.num_blocks, world.device.block_size

        def submit(self, plan: StepPlan) -> StepFuture:
            plans.append(plan)
            assert plan.decodes == what_it_says(plan), f"seed {seed}"
            future = submit(plan)
            return future if finds else Silent(future)  # type: ignore[arg-type]

    def on_output(output: RequestOutput, now: float) -> None:
        outputs.append(output)
        tell(output, now)

    world.engine.executor = Reader()
    world.on_output = on_output  # type: ignore[method-assign]
    world.run(150)
    return plans, outputs


@pytest.mark.parametrize("finds", [True, False], ids=["looked_up", "of_a_model"])
@pytest.mark.parametrize("seed", [*range(12), *slow(*range(12, 40))])
def test_drafts_are_planned_and_taken_as_the_long_way(
    seed: int, finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, outputs = seen_with_drafts(seed, finds=finds)

    def take_each(
        taker: ResultTaker, in_flight: Sequence[InFlight], result: StepResult
    ) -> list[RequestOutput]:
        return [output for flown in in_flight if (output := taker.take(flown, result)) is not None]

    monkeypatch.setattr(BlockManager, "_note_room", lambda blocks, request, end: None)
    monkeypatch.setattr(ResultTaker, "take_all", take_each)
    long_plans, long_outputs = seen_with_drafts(seed, finds=finds)
    assert plans == long_plans
    assert outputs == long_outputs


def test_worlds_draft_between_steps_that_do_not() -> None:
    turns = drafting = 0
    for seed in range(10):
        before = False
        for plan in seen_with_drafts(seed, finds=seed % 2 == 0)[0]:
            draft_tokens = any(entry.num_draft for entry in plan.scheduled)
            drafting += draft_tokens
            turns += before is not draft_tokens
            before = draft_tokens
    assert drafting > 100
    assert turns > 100


def test_a_copy_of_a_plan_is_asked_anew() -> None:
    entry = ScheduledRequest("a", 4, 1, ((),), True)
    plan = StepPlan(1, (entry,)).knowing(Decodes(("a",), (4,), ()))
    assert plan.shape == ((1, 4),)
    changed = replace(plan, scheduled=())
    assert changed.decodes is None
    assert changed.shape == ()
    assert plan == StepPlan(1, (entry,))


def room(request: Request) -> int:
    return request.num_tokens_with_slots - request.num_computed_tokens


def test_room_is_what_its_own_last_block_has() -> None:
    rig = Rig(budget=64)
    request = make_request("a", 2 * rig.scheduler.blocks.block_size, 40)
    size = rig.scheduler.blocks.block_size
    rig.add(request)
    rig.plan()
    assert room(request) == 0
    rig.complete()
    rig.plan()
    assert room(request) == size - 1


def test_a_fork_takes_the_room_until_its_parent_has_looked_again() -> None:
    rig = Rig(budget=64)
    size = rig.scheduler.blocks.block_size
    parent = make_request("p", 2 * size + 2, 40)  # its fork shares the half-filled third block
    rig.add(parent)
    rig.step()
    assert parent.num_tokens_with_slots == 3 * size
    child = make_request("c", 0, 40, prompt=parent.prompt_token_ids, fork_of="p")
    rig.add(child)
    copies = rig.step().copies
    assert [copy.request_id for copy in copies] == ["c"]
    assert parent.num_tokens_with_slots == 0
    rig.step()
    assert parent.num_tokens_with_slots == 3 * size
    assert parent.block_ids[0][2] != child.block_ids[0][2]
    rig.scheduler.check_invariants()


def test_no_room_beyond_what_is_ever_computed() -> None:
    rig = Rig(budget=64)
    request = make_request("a", 2, 1)
    rig.add(request)
    rig.plan()
    assert request.num_tokens_with_slots <= request.num_computable_tokens == 2


def test_room_is_no_reason_to_leave_drafts_out() -> None:
    rig = Rig(num_drafts=2, num_blocks=40)
    request = make_request("a", 5, 20)
    rig.add(request)
    rig.plan()
    assert room(request) > 0
    [entry] = rig.plan().scheduled
    assert entry.num_draft == 2
    assert rig.plans[-1].decodes is None
