"""An engine of ours on a fake device, for tests of the server: no weights, no torch.

The next token is a hash of every token before it (and of the seed, when sampling), so each answer
can be told from its prompt alone. A prompt may begin with orders for the device:

!slow   each step with this request takes 20 ms      !hang   the step never ends
!die    the process is killed at the fifth token     !nan    this request's numbers go wrong
!fault  the step fails                               !eos    the fourth token is the end token
!crawl  each step with this request takes 200 ms
!shell  the step starts a program

Wherever a prompt says "!say ", the answer is what follows, up to the next special token.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ridgeline.clock import WallClock
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.cost.pricer import Pricer
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.generation import GenerationDefaults
from ridgeline.observe.engine_header import header_of, setup_record
from ridgeline.observe.event_log import LogFile, Recorder
from ridgeline.observe.evidence import RunRecord
from ridgeline.request import SamplingParams, TokenLogprobs
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import NewRequest, ScheduledRequest, StepPlan, StepResult
from ridgeline.text.vocabulary import Vocabulary
from tests.observe.priced import CONFIG, small_setup

VOCAB_SIZE = 264
END = 257
ALPHABET = [*b"abcdefghijklmnopqrstuvwxyz", *b"     ,.", 0xC3]
MAX_MODEL_LEN = 512
ORDERS = ("!slow", "!crawl", "!hang", "!die", "!nan", "!fault", "!eos", "!shell")


def candidates(token_ids: Sequence[int], seed: int | None, count: int) -> list[int]:
    """Tokens that may come next, likeliest first; a lead byte is always completed."""
    if token_ids[-1] == 0xC3:
        return [0xA9, *ALPHABET[: count - 1]]
    text = ",".join(map(str, token_ids)) + f";{seed}"
    first = int.from_bytes(sha256(text.encode()).digest()[:4], "big")
    return [ALPHABET[(first + 7 * i) % len(ALPHABET)] for i in range(count)]


def reference(prompt: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    """The answer to a prompt, from nothing but the prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids += candidates(token_ids, seed, 1)
    return token_ids[len(prompt) :]


@dataclass(slots=True)
class Row:
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams

    @property
    def order(self) -> str:
        head = bytes(i for i in self.token_ids[:8] if i < 256).decode("latin-1")
        return next((order for order in ORDERS if head.startswith(order)), "")

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Done:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class FakeExecutor:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.rows: dict[str, Row] = {}

    def submit(self, plan: StepPlan) -> Done:
        for request_id in (*plan.preempted, *plan.finished):
            self.rows.pop(request_id, None)
        for new in plan.new:
            self.rows[new.request_id] = _row(new)
        rows = [self.rows[entry.request_id] for entry in plan.scheduled]
        _obey({row.order for row in rows}, any(row.num_output_tokens >= 4 for row in rows))
        result = StepResult({})
        for entry, row in zip(plan.scheduled, rows, strict=True):
            self._compute(entry, row, result)
        return Done(result)

    def _compute(self, entry: ScheduledRequest, row: Row, result: StepResult) -> None:
        if row.order == "!nan" and entry.samples:
            result.faults[entry.request_id] = "the logits are not numbers"
            return
        if row.sampling.prompt_logprobs is not None:
            end = min(entry.start + entry.num_tokens + 1, row.num_prompt_tokens)
            result.prompt_logprobs[entry.request_id] = tuple(
                _logprobs(row.token_ids[:p], row.token_ids[p], row.sampling.prompt_logprobs)
                for p in range(entry.start + 1, end)
            )
        if entry.samples:
            self._sample(entry, row, result)

    def _sample(self, entry: ScheduledRequest, row: Row, result: StepResult) -> None:
        sampling = row.sampling
        seed = None if sampling.is_greedy else sampling.seed
        before = list(row.token_ids[: entry.start + entry.num_tokens])
        token_id = candidates(before, seed, 1)[0]
        if (said := _said(row.token_ids[: row.num_prompt_tokens])) is not None:
            token_id = [*said, END][min(row.num_output_tokens, len(said))]
        if row.order == "!eos" and row.num_output_tokens == 3:
            token_id = END
        row.token_ids[len(before) :] = [token_id]
        result.token_ids[entry.request_id] = (token_id,)
        if sampling.logprobs is not None:
            entry_logprobs = _logprobs(before, token_id, sampling.logprobs)
            result.logprobs[entry.request_id] = (entry_logprobs,)


def _said(prompt: Sequence[int]) -> bytes | None:
    """What the last order of a prompt tells the model to say."""
    text = bytes(token_id if token_id < 256 else 0 for token_id in prompt)
    _, order, rest = text.rpartition(b"!say ")
    return rest.partition(b"\0")[0] if order else None


