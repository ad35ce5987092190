"""How fast is a server that has B requests in flight all the time? A closed form, no simulation.

Each request has I prompt tokens and O answer tokens, and one that ends is replaced at once. In the
time T that one request takes, each of the B places serves one request, so T holds B prompts. The
engine runs N steps in T; prompts are read in some of them, beside the decodes of others:

  own steps   p = ceil(I / room) to read the prompt, room = budget - (B - 1), then O - 1 decodes
  all steps   N = max(p + O - 1, B (I + O - 1) / budget)     a full budget makes requests wait
  mixed       n = min(B p, N), each with B I / n prompt tokens and B - B (N - O + 1) / n decodes
  time        T = (N - n) t_decode + n t_mixed

This is for requests that start independently of each other, as answers of different lengths make
them. Where all start and end together, their prompts share few steps and disturb no decodes: the
real scheduler, simulated, is then up to 14 % faster; otherwise both agree within a few percent.
Rates follow from Little's law, rate = B / T. With pipeline stages, B / stages requests are in each
of as many steps at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, floor

from ridgeline.errors import ConfigError
from ridgeline.step import StepPricer, StepShape

DECODE_POINTS = 5  # contexts at which a decode step is priced; its time is close to linear in them
PROMPT_POINTS = 32  # chunks of a prompt that are priced one by one


@dataclass(frozen=True, slots=True)
class Load:
    """`batch` requests in flight, each of `num_input` and `num_output` tokens; a step computes at
    most `max_num_batched_tokens`."""

    batch: int
    num_input: int
    num_output: int
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        if min(self.batch, self.num_input, self.num_output) < 1:
            raise ConfigError("batch, input and output must be at least 1")
        if self.max_num_batched_tokens < self.batch:
            raise ConfigError(
                f"a token budget of {self.max_num_batched_tokens} has no room for {self.batch} "
                "decodes in a step; raise it, or lower the batch"
            )

    @property
    def num_tokens(self) -> int:
        """Of one request at its end."""
        return self.num_input + self.num_output

    @property
    def middle_context(self) -> int:
        """Of a request in the middle of its answer."""
        return self.num_input + max(0, self.num_output - 2) // 2

    @property
    def prompt_steps(self) -> int:
        """Steps in which a prompt is read beside the decodes of all others."""
        room = max(1, self.max_num_batched_tokens - (self.batch - 1))
        return ceil(self.num_input / room)


@dataclass(frozen=True, slots=True)
class Cycle:
    """What happens while one request lives, in steps (which need not be whole)."""

    prompt_steps: int  # p
    waiting_steps: float
    mixed_steps: float  # n
    plain_steps: float  # N - n
    prompt_tokens: float  # in each mixed step
    mixed_decodes: float  # decodes in each mixed step


def cycle(load: Load) -> Cycle:
    """Counts only; see the top of this file."""
    batch, decodes = load.batch, load.num_output - 1
    own = load.prompt_steps
    full = batch * (load.num_input + decodes) / load.max_num_batched_tokens
    steps = max(float(own + decodes), full)
    mixed = min(float(batch * own), steps)
    return Cycle(
        prompt_steps=own,
        waiting_steps=steps - own - decodes,
        mixed_steps=mixed,
        plain_steps=steps - mixed,
        prompt_tokens=batch * load.num_input / mixed,
        mixed_decodes=max(0.0, batch - batch * (steps - decodes) / mixed),
    )


def decode_shape(batch: int, context: int) -> StepShape:
    return ((1, context),) * batch


def mixed_shape(load: Load, counts: Cycle) -> StepShape:
    """The average step with prompt tokens: chunks from the middle of their prompts, and decodes
    from the middle of their answers."""
    total = max(1, round(counts.prompt_tokens))
    own_chunk = ceil(load.num_input / counts.prompt_steps)
    num_chunks = max(1, round(total / own_chunk))
    sizes = [total // num_chunks + (i < total % num_chunks) for i in range(num_chunks)]
    chunks = tuple((size, max(0, load.num_input - size) // 2) for size in sizes)
    return chunks + decode_shape(round(counts.mixed_decodes), load.middle_context)


def prompt_shapes(num_input: int, budget: int) -> tuple[StepShape, ...]:
    """The steps in which one prompt is read alone."""
    return tuple(
        ((min(budget, num_input - start), start),) for start in range(0, num_input, budget)
    )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Seconds and rates of a steady load, of one replica.

    `tpot_s` is 0 when answers have one token. `decode_s` is the mean decode step without prompts,
    `mixed_s` the mean step with them; `prompt_alone_s` is the time to read one prompt on an idle
    server.
    """

    load: Load
    counts: Cycle
    ttft_s: float
    tpot_s: float
    decode_s: float
    mixed_s: float
    prompt_alone_s: float

    @property
    def e2e_s(self) -> float:
        return request_seconds(self.ttft_s, self.tpot_s, self.load.num_output)

    @property
    def request_rate(self) -> float:
        """Requests per second that are finished."""
        return closed_loop_rate(self.load.batch, self.e2e_s)

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of all requests."""
        return self.request_rate * self.load.num_output

    @property
    def tokens_per_s_per_user(self) -> float:
        """What one person sees after the first token; over the whole request for one token."""
        return 1 / self.tpot_s if self.tpot_s else self.load.num_output / self.e2e_s

    @property
    def prompt_share(self) -> float:
        """Share of the busy time that prompts add to what decoding alone would take."""
        return max(0.0, 1 - (self.load.num_output - 1) * self.decode_s / self.e2e_s)


def throughput(pricer: StepPricer, whole: Load, stages: int = 1) -> Throughput:
    """TTFT, TPOT and rates from a handful of step prices; `stages` pipeline stages work at once."""
    load = replace(whole, batch=ceil(whole.batch / stages))
    counts = cycle(load)
    decode_s = mean_decode_seconds(pricer, load)
    alone_s = prompt_seconds(pricer, load.num_input, load.max_num_batched_tokens)
    if load.batch == 1:
        mixed_s = alone_s / counts.prompt_steps
    else:
        mixed_s = pricer.seconds(mixed_shape(load, counts))
    ttft_s = (counts.prompt_steps + counts.waiting_steps) * mixed_s
    cycle_s = counts.plain_steps * decode_s + counts.mixed_steps * mixed_s
    decodes = load.num_output - 1
    tpot_s = (cycle_s - ttft_s) / decodes if decodes else 0.0
    return Throughput(whole, counts, ttft_s, tpot_s, decode_s, mixed_s, alone_s)


def mean_decode_seconds(pricer: StepPricer, load: Load) -> float:
    """Mean time of a step of `batch` decodes while their contexts grow from I to I + O."""
    decodes = max(1, load.num_output - 1)
    points = min(DECODE_POINTS, decodes)
    contexts = [load.num_input + floor((i + 0.5) * decodes / points) for i in range(points)]
    return sum(pricer.seconds(decode_shape(load.batch, c)) for c in contexts) / points


def prompt_seconds(pricer: StepPricer, num_input: int, budget: int) -> float:
    """Time to read one prompt, in chunks of the token budget, on an idle server."""
    shapes = prompt_shapes(num_input, budget)
    if len(shapes) <= PROMPT_POINTS:
        return sum(pricer.seconds(shape) for shape in shapes)
    whole, last = shapes[:-1], shapes[-1]
    step = len(whole) / PROMPT_POINTS
    picked = [whole[floor((i + 0.5) * step)] for i in range(PROMPT_POINTS)]
    mean = sum(pricer.seconds(shape) for shape in picked) / PROMPT_POINTS
    return mean * len(whole) + pricer.seconds(last)


def saturation(pricer: StepPricer, load: Load, limit: int, stages: int = 1) -> Throughput:
    """The throughput of a server that never runs out of waiting requests: `limit` are in flight."""
    most = min(limit, load.max_num_batched_tokens)
    return throughput(pricer, replace(load, batch=most), stages)


def request_seconds(ttft_s: float, tpot_s: float, num_output: int) -> float:
    """From arrival to the last token. Tokens of one request come one after the other: the time
    between two of them is that of a whole step, however many requests share it."""
    return ttft_s + (num_output - 1) * tpot_s


def in_flight(request_rate: float, e2e_s: float) -> float:
    """Little's law: how many requests are in the system on average."""
    return request_rate * e2e_s


def closed_loop_rate(batch: int, e2e_s: float) -> float:
    """Little's law again: requests per second of `batch` places that are always taken."""
    return batch / e2e_s


def replicas(request_rate: float, rate_per_replica: float, headroom: float = 0.0) -> int:
    """How many replicas carry a rate when each keeps a share `headroom` of its own free."""
    if not rate_per_replica > 0 or not 0 <= headroom < 1:
        raise ConfigError("a replica must carry more than 0 requests/s, headroom be in 0 .. 1")
    return ceil(request_rate / (rate_per_replica * (1 - headroom)))


def static_waste(lengths: Iterable[int]) -> int:
    """Places in steps that stay empty when a batch runs until its longest answer ends."""
    every = tuple(lengths)
    return sum(max(every) - length for length in every)


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Share of time that a stage is idle: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (microbatches + stages - 1)
