"""How fast is Ridgeline on this CPU at the CPU workloads? One model in one format, one JSON object.

    python -m bench.cpu.run --model DIR --dtype bfloat16 [--weight-format int8] --prefill 512,2048 \
        --decode 1,8 --new 32 --threads 2

Prompts are random token ids, never twice the same; answers are greedy and have a forced length.
"decode" is tokens a second of all requests from the first token of the last one on. `read_gb_s` is
what this machine reads at that moment, by all threads; `rss_mb` the most memory that the process
held, `start_rss_mb` the same when the model was loaded.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.adapter import RidgelineEngine, RunResult
from bench.cpu.kernels import read_bandwidth

CONTEXT = 128  # prompt tokens before a decode
MOST_TOKENS = 2560


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0


class Runner:
    def __init__(self, engine: RidgelineEngine) -> None:
        self._engine, self._random = engine, random.Random(0)

    def _run(self, count: int, prompt_len: int, new: int) -> RunResult:
        vocab = self._engine.llm.spec.vocab_size
        draw = self._random.randrange
        asked = [Asked([draw(300, vocab) for _ in range(prompt_len)], new) for _ in range(count)]
        return self._engine.run(asked)

    def prefill(self, count: int) -> float:
        return count / self._run(1, count, 1).wall

    def decode(self, batch: int, new: int) -> float:
        """From the step on by which there is a token of each request; all begin in one step."""
        result = self._run(batch, CONTEXT, new)
        seen = 0
        for at, tokens in result.steps:
            seen += tokens
            if seen >= batch:
                return (result.out_tokens - seen) / (result.t_done - at)
        raise SystemExit("a decode ended before it began")


def peak_rss_mb() -> float:
    """The most that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weight-format", default="auto")
    parser.add_argument("--load-format", default="auto", help="random: needs config.json alone")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--decode", default="1,8")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    begin = time.perf_counter()
    engine = RidgelineEngine(
        args.model,
        device="cpu",
        dtype=args.dtype,
        weight_format=args.weight_format,
        load_format=args.load_format,
        threads=args.threads,
        max_model_len=MOST_TOKENS,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
    )
    found = {"load_s": time.perf_counter() - begin, "start_rss_mb": peak_rss_mb()}
    runner = Runner(engine)
    runner.prefill(16)
    for batch in numbers(args.decode):  # steps are recorded when they are first met
        runner.decode(batch, 4)
    for count in numbers(args.prefill):
        found[f"prefill {count}"] = runner.prefill(count)
    for batch in numbers(args.decode):
        found[f"decode b{batch}"] = runner.decode(batch, args.new)
    found["rss_mb"] = peak_rss_mb()
    found["read_gb_s"] = read_bandwidth(5)[0] / 1e9
    print(json.dumps(found))


if __name__ == "__main__":
    main()
