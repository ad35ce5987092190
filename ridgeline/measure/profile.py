"""Which kernels does a step run, and what should they cost? A torch profile beside the prices.

Each kernel (on a CPU: each operator of PyTorch) is put into the class of the operator that launched
it, and so is each operator of the cost model; a class is the finest thing that both know.

Where the engine drafts, each step is priced as it ran, with its own number of drafts: making
them, checking them, and the pass in which a draft model reads prompts, as the kernels are of all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from ridgeline.build import Built
from ridgeline.cost.constants import ORIGINS, Origin
from ridgeline.cost.roofline import OpCost, StepCost, step_cost
from ridgeline.cost.setup import Setup
from ridgeline.costing import asked_drafts
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.kernels.cpu.recorder import call_hook
from ridgeline.observe.evidence import engine_drafter
from ridgeline.request import Request, SamplingParams
from ridgeline.speculation.price import Drafter, DraftSteps
from ridgeline.step import Listener, StepPlan, StepRecord, StepShape

Phase = Literal["decode", "prefill"]
CLASSES = ("matmul", "attention", "elementwise", "embedding", "sampling", "other")
WARM_UP = 3  # steps before those that are profiled
# With drafts, until their number has settled: the first step of each number prepares what later
# ones find, and a draft model reads what it was not asked of before; neither has a price.
WARM_UP_DRAFTS = 16
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
class MeanCost:
    """What steps should cost, making their drafts included: means of one. `draft_s` is the part
    of `expected_s` that makes drafts; `bound` is what most of the time is bound by."""

    expected_s: float
    ideal_s: float
    draft_s: float
    bound: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Profile:
    """Means over the steps of `shapes`, of which `shape` is the middle one; `draft_tokens` are
    those that each of them verified, of all its requests. `wall_s` is a step from end to end with
    the profiler on, which slows a CPU's small operators down; `plain_s` without it, of other steps
    of the same requests, which should have cost `plain_expected_s`: they may have had more drafts,
    or fewer."""

    phase: Phase
    shapes: tuple[StepShape, ...]
    draft_tokens: tuple[int, ...]
    wall_s: float
    plain_s: float
    plain_expected_s: float
    cost: MeanCost
    classes: tuple[ClassTime, ...]
    kernels: tuple[Kernel, ...]

    @property
    def num_steps(self) -> int:
        return len(self.shapes)

    @property
    def shape(self) -> StepShape:
        return self.shapes[len(self.shapes) // 2]

    @property
    def num_tokens(self) -> float:
        """Of a step, drafts included."""
        return sum(new for shape in self.shapes for new, _ in shape) / self.num_steps

    @property
    def num_draft_tokens(self) -> float:
        """Of a step."""
        return sum(self.draft_tokens) / self.num_steps

    @property
    def kernels_s(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)


@dataclass(slots=True)
class _Steps(Listener):
    """An observer that keeps the steps."""

    records: list[StepRecord]

    def on_step(self, record: StepRecord) -> None:
        if record.error is not None:
            raise EngineFault(record.error)
        self.records.append(record)


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

    `trace` gets a Chrome trace of the same steps. Raises ConfigError for what cannot be run, and
    for a trace that cannot be written.
    """
    _check(built, phase, batch, num_input, num_steps)
    seen = _Steps([])
    built.engine.listeners.append(seen)
    try:
        run = (
            _Decodes(built, batch, num_input) if phase == "decode" else _Prefills(built, num_input)
        )
        plain_s, plain = _timed(built, seen, run, num_steps)
        with _profiler(built) as profiler:
            wall_s, plans = _timed(built, seen, run, num_steps)
    finally:
        built.engine.listeners.remove(seen)
        _end(built.engine)
    if trace is not None:
        _write_trace(profiler, trace)
    kernels = _kernels(profiler.events(), num_steps)
    asked = asked_drafts(built.resolved)
    drafter = engine_drafter(built.run_record.header, setup)
    prices = _Prices(setup, drafter, asked is not None and asked.line.has_cache)
    costs = [prices.of(plan) for plan in plans]
    plain_costs = [prices.of(plan) for plan in plain]
    ops = [op for cost in costs for part in cost.passes for op in part.ops]
    return Profile(
        phase,
        tuple(plan.shape for plan in plans),
        tuple(map(_num_draft_tokens, plans)),
        wall_s,
        plain_s,
        _mean(plain_costs).expected_s,
        _mean(costs),
        _classes(kernels, ops, num_steps),
        kernels,
    )


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
        draft_tokens = built.resolved.draft_method is not None
        for _ in range(WARM_UP_DRAFTS if draft_tokens else WARM_UP):
            self()

    def __call__(self) -> None:
        """One step from plan to tokens, so that a profile holds whole steps."""
        self.engine.launch()
        self.engine.collect()


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
) -> tuple[float, list[StepPlan]]:
    """Mean seconds of a step, and what the steps were."""
    seen.records.clear()
    for done in range(num_steps):
        run()
        # Right drafts make answers longer than a token a step, which no check can foresee.
        if len(seen.records) <= done or _rows(seen.records[done]) < _rows(seen.records[0]):
            raise ConfigError(
                f"right drafts filled the context of {built.resolved.max_model_len} tokens before "
                "all steps were profiled; lower --steps or --input, or give --speculate off"
            )
    built.device.synchronize()
    seconds = [record.collected_at - record.launched_at for record in seen.records]
    return sum(seconds) / len(seconds), [record.plan for record in seen.records]


