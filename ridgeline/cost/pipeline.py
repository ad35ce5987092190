"""When does each stage of a pipeline work, when does it send, and when does it wait?

A step of p stages is cut into m micro-batches that follow each other. Stage s begins with
micro-batch j when stage s - 1 has sent it and when it has done micro-batch j - 1 itself. With equal
stages of time t the step takes (m + p - 1) t, and a stage is idle for (p - 1) / (m + p - 1) of it,
as `throughput.pipeline_bubble` has it; real stages differ, as the first looks up embeddings and the
last multiplies by the output matrix. Times are of the devices; the host is not in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ridgeline.architectures.stages import cut, stage_spec
from ridgeline.cost.communication import wire
from ridgeline.cost.execution_mode import ExecutionModes
from ridgeline.cost.fit_suggestions import Limits
from ridgeline.cost.memory import plan_or_none
from ridgeline.cost.ops import COLLECTIVES, Op, layer_ops, stage_message, stage_ops
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.roofline import OpCost, op_cost
from ridgeline.cost.setup import Setup
from ridgeline.cost.step_features import attention_kinds, step_features
from ridgeline.errors import ConfigError
from ridgeline.step import StepPricer, StepShape

TOKEN_BYTES = 8  # of a token id as ranks send it


@dataclass(frozen=True, slots=True)
class Busy:
    """A stage with one micro-batch: arithmetic and memory first, messages with them."""

    stage: int
    micro_batch: int
    start_s: float
    work_s: float
    sent_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.work_s + self.sent_s


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One step through all stages."""

    busy: tuple[Busy, ...]
    num_stages: int

    @property
    def total_s(self) -> float:
        return max(one.end_s for one in self.busy)

    @property
    def sent_s(self) -> float:
        """Of all stages together."""
        return sum(one.sent_s for one in self.busy)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait for others."""
        working_s = sum(one.work_s + one.sent_s for one in self.busy)
        return max(0.0, 1 - working_s / (self.num_stages * self.total_s))


class Pipeline:
    """A setup, asked step after step."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._kinds = tuple(attention_kinds(setup.spec))
        self._modes = ExecutionModes(setup)

    def step(self, shapes: Sequence[StepShape]) -> PipelineStep:
        """One whose micro-batches have these shapes. ConfigError where one is empty."""
        if not shapes or not all(shapes):
            raise ConfigError(
                "every micro-batch needs a request; use as many as there are requests"
            )
        stages = self.setup.layout.pp
        busy: list[Busy] = []
        free = [0.0] * stages
        times: dict[tuple[StepShape, int], tuple[float, float]] = {}
        for number, shape in enumerate(shapes):
            arrived = 0.0
            for stage in range(stages):
                if (shape, stage) not in times:
                    times[shape, stage] = self.stage_seconds(shape, stage)
                one = Busy(stage, number, max(arrived, free[stage]), *times[shape, stage])
                busy.append(one)
                arrived = free[stage] = one.end_s
        return PipelineStep(tuple(busy), stages)

    def layer(self, index: int, shape: StepShape) -> tuple[OpCost, ...]:
        """What each operator of a layer takes, in the order of its work."""
        setup = self.setup
        ops = layer_ops(setup.spec, index, shape, setup.layout, setup.precision)
        return self._costs(shape, ops)

    def stage_seconds(self, shape: StepShape, stage: int) -> tuple[float, float]:
        """Of one stage: of work, and of messages."""
        setup = self.setup
        ops = stage_ops(setup.spec, shape, setup.layout, setup.precision, stage)
        costs = self._costs(shape, ops)
        sent_s = sum(one.expected_s for one in costs if one.op.kind in COLLECTIVES)
        return sum(one.expected_s for one in costs) - sent_s, sent_s

    def _costs(self, shape: StepShape, ops: Iterable[Op]) -> tuple[OpCost, ...]:
        mode = self._modes.of(step_features(self._kinds, shape))
        return tuple(op_cost(op, self.setup.device, self.setup.constants, mode) for op in ops)


