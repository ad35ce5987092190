"""How are matrices kept that somebody has quantized? As the checkpoint stores them: their codes and
scales, exactly, in the first home that takes them; numbers in e4m3 as the formats fp8 and fp8-block
keep theirs. What is stored otherwise comes unpacked, like what was never quantized.

Matrices of one product that are stored alike are kept as one, others each for itself, and their
outputs stand side by side. Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.architectures.spec import ModelSpec
from ridgeline.architectures.stored import Raw, Stored, raw_name, tensors_of
from ridgeline.architectures.stored_config import kept_matrices
from ridgeline.errors import ConfigError, InternalError, check
from ridgeline.formats import STORED
from ridgeline.kernels.small_linear import Fusion
from ridgeline.quantization.contract import MatrixShare, Parameters, TensorPiece, WeightFormat
from ridgeline.quantization.fp8 import Fp8Weights
from ridgeline.quantization.fp8_blocks import BLOCK, Fp8BlockWeights
from ridgeline.quantization.homes import HOMES, INVARIANT_HOMES, Homes
from ridgeline.quantization.plain import InvariantPlainWeights, PlainWeights
from ridgeline.quantization.readers import Read, read_matrix
from ridgeline.quantization.stored_keepers import (
    BlocksKeeper,
    CodesKeeper,
    Keeper,
    OrderedKeeper,
    PlainKeeper,
    RowsKeeper,
)

DTYPES: Mapping[str, torch.dtype] = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
ASIS = "weight"


class StoredWeights(PlainWeights):
    """A format that must know the model: `of_model`, then `of` for each product. By itself, and for
    matrices that are stored as they were, it is `plain`."""

    name = STORED

    def __init__(self, known: Mapping[str, Stored] | None = None) -> None:
        self._known = {} if known is None else known

    def of_model(self, spec: ModelSpec) -> StoredWeights:
        """The same with what the model's checkpoint stores."""
        return type(self)({one.name: one.stored for one in kept_matrices(spec)})

    def of(self, shares: Sequence[MatrixShare], dtype: torch.dtype) -> WeightFormat:
        """Of the product whose rows are these, one below the other; x is of `dtype`. ConfigError
        if a share begins within a group or a word."""
        stored = [self._known.get(share.name) for share in shares]
        if not any(stored):
            return self._plain()
        matrices = [_Matrix(*both) for both in zip(shares, stored, strict=True)]
        for matrix in matrices:
            matrix.check_share()
        runs = [_Run(tuple(run), self._keeper(run[0].stored)) for run in _alike(matrices)]
        return StoredRows(runs, dtype)

    def invariant(self) -> StoredWeights:
        return InvariantStoredWeights(self._known)

    def _keeper(self, stored: Stored | None) -> Keeper:
        if stored is None:
            return PlainKeeper(self._plain())
        if stored.keeps == "e4m3":
            return RowsKeeper(self._fp8())
        if stored.keeps == "blocks":
            return BlocksKeeper(self._fp8_blocks())
        return OrderedKeeper(self._homes()) if stored.act_order else CodesKeeper(self._homes())

    def _plain(self) -> PlainWeights:
        return PlainWeights()

    def _homes(self) -> Homes:
        return Homes(HOMES)

    def _fp8(self) -> Fp8Weights:
        return Fp8Weights()

    def _fp8_blocks(self) -> Fp8BlockWeights:
        return Fp8BlockWeights()


class InvariantStoredWeights(InvariantPlainWeights, StoredWeights):
    """The same numbers; each row of a product has the same bits in any company."""

    def invariant(self) -> StoredWeights:
        return self

    def _plain(self) -> PlainWeights:
        return PlainWeights().invariant()

    def _homes(self) -> Homes:
        return Homes(INVARIANT_HOMES)

    def _fp8(self) -> Fp8Weights:
        return Fp8Weights().invariant()

    def _fp8_blocks(self) -> Fp8BlockWeights:
        return Fp8BlockWeights().invariant()


