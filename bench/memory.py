"""Is the memory contract kept? Predicted against allocated, at the worst steps it allows.

    python bench/memory.py --out bench/cpu/results/memory.json
    python bench/memory.py --device cuda --out memory.json DIR_8B DIR_0.6B

Each DIR needs only a config.json: weights are random. An engine is built for each configuration,
then steps are sent to its executor that use every limit at once: the full budget of tokens, all
rows sampling with every filter, penalty and log-probability on, contexts as long as they may be.
Their blocks repeat where the cache holds fewer, as those of requests with a shared prefix do.

What is allocated is what torch's allocator had given out at the worst moment: on a GPU its own
peak counter; on a CPU the profiler's record of every allocation and release by any operator, from
before the engine was built, which is exact to the byte and does not depend on where Python holds a
tensor; a pool that comes from the system itself is added whole. (The resident size of the process
is shown too; it counts libraries and the interpreter.)
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.benchmark.environment import environment
from ridgeline.build import Built, build
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.devices import open_device
from ridgeline.errors import RidgelineError
from ridgeline.kernels import noise
from ridgeline.request import SamplingParams
from ridgeline.step import NewRequest, ScheduledRequest, StepPlan

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    min_p=1e-4,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={5: 1.0},
    min_tokens=1,
    stop_token_ids=(3,),
    logprobs=20,
    prompt_logprobs=20,
    max_tokens=None,
)
TOKEN = 7  # nearly everywhere: nearly all tokens then want the same experts, the worst there is


def llama(hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    """A config.json of the Llama family."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    } | more


SHAPES: dict[str, dict[str, Any]] = {
    "small-768": llama(768, 12, 12, 4, intermediate_size=2048, vocab_size=32000),
    "qk-norm-512": llama(512, 4, 8, 2, intermediate_size=1536, vocab_size=8192)
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "window-256": llama(256, 4, 8, 4, intermediate_size=768, vocab_size=4096, sliding_window=300)
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "tiny-64": llama(64, 2, 4, 2, intermediate_size=176, vocab_size=2048),
}


@dataclass(frozen=True)
class Case:
    """`model` is a folder, a bundled model or a name in SHAPES; `options` are EngineConfig's."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """Bytes."""

    what: str
    predicted: int
    allocated: int

    @property
    def error(self) -> float:
        return self.predicted / self.allocated - 1


@dataclass(frozen=True)
class Result:
    """`steps` are the peaks above weights and cache of each step; `reserved` is what the allocator
    or the process held from the system, in bytes."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    lines: tuple[Line, ...]
    items: tuple[tuple[str, int], ...]
    steps: dict[str, int]
    reserved: int
    seconds: float

    @property
    def total(self) -> Line:
        predicted = sum(line.predicted for line in self.lines)
        return Line("in all", predicted, sum(line.allocated for line in self.lines))


CPU_CASES = (
    Case("demo:chat", {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}),
    Case(
        "demo:chat",
        {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8, "block_size": 32},
    ),
    Case(
        "demo:chat",
        {
            "dtype": "float16",
            "max_model_len": 256,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 16 << 20,
        },
    ),
    Case(
        "small-768",
        {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
        },
    ),
    Case(
        "small-768",
        {
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1024,
            "block_size": 8,
        },
    ),
    Case(
        "small-768",
        {
            "dtype": "float16",
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "num_blocks": 300,
        },
    ),
    Case(
        "small-768",
        {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 512 << 20,
            "block_size": 64,
        },
    ),
    Case(
        "qk-norm-512",
        {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8},
    ),
    Case(
        "qk-norm-512",
        {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 24, "block_size": 4},
    ),
    Case(
        "window-256",
        {"dtype": "float16", "max_model_len": 2048, "max_num_seqs": 8, "num_blocks": 600},
    ),
    Case(
        "demo:moe",
        {
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
        },
    ),
)


def cuda_cases(folder: str) -> tuple[Case, ...]:
    """For a model of up to 8 billion parameters on a device of 80 GB or more."""
    return (
        Case(folder, {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 64}),
        Case(
            folder,
            {
                "dtype": "bfloat16",
                "max_model_len": 32768,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 2048,
                "kv_cache_memory_bytes": 8 << 30,
            },
        ),
        Case(
            folder,
            {
                "dtype": "float16",
                "max_model_len": 2048,
                "max_num_seqs": 256,
                "max_num_batched_tokens": 16384,
                "block_size": 32,
                "num_blocks": 4096,
            },
        ),
        Case(
            folder,
            {
                "dtype": "float32",
                "max_model_len": 4096,
                "max_num_seqs": 32,
                "max_num_batched_tokens": 4096,
                "kv_cache_memory_bytes": 6 << 30,
            },
        ),
        Case(
            folder,
            {
                "dtype": "bfloat16",
                "max_model_len": 1024,
                "max_num_seqs": 512,
                "max_num_batched_tokens": 1024,
                "block_size": 64,
                "memory_utilization": 0.5,
            },
        ),
    )