def _row(new: NewRequest) -> Row:
    return Row(list(new.token_ids), new.num_prompt_tokens, new.sampling)


def _obey(orders: set[str], is_late: bool) -> None:
    if "!slow" in orders:
        time.sleep(0.02)
    if "!crawl" in orders:
        time.sleep(0.2)
    if "!hang" in orders:
        time.sleep(3600)
    if "!shell" in orders:
        os.system("true")
    if "!fault" in orders:
        raise EngineFault("the fake device failed")
    if "!die" in orders and is_late:
        os.kill(os.getpid(), signal.SIGKILL)


def _logprobs(before: Sequence[int], token_id: int, count: int) -> TokenLogprobs:
    """The n-th candidate has -n/10, whatever stands behind the last of them a little less."""
    ranked = candidates(before, None, len(ALPHABET))
    rank = 1 + ranked.index(token_id) if token_id in ranked else len(ALPHABET) + 1
    top = tuple((c, -0.1 * (i + 1)) for i, c in enumerate(ranked[:count]))
    return TokenLogprobs(token_id, -0.1 * rank, rank, top)


@dataclass(frozen=True, slots=True)
class FakeSpec:
    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class FakeDevice:
    def memory_total(self) -> int:
        return 1 << 30

    def memory_free(self) -> int:
        return 1 << 29


@dataclass(frozen=True, slots=True)
class MemoryLine:
    what: str
    predicted: int
    measured: int | None = None


@dataclass(frozen=True, slots=True)
class FakeBuilt:
    engine: Engine
    resolved: ResolvedConfig
    generation: GenerationDefaults
    run_record: RunRecord | None = None
    spec: FakeSpec = FakeSpec()
    device: FakeDevice = FakeDevice()
    memory: tuple[MemoryLine, ...] = (MemoryLine("KV cache", 1 << 20),)
    no_grammars: str = "the fake samples nothing"

    def learn(self, vocabulary: Vocabulary | None, end_token_ids: frozenset[int]) -> None:
        """It is never asked to."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        return frozenset({END})


def build(config: EngineConfig, progress: Callable[[str, int, int], None]) -> FakeBuilt:
    """What ridgeline.build:build is to real models. `config.attention_backend` may name a start to
    go wrong."""
    if config.attention_backend == "refuse":
        raise ConfigError("this model cannot be had")
    if config.attention_backend == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.attention_backend == "slow":
        time.sleep(1.5)
    progress("weights", 1, 1)
    resolved = ResolvedConfig(
        model_path=config.model,
        model_name=Path(config.model).name,
        revision=None,
        device="cpu",
        dtype="float32",
        load_format="random",
        seed=0,
        max_model_len=config.max_model_len or MAX_MODEL_LEN,
        block_size=config.block_size,
        num_blocks=config.num_blocks or 256,
        max_num_seqs=config.max_num_seqs or 64,
        max_num_batched_tokens=config.max_num_batched_tokens or 256,
        prefix_caching=config.prefix_caching,
        policy="fcfs",
        max_in_flight=config.max_in_flight,
        attention_backend="none",
        weight_format="none",
        kv_cache_dtype="float32",
        threads=1,
    )
    blocks = BlockManager(
        resolved.num_blocks, resolved.block_size, prefix_caching=resolved.prefix_caching
    )
    scheduler = Scheduler(blocks, FCFS(), resolved.max_num_batched_tokens, resolved.max_num_seqs)
    executor = FakeExecutor(resolved.num_blocks, resolved.block_size)
    engine = Engine(scheduler, executor, WallClock(), resolved.max_in_flight)
    return FakeBuilt(
        engine, resolved, GenerationDefaults(temperature=0.0), _made_record(engine, config)
    )


def build_with_grammars(
    config: EngineConfig, progress: Callable[[str, int, int], None]
) -> FakeBuilt:
    """For answers that keep to a grammar because the test tells them so."""
    return replace(build(config, progress), no_grammars="")


def _made_record(engine: Engine, config: EngineConfig) -> RunRecord:
    """The fake device is priced as a small model on a large one."""
    setup = small_setup()
    header = header_of(
        engine.scheduler,
        policy="fcfs",
        max_in_flight=config.max_in_flight,
        computes_in_submit=True,
        model="fake",
        setup=setup_record(setup, CONFIG),
    )
    if config.event_log is not None:
        engine.listeners.append(Recorder(LogFile(config.event_log).write, header, b"key"))
    run_record = RunRecord(header, Pricer(setup))
    engine.listeners.append(run_record)
    return run_record
