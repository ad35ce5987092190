"""Which way of cutting each product is the fastest where it stands, in a whole decode step?

    PYTHONPATH=. python3 bench/gpu/tune_chain.py --out DIR --model 0.6B [--rows 32,128,256] \
        [--context 256] [--jobs 14] [--budget-s 200] CONFIG_DIR

CONFIG_DIR needs a config.json only: weights are random. `tune_linear` times a product among copies
of itself; in a step it stands between others, whose rings of shared memory decide whether its
weights are called in before they have ended. Child processes first compile every candidate and hold
it against float32. Then one product after the other takes the candidate with which the captured
step of so many requests is replayed fastest, if it stays ahead in turns with what stood there;
twice over. Last, steps by the old and the new table in turn. With many rows of a large model the
card is held back by its power: `--hold-s` keeps it at work for so long before each measurement.
DIR gets rows.jsonl and tiles.json, the table of the package with what was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from bench.adapter import RidgelineEngine
from bench.gpu.tune_linear import (
    LAYERS,
    MODELS,
    NORM_ROWS,
    TOO_LARGE,
    Bench,
    Layer,
    Trial,
    candidates,
    short,
)
from ridgeline.executor.decode_graphs import DecodeGraphs, Sampling
from ridgeline.kernels import tiles
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.tile_linear import columns_of, shared_bytes
from ridgeline.kernels.tiles import FILE, Place, Tile, write_tiles

ORDER = ("gate_up", "down", "o", "qkv", "lm_head")
ROOMS = (0.75, 0.5, 0.33)  # of the largest ring, that smaller ones take
GAIN = 0.9985  # of the step's time, which a change must be below
DUELS, TURNS = 3, 3  # how many of the fastest are compared with what stands there, and how often
PASSES = 2
REPLAYS, BATCHES = 8, 4
ROUNDS = 7  # of the last comparison
NEAREST = 8  # that a second pass looks at again

Table = dict[Place, Tile | None]


@dataclass(frozen=True, slots=True)
class Choice:
    """A tile for one product; `norm`: with the norm inside. None: the library."""

    name: str
    tile: Tile | None
    norm: bool = False


def choices(layer: Layer, rows: int) -> Iterator[tuple[Layer, Tile]]:
    """All that could be right, each with the kind of layer that it is for."""
    plain = dataclasses.replace(layer, norm=False)
    seen: set[tuple[bool, Tile]] = set()
    kinds = [plain, layer] if layer.norm and rows <= NORM_ROWS else [plain]
    for kind in kinds:
        for tile in candidates(kind, rows):
            for made in (tile, *_smaller(tile), *_eighths(tile, rows, kind)):
                if (made.stream or made.wgmma) and (kind.norm, made) not in seen:
                    seen.add((kind.norm, made))
                    yield kind, made


def _smaller(tile: Tile) -> Iterator[Tile]:
    """With a shorter ring, beside which the next kernel finds room."""
    if not tile.wgmma:
        return
    stages = {max(3, round(tile.stages * room)) for room in ROOMS}
    yield from (dataclasses.replace(tile, stages=n) for n in stages if n < tile.stages)


def _eighths(tile: Tile, rows: int, layer: Layer) -> Iterator[Tile]:
    """Clusters of eight along K, for few outputs."""
    if not (tile.wgmma and tile.splits == 4 and layer.inputs // tile.block_k >= 16):
        return
    columns = columns_of(rows, tile.block_m)
    for stages in (12, 8, 6, 4):
        made = dataclasses.replace(tile, splits=8, stages=stages)
        room = stages * 128 * (tile.block_n + columns)
        fits = room >= tile.block_n * max(columns // 8, 8) * 8 * 4
        if fits and shared_bytes(made, columns, 1, gated=layer.gated) <= 227 << 10:
            yield made


# ------------------------------------------------------------------------ what is right


@cache
def _bench() -> Bench:
    device = torch.device("cuda")
    return Bench(device, torch.bfloat16, True, make_workspace(device, 1 << 24, 1 << 14))


def checked(trial: Trial) -> tuple[Trial, str, str]:
    """In a child: compiles it, and holds it against float32."""
    try:
        what, why = _bench().check(trial)
    except Exception as error:
        what, why = "failed", f"{type(error).__name__}: {str(error)[:200]}"
        if any(words in why for words in TOO_LARGE):
            what = "skipped"
    return trial, what, why


def right_ones(trials: list[Trial], jobs: int) -> tuple[set[Trial], list[dict[str, Any]]]:
    right, rows = set(), []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for trial, what, why in pool.map(checked, trials, chunksize=4):
            rows.append({"what": what, "why": why, **asdict(trial)})
            if what == "right":
                right.add(trial)
            elif what != "skipped":
                print(f"  {what}: {trial.layer.name} {trial.rows} {short(trial.tile)}: {why}")
    return right, rows


# ------------------------------------------------------------------------ a step


class Step:
    """The captured greedy decode step of some requests that have a context."""

    def __init__(self, engine: RidgelineEngine, rows: int, context: int, hold_s: float) -> None:
        self.engine, self.rows, self.hold_s = engine, rows, hold_s
        steps, rng, vocab = engine.llm.engine, Random(rows), engine.llm.spec.vocab_size
        for _ in range(rows):
            prompt = [rng.randrange(vocab) for _ in range(context)]
            asked = SimpleNamespace(prompt=prompt, max_tokens=64, temperature=0.0)
            steps.add(engine.request(asked, 0.0))
        while min(r.num_computed_tokens for r in steps.scheduler.requests.values()) < context:
            steps.step()
        for _ in range(4):
            steps.step()
        while steps.num_in_flight:
            steps.collect()
        torch.cuda.synchronize()
        graphs = getattr(steps.executor, "decode_graphs", None)
        if not isinstance(graphs, DecodeGraphs):
            raise SystemExit("decode steps are not captured here")
        self.graphs = graphs
        self.sent = graphs._sent.clone()

    def seconds(self) -> float:
        """Of one replay, captured anew with the table as it is now."""
        bucket = next(b for b in self.graphs.buckets if b >= self.rows)
        self.graphs._graphs.clear()
        self.graphs.prepare(bucket, 0, Sampling.GREEDY)
        replay = self.graphs._graphs[bucket, 0, Sampling.GREEDY]
        self.graphs._sent.copy_(self.sent)
        return replayed(replay, self.hold_s)

    def end(self) -> None:
        steps = self.engine.llm.engine
        self.graphs._graphs.clear()
        for request_id in list(steps.scheduler.requests):
            steps.abort(request_id)
        while not steps.is_idle:
            steps.step()


def replayed(replay: Any, hold_s: float) -> float:
    """The fastest of a few batches, or the mean of all that run after `hold_s`."""
    few = timed(replay, 2)
    if hold_s:
        timed(replay, max(1, int(hold_s / few)))
        return timed(replay, max(REPLAYS, int(hold_s / few)))
    return min(timed(replay, REPLAYS) for _ in range(BATCHES))


def timed(replay: Any, count: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(count):
        replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / count / 1e3


# ------------------------------------------------------------------------ the search


@dataclass(slots=True)
class Search:
    step: Step
    device: str
    layers: dict[str, Layer]
    table: Table  # the one that the kernels look at
    deadline: float
    rows: list[dict[str, Any]]

    def put(self, choice: Choice) -> Table:
        """Sets the choice; what stood there before."""
        layer = self.layers[choice.name]
        plain = dataclasses.replace(layer, norm=False)
        new: Table = {}
        if choice.norm:
            new[self._place(layer)] = choice.tile
        else:
            if layer.norm and self.step.rows <= NORM_ROWS:
                new[self._place(layer)] = None
            new[self._place(plain)] = choice.tile
        before = {place: self.table.get(place) for place in new}
        self.table.update(new)
        return before

    def _place(self, layer: Layer) -> Place:
        rows = tiles.bucket(self.step.rows)
        return Place(self.device, "bfloat16", layer.outputs, layer.inputs, rows, layer.kind)

    def run(self, found: dict[str, list[Choice]]) -> None:
        best = self.step.seconds()
        print(f"{self.step.rows} rows: {best * 1e6:.1f} us", flush=True)
        for turn in range(PASSES):
            for name in ORDER:
                if name in found:
                    best, found[name] = self._best_of(found[name], best, turn)

    def _best_of(self, some: list[Choice], best: float, turn: int) -> tuple[float, list[Choice]]:
        times: dict[Choice, float] = {}
        for choice in some:
            if time.monotonic() > self.deadline:
                break
            before = self.put(choice)
            try:
                times[choice] = seconds = self.step.seconds()
            except Exception as error:
                print(f"  failed: {choice}: {error!r:.200}", flush=True)
                continue
            finally:
                self.table.update(before)
            about = {"what": "step", "rows": self.step.rows, "turn": turn, "us": seconds * 1e6}
            self.rows.append(about | asdict(choice))
        ranked = sorted(times, key=times.__getitem__)
        for choice in ranked[:DUELS]:
            if times[choice] < GAIN * best:
                best = self._dueled(choice, best)
        return best, ranked[:NEAREST]

    def _dueled(self, choice: Choice, best: float) -> float:
        """Seconds of a step by the better of the choice and what stands there, which it takes the
        place of."""
        old: list[float] = []
        new: list[float] = []
        before: Table = {}
        for _ in range(TURNS):
            old.append(self.step.seconds())
            before = self.put(choice)
            new.append(self.step.seconds())
            self.table.update(before)
        was, is_now = statistics.median(old), statistics.median(new)
        if is_now >= GAIN * was:
            return was
        self.put(choice)
        told = "the library" if choice.tile is None else short(choice.tile)
        norm = " norm" if choice.norm else ""
        print(
            f"  {was * 1e6:8.1f} -> {is_now * 1e6:8.1f} us with {choice.name} {told}{norm}",
            flush=True,
        )
        return is_now


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG_DIR")
    parser.add_argument("--model", required=True, choices=MODELS, help="whose layers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="32,128,256")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--hold-s", type=float, default=0.0)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--budget-s", type=float, default=200.0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    layers = {layer.name: layer for layer in LAYERS if layer.model == args.model}
    sizes = [int(part) for part in args.rows.split(",")]
    trials = [
        Trial(kind, rows, tile)
        for rows in sizes
        for layer in layers.values()
        for kind, tile in choices(layer, rows)
    ]
    right, told = right_ones(trials, args.jobs)
    print(f"{time.monotonic() - began:.0f} s: {len(right)} of {len(trials)} are right", flush=True)
    engine = RidgelineEngine(
        args.config,
        load_format="random",
        dtype="bfloat16",
        max_model_len=2048,
        warm_up="off",
        speculate="off",
    )
    table, old = tiles._table(), dict(tiles._table())
    device = torch.cuda.get_device_name()
    for turn, rows in enumerate(sizes):
        left = began + args.budget_s - time.monotonic()
        deadline = time.monotonic() + left / (len(sizes) - turn) - 2.0
        step = Step(engine, rows, args.context, args.hold_s)
        found = {name: [Choice(name, None)] for name in layers}
        for trial in trials:
            if trial in right and trial.rows == rows:
                choice = Choice(trial.layer.name, trial.tile, trial.layer.norm)
                found.setdefault(choice.name, []).append(choice)
        Search(step, device, layers, table, deadline, told).run(found)
        told.append(compared(step, table, old))
        step.end()
        write(args.out, table, told)
    engine.close()
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0


def compared(step: Step, table: Table, old: Table) -> dict[str, Any]:
    """Steps by both tables in turn."""
    new, times = dict(table), ([], [])  # type: ignore[var-annotated]
    for _ in range(ROUNDS):
        for which, rows in enumerate((old, new)):
            table.clear()
            table.update(rows)
            times[which].append(step.seconds() * 1e6)
    before, after = (statistics.median(some) for some in times)
    print(f"{step.rows} rows: {before:.1f} -> {after:.1f} us ({after / before:.3f})", flush=True)
    return {"what": "compared", "rows": step.rows, "before_us": times[0], "after_us": times[1]}


def write(out: Path, table: Table, told: list[dict[str, Any]]) -> None:
    lines = "\n".join(json.dumps(row) for row in told)
    (out / "rows.jsonl").write_text(lines + "\n", encoding="utf-8")
    (out / FILE).write_text(write_tiles(table, {}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
