"""How many greedy answers depend on what else is in a step?

    PYTHONPATH=. python bench/ties.py [--device cuda] [--json ties.json]

Prompts are held-out problems of `ridgeline eval`. Each is answered alone, without a cached
prefix: these answers are what the others are compared with. Then again alone (nothing may change),
in a batch (8 at a time, and all at once), and alone with the prompt in the prefix cache. Where
the two likeliest tokens of a place have the same logit, to the last bit, is counted too: then the
lowest id is taken, and the smallest change elsewhere moves the answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ridgeline import LLM, SamplingParams, __version__
from ridgeline.evaluation.answers import questions
from ridgeline.evaluation.problems import TASKS
from ridgeline.kernels.cpu import native

Answer = tuple[int, ...]


def prompts(llm: LLM, tasks: Sequence[str], count: int, seed: int) -> list[Answer]:
    """As many of each task, tasks one after the other."""
    asked, _ = questions(llm, tasks, -(-count // len(tasks)), seed)
    return [one.prompt_token_ids for one in asked][:count]


def answers(
    llm: LLM, asked: Sequence[Answer], sampling: SamplingParams, together: int, *, cached: bool
) -> list[Answer]:
    """`together` at a time. Not `cached`: no prompt is found in the prefix cache."""
    found: list[Answer] = []
    for begin in range(0, len(asked), together):
        if not cached:
            llm.engine.scheduler.blocks.clear_cache()
        results = llm.generate(asked[begin : begin + together], sampling, progress=False)
        if failed := [result.error for result in results if result.error is not None]:
            raise SystemExit(f"a request failed: {failed[0]}")
        found += [tuple(result.token_ids) for result in results]
    return found


def ties(llm: LLM, asked: Sequence[Answer], max_tokens: int) -> tuple[int, int, int]:
    """Places, places whose two likeliest tokens are equal, and answers with such a place."""
    places = equal = with_some = 0
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2)
    for prompt in asked:
        llm.engine.scheduler.blocks.clear_cache()
        (result,) = llm.generate([prompt], sampling, progress=False)
        if result.error is not None or result.outputs[0].logprobs is None:
            raise SystemExit(f"a request failed: {result.error}")
        logprobs = result.outputs[0].logprobs
        same = sum(entry.top[0][1] == entry.top[1][1] for entry in logprobs)
        places, equal, with_some = places + len(logprobs), equal + same, with_some + (same > 0)
    return places, equal, with_some


def count(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    asked = prompts(llm, args.tasks, args.prompts, args.seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    alone = answers(llm, asked, sampling, 1, cached=False)
    ways = {
        "alone again": answers(llm, asked, sampling, 1, cached=False),
        "company of 8": answers(llm, asked, sampling, 8, cached=False),
        f"company of {len(asked)}": answers(llm, asked, sampling, len(asked), cached=False),
    }
    hit = []
    for prompt in asked:
        answers(llm, [prompt], SamplingParams(temperature=0.0, max_tokens=1), 1, cached=False)
        hit += answers(llm, [prompt], sampling, 1, cached=True)
    ways["prefix hit"] = hit
    places, equal, with_some = ties(llm, asked, args.tokens)
    return {
        "answers": len(asked),
        "tokens": sum(map(len, alone)),
        "changed": {
            way: sum(a != b for a, b in zip(alone, found, strict=True))
            for way, found in ways.items()
        },
        "places": places,
        "equal_places": equal,
        "answers_with_equal_places": with_some,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo:chat")
    parser.add_argument("--tasks", nargs="+", default=["stories"], choices=list(TASKS))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weight-format", default="auto")
    parser.add_argument("--speculate", default="off")
    parser.add_argument("--num-blocks", type=int, default=4000)
    parser.add_argument("--label", default="", help="kept in the result")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python bench/ties.py --device {args.device} --dtype {args.dtype}"
        f" --tasks {' '.join(args.tasks)} --prompts {args.prompts} --tokens {args.tokens}"
        f" --seed {args.seed} --weight-format {args.weight_format} --speculate {args.speculate}",
        "model": Path(args.model).name,
        "label": args.label,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "isa": native.level() if args.device == "cpu" else None,
        "torch": torch.__version__,
        "ridgeline": __version__,
    }
    options = ("device", "dtype", "weight_format", "speculate", "num_blocks")
    with LLM(args.model, **{name: getattr(args, name) for name in options}) as llm:
        found = count(llm, args)
    of = found["answers"]
    for way, changed in found["changed"].items():
        print(f"{way:16} {changed:3} of {of} answers changed")
    print(f"{found['equal_places']} of {found['places']} places have equal likeliest tokens, "
          f"in {found['answers_with_equal_places']} of {of} answers")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(about | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
