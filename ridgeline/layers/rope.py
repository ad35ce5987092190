"""Which angles turn the heads at which position? Tables made once, as Transformers makes them.

Formulas: Hugging Face Transformers `modeling_rope_utils` (linear, dynamic NTK, Llama 3, YaRN),
in float32. Letters: L positions, T tokens, D head size.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ridgeline.architectures.rope_config import longrope_growth, yarn_growth
from ridgeline.architectures.spec import RopeSpec
from ridgeline.errors import check


class Rotation:
    """Cosines and signed sines of positions 0 .. max_model_len - 1 for one RopeSpec."""

    def __init__(
        self, spec: RopeSpec, head_dim: int, max_model_len: int, device: torch.device
    ) -> None:
        rotated = head_dim if spec.rotary_dim is None else spec.rotary_dim
        frequencies, factor = inverse_frequencies(spec, rotated, max_model_len)
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = positions[:, None] * frequencies
        still = (0, (head_dim - rotated) // 2)  # pairs that are not rotated
        cos = functional.pad(angles.cos() * factor, still, value=1.0)
        sin = functional.pad(angles.sin() * factor, still)
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        self.table_L2D = table.to(device)

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of these positions, see `rotation_at`."""
        return rotation_at(self.table_L2D, positions_T)


def rotation_at(
    table_L2D: torch.Tensor, positions_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cosines, signed sines) as `rotate_` wants them, [T, 1, D] float32 each."""
    both_T2D = table_L2D.index_select(0, positions_T)
    return both_T2D[:, :1], both_T2D[:, 1:]


def inverse_frequencies(
    spec: RopeSpec, head_dim: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """(radians per position of each pair, [D / 2]; the factor of cosines and sines).

    The dynamic kind and longrope depend on the length served: all tokens of all requests are turned
    as in a sequence of `max_model_len` tokens, so that cached keys stay valid as a request grows.
    Up to the trained length dynamic is the default kind, and longrope has its short factors.
    """
    if spec.kind == "none":
        return torch.zeros(head_dim // 2), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, head_dim)
    if spec.kind == "longrope":
        return _longrope(spec, head_dim, max_model_len)
    if spec.kind == "dynamic":
        return _plain(_dynamic_theta(spec, head_dim, max_model_len), head_dim), 1.0
    frequencies = _plain(spec.theta, head_dim)
    if spec.kind == "linear":
        frequencies = frequencies / spec.factor
    if spec.kind == "llama3":
        frequencies = _llama3(spec, frequencies)
    return frequencies, 1.0


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def _original(spec: RopeSpec) -> int:
    check(spec.original_max_position is not None, "the trained length is known", kind=spec.kind)
    return spec.original_max_position or 0


def _dynamic_theta(spec: RopeSpec, head_dim: int, max_model_len: int) -> float:
    trained = _original(spec)
    stretch = spec.factor * max(max_model_len, trained) / trained - (spec.factor - 1)
    grown: float = stretch ** (head_dim / (head_dim - 2))
    return spec.theta * grown


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are slowed down by the factor, short ones kept, those between are mixed."""
    trained, low, high = _original(spec), spec.low_freq_factor or 1.0, spec.high_freq_factor or 4.0
    wavelengths = 2 * math.pi / frequencies
    long_waves = wavelengths > trained / low
    slowed = torch.where(long_waves, frequencies / spec.factor, frequencies)
    mix = (trained / wavelengths - low) / (high - low)
    mixed = (1 - mix) * slowed / spec.factor + mix * slowed
    between = ~(wavelengths < trained / high) & ~long_waves
    return torch.where(between, mixed, slowed)


def _longrope(spec: RopeSpec, head_dim: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    trained = _original(spec)
    divisors = torch.tensor(spec.long_factors if max_model_len > trained else spec.short_factors)
    frequencies = _plain(spec.theta, head_dim) / divisors
    if spec.attention_factor is not None:
        return frequencies, spec.attention_factor
    return frequencies, longrope_growth(spec.factor, trained)


def _yarn(spec: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    trained = _original(spec)

    def dimension(rotations: float) -> float:
        """The pair that turns so many times within the trained length."""
        turns = math.log(trained / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if high == low else high
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    powers = spec.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    frequencies = 1.0 / (spec.factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_factor(spec)


def _yarn_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        whole = yarn_growth(spec.factor, spec.mscale_all_dim)
        return yarn_growth(spec.factor, spec.mscale) / whole
    return yarn_growth(spec.factor, 1.0)
