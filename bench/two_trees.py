r"""What does a change of the source cost or bring? Two trees in turns on one machine.

    PYTHONPATH=. python3 bench/two_trees.py --before FOLDER --json out.json

FOLDER has the package `ridgeline` as it was, with or without the bundled models' weights. Of each
model (shapes of known ones, random weights) one process of each tree stays loaded; both do the same
work one after the other, so that a slow minute of the machine meets both. Work is "8": the decode
steps of 8 requests; "8:1": at temperature 1; "p512": one prompt of 512 tokens; "m64": 64 requests
of mixed lengths. The time is the median step, the first token, or the whole; `ratio` is the median
of after / before over the rounds, `cpu_ratio` that of processor time, which other programs disturb
less. On a CPU, small:

    PYTHONPATH=. python bench/two_trees.py --before FOLDER --device cpu --dtype float32 \
        --models demo:chat llama-1b --layers 2 --runs 1 8 p128 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from ridgeline import demo

ROOT = Path(__file__).resolve().parents[1]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
MAX_MODEL_LEN = 2304
MIXED = 32, 512  # tokens of a prompt and of an answer in mixed work: the least, the most
FIRST = 6  # steps that do not count
ANSWER = "ANSWER "  # begins the lines that a worker answers with
DECODE, PROMPT, MIX = "", "p", "m"
Run = tuple[str, int, float]  # what, requests or tokens, temperature
Pair = tuple[dict[str, Any], dict[str, Any]]  # of a round: before, after


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as `bench.adapter` wants it."""

    prompt: list[int]
    max_tokens: int
    temperature: float


# ------------------------------------------------------------------ one tree, one model


