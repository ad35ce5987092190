"""What does this setup do under a steady load: speed, memory, what binds, and where the time goes?

Everything that `ridgeline predict` shows, from the closed form of `throughput` and the operators of
the two kinds of steps, those that only decode and those that also read prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ridgeline.architectures.rope_config import longest_context
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import ORIGINS, Origin
from ridgeline.cost.memory import Limits, MemoryPlan, memory_plan, plan_or_none
from ridgeline.cost.pipeline import step_prices
from ridgeline.cost.pricer import Setup
from ridgeline.cost.roofline import StepCost, step_cost
from ridgeline.cost.throughput import (
    Load,
    Throughput,
    decode_shape,
    mixed_shape,
    saturation,
    throughput,
)
from ridgeline.errors import ConfigError, DoesNotFit

# Where nobody says, as `resolve` has them: most tokens of a step, most requests at once.
TOKEN_BUDGET, DEFAULT_TOKEN_BUDGET = {"cpu": 2048}, 8192
SLOTS, DEFAULT_SLOTS = {"cpu": 64}, 256


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a time; the pieces of a waterfall sum to the whole."""

    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SteadyState:
    """`throughput` is that of the load, `saturated` that of a full server: as many requests as it
    runs at once, if they fit. `max_batch` requests have room in memory and in a step
    (`batch_limited_by` says in which there is no more).

    `decode` is the step of `batch` decodes in the middle of their answers, `prefill` the step that
    reads a prompt alone (a chunk from its middle, if it takes several). `mixed` is the average step
    that reads prompts beside decodes, None for one request. `whole_prompt_ideal_s` is the prompt in
    one step at the data sheet's rates.
    """

    setup: Setup
    throughput: Throughput
    saturated: Throughput
    decode: StepCost
    prefill: StepCost
    mixed: StepCost | None
    whole_prompt_ideal_s: float
    memory: MemoryPlan
    max_batch: int

    @property
    def batch_limited_by(self) -> Literal["memory", "max_num_batched_tokens"]:
        is_full_step = self.max_batch >= self.throughput.load.max_num_batched_tokens
        return "max_num_batched_tokens" if is_full_step else "memory"

    @property
    def ttft_s(self) -> float:
        return self.throughput.ttft_s

    @property
    def tpot_s(self) -> float:
        return self.throughput.tpot_s

    @property
    def tokens_per_s(self) -> float:
        return self.throughput.tokens_per_s

    @property
    def tokens_per_s_per_user(self) -> float:
        return self.throughput.tokens_per_s_per_user

    @property
    def request_rate(self) -> float:
        return self.throughput.request_rate

    @property
    def origin(self) -> Origin:
        """Where the weakest of the figures comes from."""
        return max((self.decode.origin, self.prefill.origin), key=ORIGINS.index)

    @property
    def seconds_by_bound(self) -> dict[str, float]:
        """Time of one request's life by what binds: compute, memory, link, latency, and "host"
        where the devices wait for it."""
        throughput, counts = self.throughput, self.throughput.counts
        found = dict.fromkeys((*self.decode.seconds_by_bound(), "host"), 0.0)
        for cost, total_s in (
            (self.decode, counts.plain_steps * throughput.decode_s),
            (self.mixed or self.prefill, counts.mixed_steps * throughput.mixed_s),
        ):
            steps = total_s / cost.expected_s  # of the size that `cost` is of
            for bound, seconds in cost.seconds_by_bound().items():
                found[bound] += steps * seconds
            found["host"] += steps * max(0.0, cost.expected_s - cost.device_s)
        return found

    @property
    def bound(self) -> str:
        """What binds for the largest part of the time."""
        seconds = self.seconds_by_bound
        return max(seconds, key=lambda bound: seconds[bound])

    @property
    def tpot_parts(self) -> tuple[Part, ...]:
        """The time between two tokens, from the data sheet's floor to what is expected."""
        if self.throughput.load.num_output == 1:
            return ()
        host = max(0.0, self.decode.expected_s - self.decode.device_s)
        decode_s = self.throughput.decode_s
        return (
            Part("ideal", self.decode.ideal_s),
            Part("kernels", decode_s - host - self.decode.ideal_s),
            Part("host", host),
            Part("others' prompts", self.throughput.tpot_s - decode_s),
        )

    @property
    def ttft_parts(self) -> tuple[Part, ...]:
        """The time to the first token, from the data sheet's floor to what is expected."""
        waiting = self.throughput.counts.waiting_steps * self.throughput.mixed_s
        alone = self.throughput.prompt_alone_s
        own_steps = self.throughput.counts.prompt_steps
        host = own_steps * max(0.0, self.prefill.expected_s - self.prefill.device_s)
        return (
            Part("ideal", self.whole_prompt_ideal_s),
            Part("kernels and chunks", alone - host - self.whole_prompt_ideal_s),
            Part("host", host),
            Part("others in the same steps", self.throughput.ttft_s - waiting - alone),
            Part("waiting for others' prompts", waiting),
        )

    @property
    def input_s_per_token(self) -> float:
        """Time of a replica that one prompt token takes."""
        return self.throughput.prompt_share / (self.request_rate * self.throughput.load.num_input)

    @property
    def output_s_per_token(self) -> float:
        """Time of a replica that one answer token takes."""
        return (1 - self.throughput.prompt_share) / self.tokens_per_s


