"""Which share of a decode step is not spent in kernels, for models so small that it matters?

    python -m bench.cpu.host_share --models DIR --rounds 5 --commit ID
        [--out bench/cpu/results/latest.json] [--raw FILE.jsonl.gz]

The bundled chat model, and `DIR/B-hf` (15 M parameters), with 1, 8 and 64 requests. Recorded steps
are replayed by one call into C, which is timed; everything else of `Engine.step` is the host's.
Time is that of the engine's own thread on a processor, so that others on the machine change little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.adapter import RidgelineEngine
from bench.cpu.latest import LATEST, Row, merge, row, show, write_raw
from bench.cpu.run import Asked, Runner
from ridgeline.kernels.cpu.recorder import Replay

BATCHES = (1, 8, 64)
CONTEXT, NEW = 32, 96  # tokens


@contextmanager
def timed_replays() -> Iterator[list[float]]:
    """Seconds of the replays in this context, one by one."""
    found: list[float] = []
    plain = Replay.__call__

    def timed(self: Replay) -> None:
        begin = time.thread_time()
        plain(self)
        found.append(time.thread_time() - begin)

    Replay.__call__ = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Replay.__call__ = plain  # type: ignore[method-assign]


def measure(engine: RidgelineEngine, prompts: list[list[int]]) -> dict[str, float]:
    """Of the steps in which every request gets one token."""
    inner = engine.llm.engine
    with timed_replays() as replays:
        for prompt in prompts:
            inner.add(engine.request(Asked(prompt, NEW), time.monotonic()))
        seen = 0
        while seen < len(prompts):
            seen += sum(len(output.new_token_ids) for output in inner.step())
        steps: list[tuple[float, float]] = []
        while not inner.is_idle:
            replays.clear()
            begin = time.thread_time()
            inner.step()
            steps.append((time.thread_time() - begin, sum(replays)))
    whole, kernels = (sum(part) for part in zip(*((a, b) for a, b in steps if b), strict=True))
    count = sum(1 for _, b in steps if b)
    return {"outside_us": (whole - kernels) / count * 1e6, "share": (whole - kernels) / whole}


def rounds(args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for name, model in (("demo:chat", "demo:chat"), ("B bf16", str(args.models / "B-hf"))):
        options = {"device": "cpu", "threads": 1, "max_num_seqs": max(BATCHES)}
        engine = RidgelineEngine(model, max_model_len=256, **options)
        draw, vocab = Runner(engine)._random.randrange, engine.llm.spec.vocab_size
        for number in range(args.rounds + 1):
            for batch in BATCHES:
                prompts = [[draw(300, vocab) for _ in range(CONTEXT)] for _ in range(batch)]
                found = measure(engine, prompts)
                if number:  # steps are recorded when they are first met
                    records.append({"model": name, "batch": batch, "round": number} | found)
        engine.close()
    return records


def rows(records: list[dict[str, Any]], commit: str) -> Iterator[Row]:
    cases = dict.fromkeys((record["model"], record["batch"]) for record in records)
    for model, batch in cases:
        of_case = [r for r in records if (r["model"], r["batch"]) == (model, batch)]
        for metric, key in (("share", "share"), ("us", "outside_us")):
            values = [record[key] for record in of_case]
            yield row(f"{model} decode b{batch}, outside kernels", metric, values, commit=commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--raw", type=Path)
    args = parser.parse_args()
    records = rounds(args)
    found = list(rows(records, args.commit))
    if args.raw is not None:
        write_raw(records, args.raw)
    merge(found, args.out)
    show(found)


if __name__ == "__main__":
    main()
