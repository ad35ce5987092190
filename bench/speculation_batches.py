"""Is an engine that speculates ever slower than one that does not, whatever the batch?

Random weights, and drafts that are right so often by a coin: one engine for each rate, beside one
that does not speculate ("off"). Or a model with its draft, asked for held-out problems of a task
(`--speculate`, `--task`). The number of drafts is pinned from outside, and "auto" leaves it to the
engine, which learns from the pinned runs too. Tokens a second are those of the window in which all
requests decode; few requests of random tokens give longer answers, as few steps are given by luck.

A host's speed may change twofold within a second. So a round has as many windows of each way as
fill `--least-s` without drafts, all ways in turns and in another order each time, each turn with
prompts of its own that all ways are given; its speed is all tokens of its windows over all their
seconds, and `times_off` is the middle one of its rounds, each over the same round without drafts.
Each number of drafts that the engine may choose is asked for once before that, alone and behind
others, as its steps are captured then and a draft's kernels compiled. What became of drafts is
counted in one more window of each way, behind the rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from bench.adapter import RidgelineEngine
from bench.draft_counts import Counts
from ridgeline import LLM
from ridgeline.request import Request
from ridgeline.scheduler.scheduler import DraftLengths
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.speculation.price import DraftPrices
from tools import worlds

Row = dict[str, Any]
OFF, AUTO, IN_TURNS = "off", "auto", "in turns"
TURN = 5  # steps
FEW = 8  # requests
TURNS = 1 << 30  # as many seeds of prompts
FIRST_TOKEN_ID = 3  # of random prompts; those before it may end an answer


@dataclass(frozen=True, slots=True)
class Prompt:
    prompt: list[int]
    max_tokens: int
    temperature: float = 0.0


class Pinned(DraftLengths):
    """In the place of an engine's chooser: so many drafts, as far as they fit into a step. With
    several numbers each has some steps, one behind the other."""

    def __init__(self, chooser: DraftLengthController, *num_draft_tokens: int) -> None:
        super().__init__(max(num_draft_tokens))
        self._chooser, self._in_turn = chooser, num_draft_tokens
        self._num_steps = 0

    def plan(self, decoding: Sequence[Request], now: float) -> int:
        if not decoding:
            return 0
        self._num_steps += 1
        wanted = self._in_turn[self._num_steps // TURN % len(self._in_turn)]
        most = self._chooser.max_verified_tokens // len(decoding) - 1
        fitting = [k for k in self._chooser.choices if k <= min(most, wanted)]
        return max(fitting, default=0)

    def observe(self, verified: Mapping[str, tuple[int, int]]) -> None:
        self._chooser.observe(verified)

    def forget(self, request_id: str) -> None:
        self._chooser.forget(request_id)


@contextmanager
def pinned(llm: LLM, draft_tokens: str) -> Iterator[None]:
    """The engine drafts so many tokens for each row; "auto": as many as it likes; "in turns": each
    number that it may choose."""
    scheduler = llm.engine.scheduler
    chooser = scheduler.draft_lengths
    if not isinstance(chooser, DraftLengthController):
        raise SystemExit("the engine does not choose how much to draft")
    if draft_tokens == IN_TURNS:
        scheduler.draft_lengths = Pinned(chooser, 0, *chooser.choices)
    elif draft_tokens != AUTO:
        scheduler.draft_lengths = Pinned(chooser, int(draft_tokens))
    try:
        yield
    finally:
        scheduler.draft_lengths = chooser


@dataclass(slots=True)
class Speed:
    """Of some windows."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, other: Speed) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def window(engine: RidgelineEngine, random: Random, args: argparse.Namespace, batch: int) -> Speed:
    """From the step by which each request has a token to that by which one ends."""
    # What comes behind the end of an answer to a problem is no text that anybody asks for.
    length = args.output_len * (1 if args.task else max(1, FEW // batch))
    prompts = [Prompt(ids, length) for ids in prompts_of(engine.llm, random, args, batch)]
    had: dict[str, int] = {}
    begin: tuple[float, int] | None = None
    end: tuple[float, int] | None = None
    core = engine.llm.engine
    core.scheduler.blocks.clear_cache()  # or who was asked more often has more to throw away
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
    return Speed(end[1] - begin[1], end[0] - begin[0])


def prompts_of(
    llm: LLM, random: Random, args: argparse.Namespace, batch: int
) -> Iterator[list[int]]:
    """Random tokens, of lengths that differ, as coins depend on where a token stands; or problems
    that nobody was asked before."""
    vocab = llm.spec.vocab_size
    for _ in range(batch):
        if args.task:
            asked = worlds.problem(args.task, random, "test").messages
            messages = [{"role": m.role, "content": m.content} for m in asked]
            yield llm.encode_chat(messages)
        else:
            length = args.prompt_len + random.randrange(args.prompt_len)
            yield [random.randrange(FIRST_TOKEN_ID, vocab) for _ in range(length)]


def batches(args: argparse.Namespace) -> Iterator[Row]:
    random = Random(args.seed)
    with engine_of(args, OFF) as plain:
        for rate in ("",) if args.speculate else args.rates:
            with engine_of(args, args.speculate or f"synthetic:{rate}") as drafting:
                for batch in args.batches:
                    yield from rows_of_batch(args, plain, drafting, random, batch, rate)


def rows_of_batch(
    args: argparse.Namespace,
    plain: RidgelineEngine,
    drafting: RidgelineEngine,
    random: Random,
    batch: int,
    rate: str,
) -> Iterator[Row]:
    names = [OFF, *args.draft_tokens]
    counts = {name: Counts() for name in args.draft_tokens}

    def asked(name: str, turn: int) -> Speed:
        prompts = Random(turn)
        if name == OFF:
            return window(plain, prompts, args, batch)
        with pinned(drafting.llm, name):
            return window(drafting, prompts, args, batch)

    def counted(name: str, turn: int) -> None:
        with counting(drafting.llm, counts[name]):
            asked(name, turn)

    for name in (*map(str, choices_of(drafting.llm)), IN_TURNS, AUTO, OFF):
        asked(name, random.randrange(TURNS))
    windows = max(1, math.ceil(args.least_s / asked(OFF, random.randrange(TURNS)).seconds))
    rounds: dict[str, list[Speed]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            rounds[name].append(Speed())
        for _ in range(windows):
            turn = random.randrange(TURNS)
            for name in random.sample(names, len(names)):
                rounds[name][-1].add(asked(name, turn))
    turn = random.randrange(TURNS)
    for name in args.draft_tokens:
        counted(name, turn)
    speeds = {name: [one.tokens_per_s for one in rounds[name]] for name in names}
    for name in names:
        speed = statistics.median(speeds[name])
        row = {"batch": batch, "draft_tokens": name, "tokens_per_s": speed}
        row |= {"speculate": args.speculate or f"synthetic:{rate}", "windows": windows}
        paired = [mine / base for mine, base in zip(speeds[name], speeds[OFF], strict=True)]
        row |= {"times_off": statistics.median(paired), "rounds": speeds[name]}
        if name in counts:
            gain = counts[name].predicted_gain(prices_of(drafting.llm), batch)
            row |= {"predicted_times_off": gain} | counts[name].figures()
        yield row


def choices_of(llm: LLM) -> tuple[int, ...]:
    """Numbers of drafts that the engine may choose."""
    chooser = llm.engine.scheduler.draft_lengths
    return chooser.choices if isinstance(chooser, DraftLengthController) else ()


def prices_of(llm: LLM) -> DraftPrices:
    """What the cost model says of steps with drafts, before any has run."""
    chooser = llm.engine.scheduler.draft_lengths
    seconds = chooser.times.prices if isinstance(chooser, DraftLengthController) else None
    prices = getattr(seconds, "__self__", None)  # the prices whose `seconds` the controller asks
    if not isinstance(prices, DraftPrices):
        raise SystemExit("the engine does not draft")
    return prices


@contextmanager
def counting(llm: LLM, counts: Counts) -> Iterator[None]:
    llm.engine.listeners.append(counts)
    try:
        yield
    finally:
        llm.engine.listeners.remove(counts)


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
    given = {name: getattr(args, name) for name in names} | {"calibration": args.record}
    return {name: value for name, value in given.items() if value is not None}