# ------------------------------------------------------------------------ one configuration


Run = Callable[[str, Callable[[], None]], None]  # name a piece of work, and do it
Drive = Callable[[Built, Run], None]


def measure(case: Case, device: str = "cpu", drive: Drive | None = None) -> Result:
    """Build, run the worst steps (or what `drive` does instead), and read the allocator. Raises
    DoesNotFit before anything is allocated."""
    started = time.monotonic()
    gc.collect()
    noise._token_steps.cache_clear()  # an earlier engine's table
    with _folder(case.model) as model:
        config = EngineConfig(model=model, load_format="random", device=device, **case.options)
        kind = open_device(device).torch_device.type
        measure = _on_cuda if kind == "cuda" else _on_cpu
        built, steps, reserved = measure(config, drive or run_steps)
    rows = {row.what: row for row in built.memory}
    kept = [rows.pop("weights"), rows.pop("KV cache")]
    rows.pop("reserve")
    measured = [row.measured or 0 for row in kept]
    working = max(steps.values()) - sum(measured)
    resolved = built.resolved
    return Result(
        Path(case.model).name,
        resolved.dtype,
        resolved.max_model_len,
        resolved.max_num_seqs,
        resolved.max_num_batched_tokens,
        resolved.block_size,
        resolved.num_blocks,
        (
            *(Line(row.what, row.predicted, row.measured or 0) for row in kept),
            Line("working space", sum(row.predicted for row in rows.values()), working),
        ),
        tuple((row.what, row.predicted) for row in rows.values()),
        {name: peak - sum(measured) for name, peak in steps.items()},
        reserved,
        time.monotonic() - started,
    )


@contextmanager
def _folder(model: str) -> Iterator[str]:
    if model not in SHAPES:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[model]), encoding="utf-8")
        yield folder


Measured = tuple[Built, dict[str, int], int]


def _on_cuda(config: EngineConfig, drive: Drive) -> Measured:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    built = build(config)
    peaks: dict[str, int] = {}

    def run(name: str, work: Callable[[], None]) -> None:
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - base

    drive(built, run)
    return built, peaks, torch.cuda.max_memory_reserved()


def _on_cpu(config: EngineConfig, drive: Drive) -> Measured:
    before = resident_bytes()
    spans: list[str] = []

    def run(name: str, work: Callable[[], None]) -> None:
        spans.append(name)
        with record_function(name):
            work()

    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, profile_memory=True, acc_events=True) as record:
        built = build(config)
        drive(built, run)
    mapped = mapped_bytes(built)
    peaks = {name: peak + mapped for name, peak in _peaks(record, spans).items()}
    return built, peaks, resident_bytes() - before


def _peaks(record: profile, spans: Iterable[str]) -> dict[str, int]:
    """Most bytes that were allocated and not yet released, while each of these spans ran."""
    inner = record.profiler
    results: Any = inner.kineto_results if inner is not None else None
    events = results.events()
    times = {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events}
    changes = sorted(
        (e.start_ns(), place, e.nbytes())
        for place, e in enumerate(events)
        if e.name() == "[memory]"
    )
    held = 0
    peaks = dict.fromkeys(spans, 0)
    for at, _, num_bytes in changes:
        held += num_bytes
        for name in peaks:
            if times[name][0] <= at <= times[name][1]:
                peaks[name] = max(peaks[name], held)
    return peaks


def mapped_bytes(built: Built) -> int:
    """What the cache took from the system itself, which no allocator of torch's has seen."""
    executor: Any = built.engine.executor
    storages = [t.untyped_storage() for store in executor._kv.stores for t in store]
    return sum(storage.nbytes() for storage in storages if not storage.resizable())


