"""What does continuous batching buy? The same requests, refilled at once or batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from ridgeline.benchmark.jobs import Job, log_uniform_outputs, num_output_tokens
from ridgeline.benchmark.record import Run
from ridgeline.benchmark.run import run_jobs, run_static
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.llm import LLM

PROMPT_LEN = 8


@dataclass(frozen=True, slots=True)
class BatchingResult:
    """Steps are engine steps; `idle_slot_steps` are places in a step that no request filled."""

    num_requests: int
    slots: int
    shortest: int
    longest: int
    output_tokens: int
    continuous_steps: int
    static_steps: int
    continuous_s: float
    static_s: float
    continuous_idle_slot_steps: int
    static_idle_slot_steps: int
    note: str = ""

    @property
    def step_ratio(self) -> float:
        return self.static_steps / self.continuous_steps

    @property
    def time_ratio(self) -> float:
        return self.static_s / self.continuous_s


def compare_batching(
    llm: LLM, *, num_requests: int, slots: int, low: int, high: int, seed: int
) -> BatchingResult:
    """Answers of log-uniform length in low .. high tokens, in the order they were drawn.

    `llm` must run at most `slots` requests at once, so that both ways have the same places.
    Where the context is shorter, both bounds shrink together and the spread stays.
    """
    if llm.resolved.max_num_seqs != slots:
        raise ConfigError(f"the engine runs {llm.resolved.max_num_seqs} at once, not {slots}")
    room = llm.resolved.max_model_len - PROMPT_LEN
    if room < 2:
        raise ConfigError(f"a context of {llm.resolved.max_model_len} tokens is too short")
    note = ""
    if high > room:
        low, high = max(1, low * room // high), room
        note = f"answers scaled to {low} .. {high} tokens to fit the context"
    vocab = llm.spec.vocab_size
    jobs = log_uniform_outputs(Random(seed), num_requests, PROMPT_LEN, low, high, vocab)
    run_jobs(llm.engine, jobs[:slots])  # warm up
    continuous = run_jobs(llm.engine, jobs)
    static = run_static(llm.engine, jobs, slots)
    return _result(jobs, slots, (low, high), continuous, static, note)


def _result(
    jobs: Sequence[Job],
    slots: int,
    bounds: tuple[int, int],
    continuous: Run,
    static: Run,
    note: str,
) -> BatchingResult:
    tokens = num_output_tokens(jobs)
    return BatchingResult(
        num_requests=len(jobs),
        slots=slots,
        shortest=bounds[0],
        longest=bounds[1],
        output_tokens=tokens,
        continuous_steps=len(continuous.steps),
        static_steps=len(static.steps),
        continuous_s=continuous.wall_s,
        static_s=static.wall_s,
        continuous_idle_slot_steps=len(continuous.steps) * slots - tokens,
        static_idle_slot_steps=len(static.steps) * slots - tokens,
        note=note,
    )
