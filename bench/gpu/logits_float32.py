r"""What does it cost, and what does it bring, that logits are float32? Two source trees in turns.

    PYTHONPATH=. python3 bench/gpu/logits_float32.py --before FOLDER --json out.json

FOLDER has the package `ridgeline` as it was, with or without the bundled models' weights. Of each
model (shapes of known ones, random weights) one process of each tree stays loaded; they decode the
same batches one after the other, so that a slow minute of the machine meets both. A step's time is
the median of a run, `ratio` the median of after / before over the rounds. `bench/ties.py` counts
answers with each tree. On a CPU, small:

    PYTHONPATH=. python bench/gpu/logits_float32.py --before FOLDER --device cpu \
        --models demo:chat llama-1b --layers 2 --runs 1 8 --json out.json

`cpu_ratio` compares processor time there, which other programs disturb less.
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

ROOT = Path(__file__).resolve().parents[2]
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
MAX_MODEL_LEN = 512
FIRST = 6  # steps that do not count
ANSWER = "ANSWER "  # begins the lines that a worker answers with
Run = tuple[int, float]  # requests, temperature
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

    options: dict[str, Any] = {"device": args.device, "dtype": "bfloat16", "speculate": "off"}
    if Path(args.work).name in SHAPES:
        options |= {"load_format": "random"}
    most = max(run[0] for run in args.runs)
    options |= {"max_num_seqs": most, "max_model_len": MAX_MODEL_LEN}
    options |= {"num_blocks": max(most * args.blocks_each, MAX_MODEL_LEN // 16) + 1}
    engine = RidgelineEngine(args.work, **options)
    vocab_size = engine.llm.spec.vocab_size
    print(ANSWER + json.dumps({"package": str(Path(sys.modules["ridgeline"].__file__ or ""))}))
    sys.stdout.flush()
    for line in sys.stdin:
        batch, temperature = json.loads(line)
        rng = random.Random(batch)
        asked = [
            Asked(
                [rng.randrange(3, vocab_size) for _ in range(args.prompt_len)],
                args.steps,
                temperature,
            )
            for _ in range(batch)
        ]
        engine.reset_prefix_cache()
        used = time.process_time()
        result = engine.run(asked)
        used = time.process_time() - used
        whole = [when for when, tokens in result.steps if tokens == batch][FIRST:]
        steps = [b - a for a, b in pairwise(whole)]
        answer = {"step_s": statistics.median(steps), "cpu_s": used / len(result.steps)}
        print(ANSWER + json.dumps(answer), flush=True)


class Worker:
    def __init__(self, tree: Path | None, model: str, args: argparse.Namespace) -> None:
        paths = [str(ROOT)] if tree is None else [str(tree), str(ROOT)]
        command = [sys.executable, __file__, "--work", model, "--device", args.device]
        command += ["--steps", str(args.steps), "--blocks-each", str(args.blocks_each)]
        command += ["--prompt-len", str(args.prompt_len)]
        command += ["--runs", *(f"{batch}:{hot}" for batch, hot in args.runs)]
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

    def run(self, batch: int, temperature: float) -> dict[str, Any]:
        if self.process.stdin is not None:
            self.process.stdin.write(json.dumps([batch, temperature]) + "\n")
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
            before = workers[0].run(*run)
            after = workers[1].run(*run)
        else:
            after = workers[1].run(*run)
            before = workers[0].run(*run)
        if index:
            found.append((before, after))
    return found


def row_of(name: str, run: Run, pairs: Sequence[Pair]) -> dict[str, Any]:
    row = {"model": name, "batch": run[0], "temperature": run[1]}
    for key, ratio in (("step_s", "ratio"), ("cpu_s", "cpu_ratio")):
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
        f"{row['model']:14} batch {row['batch']:3} t {row['temperature']:.0f}"
        f"  before {row['before_step_s'] * 1e6:9.1f} us  after {row['after_step_s'] * 1e6:9.1f} us"
        f"  ratio {row['ratio']:.4f} ({low:.4f} .. {high:.4f})  cpu {row['cpu_ratio']:.4f}"
    )


def count_ties(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `bench/ties.py` counts with each tree."""
    found: dict[str, Any] = {}
    for label, tree in (("before", args.before), ("after", None)):
        paths = [str(ROOT)] if tree is None else [str(tree), str(ROOT)]
        out = folder / f"{label}.json"
        command = [sys.executable, str(ROOT / "bench/ties.py"), "--device", args.device]
        command += ["--model", demo.located(demo.DEFAULT), "--label", label, "--json", str(out)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        ended = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=False)
        found[label] = json.loads(out.read_text()) if ended.returncode == 0 else None
    return found


def ties_lines(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for label, told in found.items():
        if told is None:
            lines.append(f"ties {label}: FAILED")
            continue
        changed = ", ".join(f"{way} {count}" for way, count in told["changed"].items())
        lines.append(f"ties {label:6}: of {told['answers']} answers changed: {changed};"
                     f" equal at {told['equal_places']} of {told['places']} places")  # fmt: skip
    return lines


def environment(device: str) -> dict[str, Any]:
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def one_run(text: str) -> Run:
    """8 or, at a temperature, 8:1."""
    batch, _, temperature = text.partition(":")
    return int(batch), float(temperature or 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--before", type=Path, help="folder with the other package")
    add("--models", nargs="+", default=["llama-3.1-8b", "qwen3-0.6b"])
    usual = [one_run(text) for text in ("1", "8", "32", "256", "256:1")]
    add("--runs", nargs="+", type=one_run, default=usual, metavar="BATCH[:TEMPERATURE]")
    add("--prompt-len", type=int, default=16)
    add("--steps", type=int, default=96)
    add("--rounds", type=int, default=7)
    add("--starts", type=int, default=1, help="of both processes: where memory lies differs")
    add("--layers", type=int, help="fewer of them, for a try")
    add("--blocks-each", type=int, default=16, help="of the cache, for a request")
    add("--device", default="cuda")
    add("--no-ties", action="store_true")
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
        record["ties"] = {} if args.no_ties else count_ties(args, folder)
        print("\n".join(ties_lines(record["ties"])), flush=True)
        record["steps"] = []
        for name in args.models:
            record["steps"] += compare(name, folder, args)
            if args.json:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join([*ties_lines(record["ties"]), *map(line_of, record["steps"])]))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
