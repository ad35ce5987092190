"""How likely did the model find each token of a prompt? Chunked, so that prompt x vocabulary never
stands in memory at once.

Letters: T packed tokens of the step, E hidden, V vocabulary, L prompt tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ridgeline.executor.batch import StepBatch, wants_prompt
from ridgeline.executor.rows import Row
from ridgeline.executor.transfer import Transfer
from ridgeline.layers.decoder import Decoder
from ridgeline.request import TokenLogprobs
from ridgeline.sampling.logprobs import LogprobTensors, records, token_logprobs
from ridgeline.step import ScheduledRequest

CHUNK_BYTES = 64 << 20  # of float32 logits at once
OUT_OF_MEMORY = "ran out of device memory computing prompt_logprobs"


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Some of one request's prompt tokens; the tensors are on their way to the host."""

    token_ids: list[int]
    top_k: int
    tensors: LogprobTensors

    def records(self) -> list[TokenLogprobs]:
        return records(self.tensors, self.token_ids, [self.top_k] * len(self.token_ids))


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Per request that asked; `faults` are requests that this was too much for."""

    chunks: dict[str, list[PromptChunk]]
    faults: dict[str, str]


def prompt_logprobs(
    step: StepBatch, hidden_TE: torch.Tensor, decoder: Decoder, transfer: Transfer, max_rows: int
) -> PromptLogprobs:
    """Log-probabilities of the prompt tokens that this step's tokens predict: position p's come
    from the logits at p - 1. At most `max_rows` rows of logits exist at once."""
    found = PromptLogprobs({}, {})
    first = 0
    for entry, row in zip(step.scheduled, step.rows, strict=True):
        if wants_prompt(entry, row):
            try:
                chunks = _chunks(entry, row, first, hidden_TE, decoder, transfer, max_rows)
                found.chunks[row.request_id] = list(chunks)
            except torch.OutOfMemoryError:
                found.faults[row.request_id] = OUT_OF_MEMORY
        first += entry.num_tokens
    return found


def _chunks(
    entry: ScheduledRequest,
    row: Row,
    first: int,
    hidden_TE: torch.Tensor,
    decoder: Decoder,
    transfer: Transfer,
    max_rows: int,
) -> Iterator[PromptChunk]:
    top_k = row.top_prompt_logprobs or 0
    end = min(entry.start + entry.num_tokens, row.num_prompt_tokens - 1)
    for start in range(entry.start, end, max_rows):
        stop = min(start + max_rows, end)
        at = first + start - entry.start
        ids = row.known_ids[start + 1 : stop + 1]
        logits_LV = decoder.logits(hidden_TE[at : at + stop - start])
        there = token_logprobs(logits_LV, transfer.send(ids), top_k)
        yield PromptChunk(ids.tolist(), top_k, there.each(transfer.fetch))
