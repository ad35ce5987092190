"""Are the tensors of a quantized checkpoint what its config says, and which numbers are they?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ridgeline.architectures.mtp_head import mtp_tensors
from ridgeline.architectures.parts import expected_tensors
from ridgeline.architectures.quantization_scheme import (
    FLOATS,
    ZERO,
    Raw,
    Scheme,
    raw_name,
    tensors_of,
)
from ridgeline.architectures.scheme_config import (
    KEY,
    SCALES,
    MatrixScheme,
    checkpoint_tensors,
    matrix_schemes,
    optional_checkpoint_tensors,
)
from ridgeline.architectures.scheme_methods import AWQ_MIDDLE, AWQ_ZEROS
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError, check
from ridgeline.layers.piece import Piece
from ridgeline.layers.piece import fill as fill_plain
from ridgeline.loader.checkpoint import Checkpoint, CheckpointSource, check_tensors
from ridgeline.loader.folder import refuse
from ridgeline.loader.gguf_checkpoint import GGUFCheckpoint
from ridgeline.loader.shards import INDEX_FILE, SINGLE_FILE, find_tensors
from ridgeline.quantization.readers import read_matrix

SCALE_NAMES = (".weight_scale", ".scales", ".weight_scale_inv")
ALIGNED_ROWS = 128  # whole words of zeros and of codes in every layout
CHUNK_NUMBERS = 1 << 22  # unpacked at once, with a few copies in float32 on the way
BIAS, ORDER, SHAPE = "bias", "g_idx", "weight_shape"


def with_scales(config: dict[str, object], folder: Path) -> dict[str, object]:
    """The config with the dtype of the scales in the files, which it does not say itself. Reads
    headers alone. ConfigError if there are several."""
    section = config.get(KEY)
    has_weights = (folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists()
    if not isinstance(section, dict) or not section or not has_weights:
        return config
    found: dict[str, str] = {}
    for name, (_, entry) in find_tensors(folder).items():
        if name.endswith(SCALE_NAMES):
            found.setdefault(entry.dtype, name)
    if len(found) > 1:
        shown = ", ".join(f"{name[:80]} is {dtype}" for dtype, name in found.items())
        refuse(folder, f"has scales of several dtypes, which is not supported: {shown}")
    for dtype, name in found.items():
        if dtype not in FLOATS:
            refuse(folder, f"tensor {name[:80]!r} is {dtype}; scales are {', '.join(FLOATS)}")
        return {**config, KEY: {**section, SCALES: FLOATS[dtype]}}
    return config


def check_model(checkpoint: Checkpoint, spec: ModelSpec, path: Path) -> None:
    """Does the checkpoint hold just what the model needs? `check_tensors`, and of matrices that are
    stored in a format of their own what else their tensors say. ConfigError."""
    if isinstance(checkpoint, GGUFCheckpoint):  # its reader has found all by other names
        check_tensors(checkpoint, expected_tensors(spec), path)
    else:
        _check_quantized(checkpoint, spec, path)


def _check_quantized(checkpoint: Checkpoint, spec: ModelSpec, folder: Path) -> None:
    """ConfigError also for a tensor of another dtype than its layout has, and for one that says
    what nobody would act upon."""
    matrices, expected = matrix_schemes(spec), checkpoint_tensors(spec)
    optional = optional_checkpoint_tensors(spec)
    names = set(checkpoint.names())
    for matrix in matrices:
        bias = matrix.name.removesuffix("weight") + BIAS
        if bias in names and bias not in expected and _is_zero(checkpoint, bias):
            optional[bias] = (matrix.rows,)
        for raw in tensors_of(matrix.scheme):
            if raw.is_any and (name := raw_name(matrix.name, raw)) in names:
                optional[name] = checkpoint.shape(name)
    others = [*mtp_tensors(spec, names), *(n for n in names if n.startswith(spec.left_out))]
    optional |= {name: checkpoint.shape(name) for name in others}
    check_tensors(checkpoint, expected, folder, optional=optional)
    for matrix in matrices:
        for raw in tensors_of(matrix.scheme):
            name = raw_name(matrix.name, raw)
            if name in names:
                _check_tensor(checkpoint, matrix, raw, name)


def _is_zero(checkpoint: Checkpoint, name: str) -> bool:
    """AutoGPTQ writes a bias of zeros for layers that have none, other tools zeros of symmetric
    codes."""
    found = not bool((checkpoint.tensor(name).float() != 0).any())
    checkpoint.release(name)
    return found


def _check_tensor(checkpoint: Checkpoint, matrix: MatrixScheme, raw: Raw, name: str) -> None:
    path = checkpoint.file(name)
    dtype = checkpoint.dtype(name)
    if dtype not in raw.dtypes:
        what = f"{', '.join(raw.dtypes)} in layout {matrix.scheme.layout}"
        refuse(path, f"tensor {name!r} is {dtype}; it must be {what}")
    if raw.suffix == SHAPE:
        says = checkpoint.tensor(name).tolist()
        if says != [matrix.rows, matrix.columns]:
            made = [matrix.rows, matrix.columns]
            refuse(path, f"tensor {name!r} says {says}, but config.json makes it {made}")
    if (
        raw.suffix == AWQ_ZEROS
        and raw.is_optional
        and bool((checkpoint.tensor(name) != AWQ_MIDDLE).any())
    ):
        refuse(path, f"tensor {name!r} has zeros, but config.json says zero_point false; set it")
    if raw.suffix == ZERO and raw.is_optional and not _is_zero(checkpoint, name):
        refuse(path, f"tensor {name!r} is not 0, but config.json says symmetric; set it to false")
    if raw.suffix == ORDER and raw.is_optional:
        size = matrix.scheme.group or matrix.columns
        wanted = torch.arange(matrix.columns) // size
        if not torch.equal(checkpoint.tensor(name).long(), wanted):
            refuse(
                path,
                f"tensor {name!r} orders columns, but quantization_config.desc_act of config.json"
                " is false; set it to true",
            )


class UnpackedSource(CheckpointSource):
    """A checkpoint whose quantized `matrices` are numbers: (code - zero) * scale in float32, then
    the dtype that is asked for. All else comes as it is."""

    def __init__(self, checkpoint: Checkpoint, matrices: Iterable[MatrixScheme]) -> None:
        super().__init__(checkpoint)
        self._matrices = {matrix.name: matrix for matrix in matrices}

    def names(self) -> list[str]:
        gone = {
            raw_name(name, raw)
            for name, m in self._matrices.items()
            for raw in tensors_of(m.scheme)
        }
        return [*(n for n in self._checkpoint.names() if n not in gone), *self._matrices]

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._matrices.get(name)
        return self._checkpoint.shape(name) if found is None else (found.rows, found.columns)

    def tensor(self, name: str) -> torch.Tensor:
        """In float32, where it was quantized."""
        return self.slice(name, 0, 0, self.shape(name)[0])

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        found = self._matrices.get(name)
        if found is None:
            return self._checkpoint.slice(name, dim, start, length)
        shape = [found.rows, found.columns]
        inside = dim in (0, 1) and start >= 0 and start + length <= shape[dim]
        check(inside, "slice outside its tensor", name=name)
        shape[dim] = length
        target = torch.empty(shape)
        self._unpack(found, Piece(name, target, dim, start))
        return target

    @contextmanager
    def bring(self, pieces: Iterable[Piece]) -> Iterator[Iterator[int]]:
        """ConfigError when a tensor holds NaN or infinity, before the piece is reported."""
        yield (self._fill(piece) for piece in pieces)

    def _fill(self, piece: Piece) -> int:
        found = self._matrices.get(piece.name)
        if found is not None:
            return self._unpack(found, piece)
        size = fill_plain(piece, self._checkpoint)
        self._checkpoint.release(piece.name)
        return size

    def _unpack(self, matrix: MatrixScheme, piece: Piece) -> int:
        """The bytes read. Rows are cut where words and blocks end."""
        target = piece.target
        if piece.dim == 1:
            first, rows, columns = 0, matrix.rows, slice(piece.start, None)
        else:
            first, rows, columns = piece.start, len(target), slice(None)
        aligned, step = _steps(matrix)
        total, end = 0, first + rows
        for begin in range(first // aligned * aligned, end, step):
            stop = min(begin + step, matrix.rows)
            tensors = self._tensors(matrix, begin, stop - begin)
            total += sum(one.numel() * one.element_size() for one in tensors.values())
            moved = {suffix: one.to(target.device) for suffix, one in tensors.items()}
            values = self._read(matrix, moved, stop - begin)[:, columns]
            low, high = max(begin, first), min(stop, end)
            part = target[low - first : high - first]
            part.copy_(values[low - begin : high - begin, : target.shape[1]])
        for raw in _read_tensors(matrix.scheme):
            self._checkpoint.release(raw_name(matrix.name, raw))
        return total

    def _tensors(self, matrix: MatrixScheme, begin: int, rows: int) -> dict[str, torch.Tensor]:
        """Those of some rows."""
        found = {}
        for raw in _read_tensors(matrix.scheme):
            name, at = raw_name(matrix.name, raw), raw.dim_of("rows")
            if at is None:
                found[raw.suffix] = self._checkpoint.tensor(name)
                continue
            dim = raw.dims[at]
            size = dim.size(rows, matrix.columns)
            found[raw.suffix] = self._checkpoint.slice(name, at, dim.entry(begin), size)
        return found

    def _read(
        self, matrix: MatrixScheme, tensors: dict[str, torch.Tensor], rows: int
    ) -> torch.Tensor:
        try:
            return read_matrix(matrix.scheme, tensors, rows, matrix.columns).dequantize()
        except ConfigError as error:
            raise ConfigError(f"{matrix.name}: {error}") from None


def _steps(matrix: MatrixScheme) -> tuple[int, int]:
    """Between which rows it can be cut, and how many are unpacked at once."""
    if any(dim.of == "weights" for raw in tensors_of(matrix.scheme) for dim in raw.dims):
        return matrix.rows, matrix.rows
    aligned = math.lcm(ALIGNED_ROWS, matrix.scheme.block_rows or 1)
    return aligned, max(1, CHUNK_NUMBERS // (matrix.columns * aligned)) * aligned


def _read_tensors(scheme: Scheme) -> list[Raw]:
    return [raw for raw in tensors_of(scheme) if raw.is_read and not raw.is_optional]
