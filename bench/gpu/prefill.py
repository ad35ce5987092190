"""Check and time paged prefill attention against torch's kernels on dense keys.

    PYTHONPATH=. python3 bench/gpu/prefill.py --out DIR [--sweep] [--jobs 8] [--budget-s 150]

Every config is first compiled and checked on ragged pieces by a process of its own, so that a wrong
or broken one is named and costs nothing more; what is left is timed by graph replays over several
layers' K and V. TFLOP/s count the scores that causality leaves: 4 * D * H for each pair of a query
and a key it sees. The table's last lines say which config was best where.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kernels.paged_prefill import (
    MOST_PROGRAMS,
    Config,
    PrefillBatch,
    paged_prefill,
    paged_prefill_reference,
    work_items,
)

MODELS = {"8B": (32, 8, 128), "0.6B": (16, 8, 128)}
DEVICE = "cuda"
BLOCK_SIZE = 16
LAYERS = 4  # that one replay goes over
CHECK_LIMIT_S = 90  # of the process that checks one config
TOLERANCE = 1e-2  # norm of the error over the norm of the result
ALIGNMENT = 16  # columns of a block table, so that all cases share compiled kernels


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    new: tuple[int, ...]
    lengths: tuple[int, ...]

    def flops(self, num_heads: int, head_dim: int) -> float:
        pairs = sum(
            n * (length - n) + n * (n + 1) // 2
            for n, length in zip(self.new, self.lengths, strict=True)
        )
        return 4.0 * num_heads * head_dim * pairs


CASES = (
    Case("512", (512,), (512,)),
    Case("2048", (2048,), (2048,)),
    Case("8192", (8192,), (8192,)),
    Case("512 behind 7680", (512,), (8192,)),
    Case("64 x 64 behind 2048", (64,) * 64, (2112,) * 64),
    Case("128 x 16", (16,) * 128, (16,) * 128),
)
RAGGED = Case("ragged", (1, 300, 17, 64, 2, 129), (1, 300, 801, 64, 1500, 1000))
FEW = Case("few", (17, 2), (1801, 1500))  # so few tiles that their keys are dealt out


def small_sweep() -> Iterator[Config]:
    yield Config(128, 128, 8, 3)
    yield Config(128, 64, 8, 3)
    yield Config(64, 64, 4, 3)


def full_sweep() -> Iterator[Config]:
    yield from small_sweep()
    yield Config(128, 128, 8, 2)
    yield Config(128, 64, 8, 4)
    yield Config(64, 64, 4, 2)
    yield Config(64, 128, 4, 2)
    yield Config(64, 32, 4, 3)


def label(config: Config) -> str:
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}"


class Inputs:
    """Tables, a query and LAYERS caches; whatever no request owns is NaN."""

    def __init__(
        self,
        case: Case,
        heads: tuple[int, int, int],
        layers: int = LAYERS,
        window: int | None = None,
    ) -> None:
        self.case, self.heads, self.window = case, heads, window
        num_heads, num_kv_heads, head_dim = heads
        device = torch.device(DEVICE)
        widths = [-(-length // BLOCK_SIZE) for length in case.lengths]
        columns = -(-max(widths) // ALIGNMENT) * ALIGNMENT
        shuffled = (torch.randperm(sum(widths)) + 1).int()
        blocks = list(torch.tensor_split(shuffled, list(itertools.accumulate(widths))[:-1]))
        tables = torch.zeros(len(widths), columns, dtype=torch.int32)
        for row, mine in enumerate(blocks):
            tables[row, : len(mine)] = mine
        self.tables = tables.to(device)
        shape = (sum(widths) + 1, BLOCK_SIZE, 2, num_kv_heads, head_dim)
        self.caches = [
            torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(layers)
        ]
        for cache in self.caches:
            cache[0] = torch.nan
            for mine, length in zip(blocks, case.lengths, strict=True):
                if length % BLOCK_SIZE:
                    cache[int(mine[-1]), length % BLOCK_SIZE :] = torch.nan
        rows = sum(case.new) + 1
        qkv_heads = num_heads + 2 * num_kv_heads
        fused = torch.randn(rows, qkv_heads, head_dim, device=device, dtype=torch.bfloat16)
        self.q = fused[:, :num_heads]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.heads[2])

    def batch(self, config: Config | None, num_programs: int) -> PrefillBatch:
        work = work_items(
            self.case.new,
            self.case.lengths,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            window=self.window,
            config=config,
            num_programs=num_programs,
        )
        workspace = None
        if config is not None and (work[:, 9] > 1).any():
            tiles = len(work) * self.heads[1]
            numbers = tiles * config.block_m * (self.heads[2] + 2)
            workspace = make_workspace(self.q.device, numbers, tiles)
        on_device = torch.from_numpy(work).to(self.q.device)
        return PrefillBatch(self.tables, on_device, self.window, config, workspace)

    def blank(self) -> torch.Tensor:
        return torch.full_like(self.q, torch.nan, memory_format=torch.contiguous_format)

    def exact(self) -> torch.Tensor:
        """In float32, of the first layer."""
        out = self.blank().float()
        kv = PagedKV(*self.caches[0].unbind(2))
        paged_prefill_reference(self.q, kv, self.batch(None, 0), self.scale, out)
        return out

    def dense(self) -> list[list[torch.Tensor]]:
        """Per layer q, K, V as [requests, heads, tokens, D]; for equal pieces only."""
        num_heads, _, head_dim = self.heads
        num, new, length = len(self.case.new), self.case.new[0], self.case.lengths[0]
        q = self.q[:-1].reshape(num, new, num_heads, head_dim).transpose(1, 2)
        position = torch.arange(length, device=q.device)
        blocks = self.tables[:, position // BLOCK_SIZE].long()
        layers = []
        for cache in self.caches:
            k, v = cache[blocks, position % BLOCK_SIZE].unbind(2)
            layers.append([q.contiguous()] + [x.transpose(1, 2).contiguous() for x in (k, v)])
        return layers


def error_of(got: torch.Tensor, exact: torch.Tensor) -> float:
    """NaN in the result, or a written last row, makes it infinite."""
    if not bool(got[-1].isnan().all()):
        return float("inf")
    difference = (got[:-1].float() - exact[:-1]).norm() / exact[:-1].norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def programs_of() -> int:
    """How many run at a time, where a multiprocessor has room for one."""
    return min(torch.cuda.get_device_properties(0).multi_processor_count, MOST_PROGRAMS)


# ------------------------------------------------- one config in a process of its own


def check(config: Config) -> None:
    """Compile and check all that the timing will use, and windows; prints the greatest error."""
    torch.manual_seed(1)
    worst = 0.0
    every = itertools.product(MODELS.values(), (RAGGED, FEW), (None, 1200))
    for heads, case, window in every:
        inputs = Inputs(case, heads, layers=1, window=window)
        exact = inputs.exact()
        for num_programs in (0, MOST_PROGRAMS):
            out = inputs.blank()
            run_layer(inputs, 0, inputs.batch(config, num_programs), out)
            torch.cuda.synchronize()
            error = error_of(out, exact)
            if not error < TOLERANCE:
                how = f"heads={heads} window={window} programs={num_programs}"
                print(f"WRONG {case.name} {how}: {error}")
                sys.exit(1)
            worst = max(worst, error)
    print(f"error {worst:.1e}")


def check_apart(config: Config) -> tuple[bool, str]:
    command = [sys.executable, __file__, "--check", json.dumps(asdict(config))]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_LIMIT_S)
    except subprocess.TimeoutExpired:
        return False, f"did not end in {CHECK_LIMIT_S} s"
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    told = next((line for line in lines if "WRONG" in line or "Error" in line), lines[-1])
    return done.returncode == 0, f"{told[:200]} ({time.monotonic() - started:.0f} s)"


# ---------------------------------------------------------------------- timing


def run_layer(inputs: Inputs, layer: int, batch: PrefillBatch, out: torch.Tensor) -> None:
    kv = PagedKV(*inputs.caches[layer].unbind(2))
    paged_prefill(inputs.q, kv, batch, inputs.scale, out_THD=out)


def seconds(once: Callable[[], object], layers: int) -> float:
    """Of one layer: the median of several replays of all of them."""
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    times = []
    for number in range(9):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if number > 1:
            times.append(float(begin.elapsed_time(end)) / 1e3 / layers)
    return sorted(times)[len(times) // 2]


def time_ours(inputs: Inputs, config: Config, exact: torch.Tensor) -> tuple[float, float]:
    batch, out = inputs.batch(config, programs_of()), inputs.blank()
    run_layer(inputs, 0, batch, out)
    error = error_of(out, exact)

    def once() -> None:
        for layer in range(len(inputs.caches)):
            run_layer(inputs, layer, batch, out)

    return seconds(once, len(inputs.caches)), error


def theirs(inputs: Inputs) -> Iterator[tuple[str, Callable[[], object]]]:
    """Torch's kernels on dense keys and values; whether they run is seen when they are called."""
    layers, scale = inputs.dense(), inputs.scale
    new, length = inputs.case.new[0], inputs.case.lengths[0]
    share = inputs.heads[0] // inputs.heads[1]
    wide = [[q, *(x.repeat_interleave(share, 1) for x in (k, v))] for q, k, v in layers]
    mask = None if new == length else causal_lower_right(new, length)

    def attend(what: list[list[torch.Tensor]], backend: SDPBackend, gqa: bool) -> None:
        with sdpa_kernel(backend):
            for q, k, v in what:
                functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
                )

    yield "torch flash, expanded", lambda: attend(wide, SDPBackend.FLASH_ATTENTION, False)
    yield "torch flash, gqa", lambda: attend(layers, SDPBackend.FLASH_ATTENTION, True)
    if mask is None:
        yield "torch cudnn, expanded", lambda: attend(wide, SDPBackend.CUDNN_ATTENTION, False)
        yield "torch cudnn, gqa", lambda: attend(layers, SDPBackend.CUDNN_ATTENTION, True)


