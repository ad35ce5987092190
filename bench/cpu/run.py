"""How fast is Ridgeline on this CPU at the CPU workloads? One model in one format, one JSON object.

    python -m bench.cpu.run --model DIR --dtype bfloat16 [--weight-format int8] --prefill 512,2048 \
        --decode 1,8 --new 32 --threads 2

Prompts are random token ids, never twice the same; answers are greedy and have a forced length.
"decode" is tokens a second of all requests from the first token of the last one on. `read_gb_s` is
what this machine reads at that moment, by all threads.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence

from bench.cpu.kernels import read_bandwidth
from ridgeline import LLM, SamplingParams
from ridgeline.answer import Answer, check_prompt, resolve_sampling

CONTEXT = 128  # prompt tokens before a decode
MOST_TOKENS = 2560


class Runner:
    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine
        self._random, self._count = random.Random(0), 0

    def add(self, prompt_len: int, new: int) -> None:
        vocab = self.llm.spec.vocab_size
        prompt = [self._random.randrange(300, vocab) for _ in range(prompt_len)]
        sampling = resolve_sampling(
            SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True),
            prompt_len,
            max_model_len=MOST_TOKENS,
            vocab_size=vocab,
            end_token_ids=(),
        )
        self._count += 1
        answer = Answer(
            f"r{self._count}",
            check_prompt(prompt, vocab),
            sampling,
            tokenizer=None,
            end_token_ids=frozenset(),
            arrival_time=0.0,
        )
        self.engine.add(answer.requests[0])

    def prefill(self, count: int) -> float:
        self.add(count, 1)
        begin = time.perf_counter()
        while not self.engine.is_idle:
            self.engine.step()
        return count / (time.perf_counter() - begin)

    def decode(self, batch: int, new: int) -> float:
        for _ in range(batch):
            self.add(CONTEXT, new)
        done, begin, at_begin, missing = 0, 0.0, 0, batch
        started: set[str] = set()
        while not self.engine.is_idle:
            for output in self.engine.step():
                done += len(output.new_token_ids)
                if output.new_token_ids and output.request_id not in started:
                    started.add(output.request_id)
                    missing -= 1
                    if missing == 0:
                        begin = time.perf_counter()
            if missing == 0 and at_begin == 0:
                at_begin = done
        return (done - at_begin) / (time.perf_counter() - begin)


def numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weight-format", default="auto")
    parser.add_argument("--prefill", default="512,2048")
    parser.add_argument("--decode", default="1,8")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    begin = time.perf_counter()
    llm = LLM(
        args.model,
        device="cpu",
        dtype=args.dtype,
        weight_format=args.weight_format,
        threads=args.threads,
        max_model_len=MOST_TOKENS,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
    )
    found = {"load_s": time.perf_counter() - begin}
    runner = Runner(llm)
    runner.prefill(16)
    for batch in numbers(args.decode):  # steps are recorded when they are first met
        runner.decode(batch, 4)
    for count in numbers(args.prefill):
        found[f"prefill {count}"] = runner.prefill(count)
    for batch in numbers(args.decode):
        found[f"decode b{batch}"] = runner.decode(batch, args.new)
    found["read_gb_s"] = read_bandwidth(5)[0] / 1e9
    print(json.dumps(found))


if __name__ == "__main__":
    main()