def _rows(record: StepRecord) -> int:
    return len(record.plan.scheduled)


def _num_draft_tokens(plan: StepPlan) -> int:
    return sum(entry.num_draft for entry in plan.scheduled)


# ------------------------------------------------------------------------ the prices


@dataclass(frozen=True, slots=True)
class _PlanCost:
    """Of one step: all its passes, that of the model first, and seconds of those of the draft."""

    passes: tuple[StepCost, ...]
    draft_s: float


@dataclass(frozen=True, slots=True)
class _Prices:
    """`reads_prompts`: who drafts has a cache of its own, that prompts have to go into."""

    setup: Setup
    drafter: Drafter | None
    reads_prompts: bool

    def of(self, plan: StepPlan) -> _PlanCost:
        """As the engine prices its own steps, and operator by operator."""
        num_logits = sum(entry.num_draft + 1 for entry in plan.scheduled if entry.samples)
        passes, draft_s = [step_cost(self.setup, plan.shape, num_logits)], 0.0
        rows, drafter = plan.scheduled, self.drafter
        draft_tokens = [entry.num_draft for entry in rows if entry.num_draft]
        if draft_tokens and drafter is not None:
            batch, context = len(draft_tokens), sum(entry.start for entry in rows) // len(rows)
            draft_s += drafter.seconds(batch, context, max(draft_tokens))
            if isinstance(drafter, DraftSteps):
                shapes = drafter.passes(batch, context, max(draft_tokens))
                passes += [step_cost(drafter.pricer.setup, shape) for shape in shapes]
        prompts = tuple(
            (entry.num_tokens, entry.start)
            for entry in rows
            if entry.num_tokens - entry.num_draft > 1
        )
        if prompts and self.reads_prompts and isinstance(drafter, DraftSteps):
            pricer = drafter.pricer
            draft_s += pricer.pass_seconds_of(pricer.features(prompts), 0)
            passes.append(step_cost(pricer.setup, prompts, 0))
        return _PlanCost(tuple(passes), draft_s)


def _mean(costs: Sequence[_PlanCost]) -> MeanCost:
    passes = [part for cost in costs for part in cost.passes]
    by_bound: dict[str, float] = defaultdict(float)
    for part in passes:
        by_bound[part.bound] += part.expected_s
    draft_s = sum(cost.draft_s for cost in costs) / len(costs)
    return MeanCost(
        sum(cost.passes[0].expected_s for cost in costs) / len(costs) + draft_s,
        sum(part.ideal_s for part in passes) / len(costs),
        draft_s,
        max(by_bound, key=lambda bound: by_bound[bound]),
        max((part.origin for part in passes), key=ORIGINS.index),
    )


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
        with call_hook(_named):
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


def _write_trace(profiler: Any, path: Path) -> None:
    """PyTorch only logs that it could not write, so that it writes to a folder of ours first."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "trace.json.gz" if path.suffix == ".gz" else "trace.json")
        with _silent_stderr():
            profiler.export_chrome_trace(str(kept))
        if not kept.exists():
            raise ConfigError(
                f"--trace {path}: PyTorch could not write it to {folder} first; make room there"
            )
        try:
            with kept.open("rb") as source, path.open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise ConfigError(
                f"--trace {path}: cannot be written ({error.strerror}); name another file"
            ) from None


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


def _classes(
    kernels: Sequence[Kernel], ops: Sequence[OpCost], num_steps: int
) -> tuple[ClassTime, ...]:
    """`ops` are those of all steps together."""
    rows = []
    for kind in CLASSES:
        mine = [kernel for kernel in kernels if kernel.kind == kind]
        prices = [price for price in ops if _class_of(price.op.kind) == kind]
        if mine or prices:
            rows.append(
                ClassTime(
                    kind,
                    sum(kernel.calls for kernel in mine),
                    sum(kernel.seconds for kernel in mine),
                    sum(price.expected_s for price in prices) / num_steps,
                    sum(price.ideal_s for price in prices) / num_steps,
                    sum(price.op.count * price.op.bytes for price in prices) / num_steps,
                    sum(price.op.count * price.op.flops for price in prices) / num_steps,
                )
            )
    return tuple(rows)


def _class_of(kind: str) -> str:
    if kind.endswith("_attention"):
        return "attention"
    return kind if kind in CLASSES else "other"
