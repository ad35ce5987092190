"""The native linear layers against sums in float64, at every level that this processor has."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.packed_linear import (
    GROUPED,
    Codes,
    PackedMatrix,
    first_rows,
    gather,
    linear,
    pack,
    pack_codes,
)
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, join_bytes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")

LEVELS = native.LEVELS[1 : native.LEVELS.index(native.best_level()) + 1]
ROWS = (*range(1, 20), 24, 31, 32, 33, 47, 64, 70)
OUTPUTS = (1, 7, 16, 31, 32, 48, 64, 131, 256)
INPUTS = (1, 2, 7, 8, 63, 64, 65, 100, 130, 288, 600)
GIVEN = (Codes.GROUPS8,)  # kinds that the kernels do not round to
INTEGERS = tuple(kind for kind in Codes if kind != Codes.BF16)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with native.at_level(name):
        yield name


def packed_of(
    weight_NK: torch.Tensor,
    kind: Codes,
    group: int = 64,
    scale_dtype: torch.dtype = torch.float16,
) -> PackedMatrix:
    """Rounded by the kernels where they round, else given codes, with scales of `scale_dtype`."""
    if kind in GIVEN:
        group = 0 if kind == Codes.INT8 else group
        return pack_codes(quantized(weight_NK, 8, group, scale_dtype), kind)
    has_zero = kind == Codes.GROUPS4
    group = group if kind in GROUPED else 0
    return pack(weight_NK.clone(), kind, group=group, has_zero=has_zero)


def quantized(
    weight_NK: torch.Tensor, bits: int, group: int, scale_dtype: torch.dtype
) -> QuantizedMatrix:
    """To the largest of each group, without zero points."""
    outputs, inputs = weight_NK.shape
    size = group or inputs
    groups = -(-inputs // size)
    padded = torch.nn.functional.pad(weight_NK.float(), (0, groups * size - inputs))
    grouped = padded.view(outputs, groups, size)
    middle = 1 << (bits - 1)
    scale = (grouped.abs().amax(-1) / (middle - 1)).clamp_min(1e-4).to(scale_dtype)
    codes = (grouped / scale.float()[..., None]).round().clamp(1 - middle, middle - 1) + middle
    codes_NK = codes.to(torch.uint8).view(outputs, -1)[:, :inputs]
    return QuantizedMatrix(join_bytes(codes_NK, bits), scale, None, inputs, bits, group)


def rounded_x(x_MK: torch.Tensor, kind: Codes, group: int) -> torch.Tensor:
    """x as the kernels see it, in float64."""
    if kind == Codes.BF16:
        return x_MK.bfloat16().double()
    step = group if kind in GROUPED else max(1, x_MK.shape[1])
    pieces = []
    for piece in torch.split(x_MK.float(), step, 1):
        most = piece.abs().amax(1, keepdim=True)
        inverse = torch.where(most > 0, 127 / most, torch.zeros_like(most))
        pieces.append((piece * inverse).round().double() * (most.double() / 127))
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("kind", list(Codes), ids=lambda kind: kind.name)
def test_products_of_ragged_shapes(level: str, kind: Codes) -> None:
    seed = 3
    print("seed", seed)
    draw = random.Random(seed)
    noise = torch.Generator().manual_seed(seed)
    for _ in range(60):
        rows, outputs, inputs = draw.choice(ROWS), draw.choice(OUTPUTS), draw.choice(INPUTS)
        group = draw.choice((8, 32, 64, 96, 128))
        dtype = draw.choice((torch.float32, torch.bfloat16))
        x = torch.randn(rows, inputs, generator=noise).to(dtype)
        matrix = packed_of(torch.randn(outputs, inputs, generator=noise), kind, group)
        w = gather(matrix, None, torch.float32).double()
        bias = torch.randn(outputs, generator=noise) if draw.random() < 0.5 else None
        added = torch.randn(rows, outputs, generator=noise) if draw.random() < 0.5 else None
        wanted = rounded_x(x, kind, group) @ w.T
        wanted = wanted if bias is None else wanted + bias
        wanted = wanted if added is None else wanted + added
        out = torch.full((rows, outputs), torch.nan)
        got = linear(x, matrix, bias_N=bias, residual_MO=added, out_MO=out)
        assert got is out
        # A code of x may be the other neighbour where its product with 1 / scale is rounded.
        slack = 1e-5 if kind == Codes.BF16 else 4e-3
        size = x.double().norm(dim=1)[:, None] * w.norm(dim=1)[None] + 0.1
        worst = ((got - wanted).abs() / size).max()
        assert worst < slack, (level, rows, outputs, inputs, group, dtype)


@pytest.mark.parametrize("kind", list(Codes), ids=lambda kind: kind.name)
def test_gate_and_residual_in_place(level: str, kind: Codes) -> None:
    noise = torch.Generator().manual_seed(0)
    for rows in (1, 6, 17, 40):
        x = torch.randn(rows, 96, generator=noise).bfloat16()
        matrix = packed_of(torch.randn(64, 96, generator=noise) / 8, kind, 32)
        bias = torch.randn(64, generator=noise).bfloat16()
        hidden = torch.randn(rows, 32, generator=noise)
        full = linear(x, matrix, bias_N=bias, out_MO=torch.empty(rows, 64)).double()
        wanted = torch.nn.functional.silu(full[:, :32]) * full[:, 32:] + hidden
        got = linear(x, matrix, bias_N=bias, gated=True, residual_MO=hidden, out_MO=hidden)
        assert got is hidden
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", list(Codes), ids=lambda kind: kind.name)
def test_the_first_rows_of_a_matrix(kind: Codes) -> None:
    noise = torch.Generator().manual_seed(4)
    x = torch.randn(3, 96, generator=noise)
    matrix = packed_of(torch.randn(80, 96, generator=noise), kind, 32)
    whole = linear(x, matrix)
    for outputs in (80, 79, 65, 64, 33, 16, 1):
        some = linear(x, first_rows(matrix, outputs), out_MO=torch.empty(3, 100)[:, :outputs])
        assert torch.equal(some, whole[:, :outputs])


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_rows_of_integers_are_the_same_in_any_company(level: str, kind: Codes) -> None:
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(70, 200, generator=noise)
    matrix = packed_of(torch.randn(48, 200, generator=noise), kind)
    together = linear(x, matrix)
    for begin, end in ((0, 1), (3, 5), (10, 26), (20, 60)):
        assert torch.equal(linear(x[begin:end], matrix), together[begin:end])


@pytest.mark.parametrize("kind", list(Codes), ids=lambda kind: kind.name)
def test_threads_change_nothing(kind: Codes) -> None:
    noise = torch.Generator().manual_seed(2)
    x = torch.randn(9, 256, generator=noise)
    matrix = packed_of(torch.randn(640, 256, generator=noise), kind)
    alone = linear(x, matrix)
    try:
        native.set_threads(3)
        for _ in range(20):
            assert torch.equal(linear(x, matrix), alone)
    finally:
        native.set_threads(1)


def test_strides_of_rows(level: str) -> None:
    noise = torch.Generator().manual_seed(4)
    wide = torch.randn(5, 100, generator=noise)
    matrix = packed_of(torch.randn(16, 40, generator=noise), Codes.BF16)
    x, out = wide[:, 7:47], torch.zeros(5, 50)
    linear(x, matrix, out_MO=out[:, 9:25])
    assert torch.equal(out[:, 9:25], linear(x.contiguous(), matrix))
    assert out[:, :9].abs().max() == 0 == out[:, 25:].abs().max()


def test_a_row_that_is_not_finite_spoils_itself_alone(level: str) -> None:
    for kind in Codes:
        matrix = packed_of(torch.ones(16, 64), kind)
        for bad in (torch.nan, torch.inf):
            x = torch.ones(3, 64)
            x[1, 5] = bad
            y = linear(x, matrix)
            assert not torch.isfinite(y[1]).any(), (kind, bad)
            assert torch.allclose(y[0::2], torch.full((2, 16), 64.0), rtol=0.02)


def test_bfloat16_is_packed_in_place_and_read_back() -> None:
    weight = torch.randn(48, 70).bfloat16()
    kept = weight.clone()
    matrix = pack(weight, Codes.BF16)
    assert matrix.codes.data_ptr() == weight.data_ptr()
    assert torch.equal(gather(matrix, None, torch.bfloat16), kept)
    rows = torch.tensor([5, 0, 47, 5])
    assert torch.equal(gather(matrix, rows, torch.bfloat16), kept[rows])
    assert torch.equal(gather(matrix, rows, torch.float32), kept[rows].float())
    with pytest.raises(InternalError):
        gather(matrix, torch.tensor([48]), torch.bfloat16)


@pytest.mark.parametrize(
    "kind", [Codes.INT8, Codes.INT4, Codes.GROUPS4], ids=lambda kind: kind.name
)
def test_weights_that_are_not_finite_are_refused(kind: Codes) -> None:
    for bad in (torch.nan, -torch.inf):
        weight = torch.ones(20, 64)
        weight[17, 3] = bad
        with pytest.raises(ValueError, match="infinite or NaN"):
            packed_of(weight, kind)


def test_wrong_arguments_are_refused() -> None:
    matrix = packed_of(torch.ones(16, 64), Codes.INT8)
    with pytest.raises(InternalError, match="rows of x"):
        linear(torch.ones(2, 63), matrix)
    with pytest.raises(InternalError, match="rows of x"):
        linear(torch.ones(2, 64, dtype=torch.float16), matrix)
    with pytest.raises(InternalError, match="rows of y"):
        linear(torch.ones(2, 64), matrix, out_MO=torch.ones(2, 15))
    with pytest.raises(InternalError, match="gate and up"):
        linear(torch.ones(2, 64), matrix, gated=True)
    with pytest.raises(InternalError, match="packed codes"):
        PackedMatrix(matrix.codes, matrix.scales, 33, 64, Codes.INT8)
    assert linear(torch.ones(0, 64), matrix).shape == (0, 16)


def any_matrix(
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    scale_dtype: torch.dtype,
    *,
    has_zero: bool,
    seed: int,
) -> QuantizedMatrix:
    """Random codes, scales and zero points."""
    noise = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group) if group else 1
    codes_NK = torch.randint(0, 1 << bits, (outputs, inputs), generator=noise, dtype=torch.uint8)
    scale = torch.rand(outputs, groups, generator=noise).add_(0.5).to(scale_dtype)
    zero = torch.randint(0, 17, (outputs, groups), generator=noise, dtype=torch.uint8)
    codes = join_bytes(codes_NK, bits)
    return QuantizedMatrix(codes, scale, zero if has_zero else None, inputs, bits, group)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("bits", "group", "has_zero"),
    [(4, 32, False), (4, 64, True), (4, 128, True), (4, 128, False), (8, 32, False), (8, 0, False)],
)
def test_codes_that_are_given(
    level: str, bits: int, group: int, has_zero: bool, scale_dtype: torch.dtype
) -> None:
    """Read back they are what was given, and products are those of them; whole numbers as x, of
    which the largest of each group is 127, are rounded to themselves."""
    kind = {(8, 0): Codes.INT8, (8, 32): Codes.GROUPS8}.get((bits, group), Codes.GROUPS4)
    for outputs, inputs, rows in ((16, 128, 1), (32, 288, 3), (19, 75, 6), (48, 640, 70)):
        matrix = any_matrix(outputs, inputs, bits, group, scale_dtype, has_zero=has_zero, seed=rows)
        packed = pack_codes(matrix, kind)
        exact = matrix.dequantize()
        assert torch.equal(gather(packed, None, torch.float32), exact)
        noise = torch.Generator().manual_seed(rows)
        x = torch.randint(-126, 127, (rows, inputs), generator=noise).float()
        x[:, :: group or inputs] = 127
        wanted = x.double() @ exact.double().T
        got = linear(x, packed).double()
        size = x.double().norm(dim=1)[:, None] * exact.double().norm(dim=1)[None]
        assert ((got - wanted).abs() / size).max() < 1e-6, (outputs, inputs, rows)


def test_groups_of_8_bits_are_not_rounded_to() -> None:
    with pytest.raises(InternalError, match="nothing is rounded to groups of 8 bits"):
        pack(torch.ones(16, 64), Codes.GROUPS8, group=32)
    with pytest.raises(InternalError, match="a zero point is of GROUPS4"):
        pack(torch.ones(16, 64), Codes.INT4, group=32, has_zero=True)


@pytest.mark.parametrize("kind", Codes)
def test_few_rows_have_the_bits_that_each_has_alone(kind: Codes, level: str) -> None:
    """Rows of bfloat16 up to 7, or up to 4 beside tiles; of whole numbers any."""
    generator = torch.Generator().manual_seed(5)
    most = 4 if level == "amx" else 7
    for outputs, inputs, gated in ((640, 386, False), (1000, 258, False), (96, 1100, True)):
        weight_NK = torch.randn(outputs, inputs, generator=generator).bfloat16()
        matrix = packed_of(weight_NK, kind)
        x_MK = torch.randn(most, inputs, generator=generator).bfloat16()
        alone = torch.cat([linear(row, matrix, gated=gated) for row in torch.split(x_MK, 1)])
        for rows in range(2, most + 1):
            found = linear(x_MK[:rows], matrix, gated=gated)
            assert torch.equal(found, alone[:rows]), (rows, outputs, inputs, gated)