class Table:
    def __init__(self, out: Path | None) -> None:
        self.out = out
        self.best: dict[str, tuple[float, str]] = {}

    def row(
        self, model: str, case: Case, who: str, taken: float, rate: float, error: float
    ) -> None:
        wrong = "" if error < TOLERANCE else f"   <<<<<< WRONG, error {error} >>>>>>"
        print(
            f"{model:5} {case.name:20} {who:28} {taken * 1e6:9.1f} us {rate:7.1f} TFLOP/s{wrong}",
            flush=True,
        )
        if error < TOLERANCE:
            self.best[f"{model} {case.name}"] = max(
                self.best.get(f"{model} {case.name}", (0.0, "")), (rate, who)
            )
        if self.out:
            line = {"model": model, "case": case.name, "who": who, "us": taken * 1e6}
            with (self.out / "prefill.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"tflops": rate, "error": error}) + "\n")


def measure(configs: list[Config], table: Table, deadline: float) -> None:
    for (model, heads), case in itertools.product(MODELS.items(), CASES):
        if time.monotonic() > deadline:
            print("the time is used up; the rest was not measured")
            return
        torch.manual_seed(0)
        inputs = Inputs(case, heads)
        exact, flops = inputs.exact(), case.flops(heads[0], heads[2])
        for config in configs:
            try:
                taken, error = time_ours(inputs, config, exact)
                table.row(model, case, label(config), taken, flops / taken / 1e12, error)
            except Exception as problem:
                print(f"{model} {case.name} {label(config)}: {str(problem)[:200]}", flush=True)
        try:
            rivals = list(theirs(inputs))
        except Exception as problem:
            print(f"{model} {case.name} torch: {str(problem)[:200]}")
            rivals = []
        for who, once in rivals:
            try:
                taken = seconds(once, len(inputs.caches))
                table.row(model, case, who, taken, flops / taken / 1e12, 0.0)
            except Exception as problem:
                print(f"{model} {case.name} {who}: {str(problem).splitlines()[0][:120]}")
        del inputs, exact, rivals
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="all configs instead of a few")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--check", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.check:
        check(Config(**json.loads(args.check)))
        return
    deadline = time.monotonic() + args.budget_s
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    configs = list(full_sweep() if args.sweep else small_sweep())
    with ThreadPoolExecutor(args.jobs) as pool:
        checked = list(pool.map(check_apart, configs))
    for config, (right, told) in zip(configs, checked, strict=True):
        print(f"{'ok' if right else '<<<<<< FAILED >>>>>>'} {label(config)}: {told}", flush=True)
    table = Table(args.out)
    try:
        measure(
            [c for c, (right, _) in zip(configs, checked, strict=True) if right], table, deadline
        )
    except Exception:
        traceback.print_exc()
    for key, (rate, who) in table.best.items():
        print(f"best {key:26} {rate:7.1f} TFLOP/s  {who}")


if __name__ == "__main__":
    main()
