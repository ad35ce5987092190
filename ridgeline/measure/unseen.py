"""Do the predictions hold? Whole steps of a real model at sizes that no calibration has seen."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ridgeline.build import Built, build
from ridgeline.config import EngineConfig
from ridgeline.cost.precision import Precision
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.costing import engine_host
from ridgeline.measure.points import Progress, described
from ridgeline.measure.steps import StepBench, StepTimes, step_bench
from ridgeline.measure.stopwatch import typical
from ridgeline.records import Record
from ridgeline.step import StepShape

ROUNDS = 2
BUDGET_S = 0.4  # of one point, per round
MOST_STEPS = 20


@dataclass(frozen=True, slots=True)
class Unseen:
    """Steps to look at: (requests, context) that decode, prompts that are read."""

    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[int, ...]

    def fitting(self, max_tokens: int) -> Unseen:
        """Without what does not fit in a cache of `max_tokens`."""
        return Unseen(
            tuple((b, s) for b, s in self.decodes if b * (s + 128) <= max_tokens),
            tuple(n for n in self.prefills if n <= max_tokens),
        )


UNSEEN = {
    "cpu": Unseen(
        tuple((b, s) for b in (1, 2, 6, 12, 32) for s in (64, 200, 700, 2048)),
        (16, 50, 200, 800, 2048),
    ),
    "cuda": Unseen(
        tuple((b, s) for b in (1, 4, 16, 48, 96, 200) for s in (150, 600, 1800, 7000)),
        (16, 50, 200, 600, 1500, 4000, 7500),
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One step: what was predicted, what was measured, and how far off that is (signed)."""

    model: str
    dtype: str
    what: str
    step: str
    measured_s: float
    predicted_s: float
    origin: str

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def look(
    model: str,
    dtype: str,
    record: Record,
    unseen: Unseen,
    progress: Progress,
    *,
    device: str = "auto",
    threads: int | None = None,
) -> list[Row]:
    """Predict and measure the steps of `model` (a folder with config.json; random weights)."""
    config = EngineConfig(
        model=model,
        load_format="random",
        dtype=dtype,
        device=device,
        threads=threads,
        max_num_seqs=max(rows for rows, _ in unseen.decodes),
        max_num_batched_tokens=max(unseen.prefills),
    )
    rows = _look(build(config), record, unseen, progress)
    forget()
    return rows


def forget() -> None:
    """Give the memory of an engine that is no longer used back to the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _look(built: Built, record: Record, unseen: Unseen, progress: Progress) -> list[Row]:
    tokens = (built.resolved.num_blocks - 2) * built.resolved.block_size
    fitting = unseen.fitting(tokens)
    constants = record.calibration
    pricer = Pricer(
        Setup(
            built.spec,
            record.device,
            precision=Precision(built.resolved.dtype),
            calibration=replace(constants, host=engine_host(constants.host, built.resolved)),
        )
    )
    return _rows(built, pricer, fitting, progress)


def _rows(built: Built, pricer: Pricer, unseen: Unseen, progress: Progress) -> list[Row]:
    bench = step_bench(built)
    length = built.resolved.max_model_len - 128
    wanted: list[tuple[str, tuple[int, ...]]] = [
        *(("decode", one) for one in unseen.decodes if one[1] <= length),
        *(("prefill", (n,)) for n in unseen.prefills if n <= length),
    ]
    found: list[list[StepTimes]] = [[] for _ in wanted]
    for turn in range(ROUNDS):
        for number, (what, sizes) in enumerate(wanted):
            stage = f"unseen steps of {built.resolved.model_name}, {built.resolved.dtype}"
            progress(stage, turn * len(wanted) + number, ROUNDS * len(wanted))
            found[number].append(_measure(bench, what, sizes, found[number]))
    return [
        _row(built, pricer, what, times) for (what, _), times in zip(wanted, found, strict=True)
    ]


def _measure(
    bench: StepBench, what: str, sizes: tuple[int, ...], earlier: Sequence[StepTimes]
) -> StepTimes:
    steps = 4 if not earlier else int(BUDGET_S / typical(earlier[0].seconds))
    steps = max(1, min(MOST_STEPS, steps))
    if what == "prefill":
        return bench.prefill(sizes[0], steps)
    return bench.decode(sizes[0], sizes[1], steps)


def _row(built: Built, pricer: Pricer, what: str, times: Sequence[StepTimes]) -> Row:
    shape: StepShape = times[-1].shape
    measured = typical([seconds for each in times for seconds in each.seconds])
    return Row(
        built.resolved.model_name,
        built.resolved.dtype,
        what,
        described(shape),
        measured,
        pricer.seconds(shape),
        pricer.cost(shape).origin,
    )


def median_error(rows: Iterable[Row]) -> float:
    """Median of the sizes of the errors."""
    return statistics.median(abs(row.error) for row in rows)
