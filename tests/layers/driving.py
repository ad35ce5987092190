"""A small serving loop over a Decoder: shuffled block tables, several requests in one batch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention import choose_backend
from ridgeline.attention.layout import AttentionLayout, ForwardBatch
from ridgeline.distributed.placement import Placement
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.piece import TensorSource
from ridgeline.quantization import open_weight_format
from tests.conftest import TEST_DEVICE


class TensorDict(TensorSource):
    """A TensorSource over tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self.tensors[name].narrow(dim, start, length)


def build_decoder(
    spec: ModelSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    device: str = TEST_DEVICE,
    placement: Placement | None = None,
    weight_format: str = "auto",
    kv_format: str = "auto",
) -> Decoder:
    where = torch.device(device)
    return Decoder(
        spec,
        dtype=dtype,
        device=where,
        placement=placement or Placement(),
        attention=choose_backend(backend, spec, dtype, where, kv_format),
        weight_format=open_weight_format(weight_format),
        max_model_len=max_model_len,
    )


def load_decoder(
    config: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    *,
    max_model_len: int,
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
) -> Decoder:
    spec = read_spec(config, max_model_len=max_model_len)
    decoder = build_decoder(spec, max_model_len=max_model_len, dtype=dtype, backend=backend)
    decoder.load(TensorDict(tensors))
    return decoder


class Driver:
    """Requests by name over one Decoder. Block ids are handed out in shuffled order; what no
    request owns is NaN, and blocks that a window has passed are dropped from the tables."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int = 256,
        block_size: int = 4,
        seed: int = 0,
        kv_format: str = "auto",
        num_kv_heads: int | None = None,
        poison: bool = True,
    ) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.groups = kv_groups(spec)
        self.block_size = block_size
        self.kv = KVCache(
            spec,
            self.groups,
            num_blocks,
            block_size,
            decoder.dtype,
            decoder.device,
            kv_format=kv_format,
            num_kv_heads=num_kv_heads,
        )
        if poison:
            for store in self.kv.stores:
                for tensor in store:
                    if tensor.is_floating_point():
                        tensor.fill_(torch.nan)
        self.free = list(range(1, num_blocks + 1))
        random.Random(seed).shuffle(self.free)
        self.tables: dict[str, list[list[int]]] = {}
        self.computed: dict[str, int] = {}

    def step(self, work: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Compute these new tokens of these requests; logits of each of them, [n, V], on the
        host."""
        batch = self.batch(work)
        hidden = self.decoder.forward(batch, self.kv)
        logits = self.decoder.logits(hidden).cpu()
        lengths = [len(tokens) for tokens in work.values()]
        return dict(zip(work, torch.split(logits, lengths), strict=True))

    def batch(self, work: Mapping[str, Sequence[int]]) -> ForwardBatch:
        query_lens, seq_lens, start = [], [], [0]
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in self.groups]
        for name, tokens in work.items():
            begin = self.computed.get(name, 0)
            self._grow(name, begin, begin + len(tokens))
            places = range(begin, begin + len(tokens))
            for group, table in enumerate(self.tables[name]):
                slots[group] += [self._slot(table, place) for place in places]
            positions += places
            query_lens.append(len(tokens))
            seq_lens.append(begin + len(tokens))
            start.append(start[-1] + len(tokens))
            self.computed[name] = begin + len(tokens)
        device = self.decoder.device
        layout = AttentionLayout(
            query_lens,
            seq_lens,
            start,
            tuple(self._padded(list(work), g) for g in range(len(self.groups))),
            tuple(torch.tensor(s, device=device) for s in slots),
            self.block_size,
        )
        flat = [token for tokens in work.values() for token in tokens]
        return ForwardBatch(
            torch.tensor(flat, device=device),
            torch.tensor(positions, device=device),
            layout,
        )

    def _slot(self, table: list[int], place: int) -> int:
        return table[place // self.block_size] * self.block_size + place % self.block_size

    def _grow(self, name: str, begin: int, end: int) -> None:
        tables = self.tables.setdefault(name, [[] for _ in self.groups])
        for group, table in zip(self.groups, tables, strict=True):
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            if group.window is not None:
                passed = max(0, begin + 1 - group.window) // self.block_size
                for index in range(passed):
                    if table[index]:
                        self.free.insert(0, table[index])
                        table[index] = 0

    def _padded(self, names: Sequence[str], group: int) -> torch.Tensor:
        tables = [self.tables[name][group] for name in names]
        width = max(len(table) for table in tables)
        rows = [table + [0] * (width - len(table)) for table in tables]
        return torch.tensor(rows, dtype=torch.int32, device=self.decoder.device)

    def release(self, name: str) -> None:
        for table in self.tables.pop(name):
            self.free += [block for block in table if block]
        del self.computed[name]


def greedy(driver: Driver, prompts: Mapping[str, Sequence[int]], num: int) -> dict[str, list[int]]:
    """`num` likeliest tokens after each prompt, all requests in one batch."""
    work: dict[str, Sequence[int]] = dict(prompts)
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for _ in range(num):
        for name, logits in driver.step(work).items():
            answers[name].append(int(logits[-1].argmax()))
        work = {name: answers[name][-1:] for name in prompts}
    return answers