class StagePrices:
    """The stages of a setup, each priced as a model of its layers: how steps that follow each other
    pass through them. Only the first plans."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        spec, layout, constants = setup.spec, setup.layout, setup.constants
        idle = replace(constants, host=replace(constants.host, c0_s=0.0, c1_s=0.0))
        self.stages = tuple(
            Pricer(
                replace(
                    setup,
                    spec=stage_spec(spec, layout.stage_layers(spec.num_layers, stage)),
                    layout=replace(layout, pp=1, starts=()),
                    calibration=idle if stage else constants,
                )
            )
            for stage in range(layout.pp)
        )
        self._messages = constants.messages
        self._sent_s: dict[int, float] = {}

    def sent_s(self, num_tokens: int) -> float:
        """From one stage to the next, while both may work on other steps."""
        found = self._sent_s.get(num_tokens)
        if found is None:
            setup = self._setup
            op = stage_message(setup.spec, num_tokens, setup.layout, setup.precision)
            found = op_cost(op, setup.device, setup.constants).expected_s
            self._sent_s[num_tokens] = found
        return found

    def returned_s(self, num_rows: int) -> float:
        """Of the token ids, from the last stage to the first, which waits for them."""
        way, messages = wire(self._setup.device, self._setup.layout.devices), self._messages
        alpha_s = way.latency_s if messages.alpha_s is None else messages.alpha_s
        return alpha_s + num_rows * TOKEN_BYTES / (messages.efficiency * way.bytes_per_s)

    def seconds(self, shape: StepShape) -> float:
        """From one step to the next with the same requests, while each other stage has as many
        requests: all stages and messages, but no less than the slowest stage for each."""
        times = [stage.seconds(shape) for stage in self.stages]
        num_tokens = sum(new for new, _ in shape)
        sent_s = (len(times) - 1) * self.sent_s(num_tokens) + self.returned_s(len(shape))
        return max(sum(times) + sent_s, len(times) * max(times))


def step_prices(setup: Setup, pricer: Pricer | None = None) -> StepPricer:
    """From one step to the next of the same requests, in steady state."""
    return StagePrices(setup) if setup.layout.pp > 1 else pricer or Pricer(setup)


USUAL_STEP: StepShape = ((1, 1024),) * 32  # stages are made equal in it


# The least that a stage must have room for beside its weights.
ONE_REQUEST = Limits(max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1)


def with_cuts(setup: Setup, limits: Limits = ONE_REQUEST) -> Setup:
    """With stages of which the slowest of those that fit is as fast as may be; where none fit,
    which their memory contract says, as fast as if they did. ConfigError where there are none."""
    spec, layout = setup.spec, setup.layout
    if layout.pp == 1 or layout.starts:
        return setup
    # As many stages as layers may have no way to talk; of their times work alone counts.
    device = replace(setup.device, network_bytes_per_s=setup.device.network_bytes_per_s or 1.0)
    layers_alone = replace(setup, device=device, layout=replace(layout, pp=spec.num_layers))
    each = Pipeline(layers_alone)
    times = [each.stage_seconds(USUAL_STEP, index)[0] for index in range(spec.num_layers)]

    def seconds(layers: range) -> float:
        return sum(times[layers.start : layers.stop])

    def fits(layers: range) -> bool:
        alone = replace(setup, spec=stage_spec(spec, layers), layout=replace(layout, pp=1))
        return plan_or_none(alone, limits) is not None

    try:
        found = cut(spec, layout.pp, seconds, fits)
    except ConfigError:
        found = cut(spec, layout.pp, seconds)
    return replace(setup, layout=replace(layout, starts=tuple(one.start for one in found[1:])))


def micro_batches(shape: StepShape, count: int) -> list[StepShape]:
    """The requests of a step in so many parts of nearly the same number."""
    if not 1 <= count <= len(shape):
        raise ConfigError(
            f"{len(shape)} requests make 1 to {len(shape)} micro-batches, not {count}"
        )
    return [
        tuple(shape[i * len(shape) // count : (i + 1) * len(shape) // count]) for i in range(count)
    ]
