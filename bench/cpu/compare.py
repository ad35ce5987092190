"""Ridgeline, llama.cpp and OpenVINO on the CPU workloads, in turns on one machine.

    python -m bench.cpu.compare --models DIR --llama PYTHON --openvino PYTHON --rounds 5 --commit ID
        [--only A,B] [--kinds bf16,int8,int4] [--prefill 512,2048]
        [--out bench/cpu/results/latest.json] [--raw rounds.jsonl.gz]

DIR has, for models A and B, a folder `A-hf` with bfloat16 weights and a file `A-bf16.gguf` with the
same. Quantized files and OpenVINO's folders are made where they are missing; for the latter that
PYTHON needs optimum-intel and nncf. Without a PYTHON its engine is left out. Each contender is a
process of its own that ends before the next begins, and each of ours also measures what memory
gives at that moment. Values are medians of the rounds. A row of the table has the faster peer; one
that says "beside" has the other. Goals follow the peers of the same run where they are ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.cpu.latest import LATEST, Row, merge, row, show, write_raw

HERE = Path(__file__).parent
NEW = {"A": 32, "B": 256}  # tokens of a decode
INT4 = 0.5 + 2 / 128
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": INT4, "int4-all": INT4}  # of one, with its scales
HEAD_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 1.0, "int4-all": 0.5 + 2 / 32}
LAYER_WEIGHTS, HEAD_WEIGHTS = 973_078_528, 262_668_288  # of A
# Wanted of what memory gives, batch 1 of A.
SHARES = {"bf16": 0.90, "int8": 0.88, "int4": 0.85, "int4-all": 0.85}
LLAMA, OPENVINO = "llama.cpp", "OpenVINO"
FORMAT_OF = {
    LLAMA: {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0", "int4-all": "q4_0"},
    OPENVINO: {"bf16": "bf16", "int8": "int8", "int4": "int4", "int4-all": "int4"},
}
FLAGS: dict[str, list[str]] = {"bf16": []}
FLAGS |= {kind: ["--weight-format", kind] for kind in ("int8", "int4", "int4-all")}
B8_GOAL = 158.0  # tok/s of A by the best width
PREFILL_GOAL = {"bf16": 1.3, "int8": 1.5}  # times OpenVINO, of A
INT4_GOAL = 1.2  # times llama.cpp, batch 1 of A
UNITS = {"load_s": "s", "rss_mb": "MB", "read_gb_s": "GB/s"}
LESS_IS_MORE = ("load_s", "rss_mb")
LIMIT_S = 900

Taken = dict[str, list[float]]  # of a figure: all rounds


@dataclass(frozen=True, slots=True)
class Contender:
    """`kind` is our name of the format."""

    model: str
    engine: str
    kind: str
    command: tuple[str, ...]


def contenders(args: argparse.Namespace) -> Iterator[Contender]:
    for model in args.only.split(","):
        sizes = ("--prefill", args.prefill, "--new", str(NEW[model]), "--threads", "2")
        folder = args.models / f"{model}-hf"
        for kind in args.kinds.split(","):
            program = (sys.executable, "-m", "bench.cpu.run", "--model", str(folder))
            ours = (*program, *FLAGS[kind], *sizes)
            yield Contender(model, "ridgeline", kind, ours)
            if args.llama is not None:
                program = (str(args.llama), str(HERE / "peer_llama.py"))
                file = gguf(args.models, model, FORMAT_OF[LLAMA][kind], program)
                yield Contender(model, LLAMA, kind, (*program, "--gguf", str(file), *sizes))
            if args.openvino is not None:
                program = (str(args.openvino), str(HERE / "peer_openvino.py"))
                ir = openvino_ir(args.models, model, FORMAT_OF[OPENVINO][kind], program)
                yield Contender(model, OPENVINO, kind, (*program, "--ir", str(ir), *sizes))


def gguf(models: Path, model: str, kind: str, program: tuple[str, ...]) -> Path:
    source, file = models / f"{model}-bf16.gguf", models / f"{model}-{kind}.gguf"
    if not file.exists():
        run((*program, "--gguf", str(source), "--quantize", kind, "--to", str(file)))
    return file


def openvino_ir(models: Path, model: str, kind: str, program: tuple[str, ...]) -> Path:
    folder = models / f"{model}-ov-{kind}"
    if not (folder / "openvino_model.xml").exists():
        how = ["--export", str(models / f"{model}-hf")]
        if kind != "bf16":
            how = ["--compress", str(openvino_ir(models, model, "bf16", program)), "--kind", kind]
        run((*program, "--ir", str(folder), *how))
    return folder


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
            key = {"round": number, "model": one.model, "engine": one.engine, "format": one.kind}
            records.append(key | found)
            figures = {k: v for k, v in found.items() if isinstance(v, float)}
            told = ", ".join(f"{k} {v:.1f}" for k, v in figures.items())
            print(f"{number} {one.model} {one.engine} {one.kind}: {told}", flush=True)
            if args.raw:
                write_raw(records, args.raw)
    return records


def rows(records: list[dict[str, Any]], commit: str) -> Iterator[Row]:
    values: dict[tuple[str, str, str], Taken] = defaultdict(lambda: defaultdict(list))
    for record in records:
        of_one = values[record["model"], record["format"], record["engine"]]
        for name, value in record.items():
            if name.startswith(("prefill", "decode")) or name in UNITS:
                of_one[name].append(value)
    for (model, kind, engine), taken in values.items():
        if engine != "ridgeline":
            continue
        peers = {e: values[model, kind, e] for e in FORMAT_OF if (model, kind, e) in values}
        for name, ours in taken.items():
            yield from rows_of(model, kind, name, ours, peers, commit)
    yield from shares(records, commit)


def rows_of(
    model: str, kind: str, name: str, ours: list[float], peers: dict[str, Taken], commit: str
) -> Iterator[Row]:
    """The figure beside the best peer, then beside the other."""
    beside = {engine: taken[name] for engine, taken in peers.items() if name in taken}
    wanted = goal(model, kind, name, {engine: median(of) for engine, of in beside.items()})
    best_first = sorted(beside, key=lambda engine: median(beside[engine]))
    if name not in LESS_IS_MORE:
        best_first.reverse()
    for place, engine in enumerate(best_first or [""]):
        yield row(
            f"{model} {kind} {name}" + (f", beside {engine}" if place else ""),
            UNITS.get(name, "tok/s"),
            ours,
            commit=commit,
            peer=f"{engine} {FORMAT_OF[engine][kind]}" if engine else None,
            peer_values=beside.get(engine, ()),
            goal=wanted,
        )


def goal(model: str, kind: str, name: str, peers: dict[str, float]) -> float | None:
    if model == "A" and name == "decode b8":
        return B8_GOAL
    if model == "A" and name.startswith("prefill") and OPENVINO in peers and kind in PREFILL_GOAL:
        return PREFILL_GOAL[kind] * peers[OPENVINO]
    if model == "A" and kind.startswith("int4") and name == "decode b1" and LLAMA in peers:
        return INT4_GOAL * peers[LLAMA]
    if model == "B" and name == "decode b1" and peers:
        return max(peers.values())
    return None


def shares(records: list[dict[str, Any]], commit: str) -> Iterator[Row]:
    """Of what memory gave in the same process: bytes of all weights, once a token."""
    for kind, wanted in SHARES.items():
        size = LAYER_WEIGHTS * WEIGHT_BYTES[kind] + HEAD_WEIGHTS * HEAD_BYTES[kind]
        taken = [
            r["decode b1"] * size / 1e9 / r["read_gb_s"]
            for r in records
            if (r["model"], r["engine"], r["format"]) == ("A", "ridgeline", kind)
        ]
        if taken:
            name = f"A {kind} decode b1, of the read rate"
            yield row(name, "share", taken, commit=commit, goal=wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--llama", type=Path, help="a Python with llama-cpp-python")
    parser.add_argument("--openvino", type=Path, help="a Python with openvino")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="A,B")
    parser.add_argument("--kinds", default="bf16,int8,int4", help=", ".join(FLAGS))
    parser.add_argument("--prefill", default="512,2048", help="prompt lengths")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--raw", type=Path, help="a file .jsonl.gz")
    args = parser.parse_args()
    found = list(rows(measure(args), args.commit))
    merge(found, args.out)
    show(found)


if __name__ == "__main__":
    main()
