"""x @ W.T with W of 4 bits on a GPU, groups of 32, 64 or 128: which kernel, and where W is kept.

Up to `MAX_FEW` rows of x one kernel streams W and does all that stands beside the product. Up to
`MAX_TILED` rows tensor cores take W from registers, with the gate, the residual and a bias inside.
Of more rows the library multiplies by W in the dtype of x, which is unpacked before (in pieces, if
it is large). `tiles.json` says what was measured (its dtype is "int4"); the rest is guessed.
Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.int4_linear_cuda import (
    multiply_tiles,
    stream,
    stream_cut,
    tiles_cut,
    unpack,
)
from ridgeline.kernels.int4_linear_records import (
    COLUMNS,
    ROWS,
    Form,
    Records,
    fits_records,
    pack_records,
    unpack_records,
)
from ridgeline.kernels.large_m_linear import large_m_linear
from ridgeline.kernels.quantized_matrix import (
    SIZES,
    Parameters,
    QuantizedMatrix,
    WeightLayout,
    read_sizes,
)
from ridgeline.kernels.small_linear import Beside, Fusion
from ridgeline.kernels.stream_linear import compiles, multiprocessors
from ridgeline.kernels.tile_linear import ALIGNMENT
from ridgeline.kernels.tiles import Place, Tile, bucket, find_tile, is_measured, kind_of

BITS = 4
DTYPE = "int4"  # in tiles.json
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)  # of the instructions that the kernels use
MAX_FEW = 8  # rows for which streaming W is guessed to be the fastest
# Measured on an H200 with weights of an 8B model, all products of a layer, in us. Unpacked: with
# the gate as a kernel of its own; of 2,048 rows and fewer also in pieces of 1 << 25 numbers.
#     rows   from codes   unpacked, then the library   bfloat16
#      512          310                          497        314
#    1,024          613                          816        591
#    2,048        1,402                        1,815      1,174
#    4,096        2,838                        2,845      2,314
MAX_TILED = 2048  # rows; of more, unpacking is expected to cost less, its price being fixed
LIBRARY_NUMBERS = 1 << 27  # of W that are unpacked at once
HALF_BYTES = 110 << 10  # of shared memory, so that the next kernel finds room beside this one
UNITS = 132  # multiprocessors of an H200


@dataclass(frozen=True, slots=True)
class Asked:
    """What the choice of a kernel depends on."""

    rows: int
    form: Form
    units: int
    gated: bool = False
    norm: bool = False
    residual: bool = False

    @property
    def kind(self) -> str:
        return kind_of(norm=self.norm, gated=self.gated, residual=self.residual)


class Int4Layout(WeightLayout):
    """Where the kernels are: NVRTC and a GPU of compute capability 9.0."""

    def takes(self, like: QuantizedMatrix, dtype: torch.dtype) -> bool:
        return (
            like.codes.device.type == "cuda"
            and dtype in SIXTEEN_BITS
            and fits_records(like)
            and torch.cuda.get_device_capability(like.codes.device) == CAPABILITY
            and compiles()
        )

    def keep(self, matrix: QuantizedMatrix) -> Parameters:
        return kept(pack_records(matrix))

    def matrix(self, parameters: Parameters) -> QuantizedMatrix:
        return unpack_records(records_of(parameters))

    def linear(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
    ) -> torch.Tensor:
        return int4_linear(x_TI, records_of(parameters), bias_O)

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: Parameters,
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return int4_fused(x_TI, records_of(parameters), bias_O, fusion)


def kept(records: Records) -> Parameters:
    """As parameters of a layer. Two of them have no numbers: one has a dtype and one a shape."""
    form, codes = records.form, records.bytes_RCB
    scale = torch.empty(0, dtype=form.scale_dtype, device=codes.device)
    sizes = codes.new_empty(form.outputs, form.inputs, BITS, form.group, 0)
    return {"records": codes, "scale_like": scale, SIZES: sizes}


def records_of(parameters: Parameters) -> Records:
    codes, dtype = parameters["records"], parameters["scale_like"].dtype
    outputs, inputs, _, group = read_sizes(parameters)
    form = Form(outputs, inputs, group, dtype, False)
    has_zero = codes.shape[2] > form.record_bytes
    return Records(codes, replace(form, has_zero=has_zero))


def int4_linear(
    x_TI: torch.Tensor, records: Records, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ W.T + bias, [T, O] in the dtype of x."""
    if x_TI.shape[0] == 0:
        return x_TI.new_empty(0, records.form.outputs)
    tile = choose(_asked(x_TI, records.form, Fusion()))
    if tile is None:
        return _by_library(x_TI, records, bias_O)
    return by_tile(x_TI, records, tile, Beside(bias_N=bias_O))


def int4_fused(
    x_TI: torch.Tensor, records: Records, bias_O: torch.Tensor | None, fusion: Fusion
) -> torch.Tensor | None:
    """The product and what stands beside it; None if there is no kernel for all of that."""
    residual_TO = fusion.residual_TO
    if fusion.of_gated or fusion.sum_TI is not None or x_TI.shape[0] == 0:
        return None
    if fusion.is_gated and records.form.outputs % (2 * ROWS):
        return None
    if fusion.norm is not None and x_TI.dtype != torch.bfloat16:
        return None
    if residual_TO is not None and not _is_aligned(residual_TO):
        return None
    tile = choose(_asked(x_TI, records.form, fusion))
    if tile is None:
        return _large_m(x_TI, records, fusion) if bias_O is None else None
    beside = Beside(
        norm=fusion.norm,
        bias_N=bias_O,
        gated=fusion.is_gated,
        residual_MO=residual_TO,
        out_MO=residual_TO,
    )
    return by_tile(x_TI, records, tile, beside)


