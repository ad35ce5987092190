"""A checkpoint of random numbers, for tests and for measuring without a download."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

STD = 0.02  # what Transformers calls initializer_range


class RandomSource:
    """Normal numbers of standard deviation 0.02, made on the device; norms are one, biases zero.

    A tensor depends on its name and the seed alone, so every sharding reads the same model.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shapes = shapes
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> torch.Tensor:
        values = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return values.zero_()
        if values.dim() == 1:
            return values.fill_(1.0)
        if self._device.type == "meta":
            return values
        generator = torch.Generator(self._device)
        generator.manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
        return values.normal_(0.0, STD, generator=generator)

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self.tensor(name).narrow(dim, start, length)
