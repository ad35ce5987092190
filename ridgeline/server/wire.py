"""What do the HTTP process and the engine process say to each other?

Frames of `ridgeline.frames`. The engine side gets only what the HTTP side has validated.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ridgeline.config import EngineConfig
from ridgeline.frames import BrokenWire
from ridgeline.observe.requests import PromptChunk
from ridgeline.observe.run import RankStatus
from ridgeline.request import Request, RequestOutput, SamplingParams
from ridgeline.server.text_wire import VocabularyTable

_NUMBER = float | int


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One engine request. `prompt` is a place in the list of its Add message."""

    request_id: str
    prompt: int
    sampling: SamplingParams
    fork_of: str | None


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Take in all of these or none; the answer is Admitted or Refused with the same ticket.
    `queued_at`: when they were sent, in seconds of the monotonic clock that both processes read.
    `wants_cost`: tell what they cost, with each of their outputs. `wants_chunks`: tell of each step
    that reads their prompts."""

    ticket: int
    prompts: tuple[tuple[int, ...], ...]
    sequences: tuple[Row, ...]
    priority: int
    cache_salt: bytes
    queued_at: float
    wants_cost: bool = False
    wants_chunks: bool = False
    tenant: bytes = b""
    weight: float = 1.0


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Unknown ids are fine: a request may end while its abort is on the way."""

    request_ids: tuple[str, ...]


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: build this engine, and leave so many bytes of the host's memory to us.
    `overdue_s`: a rank that is in one place of a step for longer is stuck."""

    config: EngineConfig
    log_level: str
    log_format: str = "text"
    http_bytes: int = 0
    tripwire: bool = False
    overdue_s: float = 10.0


class Explain(msgspec.Struct, tag="explain", array_like=True, frozen=True):
    """Tell all that is known of where time went, or what concerns the requests of one tenant; the
    answer is Explained with the same ticket."""

    ticket: int
    tenant: bytes | None = None


class Vocabulary(msgspec.Struct, tag="vocabulary", array_like=True, frozen=True):
    """Once it is ready: the bytes of the tokens, for answers that keep to a grammar."""

    table: VocabularyTable
    end_token_ids: tuple[int, ...]


Command = Start | Add | Abort | Explain | Vocabulary


class Loading(msgspec.Struct, tag="loading", array_like=True, frozen=True):
    """How far the engine has got with a stage of its start."""

    stage: str
    done: int
    total: int


class Prices(msgspec.Struct, array_like=True, frozen=True):
    """What the engine's devices could do at best, per second, and where expectations of its steps
    come from (assumed, calibrated, ...)."""

    device: str
    origin: str
    flops_per_s: float
    bytes_per_s: float


SPEED_CONTEXT = 1024  # tokens


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine takes requests. What the HTTP side must know of it; sizes in tokens."""

    pid: int
    model_path: str
    model_name: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    end_token_ids: tuple[int, ...]
    default_sampling: tuple[tuple[str, _NUMBER], ...]
    memory: tuple[tuple[str, int], ...]
    device_memory_total: int
    max_servable_tokens: int
    prices: Prices | None = None
    startup: tuple[tuple[str, float], ...] = ()  # seconds by phase
    # Prompt tokens a second and seconds of a step, beside 0, 1, 2, 4, ... rows of SPEED_CONTEXT.
    speeds: tuple[tuple[float, float], ...] = ()
    no_grammars: str = ""  # why structured outputs are not served


class StartFailed(msgspec.Struct, tag="start_failed", array_like=True, frozen=True):
    """The engine cannot be built as asked; trying again would not help."""

    message: str


class Admitted(msgspec.Struct, tag="admitted", array_like=True, frozen=True):
    ticket: int


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    ticket: int
    message: str
    param: str | None
    code: str
    retry_after_s: _NUMBER | None = None