def resident_bytes() -> int:
    """What the process holds of the machine's memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


# ------------------------------------------------------------------------ the worst steps


def run_steps(built: Built, run: Run) -> None:
    """Send each of the worst steps, in turn, to the executor of this engine."""
    open_rows: tuple[str, ...] = ()
    for index, (name, lengths) in enumerate(worst_steps(built.resolved).items(), start=1):
        plan = worst_plan(built, index, lengths, open_rows)
        open_rows = tuple(entry.request_id for entry in plan.scheduled)
        run(name, partial(_submit, built, plan))


def _submit(built: Built, plan: StepPlan) -> None:
    result = built.engine.executor.submit(plan).result()
    if result.faults or len(result.token_ids) != len(plan.scheduled):
        raise RuntimeError(f"a step of {len(plan.scheduled)} requests failed: {result.faults}")


def worst_steps(resolved: ResolvedConfig) -> dict[str, list[int]]:
    """New tokens of each request, for steps that are extreme in different ways."""
    budget, longest = resolved.max_num_batched_tokens, resolved.max_model_len - 1
    rows = min(resolved.max_num_seqs, budget)
    share = min(budget // rows, longest)
    mixed = [1] * rows
    left = budget - rows
    for row in range(rows):
        mixed[row] += (more := min(left, longest - 1))
        left -= more
    prompts = [min(longest, budget - start) for start in range(0, budget, longest)]
    return {
        "decodes and chunks": mixed,
        "a chunk of each": [share] * rows,
        "a few of each": [min(8, share)] * rows,
        "prompts": prompts[:rows],
    }


def worst_plan(
    built: Built, index: int, lengths: Iterable[int], finished: tuple[str, ...]
) -> StepPlan:
    """Requests that end this step one token short of the longest context, every other one token
    before (so that not all are equally long)."""
    num_groups = len(kv_groups(built.spec))
    new: list[NewRequest] = []
    scheduled: list[ScheduledRequest] = []
    for row, length in enumerate(lengths):
        end = max(length, built.resolved.max_model_len - 1 - row % 2)
        name = f"step {index} row {row}"
        tables = (_table(built, end, row),) * num_groups
        ids = tuple(at % 1000 if at % 64 == 63 else TOKEN for at in range(end))
        new.append(NewRequest(name, ids, end, EVERYTHING, tables))
        entry = ScheduledRequest(name, end - length, length, ((),) * num_groups, samples=True)
        scheduled.append(entry)
    return StepPlan(index, tuple(scheduled), tuple(new), finished=finished)


def _table(built: Built, num_tokens: int, row: int) -> tuple[int, ...]:
    resolved = built.resolved
    needed = -(-num_tokens // resolved.block_size)
    return tuple(1 + (row * needed + i) % resolved.num_blocks for i in range(needed))


# ------------------------------------------------------------------------ the command


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="with cuda: folders with config.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="where to put the table as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--only", help="cases whose model's name has this in it")
    args = parser.parse_args()
    cases = [case for model in args.models for case in cuda_cases(model)] or list(CPU_CASES)
    results: list[Result] = []
    failed = 0
    for case in cases:
        if args.only and args.only not in case.model:
            continue
        try:
            results.append(measure(case, args.device))
        except (RidgelineError, RuntimeError) as error:
            print(f"{case}: {error}", file=sys.stderr)
            failed += 1
            continue
        if not args.json:
            show(results[-1])
    where = open_device(args.device).torch_device
    # Folders are those of whoever measured; their names say what was.
    words = [Path(word).name for word in sys.argv[1:]]
    about = replace(environment(where), command=" ".join(["python bench/memory.py", *words]))
    record = {"environment": asdict(about), "rows": [as_json(one) for one in results]}
    text = json.dumps(record, indent=1) + "\n"
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    if args.json:
        print(text, end="")
    else:
        worst = max((abs(one.total.error) for one in results), default=0.0)
        print(f"{len(results)} configurations, largest error in all {worst:.2%}; {failed} failed")
    return 2 if failed else 0


def as_json(result: Result) -> dict[str, Any]:
    return asdict(result) | {
        "errors": {line.what: line.error for line in (*result.lines, result.total)}
    }


def show(result: Result) -> None:
    print(
        f"{result.model} {result.dtype}, {result.max_model_len} tokens, {result.max_num_seqs} "
        f"requests, steps of {result.max_num_batched_tokens}, {result.num_blocks} blocks of "
        f"{result.block_size} ({result.seconds:.1f} s, process grew by "
        f"{result.reserved / 1e6:.0f} MB)"
    )
    for line in (*result.lines, result.total):
        print(
            f"  {line.what:14} predicted {line.predicted / 1e6:10.2f} MB  allocated "
            f"{line.allocated / 1e6:10.2f} MB  {line.error:+8.2%}"
        )
    sizes = (f"{name} {size / 1e6:.2f}" for name, size in (*result.items, *result.steps.items()))
    print("  " + ", ".join(sizes), flush=True)


if __name__ == "__main__":
    sys.exit(main())
