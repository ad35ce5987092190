"""A target's cache and rows, a draft over them, and what that draft says when it is asked alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.attention import choose_backend
from ridgeline.attention.layout import AttentionLayout, ForwardBatch
from ridgeline.devices import open_device
from ridgeline.distributed.placement import Placement
from ridgeline.kernels.cpu.recorder import Arena, Replay, record
from ridgeline.kernels.drafts import History, make_history
from ridgeline.kernels.draw_rows import Draws, draw_rows
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.quantization import open_weight_format
from ridgeline.speculation.contract import DraftMethod, DraftStep
from tests.conftest import TEST_DEVICE
from tests.executor.rig import RandomTensors
from tests.layers.driving import Driver
from tests.tiny_model import tiny_config

MAX_MODEL_LEN = 64
NUM_ROWS = 8
BLOCK_SIZE = 4
VOCAB = 97


def make_decoder(
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weight_format: str = "auto",
    min_token_ids: int = 0,
    max_model_len: int = MAX_MODEL_LEN,
    **changes: Any,
) -> Decoder:
    config = (
        tiny_config(vocab_size=VOCAB, head_dim=16, max_position_embeddings=max_model_len) | changes
    )
    spec, where = read_spec(config), torch.device(TEST_DEVICE)
    decoder = Decoder(
        spec,
        dtype=dtype,
        device=where,
        placement=Placement(),
        attention=choose_backend("auto", spec, dtype, where),
        weight_format=open_weight_format(weight_format),
        max_model_len=max_model_len,
        min_token_ids=min_token_ids,
    )
    decoder.load(RandomTensors(expected_tensors(spec), seed))
    return decoder


def make_cache(decoder: Decoder) -> KVCache:
    """With room for all rows at their longest."""
    groups = kv_groups(decoder.spec)
    num_blocks = len(groups) * NUM_ROWS * (-(-MAX_MODEL_LEN // BLOCK_SIZE))
    return KVCache(decoder.spec, groups, num_blocks, BLOCK_SIZE, decoder.dtype, decoder.device)


@dataclass
class Scene:
    """`tokens` are those of each open row (1 ..), as a host would know them."""

    decoder: Decoder  # the target
    kv: KVCache
    max_draft_tokens: int = 8
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where, width = self.decoder.device, -(-MAX_MODEL_LEN // BLOCK_SIZE)
        blocks = list(range(1, self.kv.num_blocks + 1))
        random.Random(3).shuffle(blocks)
        shape = (len(self.kv.groups), NUM_ROWS, width)
        need = shape[0] * NUM_ROWS * width
        self.tables_gNM = torch.tensor(blocks[:need], dtype=torch.int32, device=where).view(shape)
        self.tables_gNM[:, 0] = 0
        self.history: History = make_history(NUM_ROWS, MAX_MODEL_LEN, self.max_draft_tokens, where)

    def open(self, row: int, tokens: Sequence[int], method: DraftMethod | None = None) -> None:
        """All but the newest token are computed; `method` follows them, if it is given."""
        self.tokens[row] = list(tokens)
        self._note(row)
        if method is not None:
            method.follow(self.batch({row: (0, len(tokens) - 1)}))

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """What came out of a step."""
        self.tokens[row] += tokens
        self._note(row)

    def _note(self, row: int) -> None:
        known = self.tokens[row]
        self.history.tokens_NL[row, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.history.lens_N[row] = len(known)
        self.history.found_N[row] = 0

    def batch(self, spans: Mapping[int, tuple[int, int]]) -> ForwardBatch:
        """Tokens begin .. end - 1 of each row, as a step with prompts computes them."""
        where = self.decoder.device
        positions = [p for begin, end in spans.values() for p in range(begin, end)]
        ids = [t for row, (begin, end) in spans.items() for t in self.tokens[row][begin:end]]
        lens = [end - begin for begin, end in spans.values()]
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        rows = list(spans)
        slots = [
            [
                int(table_NM[row, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
                for row, (begin, end) in spans.items()
                for p in range(begin, end)
            ]
            for table_NM in self.tables_gNM
        ]
        layout = AttentionLayout(
            lens,
            [end for _, end in spans.values()],
            starts,
            tuple(table_NM[rows] for table_NM in self.tables_gNM),
            tuple(torch.tensor(s, device=where) for s in slots),
            BLOCK_SIZE,
        )
        return ForwardBatch(
            torch.tensor(ids, device=where), torch.tensor(positions, device=where), layout
        )

    def step(
        self, rows: Sequence[int], limits: Sequence[int], draws: Draws | None = None
    ) -> DraftStep:
        where = self.decoder.device
        return DraftStep(
            torch.tensor(rows, device=where),
            torch.tensor(limits, device=where),
            self.history,
            self.tables_gNM,
            BLOCK_SIZE,
            draws,
        )

    def draft_tokens(self, row: int) -> list[int]:
        """What lies behind the row's tokens."""
        begin, found = len(self.tokens[row]), int(self.history.found_N[row])
        line: list[int] = self.history.tokens_NL[row, begin : begin + found].tolist()
        return line


def alone(
    decoder: Decoder,
    tokens: Sequence[int],
    num: int,
    draws: Draws | None = None,
    num_ids: int | None = None,
) -> tuple[list[int], torch.Tensor]:
    """`num` tokens after these and the logits [num, V] they come from, one step after the other
    from nothing; `draws` of one row, `num_ids` the first ids alone."""
    driver = Driver(decoder, block_size=BLOCK_SIZE, num_blocks=64)
    work, answer, lines = list(tokens), list[int](), list[torch.Tensor]()
    for _ in range(num):
        line = driver.step({"row": work})["row"][-1:, :num_ids]
        line = line.to(decoder.device, decoder.dtype)
        position = there([len(tokens) + len(answer)])
        answer.append(int(draw_rows(line, position, draws)[0]))
        lines.append(line)
        work = answer[-1:]
    return answer, torch.cat(lines)


def of_row(draws: Draws, index: int) -> Draws:
    at = slice(index, index + 1)
    return Draws(draws.keys_R[at], draws.temperatures_R[at], draws.noisy_R[at])


def there(numbers: Iterable[float]) -> torch.Tensor:
    """On the device that is tested."""
    return torch.tensor(list(numbers), device=TEST_DEVICE)


def captured(launch: Callable[[], None]) -> Callable[[], None]:
    """As an engine captures a step; on a CPU all of it has to be recorded."""
    if TEST_DEVICE == "cpu":
        return Replay(record(launch, Arena()))
    return open_device(TEST_DEVICE).capture(launch)


def some_tokens(num: int, seed: int, vocab: int = VOCAB) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=num)
