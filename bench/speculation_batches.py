"""Is an engine that speculates ever slower than one that does not, whatever the batch?

Random weights, and guesses that are right so often by a coin: one engine for each rate, beside one
that does not speculate ("off"). Or a model with its draft, asked for held-out problems of a task
(`--speculate`, `--task`). The number of guesses is pinned from outside, and "auto" leaves it to the
engine, which learns from the pinned runs too and is asked before them in each round. Tokens a
second are those of the window in which all requests decode; few requests give longer answers, as
few steps are given by luck.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from bench.adapter import RidgelineEngine
from bench.guess_counts import Counts
from ridgeline import LLM
from ridgeline.evaluation.tasks import problems
from ridgeline.request import Request
from ridgeline.scheduler.guessing import GuessChooser

Row = dict[str, Any]
OFF, AUTO = "off", "auto"
FEW = 8  # requests
FIRST_TOKEN_ID = 3  # of random prompts; those before it may end an answer


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0


class Pinned:
    """In the place of an engine's chooser: so many guesses, as far as they fit into a step."""

    def __init__(self, chooser: GuessChooser, num_guesses: int) -> None:
        self._chooser, self._num_guesses = chooser, num_guesses

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        if not decoding:
            return 0
        most = self._chooser.max_checked_tokens // len(decoding) - 1
        fitting = [k for k in self._chooser.choices if k <= min(most, self._num_guesses)]
        return max(fitting, default=0)

    def limit(self, request: Request, k: int) -> int:
        return k

    def observe(self, checked: Mapping[str, tuple[int, int]]) -> None:
        self._chooser.observe(checked)

    def forget(self, request_id: str) -> None:
        self._chooser.forget(request_id)


@contextmanager
def pinned(llm: LLM, guesses: str) -> Iterator[None]:
    """The engine guesses so many tokens for each row; "auto": as many as it likes."""
    scheduler = llm.engine.scheduler
    chooser = scheduler.guesses
    if not isinstance(chooser, GuessChooser):
        raise SystemExit("the engine does not choose how much to guess")
    if guesses != AUTO:
        scheduler.guesses = Pinned(chooser, int(guesses))
    try:
        yield
    finally:
        scheduler.guesses = chooser


def window(engine: RidgelineEngine, random: Random, args: argparse.Namespace, batch: int) -> float:
    """Tokens a second from the step by which each request has one to that by which one ends."""
    # What comes behind the end of an answer to a problem is no text that anybody asks for.
    length = args.output_len * (1 if args.task else max(1, FEW // batch))
    prompts = [Prompt(ids, length) for ids in prompts_of(engine.llm, random, args, batch)]
    had: dict[str, int] = {}
    begin: tuple[float, int] | None = None
    end: tuple[float, int] | None = None
    core = engine.llm.engine
    for prompt in prompts:
        core.add(engine.request(prompt, time.monotonic()))
    while not core.is_idle:
        for output in core.step():
            had[output.request_id] = had.get(output.request_id, 0) + len(output.new_token_ids)
        now, total = time.monotonic(), sum(had.values())
        if begin is None and len(had) == batch:
            begin = now, total
        if end is None and max(had.values(), default=0) >= length:
            end = now, total
    if begin is None or end is None or end[0] <= begin[0]:
        raise SystemExit(f"batch {batch}: no window in which all decode; ask for longer answers")
    return (end[1] - begin[1]) / (end[0] - begin[0])


def prompts_of(
    llm: LLM, random: Random, args: argparse.Namespace, batch: int
) -> Iterator[list[int]]:
    """Random tokens, or problems that nobody was asked before."""
    vocab = llm.spec.vocab_size
    asked = iter(problems(args.task, batch, random.randrange(1 << 30)) if args.task else ())
    for _ in range(batch):
        if args.task:
            messages = [{"role": m.role, "content": m.content} for m in next(asked).messages]
            yield llm.encode_chat(messages)
        else:
            yield [random.randrange(FIRST_TOKEN_ID, vocab) for _ in range(args.prompt_len)]


def batches(args: argparse.Namespace) -> Iterator[Row]:
    random = Random(args.seed)
    with engine_of(args, OFF) as plain:
        for rate in ("",) if args.speculate else args.rates:
            with engine_of(args, args.speculate or f"synthetic:{rate}") as guessing:
                counts = Counts()
                guessing.llm.engine.journals.append(counts)
                for batch in args.batches:
                    yield from rows_of_batch(args, (plain, guessing), counts, random, batch, rate)


def rows_of_batch(
    args: argparse.Namespace,
    engines: tuple[RidgelineEngine, RidgelineEngine],
    counts: Counts,
    random: Random,
    batch: int,
    rate: str,
) -> Iterator[Row]:
    plain, guessing = engines
    order = sorted(args.guesses, key=lambda name: name != AUTO)
    found: dict[str, list[float]] = {name: [] for name in (OFF, *order)}
    about: dict[str, Row] = {OFF: {}}
    for number in range(args.rounds + 1):
        speeds = {OFF: window(plain, random, args, batch)}
        for name in order:
            counts.restart()
            with pinned(guessing.llm, name):
                speeds[name] = window(guessing, random, args, batch)
            about[name] = counts.figures()
        if number:  # in the first steps are captured
            for name, speed in speeds.items():
                found[name].append(speed)
    base = statistics.median(found[OFF])
    for name in (OFF, *args.guesses):
        speed = statistics.median(found[name])
        row = {"batch": batch, "guesses": name, "tokens_per_s": speed}
        row["speculate"] = args.speculate or f"synthetic:{rate}"
        yield row | {"times_off": speed / base, "rounds": found[name]} | about[name]


@contextmanager
def engine_of(args: argparse.Namespace, speculate: str) -> Iterator[RidgelineEngine]:
    engine = RidgelineEngine(args.model, speculate=speculate, **options(args))
    try:
        yield engine
    finally:
        engine.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def options(args: argparse.Namespace) -> Row:
    names = ["device", "dtype", "threads", "max_model_len", "weight_format", "kv_cache_dtype"]
    names += ["kv_cache_memory_bytes", "load_format", "max_num_seqs", "warm_up"]
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}
