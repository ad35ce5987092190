"""A tiny random model, an executor over it, and a host that writes plans by hand.

`alone` is what everything is compared with: each token from a full forward pass over all tokens
before it, with no cache, no batch and no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.attention import AttentionBackend, choose_backend
from ridgeline.devices import Device, open_device
from ridgeline.distributed.placement import Placement
from ridgeline.executor.drafter import Drafting
from ridgeline.executor.local import LocalExecutor
from ridgeline.executor.scorer import Scorer
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.piece import TensorSource
from ridgeline.quantization import open_weight_format
from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import build_batch
from ridgeline.sampling.penalties import Array, PenaltyCounts
from ridgeline.sampling.row import Needs, sampling_row
from ridgeline.sampling.sampler import sample
from ridgeline.step import (
    BlockCopy,
    NewRequest,
    ScheduledRequest,
    StepFuture,
    StepPlan,
    StepResult,
)
from tests.conftest import TEST_DEVICE
from tests.tiny_model import tiny_config

MAX_MODEL_LEN = 512
VOCAB = 97


class RandomTensors(TensorSource):
    """Weights with std 0.2, so that ties between tokens are rare."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self._tensors = {
            name: 0.2 * torch.randn(shape, generator=noise) + (1.0 if "norm" in name else 0.0)
            for name, shape in shapes.items()
        }

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self._tensors[name].narrow(dim, start, length)


@cache
def device() -> Device:
    return open_device(TEST_DEVICE)


