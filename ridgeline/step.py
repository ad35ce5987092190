"""What crosses the border between the scheduler and whoever executes a step?

A plan's size follows what changed, never the context length: the executor keeps a row for each
request (its tokens, block tables and sampling state) from the plan that brings it in `new` to the
plan that names it in `preempted` or `finished`. A plan is applied in this order: `preempted` and
`finished` rows go, `new` rows come, `copies` are made, `scheduled` tokens are computed and sampled.
A name without a row in `preempted` or `finished` is harmless (after a fault the host names rows
again), and one plan may close a row and open it anew (after a preemption).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol, runtime_checkable

import msgspec

from ridgeline.errors import RequestFault
from ridgeline.log import say
from ridgeline.request import Request, RequestOutput, SamplingParams, TokenLogprobs, record

logger = logging.getLogger(__name__)

NULL_BLOCK = 0  # never allocated: padding, and what left a sliding window. Real ids start at 1.

StepShape = tuple[tuple[int, int], ...]  # (new tokens, context before them) per request
BlockTables = tuple[tuple[int, ...], ...]  # block ids per KV group


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A row to open: at admission, after a preemption, or for a fork.

    `token_ids` are all known tokens (prompt, then output), the first `num_prompt_tokens` of them
    the prompt. `block_ids` are the tables as they stand before this plan's `scheduled` entry adds
    its `new_block_ids`; entries may be NULL_BLOCK where a window has passed. `pool`: of several
    pools of blocks, the one that they and all of its later ones are of.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: BlockTables
    pool: int = 0


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """Compute `num_tokens` tokens from position `start`; the last `num_draft` are drafts.

    Tokens the row does not hold yet were sampled (or drafted) by a step still in flight and are
    on the device. `new_block_ids` are appended to the row's tables, one tuple per KV group.
    `samples`: the step ends with a new token for this request.

    With drafts, each row keeps three things on the device: its true length (how many of its
    tokens are computed), its newest token and its next drafts. While a step with drafts is in
    flight the host knows only the upper bound (all of them accepted), so `start` may lie beyond
    the true start; the device then runs the same `num_tokens` at the true start, where the row's
    blocks are reserved too. The entry's tokens are the row's num_tokens - num_draft newest ones,
    then `num_draft` drafts; a row with fewer drafts fills up with any token ids (they are
    verified like all others). A result has the accepted drafts and one sampled token, and the
    row's true length becomes start + num_tokens - (drafts not accepted). Tokens past a stop token
    are cut by the host, whose next plan names the row in `finished`.
    """

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: BlockTables
    samples: bool
    num_draft: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: copy block `source` to `target` (all layers of the pool), then let entry
    `index` of this request's table of KV group `group` be `target`."""

    request_id: str
    group: int
    index: int
    source: int
    target: int


class Decodes(msgspec.Struct, frozen=True, gc=False):
    """The same as `scheduled` once more, column by column, of a step in which every row computes
    one token and samples: for those who need not look at each row. `opened` are the places of the
    rows that are given new blocks."""

    row_ids: tuple[str, ...]
    starts: tuple[int, ...]
    opened: tuple[int, ...]


@record
class StepPlan:
    """`decodes` is there where the planner knows it, and then no row is new, no block is copied
    and nothing is a draft. It is never more than `scheduled` says."""

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    # `replace` leaves it out, as it goes with `scheduled`.
    decodes: Decodes | None = field(default=None, init=False, repr=False, compare=False)
    _shape: StepShape | None = field(default=None, init=False, repr=False, compare=False)

    def knowing(self, decodes: Decodes | None) -> StepPlan:
        """This very plan, told once what `decodes` is."""
        object.__setattr__(self, "decodes", decodes)
        return self

    @property
    def shape(self) -> StepShape:
        """All that a cost model needs to know; the same object whenever it is asked for."""
        if self._shape is None:
            object.__setattr__(self, "_shape", self._make_shape())
        return self._shape or ()

    def _make_shape(self) -> StepShape:
        if self.decodes is not None:
            return tuple(zip(repeat(1), self.decodes.starts, strict=False))
        return tuple([(s.num_tokens, s.start) for s in self.scheduled])


