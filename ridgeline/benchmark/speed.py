"""How fast does the engine decode, read prompts and serve a load, and what holds it back?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from ridgeline.benchmark.jobs import Job, Lengths, fit, mixed, poisson, uniform
from ridgeline.benchmark.run import (
    Run,
    Spread,
    StepSeen,
    Throughput,
    run_jobs,
    spread_ms,
    steady_steps,
    throughput_of,
)
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.llm import LLM

LEAST_STEADY_STEPS = 4
VERIFYING_ALONE = "bytes are those of verifying; what making the drafts reads is not counted"


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Steps in which each of `batch` requests got a token, or several where drafts were right;
    medians over the repeats. Rates are tokens delivered, and bytes moved, over time.

    Bytes are those that the steps had to move by their prices, None where these are not known;
    `share_of_bandwidth` compares them with the device's measured read bandwidth.
    """

    batch: int
    prompt_len: int
    output_len: int
    step_ms: Spread
    tokens_per_step: float
    tokens_per_s: float
    bytes_per_step: float | None
    achieved_bytes_per_s: float | None
    share_of_bandwidth: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """One prompt alone: time to its first token, median over the repeats."""

    prompt_len: int
    ttft_ms: float
    tokens_per_s: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Many requests: all at once, or arriving `rate` per second. Latencies are in milliseconds,
    TTFT and E2E counted from when a request was due."""

    num_requests: int
    failed: int
    rate: float | None
    input_tokens: int
    output_tokens: int
    wall_s: float
    tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    most_running: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Where the time of one request goes: reading its prompt and writing its answer. Bytes as in
    DecodeSpeed."""

    prompt_len: int
    output_len: int
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    achieved_bytes_per_s: float | None
    share_of_bandwidth: float | None
    note: str = ""

    @property
    def decode_share(self) -> float:
        return self.decode_s / (self.prefill_s + self.decode_s)


@dataclass(frozen=True, slots=True)
class Bench:
    """The engine under test, the bandwidth to hold it against, and how often to repeat.

    The first, unmeasured repeat warms up.
    """

    llm: LLM
    read_bytes_per_s: float
    repeats: int = 3
    seed: int = 0

    def decode(self, batch: int, prompt_len: int, output_len: int) -> DecodeSpeed:
        """`batch` requests together. ConfigError when the engine does not run that many."""
        most = self.llm.resolved.max_num_seqs
        if batch > most:
            raise ConfigError(f"batch {batch} needs --max-num-seqs {batch}; it is {most}")
        lengths = fit(prompt_len, output_len, self.llm.resolved.max_model_len)
        runs = self._repeat(lambda rng: uniform(rng, batch, lengths, self.llm.spec.vocab_size))
        stretches = [steps for run in runs if (steps := _steady(run, batch))]
        gaps = [b.ended_s - a.ended_s for steps in stretches for a, b in pairwise(steps)]
        # The first step of a stretch only says when the second began.
        throughputs = [throughput_of(steps[0].ended_s, steps[1:]) for steps in stretches]
        achieved = _median(throughput.bytes_per_s for throughput in throughputs)
        return DecodeSpeed(
            batch,
            lengths.prompt,
            lengths.output,
            spread_ms(gaps),
            _median(throughput.tokens_per_step for throughput in throughputs) or 0.0,
            _median(throughput.tokens_per_s for throughput in throughputs) or 0.0,
            _median(throughput.bytes_per_step for throughput in throughputs),
            achieved,
            self._share(achieved),
            _notes(
                lengths, throughputs, "" if throughputs else "too few steps with the whole batch"
            ),
        )

    def prefill(self, prompt_len: int) -> PrefillSpeed:
        """One prompt, one token of answer."""
        lengths = fit(prompt_len, 1, self.llm.resolved.max_model_len)
        runs = self._repeat(lambda rng: uniform(rng, 1, lengths, self.llm.spec.vocab_size))
        seconds = median(run.jobs[0].ttft_s for run in runs)
        return PrefillSpeed(lengths.prompt, seconds * 1e3, lengths.prompt / seconds, lengths.note)

    def split(self, prompt_len: int, output_len: int) -> SplitResult:
        """One long request alone."""
        lengths = fit(prompt_len, output_len, self.llm.resolved.max_model_len)
        runs = self._repeat(lambda rng: uniform(rng, 1, lengths, self.llm.spec.vocab_size))
        prefill = median(run.jobs[0].ttft_s for run in runs)
        decode = median(run.jobs[0].e2e_s - run.jobs[0].ttft_s for run in runs)
        throughputs = [
            throughput for run in runs if (throughput := _answer_throughput(run)) is not None
        ]
        achieved = _median(throughput.bytes_per_s for throughput in throughputs)
        return SplitResult(
            lengths.prompt,
            lengths.output,
            prefill,
            decode,
            lengths.prompt / prefill,
            (lengths.output - 1) / decode if decode else 0.0,  # the prompt's step gave the first
            achieved,
            self._share(achieved),
            _notes(lengths, throughputs),
        )

    def mixed(self, count: int, low: int, high: int) -> LoadResult:
        """`count` requests of uniformly mixed lengths, all at once."""
        return self._load(self._mixed_jobs(count, low, high), None)

    def serving(self, count: int, rate: float, prompt_len: int, output_len: int) -> LoadResult:
        """`count` requests arriving as a Poisson process, whether or not the engine keeps up."""
        lengths = fit(prompt_len, output_len, self.llm.resolved.max_model_len)
        rng = Random(self.seed)
        jobs = poisson(rng, uniform(rng, count, lengths, self.llm.spec.vocab_size), rate)
        return self._load(jobs, rate, lengths.note)

    def _mixed_jobs(self, count: int, low: int, high: int) -> list[Job]:
        context, vocab = self.llm.resolved.max_model_len, self.llm.spec.vocab_size
        return mixed(Random(self.seed), count, low, high, context, vocab)

    def _load(self, jobs: Sequence[Job], rate: float | None, note: str = "") -> LoadResult:
        vocab = self.llm.spec.vocab_size
        run_jobs(self.llm.engine, uniform(Random(self.seed), 1, Lengths(8, 2), vocab))  # warm up
        return load_result(run_jobs(self.llm.engine, jobs), jobs, rate, note)

    def _repeat(self, make: Callable[[Random], list[Job]]) -> list[Run]:
        rng = Random(self.seed)
        run_record = self.llm.run_record
        runs = [run_jobs(self.llm.engine, make(rng), run_record) for _ in range(self.repeats + 1)]
        return runs[1:]

    def _share(self, bytes_per_s: float | None) -> float | None:
        return None if bytes_per_s is None else bytes_per_s / self.read_bytes_per_s


