"""Weights of 4 bits for the CUDA kernels: the layout is exact, and stands as tensor cores read it.

What the kernels do with indices is done here once more, lane by lane, in plain Python.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels import int4_linear_records, nvrtc
from ridgeline.kernels.int4_linear import (
    DTYPE,
    MAX_FEW,
    MAX_TILED,
    UNITS,
    Asked,
    Int4Layout,
    choose,
    kept,
    records_of,
    runs,
    untuned_tile,
)
from ridgeline.kernels.int4_linear_cuda import (
    StreamCut,
    deep_of,
    records_map,
    stream_cut,
    stream_defines,
    tiles_cut,
    tiles_defines,
)
from ridgeline.kernels.int4_linear_records import (
    CODE_BYTES,
    COLUMNS,
    ROWS,
    Form,
    fits_records,
    form_of,
    pack_records,
    unpack_records,
)
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, join_bytes, split_bytes
from ridgeline.kernels.tile_linear import COUNTERS, MOST_SHARED_BYTES, PARTIALS
from ridgeline.kernels.tiles import FILE, Tile, read_tiles

LANES = [(lane, lane // 4, lane % 4) for lane in range(32)]
SCALES = (torch.bfloat16, torch.float16, torch.float32)
LAYERS = (  # outputs, inputs, gated
    (6144, 4096, False),
    (4096, 4096, False),
    (28672, 4096, True),
    (4096, 14336, False),
    (4096, 1024, False),
    (1024, 2048, False),
    (6144, 1024, True),
    (1024, 3072, False),
    (128256, 4096, False),
    (16, 128, False),
    (48, 896, False),
)


def matrix_of(
    outputs: int,
    inputs: int,
    group: int,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    zeros: bool = False,
    seed: int = 0,
) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)
    codes_OI = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    groups = (outputs, inputs // group)
    scale = torch.randn(groups, generator=generator).to(scale_dtype)
    zero = torch.randint(0, 17, groups, generator=generator, dtype=torch.uint8)
    return QuantizedMatrix(
        join_bytes(codes_OI, 4), scale, zero if zeros else None, inputs, 4, group
    )


def assert_same(got: QuantizedMatrix, want: QuantizedMatrix) -> None:
    assert (got.inputs, got.bits, got.group) == (want.inputs, want.bits, want.group)
    assert torch.equal(got.codes, want.codes)
    assert got.scale.dtype == want.scale.dtype
    assert torch.equal(got.scale, want.scale)
    assert (got.zero is None) == (want.zero is None)
    if got.zero is not None and want.zero is not None:
        assert torch.equal(got.zero, want.zero)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_records_are_the_matrix_to_the_last_bit(
    group: int, scale_dtype: torch.dtype, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_linear_records, "PIECE_NUMBERS", 3 * ROWS * 384)  # 3, then 2
    matrix = matrix_of(5 * ROWS, 384, group, scale_dtype=scale_dtype, zeros=zeros)
    records = pack_records(matrix)
    assert records.bytes_RCB.nbytes == matrix.nbytes
    assert records.form.record_bytes % 16 == 0  # so that the copy engine takes them
    assert_same(unpack_records(records), matrix)
    assert_same(unpack_records(records_of(kept(records))), matrix)


def test_a_whole_record_differs_where_a_code_does() -> None:
    """Each half byte of a record is one code."""
    matrix = matrix_of(ROWS, COLUMNS, 128)
    seen = set()
    before = pack_records(matrix).bytes_RCB[0, 0].tolist()
    for row, byte in itertools.product(range(ROWS), range(0, COLUMNS // 2, 7)):
        other = matrix.codes.clone()
        other[row, byte] ^= 0xF0
        changed = QuantizedMatrix(other, matrix.scale, None, COLUMNS, 4, 128)
        after = pack_records(changed).bytes_RCB[0, 0].tolist()
        places = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert len(places) == 1
        assert (before[places[0]] ^ after[places[0]]) in (0x0F, 0xF0)
        seen.add((places[0], before[places[0]] ^ after[places[0]]))
    assert len(seen) == ROWS * len(range(0, COLUMNS // 2, 7))


def words_of(record: list[int], half: int, lane: int) -> list[int]:
    """As uint4: what a lane loads."""
    at = 512 * half + 16 * lane
    return [int.from_bytes(bytes(record[at + 4 * q : at + 4 * q + 4]), "little") for q in range(4)]


def neighbours(shifted: int) -> tuple[int, int]:
    """Of the two halves of `(word >> shift) & 0x000f000f`."""
    return shifted & 15, shifted >> 16 & 15


def left_operand(upper: list[list[int]], lower: list[list[int]], i: int) -> list[list[int]]:
    """[16, 16] of product i of 8, from the words of each lane, as the registers a0 .. a3 of
    mma.m16n8k16 and wgmma are laid out."""
    tile = [[-1] * 16 for _ in range(16)]
    for lane, g, t in LANES:
        shift = i % 2 * 8
        registers = [
            upper[lane][i // 2] >> shift,
            lower[lane][i // 2] >> shift,
            upper[lane][i // 2] >> (shift + 4),
            lower[lane][i // 2] >> (shift + 4),
        ]
        for number, register in enumerate(registers):
            row, column = g + number % 2 * 8, 2 * t + number // 2 * 8
            tile[row][column], tile[row][column + 1] = neighbours(register)
    return tile


def test_lanes_find_what_they_multiply() -> None:
    """As `int4_stream.cu`, and `tile_linear.cu` without a gate."""
    matrix = matrix_of(2 * ROWS, 2 * COLUMNS, 64, seed=1)
    codes_OI = split_bytes(matrix.codes, 4, matrix.inputs)
    bytes_RCB = pack_records(matrix).bytes_RCB
    for sixteen, column in itertools.product(range(2), range(2)):
        record = bytes_RCB[sixteen, column].tolist()
        upper = [words_of(record, 0, lane) for lane, _, _ in LANES]
        lower = [words_of(record, 1, lane) for lane, _, _ in LANES]
        for i in range(8):
            begin = column * COLUMNS + 16 * i
            want = codes_OI[sixteen * ROWS : (sixteen + 1) * ROWS, begin : begin + 16]
            assert left_operand(upper, lower, i) == want.tolist()


@pytest.mark.parametrize("band", [0, 1])
def test_a_gated_band_has_eight_rows_of_gate_above_eight_of_up(band: int) -> None:
    """As `Lane` of `int4_tile.cu`: a stage of 128 rows of a tile, 4 records of gate and 4 of up."""
    width, each = 64, 4
    matrix = matrix_of(2 * width, COLUMNS, 128, seed=2)
    codes_OI = split_bytes(matrix.codes, 4, COLUMNS)
    records = pack_records(matrix).bytes_RCB[:, 0].tolist()
    stage = records[:each] + records[width // ROWS : width // ROWS + each]
    for warp in range(4):
        record, half = band * 2 + warp // 2, warp % 2
        upper = [words_of(stage[record], half, lane) for lane, _, _ in LANES]
        lower = [words_of(stage[each + record], half, lane) for lane, _, _ in LANES]
        first = band * 32 + warp * 8  # output of the first row: `opens` + warp * 8
        for i in range(8):
            got = left_operand(upper, lower, i)
            columns = slice(16 * i, 16 * i + 16)
            assert got[:8] == codes_OI[first : first + 8, columns].tolist()
            assert got[8:] == codes_OI[width + first : width + first + 8, columns].tolist()


def test_scales_and_zero_points_stand_behind_the_codes() -> None:
    """As `scale_of` and `zero_of` of `int4_record.cu`."""
    matrix = matrix_of(2 * ROWS, 2 * COLUMNS, 32, scale_dtype=torch.float16, zeros=True)
    assert matrix.zero is not None
    bytes_RCB, groups = pack_records(matrix).bytes_RCB, 4
    zeros_at = CODE_BYTES + groups * ROWS * 2
    for sixteen, column, group, row in itertools.product((0, 1), (0, 1), range(groups), (0, 7, 15)):
        record = bytes_RCB[sixteen, column]
        at = CODE_BYTES + (group * ROWS + row) * 2
        scale = record[at : at + 2].clone().view(torch.float16)
        place = sixteen * ROWS + row, column * groups + group
        assert torch.equal(scale[0], matrix.scale[place])
        assert record[zeros_at + group * ROWS + row] == matrix.zero[place]


def test_unpacking_writes_each_number_to_its_place() -> None:
    """As `int4_unpack.cu`."""
    matrix = matrix_of(ROWS, COLUMNS, 128, seed=3)
    record = pack_records(matrix).bytes_RCB[0, 0].tolist()
    got = [[-1] * COLUMNS for _ in range(ROWS)]
    for _, row, p in LANES:
        for half in range(2):
            words = [words_of(record, half, 4 * row + i) for i in range(4)]
            for q, i in itertools.product(range(4), range(4)):
                first, second = neighbours(words[i][q] >> (4 * p))
                at = p * 8 + q * 32 + 2 * i
                got[half * 8 + row][at], got[half * 8 + row][at + 1] = first, second
    assert got == split_bytes(matrix.codes, 4, COLUMNS).tolist()


def test_numbers_beside_128_and_1024_are_exact() -> None:
    """`whole_numbers`: a code in the last bits of such a number, less a zero point there."""
    for dtype, opens in ((torch.bfloat16, 0x4300), (torch.float16, 0x6400)):
        bits = torch.arange(128, dtype=torch.int16) | opens
        numbers = bits.view(dtype)
        for code, zero in itertools.product(range(16), (0, 8, 16, 127)):
            assert float(numbers[code] - numbers[zero]) == code - zero


def visits(cut: StreamCut, tile: Tile, form: Form, gated: bool) -> dict[tuple[int, int], int]:
    """How often each record is read, as `int4_stream.cu` cuts them."""
    seen: dict[tuple[int, int], int] = {}
    tiles, in_group = cut.width // ROWS, tile.block_n // ROWS
    sharers = tile.warps * tile.splits
    for cta in range(-(-cut.groups // cut.each)):
        for group in range(cta * cut.each, min(cut.groups, (cta + 1) * cut.each)):
            for one, sharer in itertools.product(range(in_group), range(sharers)):
                at = group * (in_group // 2) + one // 2 if gated else group * in_group + one
                if at >= tiles:
                    continue  # the last one again
                at += one % 2 * tiles if gated else 0
                deep = deep_of(tile, form)
                units = form.along_k // deep
                first, last = units * sharer // sharers, units * (sharer + 1) // sharers
                for record in range(first * deep, last * deep):
                    seen[at, record] = seen.get((at, record), 0) + 1
    return seen


@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(96, 896, True), (176, 384, False)])
@pytest.mark.parametrize("tile", [
    Tile(32, 128, 1, 4, 2, stream=True),
    Tile(64, 128, 2, 3, 2, stream=True),
    Tile(32, 128, 4, 8, 2, stream=True),
    Tile(32, 384, 1, 2, 2, stream=True),
])  # fmt: skip
def test_each_record_is_read_once(outputs: int, inputs: int, gated: bool, tile: Tile) -> None:
    form = Form(outputs, inputs, 128, torch.bfloat16, False)
    cut = stream_cut(tile, 2, form, units=7, gated=gated)
    seen = visits(cut, tile, form, gated)
    assert seen == dict.fromkeys(itertools.product(range(outputs // ROWS), range(inputs // 128)), 1)


@pytest.mark.parametrize(("outputs", "inputs", "gated"), LAYERS)
@pytest.mark.parametrize("zeros", [False, True])
def test_an_untuned_tile_can_be_launched(
    outputs: int, inputs: int, gated: bool, zeros: bool
) -> None:
    form = Form(outputs, inputs, 32 if zeros else 128, torch.float32, zeros)
    for rows in (1, 2, 5, 8, 9, 64, 129, 256, 512, 1000):
        asked = Asked(rows, form, UNITS, gated=gated)
        tile = untuned_tile(asked)
        assert tile is not None
        assert runs(tile, asked)
        assert tile.stream or rows > MAX_FEW or inputs > 8192
        if tile.stream:
            few = stream_cut(tile, rows, form, units=UNITS, gated=gated)
            assert few.shared_bytes <= MOST_SHARED_BYTES
            assert few.groups <= UNITS * few.each
        else:
            some = tiles_cut(tile, rows, form, units=UNITS, gated=gated)
            assert some.shared_bytes <= MOST_SHARED_BYTES
    assert untuned_tile(Asked(MAX_TILED + 1, form, UNITS)) is None
    assert untuned_tile(Asked(9, form, UNITS, norm=True)) is None


def test_what_the_table_asks_for_can_be_launched() -> None:
    path = Path(int4_linear_records.__file__).with_name(FILE)
    for place, tile in read_tiles(path.read_text(encoding="utf-8")).items():
        if place.dtype != DTYPE:
            continue
        assert tile is not None
        assert tile.stream or "norm" not in place.kind
        form = Form(place.outputs, place.inputs, 128, torch.bfloat16, False)
        gated, norm = "gated" in place.kind, "norm" in place.kind
        for rows in range(place.rows // 2 + 1, place.rows + 1):
            assert runs(tile, Asked(rows, form, UNITS, gated=gated, norm=norm))
            if tile.wgmma:
                cut = tiles_cut(tile, rows, form, units=UNITS, gated=gated)
                if cut.programs != cut.tiles:
                    assert cut.programs * tile.cluster * tile.block_n * cut.columns <= PARTIALS
                    assert cut.tiles * tile.cluster * tile.warps // 4 <= COUNTERS


def test_a_measured_tile_that_does_not_fit_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table holds for groups of 128; records of other forms are larger."""
    deep = Tile(32, 128, 1, 16, 6, stream=True)
    monkeypatch.setattr("ridgeline.kernels.int4_linear.is_measured", lambda place: True)
    monkeypatch.setattr("ridgeline.kernels.int4_linear.find_tile", lambda place: deep)
    choose.cache_clear()
    small = Asked(1, Form(4096, 4096, 128, torch.bfloat16, False), UNITS)
    large = Asked(1, Form(4096, 4096, 32, torch.float32, True), UNITS)
    assert choose(small) == deep
    assert choose(large) not in (None, deep)
    choose.cache_clear()


