"""What work is measured? Lists of requests: lengths, random prompts and arrival times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from ridgeline.errors import ConfigError

FIRST_ORDINARY_ID = 3  # below are special tokens in most vocabularies


@dataclass(frozen=True, slots=True)
class Job:
    """One request: so many random prompt tokens, exactly so many answer tokens.

    `arrival_s` counts from the start of the run.
    """

    prompt: tuple[int, ...]
    num_output_tokens: int
    arrival_s: float = 0.0
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and answer length in tokens; `note` says what was changed to fit the context."""

    prompt: int
    output: int
    note: str = ""


def fit(prompt: int, output: int, max_model_len: int) -> Lengths:
    """The lengths, scaled down together where they exceed the context. ConfigError below 2."""
    if prompt + output <= max_model_len:
        return Lengths(prompt, output)
    if max_model_len < 2:
        raise ConfigError(f"a context of {max_model_len} tokens is too short to measure anything")
    scaled_output = min(max_model_len - 1, max(1, output * max_model_len // (prompt + output)))
    scaled = Lengths(max_model_len - scaled_output, scaled_output)
    note = (
        f"{prompt} + {output} tokens exceed the context of {max_model_len}; "
        f"scaled to {scaled.prompt} + {scaled.output}"
    )
    return replace(scaled, note=note)


def random_prompt(rng: Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """Fresh token ids, so that no prefix cache can help."""
    low = FIRST_ORDINARY_ID if vocab_size > 2 * FIRST_ORDINARY_ID else 0
    return tuple(rng.randrange(low, vocab_size) for _ in range(length))


def uniform(rng: Random, count: int, lengths: Lengths, vocab_size: int) -> list[Job]:
    """`count` requests of the same lengths, all at once."""
    return [
        Job(random_prompt(rng, lengths.prompt, vocab_size), lengths.output) for _ in range(count)
    ]


def mixed(
    rng: Random, count: int, low: int, high: int, max_model_len: int, vocab_size: int
) -> list[Job]:
    """Prompt and answer lengths each uniform in low .. high (or what fits), temperature 0.6."""
    high = min(high, max_model_len // 2)
    low = max(1, min(low, high))
    return [
        Job(
            random_prompt(rng, rng.randint(low, high), vocab_size),
            rng.randint(low, high),
            temperature=0.6,
        )
        for _ in range(count)
    ]


def poisson(rng: Random, jobs: Sequence[Job], rate: float) -> list[Job]:
    """The same jobs arriving at `rate` per second, the gaps exponentially distributed."""
    if rate <= 0:
        raise ConfigError(f"the arrival rate is {rate:g} per second; it must be above 0")
    when, arriving = 0.0, []
    for job in jobs:
        when += rng.expovariate(rate)
        arriving.append(replace(job, arrival_s=when))
    return arriving


def log_uniform(rng: Random, low: int, high: int) -> int:
    """A length whose logarithm is uniform: as many from 10 to 100 as from 100 to 1000."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def log_uniform_outputs(
    rng: Random, count: int, prompt: int, low: int, high: int, vocab_size: int
) -> list[Job]:
    """Equal prompts and answers of log-uniform length: what makes static batches wait.

    The lengths depend on the seed alone, not on the model's vocabulary.
    """
    lengths = [log_uniform(rng, low, high) for _ in range(count)]
    return [Job(random_prompt(rng, prompt, vocab_size), length) for length in lengths]


def num_output_tokens(jobs: Iterable[Job]) -> int:
    return sum(job.num_output_tokens for job in jobs)
