r"""How much faster are answers with drafts, and are they ever slower? Tables, one JSON each.

    python -m bench.speculation tasks --speculate off,draft:demo:draft:2,draft:demo:draft,ngram \
        --tasks stories,lookup,copy --temperatures 0,0.8 --questions 8 --rounds 3 --out tasks.json
    python -m bench.speculation batches --model DIR --dtype bfloat16 --rates 0.4,0.6,0.8 \
        --drafts 0,1,2,3,4,6,8,auto --batches 1,2,4,8,16,32,64,128,256 --out batches.json

`tasks`: held-out problems of `ridgeline eval`, the same for every engine, one at a
time; all engines live side by side and are asked in turns. Medians of the rounds; `decode_tok_s` is
that of tokens behind the first of each answer. `tokens_per_step` are those of a step of a row that
decodes, its own among them; `by_position` is how often draft 1, 2, .. was right where all before it
were; `predicted_times_off` is what the cost model, with the prices of `--record`, says of the gain
of such steps over steps without drafts, an answer's begin included. `same_answers` (greedy or
seeded): how many are those of the first engine, token for token; in 16 bits the likeliest of tokens
that are as good as equal may be another, in float32 it is not.

`batches`: see `bench.speculation_batches`.
`device`: see `bench.speculation_device`; what steps with drafts take on a GPU alone, and by price.

    python -m bench.speculation device --record calibration.json --batches 1,8 --out device.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import ridgeline
from bench.cpu.latest import device as cpu_name
from bench.draft_counts import Counts
from bench.speculation_batches import OFF, batches, options, prices_of
from bench.speculation_device import device
from ridgeline import LLM, SamplingParams
from ridgeline.evaluation.problems import TASKS, problems
from ridgeline.startup import keep_what_is_there

Row = dict[str, Any]
LONGEST = {"stories": 200, "copy": 96, "lookup": 32, "records": 96}  # tokens of an answer
OTHERS_LONGEST = 96


# ---------------------------------------------------------------------- tasks


@dataclass(slots=True)
class Seat:
    """An engine of the table of tasks, and what its rounds have brought."""

    speculate: str
    llm: LLM
    counts: Counts  # of this round
    rounds: dict[tuple[str, float], list[Row]] = field(default_factory=dict)
    answers: dict[tuple[str, float], list[list[int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    prompts: list[list[int]]
    sampling: list[SamplingParams]


def asked_of(llm: LLM, args: argparse.Namespace, task: str, temperature: float) -> Asked:
    """The first problems of a task, by the chat template."""
    prompts = [
        llm.encode_chat([{"role": m.role, "content": m.content} for m in one.messages])
        for one in problems(task, args.questions, args.seed)
    ]
    most = LONGEST.get(task, OTHERS_LONGEST)
    sampling = [
        SamplingParams(
            temperature=temperature, max_tokens=most, seed=place if args.seeded else None
        )
        for place in range(len(prompts))
    ]
    return Asked([list(ids) for ids in prompts], sampling)


def ask(seat: Seat, asked: Asked, key: tuple[str, float]) -> None:
    """One round: the questions one after the other, each prompt computed anew."""
    begin, num, decoded, decode_s = time.perf_counter(), 0, 0, 0.0
    answers = []
    for prompt, sampling in zip(asked.prompts, asked.sampling, strict=True):
        seat.llm.engine.scheduler.blocks.clear_cache()
        result = seat.llm.generate([prompt], sampling, progress=False)[0]
        metrics = result.metrics
        if metrics.first_token_time is None or metrics.finish_time is None:
            raise SystemExit(f"an answer did not end: {result.error}")
        answers.append(list(result.token_ids))
        num += len(answers[-1])
        decoded += len(answers[-1]) - 1
        decode_s += metrics.finish_time - metrics.first_token_time
    row: Row = {"whole_tok_s": num / (time.perf_counter() - begin)}
    row["decode_tok_s"] = decoded / decode_s if decode_s else None
    if seat.speculate != OFF:
        row["predicted_times_off"] = seat.counts.predicted_gain(prices_of(seat.llm), 1)
    seat.rounds.setdefault(key, []).append(row | seat.counts.figures())
    seat.answers.setdefault(key, answers)


def tasks(args: argparse.Namespace) -> Iterator[Row]:
    with ExitStack() as stack:
        seats = []
        for speculate in args.speculate:
            llm = LLM(args.model, speculate=speculate, **options(args))
            stack.callback(llm.close)
            counts = Counts()
            llm.engine.listeners.append(counts)
            seats.append(Seat(speculate, llm, counts))
        keep_what_is_there()  # as the commands do
        keys = [(task, float(t)) for task in args.tasks for t in args.temperatures]
        for seat in seats:  # steps are captured when they are first met
            for key in keys:
                ask(seat, asked_of(seat.llm, args, *key), key)
            seat.rounds.clear()
        for number in range(args.rounds):
            turn = number % len(seats)
            for key in keys:
                for seat in (*seats[turn:], *seats[:turn]):
                    seat.counts.restart()
                    ask(seat, asked_of(seat.llm, args, *key), key)
        for key in keys:
            yield from rows_of(seats, key, is_repeatable=key[1] == 0 or args.seeded)


def rows_of(seats: Sequence[Seat], key: tuple[str, float], *, is_repeatable: bool) -> Iterator[Row]:
    first = middle(seats[0].rounds[key], "decode_tok_s")
    for seat in seats:
        rounds = seat.rounds[key]
        decode = middle(rounds, "decode_tok_s")
        row: Row = {"task": key[0], "temperature": key[1], "speculate": seat.speculate}
        row |= {"decode_tok_s": decode, "whole_tok_s": middle(rounds, "whole_tok_s")}
        row |= {"times_first": decode / first if decode and first else None}
        if seat.speculate != OFF:
            row["predicted_times_off"] = middle(rounds, "predicted_times_off")
        row |= {name: rounds[-1][name] for name in ("tokens_per_step", "drafts_per_step")}
        row |= {name: rounds[-1][name] for name in ("by_position", "tried")}
        if is_repeatable:
            pairs = zip(seat.answers[key], seats[0].answers[key], strict=True)
            row["same_answers"] = sum(mine == first_one for mine, first_one in pairs)
        yield row | {"num_answers": len(seat.answers[key]), "rounds": rounds}


# ---------------------------------------------------------------------- the record


def middle(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None


def environment() -> Row:
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": package("triton"),
        "cuda": torch.version.cuda,
        "ridgeline": ridgeline.__version__,
        "command": " ".join(word.rpartition("/")[2] for word in sys.argv),
    }


def package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def line(row: Mapping[str, Any]) -> str:
    """What a person wants to see of a row."""
    long = ("rounds", "tried", "by_position")
    parts = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if name not in long and value is not None
    ]
    right = ", ".join("-" if x is None else f"{x:.2f}" for x in row.get("by_position", ()))
    return "  ".join(parts) + (f"  by position {right}" if right else "")


def record(args: argparse.Namespace, rows: Callable[[argparse.Namespace], Iterator[Row]]) -> None:
    """The file is complete after each row."""
    about = environment() | {"model": Path(args.model).name, "rows": []}
    for row in rows(args):
        about["rows"].append(row)
        print(line(row), flush=True)
        beside = Path(args.out).with_suffix(".part")
        beside.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        beside.replace(args.out)


# ---------------------------------------------------------------------- the command


def words(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def numbers(text: str) -> list[int]:
    return [int(part) for part in words(text)]


def task_names(text: str) -> list[str]:
    if unknown := set(words(text)) - set(TASKS):
        raise argparse.ArgumentTypeError(f"no task {sorted(unknown)}; there are {', '.join(TASKS)}")
    return words(text)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = found.add_subparsers(required=True)
    add_tasks(tables.add_parser("tasks"))
    add_batches(tables.add_parser("batches"))
    add_device(tables.add_parser("device"))
    return found


def add_tasks(to: argparse.ArgumentParser) -> None:
    to.set_defaults(rows=tasks)
    to.add_argument("--model", default="demo:chat")
    to.add_argument(
        "--speculate",
        type=words,
        default=words(
            "off,draft:demo:draft:1,draft:demo:draft:2,draft:demo:draft:4,draft:demo:draft,"
            "ngram:4,ngram,suffix"
        ),
        help="EngineConfig.speculate of each engine; the first is what others are compared with",
    )
    to.add_argument("--tasks", type=task_names, default=["stories", "lookup", "copy"])
    to.add_argument("--temperatures", type=words, default=["0", "0.8"])
    to.add_argument("--seeded", action="store_true", help="answers at a temperature have seeds")
    to.add_argument("--questions", type=int, default=8, help="of each task")
    add_common(to, rounds=3, kv_bytes=256 << 20)


def add_batches(to: argparse.ArgumentParser) -> None:
    to.set_defaults(rows=batches)
    to.add_argument("--model", required=True, help="a folder; a config.json is enough")
    to.add_argument("--rates", type=words, default=words("0.4,0.6,0.8"))
    to.add_argument("--speculate", help="EngineConfig.speculate instead of one engine a rate")
    to.add_argument("--task", help="ask for problems of this task, not for random tokens")
    to.add_argument("--load-format", default="random", choices=("random", "auto"))
    to.add_argument("--draft_tokens", type=words, default=words("0,1,2,3,4,6,8,auto"))
    to.add_argument("--batches", type=numbers, default=numbers("1,2,4,8,16,32,64,128,256"))
    to.add_argument("--prompt-len", type=int, default=96, help="at least; at most twice as long")
    to.add_argument("--output-len", type=int, default=256)
    to.add_argument("--least-s", type=float, default=0.25, help="of a round, without drafts")
    add_common(to, rounds=2, kv_bytes=None)


def add_device(to: argparse.ArgumentParser) -> None:
    to.set_defaults(rows=device)
    to.add_argument("--model", default="demo:chat")
    to.add_argument("--speculate", default="draft:demo:draft")
    to.add_argument("--draft_tokens", type=numbers, default=numbers("0,1,2,3,4,6,8"))
    to.add_argument("--batches", type=numbers, default=[1])
    to.add_argument("--prompt-len", type=int, default=256)
    to.add_argument("--steps", type=int, default=8, help="of each row in a round")
    add_common(to, rounds=2, kv_bytes=256 << 20)


def add_common(to: argparse.ArgumentParser, *, rounds: int, kv_bytes: int | None) -> None:
    to.add_argument("--record", help="a calibration; else the one kept for this device, if any")
    to.add_argument("--rounds", type=int, default=rounds)
    to.add_argument("--seed", type=int, default=0)
    to.add_argument("--out", required=True)
    to.add_argument("--device", default="auto")
    to.add_argument("--dtype", default="auto")
    to.add_argument("--threads", type=int)
    to.add_argument("--max-model-len", type=int)
    to.add_argument("--max-num-seqs", type=int)
    to.add_argument("--weight-format")
    to.add_argument("--kv-cache-dtype")
    to.add_argument("--kv-cache-memory-bytes", type=int, default=kv_bytes, help="of each engine")
    to.add_argument("--warm-up", choices=("auto", "off"), default="off")
    to.set_defaults(load_format=to.get_default("load_format") or "auto")


def main() -> None:
    args = parser().parse_args()
    record(args, args.rows)


if __name__ == "__main__":
    main()
