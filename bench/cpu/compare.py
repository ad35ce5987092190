"""Ridgeline and llama.cpp on the CPU workloads, in turns on one machine.

    python -m bench.cpu.compare --models DIR --peer-python PYTHON --rounds 5 --commit ID \
        [--only A] [--prefill 512,2048] [--out bench/cpu/results/latest.json] [--raw rounds.jsonl]

DIR has, for models A and B, a folder `A-hf` with bfloat16 weights and a file `A-bf16.gguf` with the
same; PYTHON is one that has llama-cpp-python, without it only Ridgeline is measured. Each contender
is a process of its own that ends before the next begins, and what memory gives at that moment is
measured in each of ours. Values are medians of the rounds: rows {workload, metric, value, peer,
peer_value, goal, date, device, commit, low, high}. A goal is a number, or what the text says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NEW = {"A": 32, "B": 256}  # tokens of a decode
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128}  # of a weight, with its scales
LAYER_WEIGHTS, HEAD_WEIGHTS = {"A": 973_078_528}, {"A": 262_668_288}  # the head stays bfloat16
SHARES = {"bf16": 0.90, "int8": 0.88, "int4": 0.85}  # wanted of what memory gives, batch 1 of A
PEER_OF = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}
FLAGS = {"bf16": [], "int8": ["--weight-format", "int8"], "int4": ["--weight-format", "int4"]}
B8_GOAL = 158.0  # tok/s of A by the best width
LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class Contender:
    """`format` is ours, or llama.cpp's."""

    model: str
    name: str  # "ridgeline" or "llama.cpp"
    format: str
    command: tuple[str, ...]


def contenders(args: argparse.Namespace) -> Iterator[Contender]:
    for model in args.only.split(","):
        sizes = ("--prefill", args.prefill, "--new", str(NEW[model]), "--threads", "2")
        folder = args.models / f"{model}-hf"
        for name, flags in FLAGS.items():
            ours = (sys.executable, "-m", "bench.cpu.run", "--model", str(folder), *flags, *sizes)
            yield Contender(model, "ridgeline", name, ours)
            if args.peer_python is not None:
                peer = (str(args.peer_python), str(HERE / "peer_llama.py"))
                kind = PEER_OF[name]
                file = quantized(args.models, model, kind, peer)
                yield Contender(model, "llama.cpp", kind, (*peer, "--gguf", str(file), *sizes))


def quantized(models: Path, model: str, kind: str, peer: tuple[str, ...]) -> Path:
    source, file = models / f"{model}-bf16.gguf", models / f"{model}-{kind}.gguf"
    if not file.exists():
        run((*peer, "--gguf", str(source), "--quantize", kind, "--to", str(file)))
    return file


def run(command: tuple[str, ...]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[-6:])} failed: {done.stderr[-800:]}")
    return done.stdout


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record a contender and round."""
    records = []
    for number in range(args.rounds):
        for one in contenders(args):
            found = json.loads(run(one.command).strip().splitlines()[-1])
            key = {"round": number, "model": one.model, "engine": one.name, "format": one.format}
            records.append(key | found)
            told = ", ".join(f"{k} {v:.1f}" for k, v in found.items())
            print(f"{number} {one.model} {one.name} {one.format}: {told}", flush=True)
            if args.raw:
                with args.raw.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(records[-1]) + "\n")
    return records


def rows(records: list[dict[str, Any]], commit: str) -> Iterator[dict[str, Any]]:
    values: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            if name.startswith(("prefill", "decode", "load_s", "read_gb_s")):
                values[record["model"], record["engine"], record["format"], name].append(value)
    common = {"date": datetime.now(UTC).date().isoformat(), "device": device(), "commit": commit}
    for (model, engine, kind, name), taken in values.items():
        if engine != "ridgeline":
            continue
        peer = values.get((model, "llama.cpp", PEER_OF[kind], name))
        row = {
            "workload": f"{model} {kind} {name}",
            "metric": "GB/s" if name == "read_gb_s" else "s" if name == "load_s" else "tok/s",
            "value": statistics.median(taken),
            "peer": f"llama.cpp {PEER_OF[kind]}" if peer else None,
            "peer_value": statistics.median(peer) if peer else None,
            "goal": goal(model, kind, name, peer),
            "low": min(taken),
            "high": max(taken),
        }
        yield row | common
    yield from (row | common for row in shares(records))


def goal(model: str, kind: str, name: str, peer: list[float] | None) -> float | None:
    if model == "A" and name == "decode b8":
        return B8_GOAL
    if peer and model == "A" and kind == "int4" and name == "decode b1":
        return 1.2 * statistics.median(peer)
    if peer and model == "B" and name == "decode b1":
        return statistics.median(peer)
    return None


def shares(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of what memory gave in the same process: bytes of all weights, once a token."""
    for kind, wanted in SHARES.items():
        ours = [
            r for r in records if (r["model"], r["engine"], r["format"]) == ("A", "ridgeline", kind)
        ]
        if not ours:
            continue
        size = LAYER_WEIGHTS["A"] * WEIGHT_BYTES[kind] + HEAD_WEIGHTS["A"] * 2
        taken = [r["decode b1"] * size / 1e9 / r["read_gb_s"] for r in ours]
        yield {
            "workload": f"A {kind} decode b1, of the read rate",
            "metric": "share",
            "value": statistics.median(taken),
            "peer": None,
            "peer_value": None,
            "goal": wanted,
            "low": min(taken),
            "high": max(taken),
        }


def device() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, 2 threads"
    return f"{platform.machine()}, 2 threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="A,B")
    parser.add_argument("--prefill", default="512", help="prompt lengths, such as 512,2048")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "latest.json")
    parser.add_argument("--raw", type=Path)
    args = parser.parse_args()
    found = list(rows(measure(args), args.commit))
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("| workload | value | low to high | peer | goal |\n|---|---|---|---|---|")
    for row in found:
        peer = f"{row['peer']} {row['peer_value']:.1f}" if row["peer"] else ""
        wanted = "" if row["goal"] is None else f"{row['goal']:.2f}"
        told = f"{row['value']:.2f} {row['metric']} | {row['low']:.2f} to {row['high']:.2f}"
        print(f"| {row['workload']} | {told} | {peer} | {wanted} |")


if __name__ == "__main__":
    main()