def by_tile(
    x_TI: torch.Tensor, records: Records, tile: Tile, beside: Beside, *, pdl: bool = True
) -> torch.Tensor:
    """One of our kernels, cut by `tile`."""
    x_TI = x_TI if _is_aligned(x_TI) else x_TI.clone(memory_format=torch.contiguous_format)
    if tile.stream:
        return stream(x_TI, records, tile=tile, pdl=pdl, **beside)
    return multiply_tiles(x_TI, records, tile=tile, pdl=pdl, **beside)


@lru_cache(maxsize=4096)
def choose(asked: Asked) -> Tile | None:
    """What was measured, where it fits this form; else a guess. None: the library, or where
    something stands beside the product, one kernel after the other."""
    form = asked.form
    known = replace(asked, rows=bucket(asked.rows))
    place = Place(_device_name(), DTYPE, form.outputs, form.inputs, known.rows, known.kind)
    if is_measured(place):
        tile = find_tile(place)
        if tile is None or runs(tile, asked):
            return tile
    return untuned_tile(asked)


def runs(tile: Tile, asked: Asked) -> bool:
    """The kernel can be cut so."""
    form, units = asked.form, asked.units
    try:
        if tile.stream:
            stream_cut(
                tile, asked.rows, form, units=units, gated=asked.gated, norm=asked.norm
            )  # fmt: skip
        else:
            tiles_cut(tile, asked.rows, form, units=units, gated=asked.gated)
    except InternalError:
        return False
    return tile.stream or not asked.norm


def untuned_tile(asked: Asked) -> Tile | None:
    """Where nothing was measured."""
    if asked.rows <= MAX_FEW:
        for tile in _untuned_streams(asked):
            if runs(tile, asked):
                return tile
    if asked.rows > MAX_TILED or asked.norm:
        return None
    for stages in range(12, 2, -1):
        tile = _units_tile(asked, stages)
        if runs(tile, asked):
            return tile
    return None


def _untuned_streams(asked: Asked) -> list[Tile]:
    """Enough programs for all multiprocessors, as many slots as half of the memory takes; else
    what the memory takes, K being shared by more programs where x is large."""
    form = asked.form
    block_n = 2 * ROWS if asked.gated else ROWS
    groups = form.outputs // block_n
    splits = 1
    while groups * splits * 2 <= asked.units and splits < min(8, form.along_k):
        splits *= 2
    found = []
    for share in (s for s in (1, 2, 4, 8) if s >= splits):
        warps = 16 if form.along_k // share >= 16 else 8
        deep = 2 if form.along_k % (2 * share * warps) == 0 else 1
        tile = Tile(block_n, COLUMNS * deep, share, warps, stages=1, stream=True)
        for room in (HALF_BYTES, None):
            found += [
                replace(tile, stages=n)
                for n in (12, 10, 8, 6, 5, 4, 3, 2)
                if _within(replace(tile, stages=n), asked, room)
            ]
    return found


def _within(tile: Tile, asked: Asked, room: int | None) -> bool:
    if not runs(tile, asked):
        return False
    cut = stream_cut(
        tile, asked.rows, asked.form, units=asked.units, gated=asked.gated, norm=asked.norm
    )
    return room is None or cut.shared_bytes <= room


def _units_tile(asked: Asked, stages: int) -> Tile:
    """The steps of all tiles are shared evenly by the multiprocessors."""
    if asked.rows <= 128:
        return Tile(128, COLUMNS, warps=8, stages=stages, per_sm=1, wgmma=True)
    return Tile(256, COLUMNS, warps=8, stages=stages, per_sm=1, block_m=128, wgmma=True)


def _by_library(x_TI: torch.Tensor, records: Records, bias_O: torch.Tensor | None) -> torch.Tensor:
    """In pieces of W, so that little of it is unpacked at once."""
    form = records.form
    y_TO = x_TI.new_empty(x_TI.shape[0], form.outputs)
    step = max(1, LIBRARY_NUMBERS // (form.inputs * ROWS)) * ROWS
    for begin in range(0, form.outputs, step):
        end = min(form.outputs, begin + step)
        weight_OI, part_TO = unpack(records, x_TI.dtype, begin, end), y_TO[:, begin:end]
        if bias_O is None:
            torch.mm(x_TI, weight_OI.T, out=part_TO)
        else:
            torch.addmm(bias_O[begin:end], x_TI, weight_OI.T, out=part_TO)
    return y_TO


def _large_m(x_TI: torch.Tensor, records: Records, fusion: Fusion) -> torch.Tensor | None:
    """The gated product of a long prompt, of weights that are unpacked before."""
    form = records.form
    is_known = fusion == Fusion(is_gated=True) and form.outputs * form.inputs <= LIBRARY_NUMBERS
    if not is_known or x_TI.shape[0] <= MAX_TILED or x_TI.dtype != torch.bfloat16:
        return None
    return large_m_linear(x_TI, unpack(records, x_TI.dtype, 0, form.outputs))


def _asked(x_TI: torch.Tensor, form: Form, fusion: Fusion) -> Asked:
    return Asked(
        x_TI.shape[0],
        form,
        multiprocessors(x_TI.device),
        gated=fusion.is_gated,
        norm=fusion.norm is not None,
        residual=fusion.residual_TO is not None,
    )


def _is_aligned(rows: torch.Tensor) -> bool:
    step = rows.stride(0) * rows.element_size()
    return rows.stride(1) == 1 and (rows.data_ptr() | step) % ALIGNMENT == 0


@lru_cache(maxsize=1)
def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
