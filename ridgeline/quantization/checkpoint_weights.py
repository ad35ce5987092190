"""How are matrices of a quantized checkpoint kept? As it stores them: their codes and scales,
exactly, in the first layout that takes them; numbers in e4m3 as the formats fp8 and fp8-block keep
theirs. What is stored otherwise comes unpacked, like what was never quantized.

Matrices of one product that are stored alike are kept as one, others each for itself, and their
outputs stand side by side. Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ridgeline.architectures.quantization_scheme import Raw, Scheme, cut_steps, raw_name, tensors_of
from ridgeline.architectures.scheme_config import kept_matrices, tensors_read
from ridgeline.architectures.spec import ModelSpec
from ridgeline.architectures.tensor_layouts import Cut, cuts
from ridgeline.errors import ConfigError, InternalError, check
from ridgeline.formats import CHECKPOINT
from ridgeline.kernels.cpu.packed_linear import PackedMatrix
from ridgeline.kernels.fp8_block_linear import BLOCK
from ridgeline.kernels.grouped_experts import StackedMatrix
from ridgeline.kernels.quantized_matrix import Parameters, QuantizedMatrix, joined
from ridgeline.kernels.small_linear import Fusion
from ridgeline.quantization.contract import MatrixShare, Piece, WeightFormat
from ridgeline.quantization.fp8 import Fp8BlockWeights, Fp8Weights
from ridgeline.quantization.integers import PackedIntegers
from ridgeline.quantization.plain import InvariantPlainWeights, PlainWeights
from ridgeline.quantization.readers import Blocks8, Ordered, Read, Rows8, read_matrix

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
ORDER = "order"  # of the columns of a matrix, beside what its layout keeps

Kind = TypeVar("Kind", QuantizedMatrix, Ordered, Rows8, Blocks8, torch.Tensor)


class CheckpointWeights(PlainWeights):
    """A format that must know the model: `of_model`, then `of` for each product. By itself, and for
    matrices that are stored as they were, it is `plain`."""

    name = CHECKPOINT

    def __init__(
        self,
        known: Mapping[str, Scheme] | None = None,
        within: Mapping[str, Cut] | None = None,
        *,
        is_of_experts: bool = False,
    ) -> None:
        self._known, self._within = known or {}, within or {}
        self._is_of_experts = is_of_experts

    def of_model(self, spec: ModelSpec) -> CheckpointWeights:
        """The same with what the model's checkpoint stores."""
        return type(self)({one.name: one.scheme for one in kept_matrices(spec)}, cuts(spec))

    def of_experts(self) -> CheckpointWeights:
        return type(self)(self._known, self._within, is_of_experts=True)

    def tensors_read(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        return tensors_read(spec)

    def of(self, shares: Sequence[MatrixShare], dtype: torch.dtype) -> WeightFormat:
        """ConfigError if a share begins within a block or a word."""
        shares = [self._stored(share) for share in shares]
        scheme = [self._known.get(share.name) for share in shares]
        if not any(scheme):
            return self._kept_as(None)
        matrices = [_Matrix(*both) for both in zip(shares, scheme, strict=True)]
        for matrix in matrices:
            matrix.check_share()
        runs = [_Run(tuple(run), self._form_of(run[0].scheme)) for run in _alike(matrices)]
        return CheckpointRows(runs, dtype)

    def _stored(self, share: MatrixShare) -> MatrixShare:
        """The same rows by the name of the quantized tensor that holds them."""
        cut = self._within.get(share.name)
        if cut is None or cut.name not in self._known:
            return share
        return replace(share, name=cut.name, first_row=share.first_row + cut.start)

    def _form_of(self, scheme: Scheme | None) -> WeightFormat:
        found = self._kept_as(scheme)
        return found.of_experts() if self._is_of_experts else found

    def _kept_as(self, scheme: Scheme | None) -> WeightFormat:
        if scheme is None:
            return PlainWeights()
        if scheme.keeps == "e4m3":
            return Fp8Weights()
        if scheme.keeps == "blocks":
            return Fp8BlockWeights()
        return OrderedIntegers() if scheme.act_order else PackedIntegers(CHECKPOINT)

    def invariant(self) -> CheckpointWeights:
        more = self._known, self._within
        return InvariantCheckpointWeights(*more, is_of_experts=self._is_of_experts)


class InvariantCheckpointWeights(InvariantPlainWeights, CheckpointWeights):
    """The same numbers; each row of a product has the same bits in any batch."""

    def invariant(self) -> CheckpointWeights:
        return self

    def _kept_as(self, scheme: Scheme | None) -> WeightFormat:
        found = super()._kept_as(scheme).invariant()
        if found is None:
            raise InternalError("quantized checkpoints are kept in formats with such products")
        return found


class OrderedIntegers(PackedIntegers):
    """Integers whose columns stand group by group: those of x are put in that order first."""

    def __init__(self) -> None:
        super().__init__(CHECKPOINT)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        return super().linear(x_TI.index_select(1, parameters[ORDER]), parameters, bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> None:
        """The order stands between x and the product."""

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> None:
        """Nor do grouped products know an order."""

    def packed(self, parameters: Parameters) -> None:
        """Nor those of a CPU."""

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        return Ordered(self.matrix(parameters), parameters[ORDER]).dequantize()


class CheckpointRows(WeightFormat):
    """The product of one layer. Parameters to load into are the checkpoint's own tensors, by number
    of the matrix and suffix; those that are kept are a run's, by number of it where there are
    several."""

    name = CHECKPOINT

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

    def pieces(self, parameters: Parameters, index: int) -> list[Piece]:
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
        return _kept(run.form, read, self._dtype)

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        if len(self._runs) == 1:
            return self._runs[0].form.linear(x_TI, parameters, bias_O)
        found, begin = [], 0
        for number, (run, count) in enumerate(zip(self._runs, self._counts, strict=True)):
            bias = None if bias_O is None else bias_O[begin : begin + count]
            found.append(run.form.linear(x_TI, _under(parameters, number), bias))
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
        return self._runs[0].form.fused(x_TI, parameters, bias_O, fusion)

    def gates_input(self, x_TI: torch.Tensor, parameters: Parameters) -> bool:
        return len(self._runs) == 1 and self._runs[0].form.gates_input(x_TI, parameters)

    def linear_of_gated(
        self, x_TG: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        if len(self._runs) > 1:
            return super().linear_of_gated(x_TG, parameters, bias_O)
        return self._runs[0].form.linear_of_gated(x_TG, parameters, bias_O)

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> StackedMatrix | None:
        if len(self._runs) > 1:
            return None
        return self._runs[0].form.stacked(parameters, bias_XN)

    def packed(self, parameters: Parameters) -> PackedMatrix | None:
        return self._runs[0].form.packed(parameters) if len(self._runs) == 1 else None

    def dequantize(self, parameters: Parameters) -> torch.Tensor:
        """In float32, except what is kept in the serving dtype."""
        if len(self._runs) == 1:
            return self._runs[0].form.dequantize(parameters)
        each = enumerate(self._runs)
        parts = [run.form.dequantize(_under(parameters, number)) for number, run in each]
        return torch.cat([part.float() for part in parts])


def _under(parameters: Parameters, number: int) -> Parameters:
    """Those whose names begin with this number, without it."""
    start = f"{number}."
    return {k.removeprefix(start): v for k, v in parameters.items() if k.startswith(start)}


# ------------------------------------------------------------------------ matrices


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A rank's share of one; `scheme` None: it is as it was."""

    share: MatrixShare
    scheme: Scheme | None

    def raws(self) -> Iterator[Raw]:
        """The tensors that are read."""
        if self.scheme is not None:
            needed = tensors_of(self.scheme)
            yield from (raw for raw in needed if raw.is_read and not raw.is_optional)

    def check_share(self) -> None:
        share, scheme = self.share, self.scheme
        if scheme is None:
            return
        if scheme.act_order and not share.has_all_columns:
            raise ConfigError(
                f"{share.name} has columns in an order of their own (act-order) and cannot be"
                " split over devices; serve it on one, or with weight_format plain"
            )
        rows, columns = cut_steps(scheme)
        is_even = self.lead * scheme.bits % 8 == 0
        if share.first_row % rows or (share.first_column - self.lead) % columns or not is_even:
            raise ConfigError(
                f"{share.name}, stored as {scheme.text}, cannot be split over so many devices: a"
                " share would begin within a block or a word; use fewer, or weight_format plain"
            )

    @property
    def lead(self) -> int:
        """Columns in front of the share that are read because its first group has them too."""
        if self.scheme is None or self.scheme.keeps != "codes":
            return 0
        return self.share.first_column % cut_steps(self.scheme)[1]

    def empty(self, dtype: torch.dtype, device: torch.device) -> Parameters:
        """Room for its tensors."""
        shape = self.share.num_rows, self.lead + self.share.num_columns
        if self.scheme is None:
            return {ASIS: torch.empty(shape, dtype=dtype, device=device)}
        return {
            raw.suffix: torch.empty(raw.shape(*shape), dtype=DTYPES[raw.dtypes[0]], device=device)
            for raw in self.raws()
        }

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        """What is copied where."""
        share = self.share
        what = "rows" if share.has_all_columns else "columns"
        first = share.first_row if share.has_all_columns else share.first_column - self.lead
        if self.scheme is None:
            yield Piece(share.name, tensors[ASIS], 0 if what == "rows" else 1, first)
        for raw in self.raws():
            dim = raw.dim_of(what)
            begin = 0 if dim is None else raw.dims[dim].entry(first)
            yield Piece(raw_name(share.name, raw), tensors[raw.suffix], dim, begin)

    def read(self, tensors: Parameters) -> Read | torch.Tensor:
        if self.scheme is None:
            return tensors[ASIS]
        share = self.share
        try:
            columns = self.lead + share.num_columns
            found = read_matrix(self.scheme, tensors, share.num_rows, columns)
        except ConfigError as error:
            raise ConfigError(f"{share.name}: {error}") from None
        return found.behind(self.lead) if isinstance(found, QuantizedMatrix) else found


@dataclass(frozen=True, slots=True)
class _Run:
    """Matrices that are kept as one, and how."""

    matrices: tuple[_Matrix, ...]
    form: WeightFormat


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
    first, second = _keeps(one.scheme), _keeps(other.scheme)
    if one.scheme is not None and one.scheme.act_order:
        return False
    if first[0] == "blocks" and one.share.num_rows % BLOCK:
        return False
    return first == second


def _keeps(scheme: Scheme | None) -> tuple[object, ...]:
    """What must be the same."""
    if scheme is None:
        return ("",)
    if scheme.keeps != "codes":
        return (scheme.keeps,)
    beside = scheme.group, scheme.has_zero, scheme.scale_dtype, scheme.act_order
    return (scheme.keeps, scheme.kept_bits, *beside)


def _kept(
    form: WeightFormat, matrices: Sequence[Read | torch.Tensor], dtype: torch.dtype
) -> Parameters:
    """Of matrices that `form` keeps one below the other, to be multiplied by rows of `dtype`; a
    Tensor is as it was."""
    if isinstance(form, OrderedIntegers):
        (one,) = _all(matrices, Ordered)
        return {**form.keep(one.matrix, dtype), ORDER: one.order_I}
    if isinstance(form, PackedIntegers):
        return form.keep(joined(_all(matrices, QuantizedMatrix)), dtype)
    if isinstance(form, Fp8Weights):
        rows = _all(matrices, Rows8)
        codes_OI = _together([one.codes_OI for one in rows])
        return {"codes": codes_OI, "scale": torch.cat([one.scale_O for one in rows])}
    if isinstance(form, Fp8BlockWeights):
        blocks = _all(matrices, Blocks8)
        codes_OI = _together([one.codes_OI for one in blocks])
        return form.keep(codes_OI, torch.cat([one.scale_RC.float() for one in blocks]))
    return form.finish({"weight": torch.cat(_all(matrices, torch.Tensor))})


def _all(matrices: Sequence[Read | torch.Tensor], kind: type[Kind]) -> list[Kind]:
    found = [one for one in matrices if isinstance(one, kind)]
    if len(found) != len(matrices):
        raise InternalError(f"a matrix that was read is no {kind.__name__}")
    return found


def _together(codes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers in e4m3, one below the other; as bytes, which every device can join."""
    return torch.cat([one.view(torch.uint8) for one in codes]).view(codes[0].dtype)
