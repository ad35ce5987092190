r"""How fast is Ridgeline on this GPU, by the rule of an engine-neutral workload file?

    PYTHONPATH=. python3 bench/gpu/run.py --workloads workloads.py --model DIR --out out.json \
        --decode 1,8,32,128,256 --long 32 --prefill 512,2048,8192 --mixed --prefix --serve 32 \
        --start

DIR needs a config.json only: weights are random. The file is written anew after each row, a row
that fails is recorded as such, and the engine runs in a process of its own, so that nothing loses
what was measured before. `--append` adds to a file, for instance rows of another weight format.

Decode steps are captured as graphs when a batch size is first met. Where that shows (mixed256, the
server, the start of a process) the first run is a row labelled "cold", later ones are "warm". The
sizes can be made small, to try all of it on a CPU:

    PYTHONPATH=. python3 bench/gpu/run.py --workloads workloads.py --model DIR --out dry.json \
        --device cpu --dtype float32 --max-model-len 512 --prompt-len 16 --output-len 16 \
        --decode 1,4 --long 2 --long-prompt-len 64 --long-output-len 16 --prefill 32 \
        --mixed --mixed-sizes 8,4,16 --prefix --prefix-sizes 4,64,8,8 \
        --serve 8 --serve-sizes 8,16,8 --start --repeats 1
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from card import sentence, watched
from processes import first_token, load_callers, load_server, served, write_weights

import ridgeline
from bench.adapter import RidgelineEngine

Row = dict[str, Any]

ENGINE_OPTIONS = (
    "device",
    "dtype",
    "max_model_len",
    "weight_format",
    "kv_cache_dtype",
    "attention_backend",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_mixed_tokens",
    "speculate",
    "warm_up",
    "enforce_eager",
    "deterministic",
    "tp",
    "collective",
)
WORKLOAD_IDS = 100_000  # the workload file's token ids lie below
PROMPT_OF_START = 128  # tokens


def load_workloads(args: argparse.Namespace) -> ModuleType:
    """The workload file, with what is drawn from it cut to the sizes that were asked for."""
    spec = importlib.util.spec_from_file_location("workloads", args.workloads)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot read {args.workloads}")
    work: Any = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = work
    spec.loader.exec_module(work)
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    if vocab < WORKLOAD_IDS:
        raise SystemExit(f"the workloads need {WORKLOAD_IDS} token ids, the model has {vocab}")
    seqs, low, high = args.mixed_sizes
    work.mixed_lengths = functools.partial(work.mixed_lengths, num_seqs=seqs, lo=low, hi=high)
    work.shared_prefix = functools.partial(work.shared_prefix, *args.prefix_sizes)
    loaded: ModuleType = work
    return loaded


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def environment() -> Row:
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "triton": package("triton"),
        "cuda": torch.version.cuda,
        "ridgeline": ridgeline.__version__,
    }


def package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


class Results:
    """The rows in a file, which is complete after each of them."""

    def __init__(self, path: str, *, watch: bool = False, **common: Any) -> None:
        self.path = Path(path)
        self.watch = watch
        self.common = common

    def start(self, about: Row, *, append: bool) -> None:
        if not (append and self.path.exists()):
            self._write(about | {"rows": []})

    def note(self, **more: Any) -> None:
        self._write(self._read() | more)

    def add(self, row: Row) -> None:
        record = self._read()
        record["rows"].append(row | self.common)
        self._write(record)
        print(line(row), flush=True)

    def try_row(self, name: Row, measure: Callable[[], Row]) -> None:
        """Add what `measure` gives, or that it failed; `name` says which row it is."""
        started = time.monotonic()
        with watched() if self.watch else nullcontext({}) as seen:
            try:
                row = measure() | name
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                row = name | {"error": why[:1000]}
        card = {"card": seen} if seen else {}
        self.add(row | card | {"took_s": time.monotonic() - started})

    def _read(self) -> Row:
        record: Row = json.loads(self.path.read_text())
        return record

    def _write(self, record: Row) -> None:
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(self.path)


# ---------------------------------------------------------------------- one line a row


def line(row: Row) -> str:
    """What a person wants to see of a row."""
    named = [str(row["workload"])]
    sized_by = ("batch", "rate", "callers", "prompt_len")
    named += [f"{key} {row[key]:g}" for key in sized_by if key in row]
    named += [str(row["label"])] if "label" in row else []
    if "error" in row:
        return f"{' '.join(named)}: FAILED, {row['error']}"
    seen = sentence(row.get("card", {}))
    return f"{' '.join(named)}: {figures(row)}{seen} [{row.get('took_s', 0.0):.1f} s]"


def figures(row: Row) -> str:
    middle = row.get("median", {})
    if row["workload"] == "decode":
        if "decode_tok_s" not in middle:
            return "no steady decode window"
        p50, mean, p99 = (middle[f"step_ms_{name}"] for name in ("p50", "mean", "p99"))
        return f"{trio(p50, mean, p99, 'ms')}, {middle['decode_tok_s']:,.0f} tok/s"
    if row["workload"] == "prefill":
        return f"{spread(row, 'ttft_ms', 'ms')}, {middle['prefill_tok_s']:,.0f} tok/s"
    if row["workload"] == "poisson_http":
        rate = row["out_tokens"] / row["wall_s"]
        return f"{online(row)}, {rate:,.0f} tok/s, {row['failed']} failed"
    if row["workload"] == "callers_http":
        return f"{online(row)}, {row['tok_s']:,.0f} tok/s"
    if row["workload"] == "start":
        return spread(row, "first_token_s", "s")
    return f"{spread(row, 'wall_s', 's')}, {middle['out_tok_s']:,.0f} tok/s"


def online(row: Row) -> str:
    names = ("ttft", "itl")
    return ", ".join(
        f"{n} p50 {row[f'{n}_ms_p50']:.2f} p99 {row[f'{n}_ms_p99']:.2f} ms" for n in names
    )


def spread(row: Row, key: str, unit: str) -> str:
    values = sorted(repeat[key] for repeat in row["repeats"])
    p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
    return trio(statistics.median(values), statistics.mean(values), p99, unit)


def trio(p50: float, mean: float, p99: float, unit: str) -> str:
    return f"p50 {p50:.3f} mean {mean:.3f} p99 {p99:.3f} {unit}"


# ---------------------------------------------------------------------- rows of an engine


def engine_options(args: argparse.Namespace, load_format: str = "random") -> Row:
    asked = {name: getattr(args, name) for name in ENGINE_OPTIONS}
    given = {name: value for name, value in asked.items() if value is not None}
    return given | {"load_format": load_format}


def in_engine(args: argparse.Namespace, results: Results) -> None:
    """All rows of an engine in this process."""
    work = load_workloads(args)
    started = time.monotonic()
    engine = RidgelineEngine(args.model, **engine_options(args))
    loaded_s = time.monotonic() - started
    results.note(load_s=loaded_s)
    print(f"engine ready in {loaded_s:.1f} s", flush=True)
    for batch in args.decode:
        sizes = (args.prompt_len, args.output_len, args.repeats)
        decode(results, work, engine, batch, sizes)
    for length in args.prefill:
        measure = functools.partial(
            work.measure_prefill, engine, length, args.prefill_repeats or 3 * args.repeats
        )
        results.try_row({"workload": "prefill", "prompt_len": length}, measure)
    if args.mixed:
        mixed(results, work, engine, args)
    if args.prefix:
        prefix(results, work, engine, args)
    for batch in args.long:
        sizes = (args.long_prompt_len, args.long_output_len, args.long_repeats)
        decode(results, work, engine, batch, sizes)
    engine.close()


def decode(
    results: Results, work: ModuleType, engine: RidgelineEngine, batch: int, sizes: tuple[int, ...]
) -> None:
    name = {"workload": "decode", "batch": batch, "prompt_len": sizes[0], "out_len": sizes[1]}
    results.try_row(name, functools.partial(work.measure_decode, engine, batch, *sizes))


def mixed(
    results: Results, work: ModuleType, engine: RidgelineEngine, args: argparse.Namespace
) -> None:
    """Cold: graphs are captured meanwhile. Warm: the same requests again, with the cache of
    prefixes emptied."""
    name = {"workload": "mixed256", "sizes": args.mixed_sizes}
    for label, repeats in (("cold", 1), ("warm", args.mixed_repeats)):
        engine.reset_prefix_cache()
        measure = functools.partial(work.measure_mixed, engine, repeats)
        results.try_row(name | {"label": label}, measure)


def prefix(
    results: Results, work: ModuleType, engine: RidgelineEngine, args: argparse.Namespace
) -> None:
    sizes = dict(zip(("n", "prefix", "unique", "out"), args.prefix_sizes, strict=True))
    name = {"workload": "shared_prefix", "label": "cold"} | sizes
    results.try_row(name, functools.partial(work.measure_prefix, engine, "cold", args.repeats))


# ---------------------------------------------------------------------- rows of other processes


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Run it in a fresh process, whose end gives the device's memory back."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def server(args: argparse.Namespace, results: Results) -> None:
    """Cold: the first requests that the server ever sees. Warm: the same load again."""
    work = load_workloads(args)
    count, *sizes = args.serve_sizes
    name = {"workload": "poisson_http", "rate": args.serve, "prompt_len": sizes[0]}
    loads = ((7, "cold"), (8, "warm")) if args.serve else ()
    try:
        with served(args.model, engine_options(args)) as url:
            for seed, label in loads:
                measure = functools.partial(
                    load_server, work, url, args.serve, count, tuple(sizes), seed
                )
                results.try_row(name | {"label": label}, measure)
            for callers in args.callers:
                row = {"workload": "callers_http", "callers": callers, "prompt_len": sizes[0]}
                measure = functools.partial(
                    load_callers, work, url, callers, args.rounds, tuple(sizes)
                )
                results.try_row(row, measure)
    except (OSError, RuntimeError) as error:
        results.add(name | {"error": str(error)})


def start(args: argparse.Namespace, results: Results) -> None:
    """Cold: the first process after the weights were written. Warm: those after it."""
    with tempfile.TemporaryDirectory(dir=args.temp) as temp:
        folder = Path(temp) / Path(args.model).name
        began = time.monotonic()
        size = write_weights(Path(args.model), folder, args.dtype)
        print(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - began:.1f} s", flush=True)
        for label, repeats in (("cold", 1), ("warm", args.start_repeats)):
            name = {"workload": "start", "label": label, "bytes": size}
            measure = functools.partial(starts, folder, engine_options(args, "auto"), repeats)
            results.try_row(name, measure)


def starts(folder: Path, options: Row, repeats: int) -> Row:
    ids = range(3, 3 + min(PROMPT_OF_START, options["max_model_len"] - 1))
    rows = [first_token(folder, options, ids) for _ in range(repeats)]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    return {"repeats": rows, "median": middle}


# ---------------------------------------------------------------------- the command


def command(about: str | None) -> argparse.ArgumentParser:
    """Of whoever measures with the workload file."""
    found = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--workloads", "--model", "--out"):
        found.add_argument(name, required=True)
    return found


def parser() -> argparse.ArgumentParser:
    found = command(__doc__)
    add = found.add_argument
    add("--append", action="store_true", help="keep the rows that are in the file")
    add("--repeats", type=int, default=3)
    add("--watch", action="store_true", help="the card's clock and power beside each row")
    add_workloads(found.add_argument_group("workloads"))
    add_engine(found.add_argument_group("engine, as of EngineConfig"))
    return found


def add_workloads(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--decode", type=numbers, default=[], metavar="BATCHES")
    add("--prompt-len", type=int, default=128)
    add("--output-len", type=int, default=256)
    add("--long", type=numbers, default=[], metavar="BATCHES", help="decode behind long prompts")
    add("--long-prompt-len", type=int, default=8192)
    add("--long-output-len", type=int, default=128)
    add("--long-repeats", type=int, default=1)
    add("--prefill", type=numbers, default=[], metavar="LENGTHS")
    add("--prefill-repeats", type=int, help="default: 3 times --repeats")
    add("--mixed", action="store_true")
    add("--mixed-sizes", type=numbers, default=[256, 100, 1024], help="requests, least, most")
    add("--mixed-repeats", type=int, default=1, help="of the warm row")
    add("--prefix", action="store_true")
    add("--prefix-sizes", type=numbers, default=[64, 2048, 64, 64], help="requests, shared ...")
    add("--serve", type=float, metavar="RATE", help="requests a second to an HTTP server")
    add("--serve-sizes", type=numbers, default=[512, 512, 128], help="requests, prompt, output")
    add("--callers", type=numbers, default=[], help="numbers of them, each without a pause")
    add("--rounds", type=int, default=6, help="requests of each, 3 or more")
    add("--start", action="store_true", help="a process' start to its first token")
    add("--start-repeats", type=int, default=3)
    add("--temp", help="folder for the weights of --start (16 GB for 8 B parameters)")


def add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--device", default="auto")
    add("--dtype", default="bfloat16")
    add("--max-model-len", type=int, default=9216)
    add("--weight-format", help="such as fp8")
    add("--kv-cache-dtype", help="such as fp8")
    add("--attention-backend")
    add("--max-num-seqs", type=int)
    add("--max-num-batched-tokens", type=int)
    add("--max-num-mixed-tokens", type=int)
    add("--speculate", help="such as ngram:4")
    add("--warm-up", choices=("auto", "off"))
    add("--enforce-eager", action="store_true", default=None)
    add("--deterministic", action="store_true", default=None)
    add("--tp", type=int, help="ranks, each with a GPU")
    add("--collective", help="such as nccl")


def main() -> None:
    args = parser().parse_args()
    if args.rounds < 3:
        raise SystemExit(f"--rounds {args.rounds}: 3 or more, the first and the last do not count")
    started = time.monotonic()
    formats = {name: getattr(args, name) or "auto" for name in ("weight_format", "kv_cache_dtype")}
    modes = {"deterministic": True} if args.deterministic else {}
    results = Results(args.out, watch=args.watch, dtype=args.dtype, **formats, **modes)
    about = apart(environment) | {"model": Path(args.model).resolve().name}
    results.start(about, append=args.append)
    if args.decode or args.long or args.prefill or args.mixed or args.prefix:
        try:
            apart(in_engine, args, results)
        except Exception as error:
            results.add({"workload": "engine", "error": f"{type(error).__name__}: {error}"[:1000]})
    if args.serve or args.callers:
        server(args, results)
    if args.start:
        start(args, results)
    print(f"{time.monotonic() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