def make_decoder(
    *,
    seed: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    attention: AttentionBackend | None = None,
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Decoder:
    config = tiny_config(vocab_size=VOCAB, max_position_embeddings=max_model_len) | changes
    spec, where = read_spec(config), device().torch_device
    decoder = Decoder(
        spec,
        dtype=dtype,
        device=where,
        placement=Placement(),
        attention=attention or choose_backend("auto", spec, dtype, where),
        weight_format=open_weight_format("auto", deterministic=deterministic),
        max_model_len=max_model_len,
        deterministic=deterministic,
    )
    decoder.load(RandomTensors(expected_tensors(spec), seed))
    return decoder


class Uncaptured:
    """The device under test, but nothing is captured on it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(device(), name)

    def capture(self, launch: Callable[[], None], what: str = "a step") -> Callable[[], None]:
        launch()
        return launch


def make_executor(
    decoder: Decoder,
    *,
    num_blocks: int = 200,
    block_size: int = 4,
    make_drafting: Callable[[Decoder, KVCache], Drafting] | None = None,
    is_captured: bool = True,
    **changes: Any,
) -> LocalExecutor:
    """Over a cache that is full of NaN, as memory of unknown contents may be. `is_captured` False:
    what would be captured runs as it is each time, for parts that need the host."""
    groups = kv_groups(decoder.spec)
    kv = KVCache(decoder.spec, groups, num_blocks, block_size, decoder.dtype, decoder.device)
    for store in kv.stores:
        for tensor in store:
            tensor.fill_(torch.nan)
    if make_drafting is not None:
        changes["drafting"] = make_drafting(decoder, kv)
    return LocalExecutor(
        decoder,
        kv,
        device() if is_captured else Uncaptured(),
        num_blocks=num_blocks,
        block_size=block_size,
        groups=groups,
        vocab_size=decoder.spec.vocab_size,
        max_model_len=decoder.max_model_len,
        **changes,
    )


def make_scorer(decoder: Decoder) -> Scorer:
    return Scorer(decoder, device(), block_size=8, max_model_len=decoder.max_model_len)


def upload(array: Array) -> torch.Tensor:
    return torch.from_numpy(array)


def alone(
    decoder: Decoder, prompt: Sequence[int], sampling: SamplingParams, num: int, name: str = "r"
) -> list[int]:
    """`num` tokens after the prompt, from scratch for each; ends early at a stop token."""
    scorer = make_scorer(decoder)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num:
        row = sampling_row(name, sampling, len(prompt))
        counts = PenaltyCounts(decoder.spec.vocab_size, upload)
        if row.needs & Needs.PENALTIES:
            row.counts_slot = counts.open(
                np.array(prompt, np.int64), np.array(tokens[len(prompt) :], np.int64)
            )
        batch = build_batch([row], decoder.spec.vocab_size, upload)
        position = np.array([len(tokens)])
        logits = scorer.logits(tokens)[-1:]
        tokens += sample(logits, batch, upload(position), position, counts).token_ids_R.tolist()
        if tokens[-1] in frozenset(sampling.stop_token_ids):
            break
    return tokens[len(prompt) :]


@dataclass
class Held:
    """What the hand-written host knows of a request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: list[int]  # with -1 for those in flight
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    is_new: bool = True


class Host:
    """Writes plans for one executor, one call of `plan` after the other."""

    def __init__(self, executor: LocalExecutor, num_groups: int = 1) -> None:
        self.executor = executor
        self.num_groups = num_groups
        self.held: dict[str, Held] = {}
        self.free = list(range(1, executor.num_blocks + 1))
        self.num_steps = 0
        self._preempted: list[str] = []
        self._finished: list[str] = []
        self._copies: list[BlockCopy] = []

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
        tables: list[list[int]] = [[] for _ in range(self.num_groups)]
        self.held[name] = Held(tuple(prompt), sampling, list(prompt), tables=tables)

    def fork(self, name: str, parent: str, sampling: SamplingParams) -> None:
        """Another answer to the parent's prompt, of which all but one token is computed: full
        blocks are shared, the last is copied when it is not full."""
        size, source = self.executor.block_size, self.held[parent]
        self.add(name, source.prompt, sampling)
        child = self.held[name]
        child.num_computed = len(source.prompt) - 1
        for group, table in enumerate(source.tables):
            num_blocks = -(-child.num_computed // size)
            child.tables[group] = table[:num_blocks]
            if child.num_computed % size:
                copy = BlockCopy(name, group, num_blocks - 1, table[num_blocks - 1], self._take())
                self._copies.append(copy)

    def finish(self, name: str) -> None:
        self._finished.append(name)
        self._release(self.held.pop(name))

    def preempt(self, name: str) -> None:
        held = self.held[name]
        assert -1 not in held.tokens
        self._preempted.append(name)
        self._release(held)
        held.tables = [[] for _ in range(self.num_groups)]
        held.num_computed, held.is_new = 0, True

    def plan(self, work: dict[str, int]) -> StepPlan:
        """Compute so many tokens of these requests; a request whose last token it is samples."""
        new = tuple(self._new(name) for name in work if self.held[name].is_new)
        scheduled = tuple(self._schedule(name, num) for name, num in work.items())
        self.num_steps += 1
        done = StepPlan(
            self.num_steps,
            scheduled,
            new,
            tuple(self._copies),
            tuple(self._preempted),
            tuple(self._finished),
        )
        for copy in self._copies:
            self.held[copy.request_id].tables[copy.group][copy.index] = copy.target
        self._copies, self._preempted, self._finished = [], [], []
        return done

    def submit(self, work: dict[str, int]) -> StepFuture:
        return self.executor.submit(self.plan(work))

    def take_in(self, result: StepResult) -> StepResult:
        for name, (token,) in result.token_ids.items():
            tokens = self.held[name].tokens
            tokens[tokens.index(-1)] = token
        return result

    def run(self, work: dict[str, int]) -> StepResult:
        return self.take_in(self.submit(work).result())

    def decode(self, names: Sequence[str], num: int, in_flight: int = 1) -> None:
        """`num` more tokens for each."""
        futures: list[StepFuture] = []
        for _ in range(num):
            futures.append(self.submit(dict.fromkeys(names, 1)))
            if len(futures) == in_flight:
                self.take_in(futures.pop(0).result())
        for future in futures:
            self.take_in(future.result())

    def output(self, name: str) -> list[int]:
        held = self.held[name]
        return held.tokens[len(held.prompt) :]

    def _take(self) -> int:
        return self.free.pop(self.num_steps * 7 % len(self.free))

    def _release(self, held: Held) -> None:
        self.free += [block for table in held.tables for block in table]

    def _new(self, name: str) -> NewRequest:
        held = self.held[name]
        held.is_new = False
        return NewRequest(
            name,
            tuple(held.tokens),
            len(held.prompt),
            held.sampling,
            tuple(tuple(table) for table in held.tables),
        )

    def _schedule(self, name: str, num: int) -> ScheduledRequest:
        held = self.held[name]
        start, held.num_computed = held.num_computed, held.num_computed + num
        more = -(-held.num_computed // self.executor.block_size) - len(held.tables[0])
        added = [[self._take() for _ in range(more)] for _ in held.tables]
        for table, blocks in zip(held.tables, added, strict=True):
            table += blocks
        samples = held.num_computed == len(held.tokens)
        if samples:
            held.tokens.append(-1)
        return ScheduledRequest(name, start, num, tuple(tuple(b) for b in added), samples)
