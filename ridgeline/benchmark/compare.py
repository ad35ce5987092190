"""What do caching, paging and continuous batching buy? The same requests with and without them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from ridgeline.benchmark.jobs import (
    Job,
    Lengths,
    fit,
    log_uniform_outputs,
    mixed,
    num_output_tokens,
    random_prompt,
)
from ridgeline.benchmark.run import Run, run_jobs, run_static
from ridgeline.errors import ConfigError
from ridgeline.request import SamplingParams

if TYPE_CHECKING:
    from ridgeline.llm import LLM


MODES = ("uncached", "cached", "paged")
ROOMS = 4  # longest requests that the crowd's cache has room for
Opener = Callable[..., "AbstractContextManager[LLM]"]


@dataclass(frozen=True, slots=True)
class CachingResult:
    """One request alone (`tokens_per_s`), then a crowd in a cache of `cache_tokens` tokens:
    how many of them ran at once and how fast all were served. None: not measured in this mode."""

    mode: str
    prompt_len: int
    output_len: int
    seconds: float
    tokens_per_s: float
    token_ids: tuple[int, ...]
    cache_tokens: int | None = None
    crowd: int | None = None
    most_running: int | None = None
    crowd_tokens_per_s: float | None = None
    note: str = ""


def check_modes(modes: Sequence[str]) -> None:
    """ConfigError for one that is not there."""
    for mode in modes:
        if mode not in MODES:
            raise ConfigError(f"--compare: unknown {mode!r}; choose among {', '.join(MODES)}")


def compare_caching(
    open_llm: Opener,
    modes: Sequence[str],
    *,
    prompt_len: int,
    output_len: int,
    crowd: int,
    seed: int,
) -> list[CachingResult]:
    """One result per mode, in the order given.

    `open_llm(**options)` starts an engine with these fields of EngineConfig changed. The cached
    and the paged engine get caches of the same size in tokens.
    """
    with open_llm() as llm:
        context, vocab = llm.resolved.max_model_len, llm.spec.vocab_size
        block_size = llm.resolved.block_size
        lengths = fit(prompt_len, output_len, context)
        prompt = random_prompt(Random(seed), lengths.prompt, vocab)
        uncached = [_uncached(llm, prompt, lengths)] if "uncached" in modes else []
    del llm  # its memory is needed for the next engine
    jobs = mixed(Random(seed), crowd, 1, min(context // 4, 256), context, vocab)
    sizes = {"cached": context, "paged": block_size}
    found = {result.mode: result for result in uncached}
    for mode in modes:
        if mode != "uncached":
            options = _options(context, sizes[mode])
            with open_llm(**options) as llm:
                found[mode] = _cached(llm, mode, prompt, lengths, jobs)
            del llm
    return [found[mode] for mode in modes]


def _options(context: int, block_size: int) -> dict[str, Any]:
    """A cache for ROOMS requests of full length, in blocks of this size."""
    return {
        "block_size": block_size,
        "num_blocks": ROOMS * -(-context // block_size),
        "kv_cache_memory_bytes": None,
        "max_model_len": context,
        "prefix_caching": False,
    }


def _uncached(llm: LLM, prompt: tuple[int, ...], lengths: Lengths) -> CachingResult:
    """Greedy decoding that asks for the logits of the whole text for every token."""
    token_ids = list(prompt)
    llm.logits(token_ids)  # warm up
    started = time.perf_counter()
    for _ in range(lengths.output):
        token_ids.append(int(llm.logits(token_ids)[-1].argmax()))
    seconds = time.perf_counter() - started
    answer = tuple(token_ids[len(prompt) :])
    return _alone("uncached", lengths, seconds, answer)


def _cached(
    llm: LLM, mode: str, prompt: tuple[int, ...], lengths: Lengths, jobs: Sequence[Job]
) -> CachingResult:
    sampling = SamplingParams(max_tokens=lengths.output, temperature=0.0, ignore_eos=True)
    llm.generate([prompt], sampling, progress=False)  # warm up
    started = time.perf_counter()
    [result] = llm.generate([prompt], sampling, progress=False)
    alone = _alone(mode, lengths, time.perf_counter() - started, tuple(result.token_ids))
    run = run_jobs(llm.engine, jobs)
    return CachingResult(
        mode,
        alone.prompt_len,
        alone.output_len,
        alone.seconds,
        alone.tokens_per_s,
        alone.token_ids,
        llm.resolved.num_blocks * llm.resolved.block_size,
        len(jobs),
        run.most_running,
        run.tokens_per_s,
        alone.note,
    )


def _alone(
    mode: str, lengths: Lengths, seconds: float, token_ids: tuple[int, ...]
) -> CachingResult:
    rate = len(token_ids) / seconds
    return CachingResult(
        mode, lengths.prompt, lengths.output, seconds, rate, token_ids, note=lengths.note
    )


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
