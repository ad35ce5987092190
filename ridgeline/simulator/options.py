"""How is the engine run that is simulated, on what, and how large is everything in it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.cost.memory import memory_plan
from ridgeline.cost.pipeline import StagePrices
from ridgeline.cost.pricer import Pricer, Setup
from ridgeline.errors import ConfigError
from ridgeline.router.policies import RouterPolicy
from ridgeline.simulator.executor import Speculation
from ridgeline.simulator.workload import Arrival
from ridgeline.step import StepPricer

PLANS_AHEAD_S = 3e-3  # medians of an H200's server, two loads of an 8B model: 3.2 and 3.3


@dataclass(frozen=True, slots=True)
class Machine:
    """All that a replica need know of its hardware and model. `windows` as the block manager's.
    `pools` of `num_blocks` each: groups of devices attend for requests of their own.
    `stages` price the parts of a step, one after the other, where it runs through a pipeline;
    `sent_s` by tokens is from one stage to the next, `returned_s` by rows from the last to the
    first."""

    pricer: StepPricer
    num_blocks: int
    windows: tuple[int | None, ...] = (None,)
    stages: tuple[StepPricer, ...] = ()
    sent_s: Callable[[int], float] = lambda num_tokens: 0.0
    returned_s: Callable[[int], float] = lambda num_rows: 0.0
    pools: int = 1


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica is lost from `start_s` to `end_s`, in seconds of the workload, and comes back with
    an empty cache. Requests that it had are sent again from their beginning, to the others or, when
    there are none, as soon as one is back."""

    replica: int
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if self.replica < 0 or not 0 <= self.start_s < self.end_s:
            raise ConfigError(
                f"an outage of replica {self.replica} from {self.start_s:g} s to {self.end_s:g} s: "
                "replicas are counted from 0, and it must end after it has begun"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the engine is run; what the model and the machine are is in the setup.

    `static_batching`: a batch is filled when the last one has ended, all of it; rows that end
    before the others go on costing. Without `chunked_prefill` a prompt is computed in one step.
    Without `paging` every seat reserves room for the longest request, so there are fewer seats, and
    nothing is shared. `num_blocks` None: what fits beside the weights. `request_s` passes between
    the arrival of a request and its coming to the engine (tokens, HTTP). `computes_in_submit`: the
    engine's loop stands still while a step is computed, as on a CPU. `plans_ahead_s`: where it does
    not, and while there is room for who comes, the next step is planned so long before the running
    one ends; None: as soon as that runs.
    """

    num_replicas: int | None = None  # None: as the layout says
    router: RouterPolicy | None = None  # None: in turn
    policy: str = "fcfs"
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    static_batching: bool = False
    chunked_prefill: bool = True
    paging: bool = True
    prefix_caching: bool = True
    max_in_flight: int = 2
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_mixed_tokens: int | None = None  # None: prompts may fill a step that also decodes
    max_model_len: int | None = None  # None: the longest request
    block_size: int = 16
    num_blocks: int | None = None
    memory_utilization: float = 0.9
    speculation: Speculation | None = None
    request_s: float = 0.0
    computes_in_submit: bool = False
    plans_ahead_s: float | None = None
    outages: tuple[Outage, ...] = ()  # two of one replica must not overlap
    macro_steps: bool = True

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of one replica after all options are taken into account."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    memory_utilization: float
    num_blocks: int | None
    overlaps: bool
    paging: bool


def limits_of(setup: Setup | Machine, workload: Sequence[Arrival], options: Options) -> Limits:
    """A prompt that is computed whole must find room in a step beside all decodes."""
    longest = max((a.num_input + a.num_output for a in workload), default=1)
    max_model_len = options.max_model_len or longest
    budget = options.max_num_batched_tokens
    if not options.chunked_prefill:
        budget = max(budget, max_model_len + options.max_num_seqs)
    return Limits(
        max_model_len,
        options.max_num_seqs,
        budget,
        options.block_size,
        options.memory_utilization,
        options.num_blocks,
        options.max_in_flight > 1,
        options.paging,
    )


def machine_of(setup: Setup | Machine, limits: Limits) -> Machine:
    """The machine that a setup makes. Raises DoesNotFit."""
    if isinstance(setup, Machine):
        return setup
    num_blocks = limits.num_blocks
    if num_blocks is None:
        num_blocks = memory_plan(
            setup,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            block_size=limits.block_size,
            utilization=limits.memory_utilization,
        ).num_blocks
    constants = setup.constants
    if constants.host.overlapped and not limits.overlaps:
        host = replace(constants.host, overlapped=False)
        setup = replace(setup, calibration=replace(constants, host=host))
    windows = tuple(group.window for group in kv_groups(setup.spec))
    return priced_machine(setup, num_blocks, windows)


def priced_machine(
    setup: Setup, num_blocks: int, windows: tuple[int | None, ...], pricer: Pricer | None = None
) -> Machine:
    """With the stages of its pipeline, if it has one."""
    target = pricer or Pricer(setup)
    if setup.layout.pp == 1:
        return Machine(target, num_blocks, windows, pools=setup.layout.dp)
    prices = StagePrices(setup)
    return Machine(target, num_blocks, windows, prices.stages, prices.sent_s, prices.returned_s)


def without_paging(limits: Limits, machine: Machine) -> Limits:
    """Contiguous caches: each seat is as long as the longest request may get, windows or not."""
    if limits.paging:
        return limits
    per_slot = -(-limits.max_model_len // limits.block_size) * len(machine.windows)
    slots = machine.pools * (machine.num_blocks // per_slot)
    if slots < 1:
        raise ConfigError(
            f"without paging one request of {limits.max_model_len} tokens reserves {per_slot} "
            f"blocks, and there are {machine.num_blocks}; lower max_model_len"
        )
    return replace(limits, max_num_seqs=min(limits.max_num_seqs, slots))