class StoredRows:
    """The product of one layer. Parameters to load into are the checkpoint's own tensors, by number
    of the matrix and suffix; those that are kept are a keeper's, by number of it where there are
    several."""

    name = STORED
    bits: int | None = None

    def __init__(self, runs: Sequence[_Run], dtype: torch.dtype) -> None:
        self._runs = tuple(runs)
        self._matrices = [matrix for run in runs for matrix in run.matrices]
        self._dtype = dtype
        self._counts = [sum(one.share.num_rows for one in run.matrices) for run in runs]

    def parameters(
        self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> Parameters:
        check(sum(self._counts) == outputs, "rows of the product", got=self._counts)
        found: Parameters = {}
        for at, matrix in enumerate(self._matrices):
            check(matrix.share.num_columns == inputs, "inputs of the product", got=inputs)
            found |= {f"{at}.{k}": v for k, v in matrix.empty(dtype, device).items()}
        return found

    def pieces(self, parameters: Parameters, index: int) -> list[TensorPiece]:
        """The tensors of one of its matrices."""
        return list(self._matrices[index].pieces(_under(parameters, index)))

    def finish(self, parameters: Parameters) -> Parameters:
        """ConfigError if the tensors of a matrix contradict each other."""
        if len(self._runs) == 1:
            return self._kept(self._runs[0], 0, parameters)
        found: Parameters = {}
        begin = 0
        for number, run in enumerate(self._runs):
            kept = self._kept(run, begin, parameters)
            found |= {f"{number}.{name}": tensor for name, tensor in kept.items()}
            begin += len(run.matrices)
        return found

    def _kept(self, run: _Run, begin: int, parameters: Parameters) -> Parameters:
        read = [
            matrix.read(_under(parameters, begin + at)) for at, matrix in enumerate(run.matrices)
        ]
        return run.keeper.keep(read, self._dtype)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        if len(self._runs) == 1:
            return self._runs[0].keeper.linear(x_TI, parameters, bias_O)
        found, begin = [], 0
        for number, (run, count) in enumerate(zip(self._runs, self._counts, strict=True)):
            bias = None if bias_O is None else bias_O[begin : begin + count]
            found.append(run.keeper.linear(x_TI, _under(parameters, number), bias))
            begin += count
        return torch.cat(found, -1)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        if len(self._runs) > 1:
            return None
        return self._runs[0].keeper.fused(x_TI, parameters, bias_O, fusion)

    def gates_input(self, x_TI: torch.Tensor, parameters: Parameters) -> bool:
        """As that of format fp8, if that keeps all of it."""
        fp8 = self._only_fp8
        return fp8 is not None and fp8.gates_input(x_TI, parameters)

    def linear_of_gated(
        self, x_TG: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        fp8 = self._only_fp8
        if fp8 is None:
            raise InternalError("only a product in fp8 gates its input")
        return fp8.linear_of_gated(x_TG, parameters, bias_O)

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """In float32, except what is kept in the serving dtype."""
        if len(self._runs) == 1:
            return self._runs[0].keeper.dequantize(parameters)
        each = enumerate(self._runs)
        parts = [run.keeper.dequantize(_under(parameters, number)) for number, run in each]
        return torch.cat([part.float() for part in parts])

    @property
    def _only_fp8(self) -> Fp8Weights | None:
        keeper = self._runs[0].keeper
        return keeper.fp8 if len(self._runs) == 1 and isinstance(keeper, RowsKeeper) else None


def _under(parameters: Parameters, number: int) -> Parameters:
    """Those whose names begin with this number, without it."""
    start = f"{number}."
    return {k.removeprefix(start): v for k, v in parameters.items() if k.startswith(start)}


# ------------------------------------------------------------------------ matrices


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A rank's share of one; `stored` None: it is as it was."""

    share: MatrixShare
    stored: Stored | None

    def raws(self) -> Iterator[Raw]:
        """The tensors that are read."""
        if self.stored is not None:
            needed = tensors_of(self.stored)
            yield from (raw for raw in needed if raw.is_read and not raw.is_optional)

    def check_share(self) -> None:
        share, stored = self.share, self.stored
        if stored is None:
            return
        if stored.act_order and not share.has_all_columns:
            raise ConfigError(
                f"{share.name} has columns in an order of their own (act-order) and cannot be"
                " split over devices; serve it on one, or with weight_format plain"
            )
        starts = {"rows": share.first_row, "columns": share.first_column}
        for dim in (dim for raw in self.raws() for dim in raw.dims if dim.of):
            if not dim.divides(starts[dim.of]):
                raise ConfigError(
                    f"{share.name}, stored as {stored.words}, cannot be split over so many"
                    " devices: a share would begin within a group or a word; use fewer, or"
                    " weight_format plain"
                )

    def empty(self, dtype: torch.dtype, device: torch.device) -> Parameters:
        """Room for its tensors."""
        shape = self.share.num_rows, self.share.num_columns
        if self.stored is None:
            return {ASIS: torch.empty(shape, dtype=dtype, device=device)}
        return {
            raw.suffix: torch.empty(raw.shape(*shape), dtype=DTYPES[raw.dtypes[0]], device=device)
            for raw in self.raws()
        }

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorPiece]:
        """What is copied where."""
        share = self.share
        what = "rows" if share.has_all_columns else "columns"
        first = share.first_row if share.has_all_columns else share.first_column
        if self.stored is None:
            yield TensorPiece(share.name, tensors[ASIS], 0 if what == "rows" else 1, first)
        for raw in self.raws():
            dim = raw.dim_of(what)
            begin = 0 if dim is None else raw.dims[dim].entry(first)
            yield TensorPiece(raw_name(share.name, raw), tensors[raw.suffix], dim, begin)

    def read(self, tensors: Parameters) -> Read | torch.Tensor:
        if self.stored is None:
            return tensors[ASIS]
        share = self.share
        try:
            return read_matrix(self.stored, tensors, share.num_rows, share.num_columns)
        except ConfigError as error:
            raise ConfigError(f"{share.name}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Run:
    """Matrices that are kept as one, and who keeps them."""

    matrices: tuple[_Matrix, ...]
    keeper: Keeper


def _alike(matrices: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
    """Neighbours that can be kept as one matrix."""
    run: list[_Matrix] = []
    for matrix in matrices:
        if run and not _joins(run[-1], matrix):
            yield run
            run = []
        run.append(matrix)
    yield run


def _joins(one: _Matrix, other: _Matrix) -> bool:
    first, second = _keeps(one.stored), _keeps(other.stored)
    if one.stored is not None and one.stored.act_order:
        return False
    if first[0] == "blocks" and one.share.num_rows % BLOCK:
        return False
    return first == second


def _keeps(stored: Stored | None) -> tuple[object, ...]:
    """What must be the same."""
    if stored is None:
        return ("",)
    if stored.keeps != "codes":
        return (stored.keeps,)
    beside = stored.group, stored.has_zero, stored.scale_dtype, stored.act_order
    return (stored.keeps, stored.kept_bits, *beside)
