"""Which kernels does a step run, and what should they cost? A torch profile beside the prices.

Each kernel (on a CPU: each operator of PyTorch) is put into the class of the operator that launched
it, and so is each operator of the cost model; a class is the finest thing that both know.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from ridgeline.build import Built
from ridgeline.cost.roofline import StepCost, step_cost
from ridgeline.cost.setup import Setup
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.kernels.cpu.recorder import watched
from ridgeline.request import Request, RequestOutput, SamplingParams
from ridgeline.step import StepRecord, StepShape

Phase = Literal["decode", "prefill"]
CLASSES = ("matmul", "attention", "elementwise", "embedding", "sampling", "other")
WARM_UP = 3  # steps before those that are profiled
PROMPT_IDS = 1000  # different token ids in prompts

MATMULS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "einsum", "mv", "dot")
SAMPLING = (
    "max",
    "argmax",
    "topk",
    "sort",
    "multinomial",
    "exponential_",
    "log_softmax",
    "softmax",
    "ridgeline::draw",
)
EMBEDDINGS = ("embedding", "ridgeline::gather")
NOT_COMPUTED = ("ProfilerStep", "cuda", "cu", "Memcpy", "Memset", "Activity Buffer")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Means of one step: how often it ran, and its seconds in all. `launched_by`: an operator of
    PyTorch; on a CPU the kernel is that operator."""

    name: str
    launched_by: str
    kind: str
    calls: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ClassTime:
    """One class of a step: measured beside the prices. Zero prices: the cost model has no such
    operator. `bytes` and `flops` are what it must move and compute."""

    kind: str
    calls: float
    seconds: float
    expected_s: float
    ideal_s: float
    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over `num_steps` steps of about this shape. `wall_s` is a step from end to end with the
    profiler on, which slows a CPU's small operators down; `plain_s` without it."""

    phase: Phase
    shape: StepShape
    num_steps: int
    wall_s: float
    plain_s: float
    cost: StepCost
    classes: tuple[ClassTime, ...]
    kernels: tuple[Kernel, ...]

    @property
    def kernels_s(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)


@dataclass(slots=True)
class _Steps:
    """An observer that keeps the steps."""

    records: list[StepRecord]

    def on_step(self, record: StepRecord) -> None:
        if record.error is not None:
            raise EngineFault(record.error)
        self.records.append(record)

    def on_output(self, output: RequestOutput, now: float) -> None:
        """Only steps count here."""


def profile_steps(
    built: Built,
    setup: Setup,
    *,
    phase: Phase,
    batch: int,
    num_input: int,
    num_steps: int,
    trace: Path | None = None,
) -> Profile:
    """Profile steps of an idle engine: `num_steps` decode steps of `batch` requests with prompts of
    `num_input` tokens, or as many steps that read one such prompt each.

    `trace` gets a Chrome trace of the same steps. Raises ConfigError for what cannot be run.
    """
    _check(built, phase, batch, num_input, num_steps)
    seen = _Steps([])
    built.engine.observers.append(seen)
    try:
        run = (
            _Decodes(built, batch, num_input) if phase == "decode" else _Prefills(built, num_input)
        )
        plain_s, _ = _timed(built, seen, run, num_steps)
        with _profiler(built) as profiler:
            wall_s, shape = _timed(built, seen, run, num_steps)
        run.end()
    finally:
        built.engine.observers.remove(seen)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    kernels = _kernels(profiler.events(), num_steps)
    cost = step_cost(setup, shape)
    return Profile(phase, shape, num_steps, wall_s, plain_s, cost, _classes(kernels, cost), kernels)


def _check(built: Built, phase: Phase, batch: int, num_input: int, num_steps: int) -> None:
    resolved = built.resolved
    longest = num_input + (2 * num_steps + WARM_UP + 2 if phase == "decode" else 1)
    if min(batch, num_input, num_steps) < 1:
        raise ConfigError("batch, input and steps must be at least 1")
    if longest > resolved.max_model_len:
        raise ConfigError(
            f"{num_input} prompt tokens and {num_steps} steps (twice, with and without the "
            f"profiler) make {longest} tokens; the context is {resolved.max_model_len}"
        )
    if batch > resolved.max_num_seqs:
        raise ConfigError(
            f"batch {batch} needs --max-num-seqs {batch}; it is {resolved.max_num_seqs}"
        )
    if phase == "prefill" and num_input > resolved.max_num_batched_tokens:
        raise ConfigError(
            f"a step reads at most {resolved.max_num_batched_tokens} tokens "
            "(--max-num-batched-tokens); lower --input"
        )


# ------------------------------------------------------------------------ the steps


class _Decodes:
    """Calling it runs a decode step of requests that have read their prompts."""

    def __init__(self, built: Built, batch: int, num_input: int) -> None:
        self.engine = built.engine
        rng = Random(0)
        room = built.resolved.max_model_len - num_input
        requests = [_request(f"profile-{i}", rng, built, num_input, room) for i in range(batch)]
        for request in requests:
            self.engine.add(request)
        while any(r.num_computed_tokens < num_input for r in requests):
            self()
        for _ in range(WARM_UP):
            self()

    def __call__(self) -> None:
        """One step from plan to tokens, so that a profile holds whole steps."""
        self.engine.launch()
        self.engine.collect()

    def end(self) -> None:
        _end(self.engine)


