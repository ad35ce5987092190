"""What do the driver of a group and its other ranks say to each other?

The driver asks who is there (`Challenge`), the rank proves that it knows the secret and says who
it is (`Hello`), and the driver proves the same (`Welcome`) or says why not (`Refused`). Then the
driver has it open the model (`Open`) and build its share (`Build`), and sends each step. A rank
says nothing of a step that goes well, but where groups of ranks attend for rows of their own the
first rank of each says what they got (`Result`).
"""

from __future__ import annotations

import msgspec

from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.step import (
    BlockCopy,
    BlockTables,
    Decodes,
    NewRequest,
    ScheduledRequest,
    StepPlan,
    StepResult,
)


class Challenge(msgspec.Struct, tag="challenge", array_like=True, frozen=True):
    """The driver's first message."""

    version: str
    nonce: bytes


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """The answer. `rank` is -1 for one that takes any."""

    version: str
    nonce: bytes
    proof: bytes
    rank: int
    host: str
    pid: int


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    proof: bytes
    rank: int
    size: int


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    reason: str


class Open(msgspec.Struct, tag="open", array_like=True, frozen=True):
    """Find this model and a device; the answer is Opened."""

    config: EngineConfig


class Opened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """`device` is its name, `hardware` which one of all it is, where that can be said; bytes of its
    memory; `digest` says which model was found."""

    device: str
    hardware: str
    total: int
    free: int
    digest: str


class Build(msgspec.Struct, tag="build", array_like=True, frozen=True):
    """Make your share of the model, and meet the others; the answer is Built."""

    resolved: ResolvedConfig
    address: str


class Built(msgspec.Struct, tag="built", array_like=True, frozen=True):
    """Bytes of weights and of the cache."""

    weights: int
    cache: int


class Step(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """A StepPlan. `known`: the last step whose result its planner had."""

    step_id: int
    known: int
    scheduled: tuple[ScheduledRequest, ...]
    new: tuple[NewRequest, ...]
    copies: tuple[BlockCopy, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]

    def plan(self) -> StepPlan:
        return StepPlan(
            self.step_id, self.scheduled, self.new, self.copies, self.preempted, self.finished
        )


class DecodeStep(msgspec.Struct, tag="decodes", array_like=True, frozen=True):
    """A StepPlan with `decodes`, by columns: a fifth of the bytes. `blocks` are those of the rows
    in `opened`; `known` as of Step."""

    step_id: int
    known: int
    num_groups: int
    row_ids: tuple[str, ...]
    starts: tuple[int, ...]
    opened: tuple[int, ...]
    blocks: tuple[BlockTables, ...]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]

    def plan(self) -> StepPlan:
        none: BlockTables = ((),) * self.num_groups
        ids, starts = self.row_ids, self.starts
        rows = [
            ScheduledRequest(row_id, start, 1, none, True)
            for row_id, start in zip(ids, starts, strict=True)
        ]
        for at, blocks in zip(self.opened, self.blocks, strict=True):
            rows[at] = ScheduledRequest(ids[at], starts[at], 1, blocks, True)
        plan = StepPlan(self.step_id, tuple(rows), preempted=self.preempted, finished=self.finished)
        return plan.knowing(Decodes(ids, starts, self.opened))


class Score(msgspec.Struct, tag="score", array_like=True, frozen=True):
    """Take part in a pass over these tokens, whose logits rank 0 reads."""

    token_ids: tuple[int, ...]


class Prepare(msgspec.Struct, tag="prepare", array_like=True, frozen=True):
    """Do the next step that can be foreseen; nothing is in flight. `draft_tokens` as of WarmUp,
    the same each time."""

    draft_tokens: tuple[int, ...]


class ExchangeExperts(msgspec.Struct, tag="exchange", array_like=True, frozen=True):
    """Pairs of experts of a layer, by its place among those with experts, change ranks."""

    at: int
    pairs: tuple[tuple[int, int], ...]


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True):
    """What are you at? The answer is Answer with the same number."""

    number: int


class Answer(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    """The last step begun, how many collectives this rank has entered, and the last of them;
    seconds spent in them, steps begun, and bytes of memory held, all since its start."""

    number: int
    step_id: int
    num_calls: int
    call: str
    waited_s: float = 0.0
    num_steps: int = 0
    memory_bytes: int = 0


class Sampled(msgspec.Struct, tag="sampled", array_like=True, frozen=True):
    """The digest of all tokens up to this step, see ridgeline.distributed.agreement."""

    step_id: int
    digest: bytes


class Result(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """What a step has given for the rows of a group of ranks."""

    step_id: int
    result: StepResult


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The rank's last words. `is_asked`: what was asked for cannot be had."""

    message: str
    is_asked: bool = False


Command = (
    Welcome | Refused | Challenge | Open | Build | Step | DecodeStep | Score | Prepare
    | ExchangeExperts | Ask
)  # fmt: skip
Said = Hello | Opened | Built | Answer | Sampled | Result | Failed

COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
SAID: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def step_message(plan: StepPlan, known: int) -> Step | DecodeStep:
    decodes, scheduled = plan.decodes, plan.scheduled
    if decodes is None or not scheduled:
        closed = plan.preempted, plan.finished
        return Step(plan.step_id, known, scheduled, plan.new, plan.copies, *closed)
    return DecodeStep(
        plan.step_id,
        known,
        len(scheduled[0].new_block_ids),
        decodes.row_ids,
        decodes.starts,
        decodes.opened,
        tuple([scheduled[at].new_block_ids for at in decodes.opened]),
        plan.preempted,
        plan.finished,
    )