def steady_state(
    setup: Setup,
    *,
    batch: int,
    num_input: int,
    num_output: int,
    max_num_batched_tokens: int | None = None,
    block_size: int = 16,
    utilization: float = 0.9,
) -> SteadyState:
    """One replica with `batch` requests in flight all the time.

    ConfigError for what the model cannot do; DoesNotFit when the device has no room for the model
    or for so many requests at once, with the cheapest changes.
    """
    budget = max_num_batched_tokens or token_budget(setup)
    load = Load(batch, num_input, num_output, budget)
    check_context(setup.spec, load)
    limits = Limits(load.num_tokens, batch, budget, block_size, utilization, min_sequences=batch)
    memory = _plan(setup, limits)
    largest = max(batch, batch_limit(setup, limits))
    pricer, stages = step_prices(setup), setup.layout.pp
    found = throughput(pricer, load, stages)
    shape_load = Load(-(-batch // stages), num_input, num_output, budget)
    own = min(num_input, budget)
    return SteadyState(
        setup=setup,
        throughput=found,
        saturated=saturation(pricer, load, max(batch, min(largest, slots(setup))), stages),
        decode=step_cost(setup, decode_shape(shape_load.batch, load.middle_context)),
        prefill=step_cost(setup, ((own, (num_input - own) // 2),)),
        mixed=None if shape_load.batch == 1 else _mixed_cost(setup, shape_load, found),
        whole_prompt_ideal_s=step_cost(setup, ((num_input, 0),)).ideal_s,
        memory=memory,
        max_batch=largest,
    )


def _mixed_cost(setup: Setup, load: Load, found: Throughput) -> StepCost:
    return step_cost(setup, mixed_shape(load, found.counts))


def token_budget(setup: Setup) -> int:
    """Tokens of a step where nobody says."""
    return TOKEN_BUDGET.get(setup.device.kind, DEFAULT_TOKEN_BUDGET)


def slots(setup: Setup) -> int:
    """Requests at once where nobody says, of all pipeline stages."""
    return SLOTS.get(setup.device.kind, DEFAULT_SLOTS) * setup.layout.pp


def context_limit(spec: ModelSpec) -> int:
    """Tokens of the longest request that the model has positions for."""
    ropes = {layer.attention.rope for layer in spec.layers}
    return max(longest_context(rope, spec.max_position_embeddings) for rope in ropes)


def check_context(spec: ModelSpec, load: Load) -> None:
    """ConfigError if the model has no positions for a request of this load."""
    limit = context_limit(spec)
    if load.num_tokens > limit:
        raise ConfigError(
            f"{load.num_input} prompt and {load.num_output} answer tokens exceed the model's "
            f"context of {limit}"
        )


def batch_limit(setup: Setup, limits: Limits) -> int:
    """The most requests of full length that have room at once, with the working space of so many;
    0 if none. At most the token budget, as each needs a token of a step."""
    low, high = 0, limits.max_num_batched_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if plan_or_none(setup, _for_batch(limits, middle)) is None:
            high = middle - 1
        else:
            low = middle
    return low


def _for_batch(limits: Limits, batch: int) -> Limits:
    return Limits(
        limits.max_model_len,
        batch,
        limits.max_num_batched_tokens,
        limits.block_size,
        limits.utilization,
        min_sequences=batch,
    )


def _plan(setup: Setup, limits: Limits) -> MemoryPlan:
    """DoesNotFit says first, where it is so, that fewer requests at once would fit."""
    try:
        return memory_plan(
            setup,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            utilization=limits.utilization,
            min_sequences=limits.min_sequences,
        )
    except DoesNotFit as error:
        fewer = batch_limit(setup, limits)
        if not fewer:
            raise
        others = (change for change in error.changes if not change.startswith("max_num_seqs"))
        changes = (f"batch {fewer}, the most that fit at once", *others)[:3]
        raise DoesNotFit(str(error), error.items, changes) from None