@pytest.mark.parametrize("gated", [False, True])
def test_a_box_of_records(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of the copy engine finds the records of a step: gate, then up, sixteen by sixteen."""
    said: list[Any] = []
    monkeypatch.setattr(nvrtc, "tensor_map", lambda *given: said.append(given))
    records = pack_records(matrix_of(192, 384, 64, zeros=True))
    records_map(records, Tile(64, 128, wgmma=True), gated=gated)
    address, _, sizes, strides, box, _ = said[0]
    size = records.form.record_bytes
    assert address == records.bytes_RCB.data_ptr()
    assert all(stride % 16 == 0 for stride in strides)
    assert sizes[0] * 8 == box[0] * 8 == size
    numbers = [range(n) for n in box[1:]]
    # At step 2 of the second block of 64 rows; the first axis of a box moves first.
    begins = (2, *((2, 0) if gated else (4,)))
    places = [
        sum((begin + i) * stride for begin, i, stride in zip(begins, index, strides, strict=True))
        for index in (tuple(reversed(t)) for t in itertools.product(*reversed(numbers)))
    ]
    sixteens = (2, 3, 8, 9) if gated else (4, 5, 6, 7)
    assert places == [(sixteen * 3 + 2) * size for sixteen in sixteens]


def test_what_a_kernel_is_compiled_with() -> None:
    form = Form(4096, 4096, 64, torch.float16, True)
    tile = Tile(32, 128, 2, 8, 3, stream=True)
    cut = stream_cut(tile, 3, form, units=UNITS, gated=True)
    defines = stream_defines(tile, cut, form, torch.bfloat16, gated=True, norm=True)
    source = nvrtc.read_source("int4_stream.cu")
    assert (defines["KEPT"], defines["COLUMNS"], defines["GROUP"]) == (4, 1, 64)
    assert all(name in source for name in defines)
    wide = Tile(128, 128, warps=8, stages=3, per_sm=1, wgmma=True)
    some = tiles_cut(wide, 100, form, units=UNITS)
    defines = tiles_defines(wide, some, form, torch.float16)
    source = nvrtc.read_source("tile_linear.cu")
    assert defines["PACKED"] == 1
    assert all(name in source for name in defines)
    assert "#include" not in source


def test_what_is_not_taken() -> None:
    layout = Int4Layout()
    assert not layout.takes(matrix_of(16, 128, 128), torch.bfloat16)  # no such device
    assert fits_records(matrix_of(16, 128, 32))
    assert not fits_records(matrix_of(24, 128, 32))
    assert not fits_records(matrix_of(16, 64, 32))
    assert not fits_records(matrix_of(16, 128, 16))
    form = form_of(matrix_of(32, 128, 32))
    with pytest.raises(InternalError, match="pairs"):
        stream_cut(Tile(16, 128, stream=True), 1, form, units=1, gated=True)
    with pytest.raises(InternalError, match="record"):
        tiles_cut(Tile(64, 64, wgmma=True), 1, form, units=1)
    wrong = matrix_of(16, 128, 128, zeros=True)
    assert wrong.zero is not None
    wrong.zero[0, 0] = 200
    with pytest.raises(InternalError, match="zero points"):
        pack_records(wrong)
