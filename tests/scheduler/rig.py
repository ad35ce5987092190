"""A scheduler with no device: the test says what each step sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ridgeline.request import Request, RequestOutput, SamplingParams, TokenLogprobs
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.base import Policy
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import ScheduledRequest, StepPlan, StepResult


def make_request(
    request_id: str, num_prompt: int = 4, max_tokens: int = 4, **fields: object
) -> Request:
    """Every request has other tokens, unless `prompt` is given."""
    first = sum(request_id.encode()) * 1000
    prompt = fields.pop("prompt", tuple(range(first, first + num_prompt)))
    sampling = fields.pop("sampling", SamplingParams(max_tokens=max_tokens))
    arrival = fields.pop("arrival_time", 0.0)
    return Request(request_id, prompt, sampling, arrival, **fields)  # type: ignore[arg-type]


class Rig:
    """Plans steps by hand. `now` counts them."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        budget: int = 64,
        seats: int = 8,
        policy: Policy | None = None,
        windows: tuple[int | None, ...] = (None,),
        num_drafts: int = 0,
        *,
        prefix_caching: bool = True,
        **options: Any,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, windows, prefix_caching, b"k")
        self.scheduler = Scheduler(
            self.blocks, policy or FCFS(), budget, seats, num_drafts=num_drafts, **options
        )
        self.now = 0.0
        self.plans: list[StepPlan] = []  # in flight

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request, self.now)

    def plan(self) -> StepPlan:
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        if plan.scheduled:
            self.plans.append(plan)
        self.scheduler.check_invariants()
        return plan

    def complete(self, token_id: int = 1, **tokens: tuple[int, ...]) -> list[RequestOutput]:
        """The oldest step is over; each request that samples got `token_id`, or its own tokens."""
        plan = self.plans.pop(0)
        sampled = {e.request_id: (token_id,) for e in plan.scheduled if e.samples}
        outputs = self.scheduler.update(plan, StepResult(sampled | tokens))
        self.scheduler.check_invariants()
        return outputs

    def step(self, token_id: int = 1) -> StepPlan:
        plan = self.plan()
        self.complete(token_id)
        return plan

    def run(self, max_steps: int = 200) -> list[StepPlan]:
        """Until nothing is left."""
        done: list[StepPlan] = []
        while self.scheduler.requests:
            assert len(done) < max_steps, "no end"
            done.append(self.step())
        return done


def entries(plan: StepPlan) -> dict[str, ScheduledRequest]:
    return {entry.request_id: entry for entry in plan.scheduled}


def tops(names: Iterable[str], *pairs: tuple[int, float]) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Every row of `names` reports the same likeliest tokens."""
    return {name: (TokenLogprobs(pairs[0][0], pairs[0][1], 1, pairs),) for name in names}
