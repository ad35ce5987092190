"""Matrices as files store them, packed number by number from the public definitions of the layouts.

Slow and plain on purpose: nothing of the package is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # rows of a word, from its lowest bits on


@dataclass(frozen=True)
class Case:
    """Codes [O, I] and zeros [O, G] are unsigned, of `bits`; a weight is (code - zero) * scale of
    its group, `group_of[i]` for column i."""

    bits: int
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group_of: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """float32"""
        wide = self.scale.float()[:, self.group_of]
        return (self.codes.float() - self.zero.float()[:, self.group_of]) * wide


def make_case(
    bits: int,
    *,
    outputs: int = 32,
    inputs: int = 64,
    group: int = 16,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
    shuffled: bool = False,
    seed: int = 0,
) -> Case:
    noise = torch.Generator().manual_seed(seed * 100 + bits)
    size = group or inputs
    groups = inputs // size
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=noise)
    zero = torch.randint(0, 1 << bits, (outputs, groups), generator=noise)
    if symmetric:
        zero = torch.full_like(zero, 1 << (bits - 1))
    scale = (0.01 + torch.rand(outputs, groups, generator=noise)).to(dtype)
    group_of = torch.arange(inputs) // size
    if shuffled:
        group_of = group_of[torch.randperm(inputs, generator=noise)]
    return Case(bits, codes, scale, zero, group_of)


def word(value: int) -> int:
    """Of 32 bits, as a signed number."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def stream(codes: Sequence[int], bits: int) -> list[int]:
    """Codes one behind the other, cut into words."""
    whole = 0
    for at, code in enumerate(codes):
        whole |= int(code) << (bits * at)
    count = -(-len(codes) * bits // 32)
    return [word(whole >> (32 * at)) for at in range(count)]


def streams(codes_RN: torch.Tensor, bits: int) -> torch.Tensor:
    """Of each row."""
    return torch.tensor([stream(row, bits) for row in codes_RN.tolist()], dtype=torch.int32)


def pack_quantized(case: Case, *, symmetric: bool) -> dict[str, torch.Tensor]:
    found = {
        "weight_packed": streams(case.codes, case.bits),
        "weight_scale": case.scale,
        "weight_shape": torch.tensor(case.codes.shape),
    }
    if not symmetric:
        found["weight_zero_point"] = streams(case.zero.T, case.bits).T.contiguous()
    return found


def int_quantized(case: Case, *, symmetric: bool) -> dict[str, torch.Tensor]:
    middle = 1 << (case.bits - 1)
    found = {"weight": (case.codes - middle).to(torch.int8), "weight_scale": case.scale}
    if not symmetric:
        found["weight_zero_point"] = (case.zero - middle).to(torch.int8)
    return found


def gptq(case: Case, *, version: int) -> dict[str, torch.Tensor]:
    zeros = [stream(column, case.bits) for column in case.zero.T.tolist()]
    if version == 1:
        top = (1 << case.bits) - 1
        zeros = [stream([(z - 1) & top for z in c], case.bits) for c in case.zero.T.tolist()]
    return {
        "qweight": streams(case.codes, case.bits).T.contiguous(),
        "qzeros": torch.tensor(zeros, dtype=torch.int32),
        "scales": case.scale.T.contiguous(),
        "g_idx": case.group_of.to(torch.int32),
    }


def awq(case: Case) -> dict[str, torch.Tensor]:
    def words(rows_first: torch.Tensor) -> torch.Tensor:
        """[O, N] -> [N, O / 8]"""
        lines = []
        for column in rows_first.T.tolist():
            eights = [column[at : at + 8] for at in range(0, len(column), 8)]
            lines.append([stream([eight[row] for row in AWQ_ROWS], 4)[0] for eight in eights])
        return torch.tensor(lines, dtype=torch.int32)

    return {
        "qweight": words(case.codes),
        "qzeros": words(case.zero),
        "scales": case.scale.T.contiguous(),
    }
