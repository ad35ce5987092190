"""Experts on a CPU: Ridgeline beside llama.cpp, and beside itself with one expert after the other.

    python -m bench.cpu.experts make --model DIR [--layers 20] [--llama PYTHON]
    python -m bench.cpu.experts run --model DIR --llama PYTHON --rounds 30 --out FILE.json.gz

`make` writes a random model in the layout of Qwen3-MoE (bfloat16), and with a PYTHON that has
llama-cpp-python and gguf the same as `model-q4_0.gguf`. Its matrices are parts of one list of
random numbers. `run` starts a process for each engine, all of which keep their model, and asks one
after the other for a short piece of work, in another order each round: a prompt of 512 tokens, or
some tokens after a prompt of 128. So what else runs on the machine slows all alike; by the clock of
the processors, and with one thread, it counts least.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import subprocess
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

import ridgeline
from bench.adapter import RidgelineEngine
from bench.cpu.latest import device
from bench.cpu.run import CONTEXT, MOST_TOKENS, Asked, numbers
from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import num_active_parameters, num_parameters
from ridgeline.architectures.parts import expected_tensors
from ridgeline.layers.experts import Experts

HERE = Path(__file__).parent
STD = 0.02
LIST = 1 << 25  # random numbers that all matrices are parts of
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Work = tuple[str, int]  # "prefill" or "decode", tokens


# ------------------------------------------------------------------------ the model


def make(folder: Path, layers: int, llama: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    made = torch.Generator().manual_seed(0)
    numbers_of_all = torch.empty(LIST).normal_(0.0, STD, generator=made).to(torch.bfloat16)
    where = random.Random(0)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        if name.endswith("mlp.gate.weight"):
            return torch.empty(shape).normal_(0.0, STD, generator=made).to(torch.bfloat16)
        count = torch.Size(shape).numel()
        begin = where.randrange(max(1, LIST - count))
        parts = [numbers_of_all[begin : begin + count]]
        while (left := count - sum(map(len, parts))) > 0:
            parts.append(numbers_of_all[:left])
        return torch.cat(parts).view(shape)

    shapes = expected_tensors(read_spec(config))
    save_file({n: tensor(n, s) for n, s in shapes.items()}, folder / "model.safetensors")
    if llama is not None:
        whole, small = folder / "model-bf16.gguf", folder / "model-q4_0.gguf"
        program = HERE / "peer_llama_experts.py"
        subprocess.run((llama, program, "--model", folder, "--to", whole), check=True)
        quantize = ("--quantize", "q4_0", "--to", small)
        subprocess.run((llama, HERE / "peer_llama.py", "--gguf", whole, *quantize), check=True)
        whole.unlink()


# ------------------------------------------------------------------------ turns


def serve(folder: Path, weight_format: str, threads: int, *, one_by_one: bool) -> None:
    """Answer each line of the input by the seconds that its work took, of a clock and of
    processors."""
    if one_by_one:
        Experts.packed = None  # type: ignore[assignment]
    adapter = RidgelineEngine(
        str(folder),
        device="cpu",
        dtype="bfloat16",
        weight_format=weight_format,
        threads=threads,
        max_model_len=MOST_TOKENS,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 29,
        speculate="off",
    )
    draw, vocab = random.Random(0).randrange, adapter.llm.spec.vocab_size
    for line in sys.stdin:
        what, count = line.split()
        rows = 8 if what == "decode8" else 1
        length, new = (int(count), 1) if what == "prefill" else (CONTEXT, int(count) + 1)
        for _ in range(rows):
            asked = Asked([draw(300, vocab) for _ in range(length)], new)
            adapter.llm.engine.add(adapter.request(asked, time.monotonic()))
        seen = 0 if what == "prefill" else -rows  # the first token of each is the prompt's
        while seen < 0:
            seen += _step(adapter)
        began = time.perf_counter(), time.process_time()
        while not adapter.llm.engine.is_idle:
            _step(adapter)
        print(time.perf_counter() - began[0], time.process_time() - began[1], flush=True)


def _step(adapter: RidgelineEngine) -> int:
    """Tokens that came out."""
    return sum(len(output.new_token_ids) for output in adapter.llm.engine.step())


class Contender:
    """A process that computes what it is told."""

    def __init__(self, name: str, command: tuple[object, ...]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, work: Work) -> list[float]:
        """Of a clock and of processors."""
        told, heard = self._process.stdin, self._process.stdout
        if told is None or heard is None:
            raise SystemExit("a process without pipes")
        told.write(f"{work[0]} {work[1]}\n")
        told.flush()
        line = heard.readline()
        if not line:
            raise SystemExit(f"{self.name} ended")
        return [float(part) for part in line.split()]

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def contenders(args: argparse.Namespace) -> list[Contender]:
    here = (sys.executable, "-m", "bench.cpu.experts", "serve", "--model", args.model)
    ours = (*here, "--weight-format", args.weight_format, "--threads", args.threads)
    found = [Contender("ridgeline", ours)]
    if args.one_by_one:
        found.append(Contender("one by one", (*ours, "--one-by-one")))
    if args.llama is not None:
        file = args.model / "model-q4_0.gguf"
        peer = (args.llama, HERE / "peer_llama.py", "--gguf", file, "--threads", args.threads)
        found.append(Contender("llama.cpp", (*peer, "--turns")))
    return found


Taken = dict[str, dict[str, list[list[float]]]]  # of each work and engine, tokens a second


def run(args: argparse.Namespace) -> Taken:
    works = [("prefill", count) for count in numbers(args.prefill)]
    works += [(kind, args.new) for kind in args.decode.split(",") if kind]
    engines = contenders(args)
    taken: Taken = defaultdict(lambda: defaultdict(list))
    for engine in engines:  # what is done once is not counted
        for work in works:
            engine.seconds(work)
            print("ready", engine.name, work, flush=True)
    order = random.Random(1)
    end = time.monotonic() + args.minutes * 60
    for _ in range(args.rounds):
        for work in works:
            for engine in order.sample(engines, len(engines)):
                tokens = work[1] * (8 if work[0] == "decode8" else 1)
                rates = [tokens / seconds for seconds in engine.seconds(work)]
                taken[f"{work[0]} {work[1]}"][engine.name].append(rates)
        if time.monotonic() > end:
            break
    for engine in engines:
        engine.end()
    return {work: dict(of) for work, of in taken.items()}


def report(args: argparse.Namespace, taken: Taken) -> None:
    print("| work | by | engine | tok/s, median | quartiles | ridgeline over it | rounds |")
    print("|---|---|---|---|---|---|---|")
    for work, of in taken.items():
        for at, clock in enumerate(("clock", "processors")):
            ours = [rates[at] for rates in of["ridgeline"]]
            for name, every in of.items():
                rates = [each[at] for each in every]
                low, high = (sorted(rates)[len(rates) * i // 4] for i in (1, 3))
                over = median(mine / theirs for mine, theirs in zip(ours, rates, strict=True))
                told = f"{median(rates):.1f} | {low:.1f} to {high:.1f} | {over:.2f} | {len(rates)}"
                print(f"| {work} | {clock} | {name} | {told} |")
    if args.out is None:
        return
    spec = read_spec(json.loads((args.model / "config.json").read_text()))
    record = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "device": device().partition(",")[0],
        "versions": {
            "ridgeline": ridgeline.__version__,
            "commit": args.commit,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "llama-cpp-python": args.llama_version,
        },
        "model": CONFIG | {"num_hidden_layers": spec.num_layers},
        "parameters": num_parameters(spec),
        "active_parameters": num_active_parameters(spec),
        "weight_format": args.weight_format,
        "threads": args.threads,
        "tokens_per_second": taken,
    }
    args.out.write_bytes(gzip.compress(json.dumps(record).encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "serve", "run"))
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--llama", type=Path, help="a Python with llama-cpp-python and gguf")
    parser.add_argument("--llama-version", help="told in the result")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--weight-format", default="int4-g32")
    parser.add_argument("--one-by-one", action="store_true", help="also, or in `serve`: this way")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", default="512", help="prompt lengths")
    parser.add_argument("--decode", default="decode", help="decode, decode8 or both")
    parser.add_argument("--new", type=int, default=16, help="tokens of a decode")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=60, help="no round begins after these")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, help="a file .json.gz")
    args = parser.parse_args()
    if args.what == "make":
        make(args.model, args.layers, args.llama)
    elif args.what == "serve":
        serve(args.model, args.weight_format, args.threads, one_by_one=args.one_by_one)
    else:
        report(args, run(args))


if __name__ == "__main__":
    main()