class RegimeTime(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Steps of one kind, and the seconds they took and should have taken."""

    name: str
    num_steps: int
    measured_s: float
    expected_s: float


class DraftCosts(msgspec.Struct, array_like=True, frozen=True):
    """Sums over steps that checked drafts, as `speculation.report.DraftTotals` has them."""

    num_steps: int = 0
    num_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_tokens: int = 0
    drafting_s: float = 0.0
    verifying_s: float = 0.0
    plain_s: float = 0.0
    num_looked: tuple[int, ...] = ()
    num_right: tuple[int, ...] = ()


class StepCosts(msgspec.Struct, array_like=True, frozen=True):
    """Sums over all steps; all only rise. Seconds, operations, bytes and rows of batches."""

    measured_s: float = 0.0
    expected_s: float = 0.0
    ideal_s: float = 0.0
    host_s: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    num_rows: int = 0
    regimes: tuple[RegimeTime, ...] = ()
    drafts: DraftCosts = DraftCosts()


class Gauges(msgspec.Struct, array_like=True, frozen=True):
    """How the engine stands after a step. Counts and bytes; the `num_` totals only rise."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    busy_s: float = 0.0
    device_memory_used: int = 0
    costs: StepCosts | None = None
    expert_load: tuple[float, ...] = ()  # of each layer with experts, the busiest over the mean one
    ranks: tuple[RankStatus, ...] = ()
    rank_load: tuple[float, ...] = ()  # the same of groups of ranks, where experts may change them
    num_expert_exchanges: int = 0


class Cost(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one request has cost so far: its share of each step's measured time, and of the
    operations and bytes of the model."""

    request_id: str
    device_ns: int
    flops: int
    bytes: int


class Scheduled(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request that a step planned at `at` computes for the first time, or again after a
    preemption. Seconds of the clock of `Add.queued_at`."""

    request_id: str
    at: float


class Step(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """Everything that one turn of the engine loop has to tell: one message for all requests."""

    replies: tuple[Admitted | Refused, ...]
    started: tuple[Scheduled, ...]
    outputs: tuple[RequestOutput, ...]
    gauges: Gauges
    costs: tuple[Cost, ...] = ()
    chunks: tuple[PromptChunk, ...] = ()


class Explained(msgspec.Struct, tag="explained", array_like=True, frozen=True):
    """`evidence` is JSON, see ridgeline.observe.evidence; empty when nothing was priced."""

    ticket: int
    evidence: bytes


class Faulted(msgspec.Struct, tag="faulted", array_like=True, frozen=True):
    """The engine's last word before its process ends."""

    message: str


Event = Loading | Ready | StartFailed | Step | Explained | Faulted

_COMMANDS = msgspec.msgpack.Decoder(Command)
_EVENTS = msgspec.msgpack.Decoder(Event)


def read_command(payload: bytes) -> Command:
    try:
        command: Command = _COMMANDS.decode(payload)
        return command
    except msgspec.DecodeError as fault:
        raise BrokenWire(f"not a command: {fault}") from None


def read_event(payload: bytes) -> Event:
    try:
        event: Event = _EVENTS.decode(payload)
        return event
    except msgspec.DecodeError as fault:
        raise BrokenWire(f"not an event: {fault}") from None


def pack_add(
    ticket: int,
    requests: Sequence[Request],
    queued_at: float,
    *,
    wants_cost: bool = False,
    wants_chunks: bool = False,
) -> Add:
    """One message for all requests of a client's call; they share priority, salt and tenant."""
    prompts: dict[tuple[int, ...], int] = {}
    rows = []
    for request in requests:
        prompt = prompts.setdefault(request.prompt_token_ids, len(prompts))
        rows.append(Row(request.request_id, prompt, request.sampling, request.fork_of))
    first = requests[0]
    return Add(
        ticket,
        tuple(prompts),
        tuple(rows),
        first.priority,
        first.cache_salt,
        queued_at,
        wants_cost,
        wants_chunks,
        first.tenant,
        first.weight,
    )


def unpack_add(message: Add, now: float) -> list[Request]:
    """The engine's requests: to it they arrive when they are sent, not when it has time to look."""
    arrival = min(message.queued_at, now)
    return [
        Request(
            row.request_id,
            message.prompts[row.prompt],
            row.sampling,
            arrival,
            priority=message.priority,
            cache_salt=message.cache_salt,
            fork_of=row.fork_of,
            tenant=message.tenant,
            weight=message.weight,
        )
        for row in message.sequences
    ]