class StepResult(msgspec.Struct, frozen=True):
    """`token_ids`: accepted drafts, then one sampled token, per request that samples.

    `logprobs` are there for requests that asked, one per token of `token_ids`. `prompt_logprobs`
    are those of prompt positions start+1 .. (start+num_tokens, at most the last prompt token)
    whose predicting position was computed in this step. `faults` names requests whose own numbers
    went wrong (for example NaN logits) and says how; they have no tokens. Of `draft_token_ids` only
    the number counts; drafts that stay on the device stand as UNKNOWN_TOKEN, and those that are
    made when they are wanted are not in it. `verified`: how many
    drafts of a request were compared with what came out (up to the first wrong one; without a
    check the first may have been, too), and how many of them were right.
    """

    token_ids: dict[str, tuple[int, ...]]
    draft_token_ids: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    faults: dict[str, str] = msgspec.field(default_factory=dict)
    verified: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class WaveCutter:
    """Cuts each plan into those of several devices, which attend for rows of their own and take
    each step together: by the pool that a row was opened with. Plans are cut in order; names of
    rows that nobody has go to all."""

    def __init__(self, num_pools: int) -> None:
        self.num_pools = num_pools
        self._pool_of: dict[str, int] = {}

    def cut(self, plan: StepPlan) -> tuple[StepPlan, ...]:
        """Some of them may have nothing to compute."""
        pool_of, every = self._pool_of, range(self.num_pools)
        closed: list[tuple[list[str], list[str]]] = [([], []) for _ in every]
        for at, names in enumerate((plan.preempted, plan.finished)):
            for name in names:
                pool = pool_of.pop(name, None)
                for one in every if pool is None else (pool,):
                    closed[one][at].append(name)
        new: list[list[NewRequest]] = [[] for _ in every]
        for row in plan.new:
            pool_of[row.request_id] = row.pool
            new[row.pool].append(row)
        copies: list[list[BlockCopy]] = [[] for _ in every]
        for copy in plan.copies:
            copies[pool_of[copy.request_id]].append(copy)
        scheduled: list[list[ScheduledRequest]] = [[] for _ in every]
        places: list[dict[int, int]] = [{} for _ in every]  # in the whole plan: in a part
        for place, entry in enumerate(plan.scheduled):
            pool = pool_of[entry.request_id]
            places[pool][place] = len(scheduled[pool])
            scheduled[pool].append(entry)
        found = []
        for pool in every:
            part = StepPlan(
                plan.step_id,
                tuple(scheduled[pool]),
                tuple(new[pool]),
                tuple(copies[pool]),
                tuple(closed[pool][0]),
                tuple(closed[pool][1]),
            )
            if plan.decodes is not None and scheduled[pool]:
                opened = [places[pool][at] for at in plan.decodes.opened if at in places[pool]]
                names = tuple([entry.request_id for entry in scheduled[pool]])
                starts = tuple([entry.start for entry in scheduled[pool]])
                part = part.knowing(Decodes(names, starts, tuple(opened)))
            found.append(part)
        return tuple(found)


