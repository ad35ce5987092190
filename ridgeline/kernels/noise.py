"""Which random number belongs to this token, at this position, of this request?

The noise is a pure function of (seed, position, token id): a counter that steps by odd constants is
sent through the finaliser of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014; multipliers of Stafford's mix 13). No generator state exists, so neither the
batch around a request, nor chunking, preemption or the device changes its numbers.

Letters: R rows that sample, V vocabulary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

Keys = TypeVar("Keys", torch.Tensor, np.ndarray[Any, np.dtype[Any]])

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TOKEN_STEP = 0xD1342543DE82EF95
_TWO_POW_MINUS_32 = 2.0**-32
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def stream_key(seed: int) -> int:
    """Where the stream of this seed starts: a signed 64-bit number, well mixed."""
    z = (seed + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return _signed(z ^ (z >> 31))


# A request's streams beside its own: of its drafts, of the coins that keep them, of what is drawn
# in place of those that are not kept.
_DRAFTS = _signed(0xA0761D6478BD642F)
_COINS = _signed(0xE7037ED1A0B428DB)
_REST = _signed(0x8EBC6AF09C88C6E3)


@lru_cache(maxsize=8)
def _token_steps(vocab_size: int, device: torch.device) -> torch.Tensor:
    ids_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    return ids_V * _signed(_TOKEN_STEP)


def uniforms(keys_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] float32 in (0, 1), the same bits on every device.

    `keys_R` (int64) come from `stream_key`; `positions_R` (int64) is where the new token will
    stand. Small numbers keep their full relative precision, which is what the upper tail of
    the Gumbel noise is made of.
    """
    return _minus_uniforms(keys_R, positions_R, vocab_size).neg_()


def minus_gumbel(keys_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] float32, standard Gumbel noise with its sign turned, which saves a pass: the argmax
    of logits minus this is a draw from their softmax. Always finite."""
    exponentials = _minus_uniforms(keys_R, positions_R, vocab_size).log1p_().neg_()
    return exponentials.log_()


def _minus_uniforms(
    keys_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    starts_R = torch.add(keys_R, positions_R, alpha=_signed(_GOLDEN))
    z = starts_R.unsqueeze(1) + _token_steps(vocab_size, keys_R.device)
    # int64 has no logical shift: the mask takes the copied sign bits away.
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= _signed(_MIX_1)
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _signed(_MIX_2)
    high = z.bitwise_right_shift_(32).bitwise_and_((1 << 32) - 1)
    return high.float().add_(0.5).mul_(-_TWO_POW_MINUS_32).clamp_(min=-_BELOW_ONE)


def draft_keys(keys_R: Keys, is_seeded_R: Keys) -> Keys:
    """The keys (int64) that a draft draws its drafts with.

    A seeded row's drafts (`is_seeded_R`, bool) are compared with the token that its own noise
    draws, so they are drawn with the same noise, which makes them agree more often. The other
    rows' are checked by their odds, which is right only if nothing else knows their noise.
    """
    drafts_R: Keys = keys_R ^ (~is_seeded_R * _DRAFTS)
    return drafts_R


def coins(keys_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """[R] float32 in (0, 1), of a stream of their own: one decides if a draft is kept."""
    return uniforms(keys_R ^ _COINS, positions_R, 1).squeeze(1)


def rest_keys(keys_R: torch.Tensor) -> torch.Tensor:
    """Keys of the noise that draws in place of a draft that is not kept."""
    return keys_R ^ _REST
