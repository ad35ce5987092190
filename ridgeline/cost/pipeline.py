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

from ridgeline.architectures.stages import cut
from ridgeline.cost.execution_mode import ExecutionModes
from ridgeline.cost.ops import COLLECTIVES, Op, layer_ops, stage_ops
from ridgeline.cost.roofline import OpCost, op_cost
from ridgeline.cost.setup import Setup
from ridgeline.cost.step_features import attention_kinds, step_features
from ridgeline.errors import ConfigError
from ridgeline.step import StepShape


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


USUAL_STEP: StepShape = ((1, 1024),) * 32  # stages are made equal in it


def cut_by_price(setup: Setup, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, so that the slowest is as fast as may be. ConfigError where there
    are no such stages."""
    spec = setup.spec
    each = Pipeline(replace(setup, layout=replace(setup.layout, pp=spec.num_layers)))
    times = [each.stage_seconds(USUAL_STEP, index)[0] for index in range(spec.num_layers)]
    return cut(spec, num_stages, lambda layers: sum(times[layers.start : layers.stop]))


def micro_batches(shape: StepShape, count: int) -> list[StepShape]:
    """The requests of a step in so many parts of nearly the same number."""
    if not 1 <= count <= len(shape):
        raise ConfigError(
            f"{len(shape)} requests make 1 to {len(shape)} micro-batches, not {count}"
        )
    return [
        tuple(shape[i * len(shape) // count : (i + 1) * len(shape) // count]) for i in range(count)
    ]
