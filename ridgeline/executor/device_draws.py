"""Where do captured steps read how their rows are drawn? Always in the same place on the device,
which one copy fills: an answer's first step waits for it.

Letters: R rows, B rows that there is room for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ridgeline.executor.transfer import Array, Transfer
from ridgeline.kernels.draw_rows import Draws
from ridgeline.sampling.batch import HostDraws

WORD = 8  # bytes


class DeviceDraws:
    """`parts` have room for so many rows each, `flags_B` (bool) for `num_flags`. What `put` and
    `put_flags` were given is there once `send` was called; rows behind it keep what they had."""

    def __init__(
        self, sizes: Sequence[int], transfer: Transfer, device: torch.device, num_flags: int = 0
    ) -> None:
        self._transfer = transfer
        num_words = 2 * sum(sizes)
        num_words += -(-num_flags // WORD)
        self._there = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._here = np.zeros(num_words, np.int64)
        self.parts: list[Draws] = []
        self._host: list[HostDraws] = []
        first = 0
        for size in sizes:
            end = first + 2 * size
            there, here = self._there[first:end], self._here[first:end]
            floats, host_floats = there[size:].view(torch.float32), here[size:].view(np.float32)
            floats[:size] = 1.0
            host_floats[:size] = 1.0
            self.parts.append(Draws(there[:size], floats[:size], floats[size:]))
            self._host.append(HostDraws(here[:size], host_floats[:size], host_floats[size:]))
            first = end
        self.flags_B = self._there[first:].view(torch.uint8)[:num_flags].view(torch.bool)
        self._host_flags_B = self._here[first:].view(np.bool_)[:num_flags]

    def put(self, part: int, draws: HostDraws, num_each: int = 1) -> None:
        """Each of these rows so many times in a row."""
        num, mine = len(draws.keys_R), self._host[part]
        for target, numbers in zip(_arrays(mine), _arrays(draws), strict=True):
            target[: num * num_each].reshape(num, num_each)[:] = numbers[:, None]

    def put_flags(self, flags_R: Array) -> None:
        self._host_flags_B[: len(flags_R)] = flags_R

    def send(self) -> None:
        self._transfer.send_into(self._here, self._there)


def _arrays(draws: HostDraws) -> tuple[Array, Array, Array]:
    return draws.keys_R, draws.temperatures_R, draws.noisy_R