class _Prefills:
    """Calling it reads one new prompt."""

    def __init__(self, built: Built, num_input: int) -> None:
        self.built, self.num_input, self.rng, self.count = built, num_input, Random(0), 0
        for _ in range(WARM_UP):
            self()

    def __call__(self) -> None:
        self.count += 1
        name = f"profile-{self.count}"
        self.built.engine.add(_request(name, self.rng, self.built, self.num_input, 1))
        self.built.engine.launch()
        self.built.engine.collect()

    def end(self) -> None:
        _end(self.built.engine)


def _request(name: str, rng: Random, built: Built, num_input: int, num_output: int) -> Request:
    top = min(built.spec.vocab_size, PROMPT_IDS)
    ids = tuple(rng.randrange(top) for _ in range(num_input))
    sampling = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, seed=0)
    return Request(name, ids, sampling, 0.0)


def _end(engine: Any) -> None:
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    while engine.num_in_flight:
        engine.collect()


def _timed(
    built: Built, seen: _Steps, run: Callable[[], None], num_steps: int
) -> tuple[float, StepShape]:
    """Mean seconds of a step, and the shape of the middle one."""
    seen.records.clear()
    for _ in range(num_steps):
        run()
    built.device.synchronize()
    seconds = [record.collected_at - record.launched_at for record in seen.records]
    middle = seen.records[len(seen.records) // 2].plan.shape
    return sum(seconds) / len(seconds), middle


# ------------------------------------------------------------------------ the profile


@contextmanager
def _profiler(built: Built) -> Iterator[Any]:
    """PyTorch's profiler, without the lines that its native part writes to standard error."""
    wanted = [torch.profiler.ProfilerActivity.CPU]
    if built.device.torch_device.type == "cuda":
        wanted.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=wanted, acc_events=True)
    with _silent_stderr():
        profiler.start()
    try:
        with watched(_named):
            yield profiler
    finally:
        with _silent_stderr():
            profiler.stop()


def _named(kernel: str) -> AbstractContextManager[object]:
    """Our native kernels stand among PyTorch's operators."""
    return torch.profiler.record_function("ridgeline::" + kernel.removeprefix("rl_"))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _kernels(events: Iterable[Any], num_steps: int) -> tuple[Kernel, ...]:
    """Kernels of a CUDA device if there are any, else the operators of the CPU; longest first."""
    events = [event for event in events if not event.name.startswith(NOT_COMPUTED[0])]
    rows = _device_rows(events) or _host_rows(events)
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, launched_by, kind, seconds in rows:
        total = sums[name, launched_by, kind]
        total[0] += 1
        total[1] += seconds
    found = [
        Kernel(*key, calls / num_steps, seconds / num_steps)
        for key, (calls, seconds) in sums.items()
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))


Row = tuple[str, str, str, float]  # kernel, launched by, class, seconds


def _device_rows(events: Sequence[Any]) -> list[Row]:
    rows = [
        (kernel.name, _plain(event.name), kind_of(event), kernel.duration / 1e6)
        for event in events
        if event.device_type.name == "CPU"
        for kernel in event.kernels
    ]
    if not rows:
        return []
    linked = {name for name, *_ in rows}
    return rows + [
        (event.name, "", _kind_of_kernel(event.name), event.device_time_total / 1e6)
        for event in events
        if event.device_type.name != "CPU"
        and event.name not in linked
        and not event.name.startswith(NOT_COMPUTED)
    ]


def _host_rows(events: Sequence[Any]) -> list[Row]:
    return [
        (_plain(event.name), _plain(event.name), kind_of(event), event.self_cpu_time_total / 1e6)
        for event in events
        if event.name.startswith(("aten::", "mkldnn", "ridgeline"))
    ]


def _plain(name: str) -> str:
    return name.removeprefix("aten::")


def kind_of(event: Any) -> str:
    """The class of an operator: that of the outermost one that has a class of its own."""
    found = "elementwise"
    while event is not None:
        name = _plain(event.name)
        if "attention" in name or "flash" in name:
            return "attention"
        if found == "elementwise":
            found = _own_kind(name)
        event = event.cpu_parent
    return found


def _own_kind(name: str) -> str:
    if name in MATMULS or "linear" in name:
        return "matmul"
    if name in EMBEDDINGS:
        return "embedding"
    return "sampling" if name in SAMPLING else "elementwise"


def _kind_of_kernel(name: str) -> str:
    """Of a kernel that no operator of PyTorch launched, by its own name."""
    lowered = name.lower()
    if "attention" in lowered or "flash" in lowered or "fmha" in lowered:
        return "attention"
    return "matmul" if "gemm" in lowered or "matmul" in lowered or "linear" in lowered else "other"


def _classes(kernels: Sequence[Kernel], cost: StepCost) -> tuple[ClassTime, ...]:
    rows = []
    for kind in CLASSES:
        mine = [kernel for kernel in kernels if kernel.kind == kind]
        prices = [price for price in cost.ops if _class_of(price.op.kind) == kind]
        if mine or prices:
            rows.append(
                ClassTime(
                    kind,
                    sum(kernel.calls for kernel in mine),
                    sum(kernel.seconds for kernel in mine),
                    sum(price.expected_s for price in prices),
                    sum(price.ideal_s for price in prices),
                    sum(price.op.count * price.op.bytes for price in prices),
                    sum(price.op.count * price.op.flops for price in prices),
                )
            )
    return tuple(rows)


def _class_of(kind: str) -> str:
    if kind.endswith("_attention"):
        return "attention"
    return kind if kind in CLASSES else "other"
