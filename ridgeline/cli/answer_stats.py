"""What does a person see after an answer? One line; with --stats all that the engine knows."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ridgeline.cli.parser import Parser
from ridgeline.cli.session import note
from ridgeline.figures import number, seconds
from ridgeline.startup import say_first_token

if TYPE_CHECKING:
    from ridgeline.answer import ChoiceDelta
    from ridgeline.llm import LLM, GenerationResult
    from ridgeline.observe.requests import TimeBreakdown
    from ridgeline.observe.run import Totals


def add_stats_flag(parser: Parser) -> None:
    parser.flag(
        "--stats", "after an answer: steps, bandwidth, drafts and cost too, not one line only"
    )


class AnswerStats:
    """Of one question to the engine; made before it is asked."""

    def __init__(self, args: argparse.Namespace, llm: LLM) -> None:
        self._args = args
        self._llm = llm
        self._started = time.perf_counter()
        self._before = _snapshot(llm) if args.stats else None
        self._first: float | None = None  # when the first tokens came, and how many they were
        self._num_first = 0
        self._num_tokens = 0
        self._reason = "abort"

    def take(self, piece: ChoiceDelta) -> None:
        """One more piece of an answer that comes bit by bit."""
        if self._first is None and piece.token_ids:
            self._first = time.perf_counter()
            self._num_first = len(piece.token_ids)
            say_first_token(self._llm.built.kernels)
        self._num_tokens += len(piece.token_ids)
        self._reason = piece.finish_reason or self._reason

    def show(self) -> None:
        """After the last piece."""
        words = [_tokens(self._num_tokens)]
        if self._first is not None:
            words.append(f"first token after {seconds(self._first - self._started)}")
            later, took = self._num_tokens - self._num_first, time.perf_counter() - self._first
            if later and took > 0:
                words.append(f"then {number(later / took)} tok/s")
        self._show(words, f"ended by {self._reason}")

    def show_batch(self, results: Sequence[GenerationResult]) -> None:
        """After all answers of a batch."""
        took = time.perf_counter() - self._started
        outputs = [choice for result in results for choice in result.outputs]
        num_tokens = sum(len(choice.token_ids) for choice in outputs)
        answers = f"{len(outputs)} answers, " if len(outputs) > 1 else ""
        words = [f"{answers}{_tokens(num_tokens)}"]
        firsts = [r.metrics.ttft_s for r in results if r.metrics.ttft_s is not None]
        if firsts:
            words.append(f"first token after {seconds(min(firsts))}")
            words.append(f"{number(num_tokens / max(took, 1e-9))} tok/s in all")
        reasons = Counter(choice.finish_reason for choice in outputs)
        ended = ", ".join(reasons)
        if len(reasons) > 1:
            ended = ", ".join(f"{reason} ({num})" for reason, num in reasons.items())
        self._show(words, f"ended by {ended}")

    def _show(self, words: Sequence[str], ended: str) -> None:
        note(self._args, f"[{', '.join(words)}, {ended}]")
        if self._before is not None:
            for name, text in _lines(self._llm, self._before):
                note(self._args, f"  {name:<9}{text}")


def _tokens(num: int) -> str:
    return f"{num} token{'s' * (num != 1)}"


def _snapshot(llm: LLM) -> tuple[Totals, int]:
    from ridgeline.observe.run_summary import snapshot

    return snapshot(llm.run_record.totals), llm.run_record.requests.num_finished


def _lines(llm: LLM, before: tuple[Totals, int]) -> Iterable[tuple[str, str]]:
    from ridgeline.observe.run_summary import run_summary

    run_record = llm.run_record
    totals, num_finished = before
    num = run_record.requests.num_finished - num_finished
    yield from _request_lines(list(run_record.requests.finished)[-num:] if num else [])
    yield from run_summary("all", run_record.pricer, run_record.totals, totals).lines()


def _request_lines(time_breakdowns: Sequence[TimeBreakdown]) -> Iterable[tuple[str, str]]:
    if not time_breakdowns:
        return
    cached = sum(breakdown.num_cached_tokens for breakdown in time_breakdowns)
    prompt = sum(breakdown.num_prompt_tokens for breakdown in time_breakdowns)
    yield "prompt", f"{_tokens(prompt)}, {cached} of them from the prefix cache"
    waited = max(breakdown.parts.queue for breakdown in time_breakdowns)
    yield "queue", f"{seconds(waited)} until the first step"
    preempted = sum(breakdown.num_preemptions for breakdown in time_breakdowns)
    if preempted:
        yield "preempted", f"{preempted} times"
