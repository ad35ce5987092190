"""What crosses the border between the scheduler and whoever executes a step?

A plan's size follows what changed, never the context length: the executor keeps a row for each
request (its tokens, block tables and sampling state) from the plan that brings it in `new` to the
plan that names it in `preempted` or `finished`. A plan is applied in this order: `preempted` and
`finished` rows go, `new` rows come, `copies` are made, `scheduled` tokens are computed and sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ridgeline.request import SamplingParams, TokenLogprobs

NULL_BLOCK = 0  # never allocated: padding, and what left a sliding window. Real ids start at 1.

StepShape = tuple[tuple[int, int], ...]  # (new tokens, context before them) per request
BlockTables = tuple[tuple[int, ...], ...]  # block ids per KV group


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A row to open: at admission, after a preemption, or for a fork.

    `token_ids` are all known tokens (prompt, then output), the first `num_prompt_tokens` of them
    the prompt. `block_ids` are the tables as they stand before this plan's `scheduled` entry adds
    its `new_block_ids`; entries may be NULL_BLOCK where a window has passed.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: BlockTables


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute `num_tokens` tokens from position `start`; the last `num_draft` are guesses.

    Tokens the row does not hold yet were sampled (or drafted) by a step still in flight and are
    on the device. Then `start` is an upper bound (all guesses accepted) and the device knows the
    true one. `new_block_ids` are appended to the row's tables, one tuple per KV group.
    `samples`: the step ends with a new token for this request.
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


@dataclass(frozen=True, slots=True)
class StepPlan:
    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()

    @property
    def shape(self) -> StepShape:
        """All that a cost model needs to know."""
        return tuple((s.num_tokens, s.start) for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids`: accepted guesses, then one sampled token, per request that samples.

    `logprobs` are there for requests that asked, one per token of `token_ids`. `prompt_logprobs`
    are those of prompt positions start+1 .. (start+num_tokens, at most the last prompt token)
    whose predicting position was computed in this step. `faults` names requests whose own numbers went
    wrong (for example NaN logits) and says how; they have no tokens.
    """

    token_ids: dict[str, tuple[int, ...]]
    draft_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


class StepFuture(Protocol):
    def result(self) -> StepResult:
        """Wait for the step. Raises EngineFault when the device failed."""
        ...


class Executor(Protocol):
    """A GPU, a CPU, eight ranks behind a socket, or a cost model.

    Steps are executed in the order they are submitted. Real block ids are 1 .. num_blocks.
    """

    num_blocks: int
    block_size: int

    def submit(self, plan: StepPlan) -> StepFuture: ...


class StepPricer(Protocol):
    def seconds(self, shape: StepShape) -> float:
        """Expected time of a step of this shape."""
        ...
