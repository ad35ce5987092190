"""How is one tensor of a checkpoint read so that only that tensor takes memory?"""

from __future__ import annotations

from pathlib import Path

import torch

from ridgeline.errors import ConfigError, check
from ridgeline.loader.checkpoint import DTYPES, check_finite
from ridgeline.loader.header import TensorEntry
from ridgeline.loader.shards import find_tensors

FLOATS = ("F32", "F16", "BF16")


class FileTensors:
    """The tensors of a model folder, each read from its file when it is asked for: nothing is
    mapped, so a limit on the address space is a limit on what this takes."""

    def __init__(self, folder: Path) -> None:
        self._entries = find_tensors(folder)

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def num_bytes(self, name: str) -> int:
        entry = self._find(name)[1]
        return entry.end - entry.start

    def tensor(self, name: str) -> torch.Tensor:
        """In the stored dtype. ConfigError if it is missing, cut off, NaN or infinite."""
        path, entry = self._find(name)
        data = bytearray(entry.end - entry.start)
        with path.open("rb", buffering=0) as file:
            file.seek(entry.start)
            done = 0
            while done < len(data):
                count = file.readinto(memoryview(data)[done:])
                if not count:
                    raise ConfigError(f"{path}: ends within tensor {name!r}; copy it again")
                done += count
        if not data:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        found = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
        check_finite(name, found, path)
        return found

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A part of `tensor(name)`."""
        shape = self.shape(name)
        check(0 <= dim < len(shape) and start + length <= shape[dim], "slice outside", name=name)
        return self.tensor(name).narrow(dim, start, length)

    def check_floats(self) -> None:
        """ConfigError if a tensor has another dtype than those that quantization starts from."""
        for name, (path, entry) in self._entries.items():
            if entry.dtype not in FLOATS:
                raise ConfigError(
                    f"{path}: tensor {name!r} is {entry.dtype}; quantize needs a checkpoint of"
                    f" {', '.join(FLOATS)}, not one that is quantized already"
                )

    def _find(self, name: str) -> tuple[Path, TensorEntry]:
        if name not in self._entries:
            raise ConfigError(f"the checkpoint has no tensor {name!r}")
        return self._entries[name]