class PartialResults:
    """What the devices of a wave say of each step, in whatever order they come to say it."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, StepResult]] = {}  # by step, by device

    def add(self, step_id: int, device: int, result: StepResult) -> None:
        self._found.setdefault(step_id, {})[device] = result

    def has(self, step_id: int, number: int) -> bool:
        """As many have spoken."""
        return len(self._found.get(step_id, ())) >= number

    def take(self, step_id: int) -> StepResult:
        """Of all that have."""
        whole = StepResult({})
        for part in self._found.pop(step_id, {}).values():
            for name in StepResult.__struct_fields__:
                getattr(whole, name).update(getattr(part, name))
        return whole


class StepFuture(Protocol):
    def result(self) -> StepResult:
        """Wait for the step. Raises EngineFault when the device failed."""
        ...


@runtime_checkable
class KnowsEnd(Protocol):
    """A future that can say whether anybody would have to wait for it."""

    def is_over(self) -> bool: ...


class Executor(Protocol):
    """A GPU, a CPU, eight ranks behind a socket, or a cost model.

    Steps are executed in the order they are submitted. Real block ids are 1 .. num_blocks.
    """

    num_blocks: int
    block_size: int

    def submit(self, plan: StepPlan) -> StepFuture: ...


@record
class StepPrice:
    """Seconds, and the operations and bytes of all devices together; of them, `own_flops` and
    `own_bytes` belong to single rows (attention over their own cache)."""

    expected_s: float
    ideal_s: float
    flops: float
    bytes: float
    own_flops: float = 0.0
    own_bytes: float = 0.0


@dataclass(slots=True, eq=False)
class PricedStep:
    """What was planned, predicted and took. `previous_ended`: when the device was done with the
    step before. `host_s`: what it then waited for this one, with work pending. Until it has run,
    `began` is when it was launched. `price_without_prompts_s` and, of a step that verifies drafts,
    `plain_s` are what its rows would have cost without; `drafting_s` is part of the price."""

    plan: StepPlan
    num_logits: int
    previous_ended: float
    began: float
    ended: float
    host_s: float
    price: StepPrice
    prompts: tuple[ScheduledRequest, ...]
    price_without_prompts_s: float
    drafting_s: float = 0.0
    checks: bool = False  # drafts, and reads no prompts
    is_overlapped: bool = False  # it was launched before the one before it was over
    plain_s: float = 0.0
    num_masked_rows: int = 0  # rows of logits that a grammar has a mask for
    mask_bytes: float = 0.0  # part of the price's

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class StepRecord(msgspec.Struct):
    """One step from its launch on; what follows `launched_at` is known when it is over. Times are
    seconds of the engine's clock. `outputs` are what it gave; `error` is set when it failed."""

    plan: StepPlan
    launched_at: float
    collected_at: float = 0.0
    outputs: Sequence[RequestOutput] = ()
    error: str | None = None

    @property
    def num_new_tokens(self) -> int:
        """Delivered by this step."""
        return sum([len(output.new_token_ids) for output in self.outputs])


class Listener:
    """Hears what goes into the scheduler of an engine and what comes out of it, in order, with the
    very clock readings that were used: enough to do it again. Override what you want to hear."""

    def on_add(self, request: Request, now: float, fault: RequestFault | None) -> None:
        """A request came in, or was refused (`fault`)."""

    def on_abort(self, request_id: str, now: float) -> None:
        """A request was ended by whoever asked."""

    def on_plan(self, plan: StepPlan, now: float) -> None:
        """A step was planned and is about to be sent; one that schedules nothing is not sent. The
        device may wait for it meanwhile: remember it, and do the work in `on_submitted`."""

    def on_submitted(self, plan: StepPlan, now: float) -> None:
        """The executor has taken it. One that computes inside `submit` is done with it."""

    def on_collect(
        self,
        plan: StepPlan,
        result: StepResult | None,
        outputs: Sequence[RequestOutput],
        error: str | None,
        now: float,
    ) -> None:
        """A step is over and was taken in; a failed one has an `error` and no result, and ends
        all steps behind it, which are told of in the same way, without outputs."""

    def on_step(self, record: StepRecord) -> None:
        """The same step, after all listeners have heard `on_collect`."""

    def on_priced(self, step: PricedStep) -> None:
        """A step has run, as the record of the run has it: `ridgeline.observe.run` tells of it."""


class Listeners(list[Listener]):
    """Whom an engine tells what happens, in this order. What one of them raises is logged and
    dropped: it must not reach the requests."""

    def tell(self, event: str, *about: object) -> None:
        """`event` is the name of a method of `Listener`, `about` its arguments."""
        for listener in self:
            try:
                getattr(listener, event)(*about)
            except Exception as problem:
                say(logger, logging.ERROR, "listener failed", problem=repr(problem))

    @property
    def hear_steps(self) -> bool:
        """Somebody wants a record of each step."""
        return any(type(listener).on_step is not Listener.on_step for listener in self)


class StepPricer(Protocol):
    def seconds(self, shape: StepShape) -> float:
        """Expected time of a step of this shape."""
        ...