def work(args: argparse.Namespace) -> None:
    """Load the model, then answer each line (batch, temperature) with what a step took."""
    from bench.adapter import RidgelineEngine

    options: dict[str, Any] = {"device": args.device, "dtype": args.dtype, "speculate": "off"}
    if Path(args.work).name in SHAPES:
        options |= {"load_format": "random"}
    most = max([number for what, number, _ in args.runs if what != PROMPT], default=1)
    config = json.loads((Path(args.work) / "config.json").read_text())
    longest = min(MAX_MODEL_LEN, config["max_position_embeddings"])
    options |= {"max_num_seqs": most, "max_model_len": longest}
    options |= {"num_blocks": max(most * args.blocks_each, longest // 16) + 1}
    engine = RidgelineEngine(args.work, **options)
    vocab_size = engine.llm.spec.vocab_size
    print(ANSWER + json.dumps({"package": str(Path(sys.modules["ridgeline"].__file__ or ""))}))
    sys.stdout.flush()
    for line in sys.stdin:
        what, number, temperature = json.loads(line)
        asked = requests((what, number, temperature), vocab_size, args)
        engine.reset_prefix_cache()
        used = time.process_time()
        result = engine.run(asked)
        used = time.process_time() - used
        seconds = result.wall
        if what == DECODE:
            whole = [when for when, tokens in result.steps if tokens == number][FIRST:]
            seconds = statistics.median([b - a for a, b in pairwise(whole)])
            used /= len(result.steps)
        print(ANSWER + json.dumps({"s": seconds, "cpu_s": used}), flush=True)


def requests(run: Run, vocab_size: int, args: argparse.Namespace) -> list[Asked]:
    """The same of both trees."""
    what, number, temperature = run
    rng = random.Random(number)

    def one(prompt: int, out: int) -> Asked:
        ids = [rng.randrange(3, vocab_size) for _ in range(prompt)]
        return Asked(ids, out, temperature)

    if what == PROMPT:
        return [one(number, 1)]
    if what == MIX:
        return [one(rng.randint(*MIXED), rng.randint(*MIXED)) for _ in range(number)]
    return [one(args.prompt_len, args.steps) for _ in range(number)]


class Worker:
    def __init__(self, tree: Path | None, model: str, args: argparse.Namespace) -> None:
        paths = [str(ROOT)] if tree is None else [str(tree), str(ROOT)]
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        command = [sys.executable, __file__, "--work", model, "--device", args.device]
        command += ["--steps", str(args.steps), "--blocks-each", str(args.blocks_each)]
        command += ["--prompt-len", str(args.prompt_len), "--dtype", args.dtype]
        command += ["--runs", *(f"{what}{number}:{hot}" for what, number, hot in args.runs)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        out: IO[str] | None = self.process.stdout
        if out is not None:
            for line in out:
                if line.startswith(ANSWER):
                    told: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                    return told
        raise SystemExit(f"a worker ended with code {self.process.wait()}")

    def run(self, run: Run) -> dict[str, Any]:
        if self.process.stdin is not None:
            self.process.stdin.write(json.dumps(run) + "\n")
            self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


# ------------------------------------------------------------------ both in turns


def compare(name: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    model = demo.located(name)
    if name in SHAPES:
        model = str(folder / name)
        layers = {"num_hidden_layers": args.layers} if args.layers else {}
        Path(model).mkdir()
        (Path(model) / "config.json").write_text(json.dumps(SHAPES[name] | layers))
    pairs: dict[Run, list[Pair]] = {run: [] for run in args.runs}
    for _ in range(args.starts):
        workers = Worker(args.before, model, args), Worker(None, model, args)
        try:
            packages = [worker.answer()["package"] for worker in workers]
            if packages[0] == packages[1]:
                raise SystemExit(f"both trees are {packages[0]}")
            for run in args.runs:
                pairs[run] += measure(workers, run, args.rounds)
        finally:
            for worker in workers:
                worker.close()
    return [row_of(name, run, found) for run, found in pairs.items()]


def measure(workers: tuple[Worker, Worker], run: Run, rounds: int) -> list[Pair]:
    found: list[Pair] = []
    for index in range(rounds + 1):  # the first one compiles and captures
        if index % 2:
            before = workers[0].run(run)
            after = workers[1].run(run)
        else:
            after = workers[1].run(run)
            before = workers[0].run(run)
        if index:
            found.append((before, after))
    return found


def row_of(name: str, run: Run, pairs: Sequence[Pair]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "work": f"{run[0]}{run[1]}", "temperature": run[2]}
    for key, ratio in (("s", "ratio"), ("cpu_s", "cpu_ratio")):
        before, after = ([told[key] for told in side] for side in zip(*pairs, strict=True))
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        row |= {
            f"before_{key}": statistics.median(before),
            f"after_{key}": statistics.median(after),
            ratio: statistics.median(ratios),
            f"{ratio}s": sorted(ratios),
        }
    print(line_of(row), flush=True)
    return row


def line_of(row: Mapping[str, Any]) -> str:
    low, high = row["ratios"][len(row["ratios"]) // 4], row["ratios"][-1 - len(row["ratios"]) // 4]
    return (
        f"{row['model']:14} {row['work']:5} t {row['temperature']:.0f}"
        f"  before {row['before_s'] * 1e6:9.1f} us  after {row['after_s'] * 1e6:9.1f} us"
        f"  ratio {row['ratio']:.4f} ({low:.4f} .. {high:.4f})  cpu {row['cpu_ratio']:.4f}"
    )


def environment(device: str) -> dict[str, Any]:
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def one_run(text: str) -> Run:
    """8 or, at a temperature, 8:1; p512; m64."""
    number, _, temperature = text.partition(":")
    what = number[0] if number[0] in (PROMPT, MIX) else DECODE
    return what, int(number.removeprefix(what)), float(temperature or 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--before", type=Path, help="folder with the other package")
    add("--models", nargs="+", default=["llama-3.1-8b", "qwen3-0.6b"])
    usual = [
        one_run(text) for text in ("1", "8", "32", "128", "256", "256:1", "p512", "p2048", "m64")
    ]
    add("--runs", nargs="+", type=one_run, default=usual, metavar="WORK[:TEMPERATURE]")
    add("--prompt-len", type=int, default=128)
    add("--steps", type=int, default=96)
    add("--rounds", type=int, default=7)
    add("--starts", type=int, default=1, help="of both processes: where memory lies differs")
    add("--layers", type=int, help="fewer of them, for a try")
    add("--blocks-each", type=int, default=16, help="of the cache, for a request")
    add("--device", default="cuda")
    add("--dtype", default="bfloat16")
    add("--json", type=Path)
    add("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args)
    if args.before is None or not (args.before / "ridgeline").is_dir():
        raise SystemExit("--before FOLDER: the folder that holds the other package ridgeline")
    args.before = args.before.resolve()
    record = environment(args.device)
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        record["rows"] = []
        for name in args.models:
            record["rows"] += compare(name, folder, args)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join([*map(line_of, record["rows"])]))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