def load_result(run: Run, jobs: Sequence[Job], rate: float | None, note: str = "") -> LoadResult:
    """The summary of a run; requests without any token count as failed."""
    answered = [job for job in run.jobs if job.token_s]
    return LoadResult(
        num_requests=len(jobs),
        failed=len(jobs) - len(answered),
        rate=rate,
        input_tokens=sum(len(job.prompt) for job in jobs),
        output_tokens=run.num_tokens,
        wall_s=run.wall_s,
        tokens_per_s=run.tokens_per_s,
        ttft_ms=spread_ms([job.ttft_s for job in answered]),
        itl_ms=spread_ms([gap for job in answered for gap in job.gaps_s]),
        tpot_ms=spread_ms([job.tpot_s for job in answered if len(job.token_s) > 1]),
        e2e_ms=spread_ms([job.e2e_s for job in answered]),
        most_running=run.most_running,
        note=note,
    )


def _steady(run: Run, batch: int) -> Sequence[StepSeen]:
    """The steady stretch; none when it is too short to trust."""
    steps = steady_steps(run.steps, batch)
    return steps if len(steps) > LEAST_STEADY_STEPS else ()


def _answer_throughput(run: Run) -> Throughput | None:
    """Of the steps behind the one that gave the only request its first token; None without any."""
    giving = [index for index, step in enumerate(run.steps) if step.num_tokens]
    if len(giving) < 2:
        return None
    first, last = giving[0], giving[-1]
    return throughput_of(run.steps[first].ended_s, run.steps[first + 1 : last + 1])


def _median(values: Iterable[float | None]) -> float | None:
    """None where one of them is not known, or there is none."""
    found = list(values)
    known = [value for value in found if value is not None]
    return median(known) if known and len(known) == len(found) else None


def _notes(lengths: Lengths, throughputs: Sequence[Throughput], more: str = "") -> str:
    drafts = VERIFYING_ALONE if any(throughput.drafts for throughput in throughputs) else ""
    return "; ".join(text for text in (lengths.note, more, drafts) if text)
