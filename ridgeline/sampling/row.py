"""What does sampling have to remember of one request, from its first token to its last?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from hashlib import blake2b

from ridgeline.kernels.noise import stream_key
from ridgeline.request import SamplingParams

NOT_RANDOM = (1.0, 0.0, 1.0, -math.inf)  # `SamplingRow.filters` of a greedy row


class Needs(IntFlag):
    """The processors that a row asks for; a batch does what any of its rows needs."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    BIAS = 16
    BANS = 32
    PENALTIES = 64
    LOGPROBS = 128
    GRAMMAR = 256


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One request's sampling parameters, made ready for a batch.

    `key` starts its stream of noise. Stop tokens are banned while the new token's position is
    below `banned_until`. `counts_slot` is its row of `PenaltyCounts`, or -1 without penalties.
    """

    params: SamplingParams
    needs: Needs
    key: int
    banned_until: int
    counts_slot: int = -1

    def top_k(self, vocab_size: int) -> int:
        return min(self.params.top_k, vocab_size) if self.needs & Needs.TOP_K else vocab_size

    @property
    def filters(self) -> tuple[float, float, float, float]:
        """Temperature, 1 if it is drawn (else 0), top_p and the logarithm of min_p."""
        if not self.needs & Needs.RANDOM:
            return NOT_RANDOM
        params = self.params
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        return max(params.temperature, 1e-30), 1.0, params.top_p, log_min_p

    @property
    def biases(self) -> Sequence[tuple[int, float]]:
        """(token, what is added to its logit)."""
        bias = self.params.logit_bias
        return tuple(bias.items()) if isinstance(bias, Mapping) else bias


def seed_of(request_id: str, params: SamplingParams) -> int:
    """The request's seed; without one, a number that only its id decides."""
    if params.seed is not None:
        return params.seed
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little")


def needs_of(params: SamplingParams) -> Needs:
    wanted = (
        (Needs.RANDOM, not params.is_greedy),
        (Needs.TOP_K, not params.is_greedy and params.top_k > 0),
        (Needs.TOP_P, not params.is_greedy and params.top_p < 1),
        (Needs.MIN_P, not params.is_greedy and params.min_p > 0),
        (Needs.BIAS, bool(params.logit_bias)),
        (Needs.BANS, bool(params.min_tokens and params.stop_token_ids)),
        (Needs.PENALTIES, _has_penalties(params)),
        (Needs.LOGPROBS, params.logprobs is not None),
        (Needs.GRAMMAR, bool(params.structured_outputs)),
    )
    return Needs(sum(need for need, is_wanted in wanted if is_wanted))


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.frequency_penalty != 0
        or params.presence_penalty != 0
    )


def sampling_row(request_id: str, params: SamplingParams, num_prompt_tokens: int) -> SamplingRow:
    return SamplingRow(
        params,
        needs_of(params),
        stream_key(seed_of(request_id, params)),
        num_prompt_tokens + params.min_tokens,
    )
