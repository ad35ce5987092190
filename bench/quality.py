"""What does a format of weights or cache, or a way of rounding, change in what a model says?

    python bench/quality.py [--model demo:chat] [--each 50] [--text FILE] [--dtype bfloat16] \
        [--out quality.json] plain fp8 int8 int4 kv:int8 kv:int4 [folder:DIR ...]

Each way is a weight format, `kv:` and a KV format, or `folder:` and what `ridgeline quantize` made
of the same model. The model as it is first answers problems greedily (`--each` of a task, where it
has a tokenizer that knows them) or reads passages of a text. Then it, once more, and every way go
over the same tokens, teacher-forced: how far (KL, in nats) are the next tokens from the first
ones, how often is the token the likeliest, how probable is it? With problems each way answers them
itself too. Of a distribution the 20 likeliest tokens are known; all others count as one, which can
only make a divergence smaller.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline import LLM, SamplingParams, __version__
from ridgeline.evaluation.answers import Question, ask, by_task, questions
from ridgeline.evaluation.perplexity import windows
from ridgeline.evaluation.problems import TASKS, is_right
from ridgeline.evaluation.texts import read_text
from ridgeline.request import MAX_LOGPROBS, TokenLogprobs

RANKS = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=MAX_LOGPROBS)
PASSAGE = 400  # characters of a text that make one
LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens, of which those from `first` on are scored."""

    token_ids: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Quality:
    """`same`: share of the tokens that are the way's likeliest. `solved`: problems of each task
    that it solves itself, of `each`. `weight_bytes` as the memory contract counts them."""

    way: str
    num_tokens: int
    kl: float
    same: float
    perplexity: float
    solved: dict[str, int]
    each: int
    weight_bytes: int


def options(way: str) -> dict[str, Any]:
    """Of LLM, beside the model."""
    kind, _, name = way.rpartition(":")
    if kind == "kv":
        return {"kv_cache_dtype": name}
    return {} if kind == "folder" else {"weight_format": way}


def known(entry: TokenLogprobs) -> dict[int, float]:
    return dict(entry.top)


def divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """KL of two distributions of which some log-probabilities are known."""
    both = p.keys() & q.keys()
    kl = sum(math.exp(p[i]) * (p[i] - q[i]) for i in both)
    p_rest, q_rest = (max(LEAST, 1.0 - sum(math.exp(x[i]) for i in both)) for x in (p, q))
    return kl + p_rest * (math.log(p_rest) - math.log(q_rest))


def teacher_forced(llm: LLM, passages: Sequence[Passage]) -> list[TokenLogprobs]:
    """What the model knew of each scored token, before it."""
    prompts = [passage.token_ids for passage in passages]
    found: list[TokenLogprobs] = []
    for passage, result in zip(passages, llm.generate(prompts, RANKS, progress=False), strict=True):
        if result.error is not None or result.prompt_logprobs is None:
            raise SystemExit(f"a request failed: {result.error}")
        found += [e for e in result.prompt_logprobs[passage.first :] if e is not None]
    return found


def material(llm: LLM, args: argparse.Namespace) -> tuple[list[Passage], list[Question]]:
    """What is scored, and the problems it came from."""
    if args.text is not None:
        text = read_text(args.text)[: args.each * PASSAGE]
        pieces = [text[i : i + PASSAGE] for i in range(0, len(text), PASSAGE)]
        return [Passage(window.token_ids, 1) for window in windows(llm, pieces)], []
    asked, _ = questions(llm, list(TASKS), args.each, args.seed)
    longest = llm.resolved.max_model_len - 1
    passages = []
    for one in ask(llm, asked, progress=False):
        prompt = one.question.prompt_token_ids
        passages.append(Passage((*prompt, *one.token_ids)[:longest], len(prompt)))
    return passages, asked


def solved(llm: LLM, asked: Sequence[Question]) -> dict[str, int]:
    return {
        task: sum(is_right(one.question.problem, one.text) for one in group)
        for task, group in by_task(ask(llm, asked, progress=False)).items()
    }


def quality(
    way: str, llm: LLM, theirs: Sequence[TokenLogprobs], passages: Sequence[Passage],
    asked: Sequence[Question], each: int,
) -> Quality:  # fmt: skip
    ours = teacher_forced(llm, passages)
    pairs = zip(theirs, ours, strict=True)
    return Quality(
        way,
        len(ours),
        sum(divergence(known(p), known(q)) for p, q in pairs) / len(ours),
        sum(entry.rank == 1 for entry in ours) / len(ours),
        math.exp(-sum(entry.logprob for entry in ours) / len(ours)),
        solved(llm, asked),
        each,
        next(row.predicted for row in llm.memory if row.what == "weights"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="+", metavar="WAY")
    parser.add_argument("--model", default="demo:chat")
    parser.add_argument("--each", type=int, default=50, help="problems of a task, or passages")
    parser.add_argument("--text", type=Path, help="passages of this file in place of problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-blocks", type=int, default=4000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def engine(model: str, **more: Any) -> LLM:
        shared = {"device": args.device, "dtype": args.dtype, "num_blocks": args.num_blocks}
        return LLM(model, **shared, **more)

    with engine(args.model) as llm:
        passages, asked = material(llm, args)
        theirs = teacher_forced(llm, passages)
    rows = []
    for way in args.ways:
        model = way.removeprefix("folder:") if way.startswith("folder:") else args.model
        with engine(model, **options(way)) as llm:
            rows.append(quality(way, llm, theirs, passages, asked, args.each))
        told = " ".join(f"{task} {num}" for task, num in rows[-1].solved.items())
        print(
            f"{Path(way).name:24} {rows[-1].num_tokens} tokens  KL {rows[-1].kl:.5f}"
            f"  same {rows[-1].same:.4f}  perplexity {rows[-1].perplexity:.4f}"
            f"  {rows[-1].weight_bytes / 1e6:.2f} MB  {told}",
            flush=True,
        )
    if args.out:
        about = {"model": Path(args.model).name, "dtype": args.dtype, "ridgeline": __version__}
        named = [asdict(row) | {"way": Path(row.way).name} for row in rows]
        args.out.write_text(json.dumps(about | {"rows": named}, indent=1) + "\n")


if __name__ == "__main__":
    main()
