"""The CUDA kernels for weights of 4 bits equal their reference in float32, whatever is fused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.kernels.int4_linear import (
    MAX_TILED,
    Int4Layout,
    by_tile,
    int4_fused,
    int4_linear,
    records_of,
)
from ridgeline.kernels.int4_linear_cuda import unpack
from ridgeline.kernels.int4_linear_records import Records, pack_records
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, join_bytes
from ridgeline.kernels.small_linear import Beside, Fusion, InputNorm
from ridgeline.kernels.tile_linear import columns_of, tile_workspace
from ridgeline.kernels.tiles import Tile
from ridgeline.quantization.integers import int4
from tests.kernels.references import small_linear_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA device of capability 9.0",
    ),
]

BOUND = {torch.bfloat16: 6e-3, torch.float16: 2e-3}  # of the largest number
STREAMS = {
    "16": Tile(16, 128, 1, 8, 4, stream=True),
    "16, many warps": Tile(16, 256, 1, 16, 2, stream=True),
    "16, cluster": Tile(16, 128, 4, 4, 3, stream=True),
    "32": Tile(32, 128, 1, 8, 2, stream=True),
    "32, cluster": Tile(32, 256, 2, 4, 2, stream=True),
    "64, two programs": Tile(64, 128, 1, 4, 3, per_sm=2, stream=True),
}
TILES = {
    "64": Tile(64, 128, warps=4, stages=4, wgmma=True),
    "64, split": Tile(64, 128, warps=4, stages=4, splits=2, block_m=128, wgmma=True),
    "128": Tile(128, 128, warps=8, stages=3, wgmma=True),
    "128, all over": Tile(128, 128, warps=8, stages=3, per_sm=1, wgmma=True),
    "128, split": Tile(128, 128, warps=8, stages=4, splits=2, block_m=64, wgmma=True),
    "128, in four": Tile(128, 128, warps=8, stages=4, splits=4, block_m=128, wgmma=True),
    "128, pairs": Tile(128, 128, warps=8, stages=3, per_sm=1, cluster=2, wgmma=True),
    "256": Tile(256, 128, warps=8, stages=3, per_sm=1, block_m=128, wgmma=True),
    "256, pairs": Tile(256, 128, warps=8, stages=3, cluster=2, block_m=96, wgmma=True),
}
SIZES = [(96, 512), (992, 1024), (4128, 2048)]


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def matrix_of(
    outputs: int,
    inputs: int,
    group: int = 128,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    zeros: bool = False,
    seed: int = 7,
) -> QuantizedMatrix:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape, groups = (outputs, inputs), (outputs, inputs // group)
    codes_OI = torch.randint(
        0, 16, shape, generator=generator, device="cuda", dtype=torch.uint8
    )  # fmt: skip
    scale = (torch.randn(groups, generator=generator, device="cuda") * 0.2 * inputs**-0.5).to(
        scale_dtype
    )
    zero = torch.randint(
        0, 17, groups, generator=generator, device="cuda", dtype=torch.uint8
    )  # fmt: skip
    return QuantizedMatrix(
        join_bytes(codes_OI, 4), scale, zero if zeros else None, inputs, 4, group
    )


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart, with NaN around them."""
    wide = x.new_full((x.shape[0] + 2, x.shape[1] + 64), torch.nan)
    inside = wide[1:-1, : x.shape[1]]
    inside.copy_(x)
    return inside


def assert_surrounded(inside: torch.Tensor) -> None:
    """What `spread` has put around it is there."""
    whole = inside._base
    assert whole is not None
    assert whole[1:-1, inside.shape[1] :].isnan().all()
    assert whole[0].isnan().all()
    assert whole[-1].isnan().all()


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    off = (got.float() - want.float()).abs().max()
    assert off <= BOUND[got.dtype] * max(1.0, float(want.abs().max()))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Whichever kernel it was, and however many numbers."""
    assert got.shape == want.shape
    assert (got.float() - want).norm() <= 4e-3 * want.norm()


def check_kind(tile: Tile, rows: int, matrix: QuantizedMatrix, kind: str) -> None:
    """Three runs into NaN are right and have the same bits, one of them without an early launch."""
    outputs, inputs = matrix.outputs, matrix.inputs
    gated = "gated" in kind
    width = outputs // 2 if gated else outputs
    x = spread(noise(rows, inputs, seed=1))
    norm = InputNorm(noise(inputs, seed=3), 1e-5) if "norm" in kind else None
    residual = noise(rows, width, seed=4) if "residual" in kind else None
    bias = noise(outputs, seed=5) if "bias" in kind else None
    weight = matrix.dequantize()
    want = small_linear_reference(
        x.float(), weight, norm=norm, bias_N=bias, gated=gated, residual_MO=residual
    )
    records, runs = pack_records(matrix), []
    for pdl in (True, kind != "plain", True):
        tile_workspace(x.device).partial_P.fill_(torch.nan)
        out = spread(x.new_full((rows, width), torch.nan) if residual is None else residual)
        beside = Beside(
            norm=norm,
            bias_N=bias,
            gated=gated,
            residual_MO=None if residual is None else out,
            out_MO=out,
        )
        by_tile(x, records, tile, beside, pdl=pdl)
        assert_surrounded(out)
        runs.append(out.clone())
    assert_near(runs[0], want)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert not tile_workspace(x.device).arrivals_A.any()


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", ["plain", "norm+gated", "residual+bias"])
def test_streams(name: str, rows: int, kind: str) -> None:
    tile = STREAMS[name]
    if "gated" in kind and tile.block_n % 32:
        pytest.skip("gate and up are pairs of tiles")
    for outputs, inputs in SIZES:
        check_kind(tile, rows, matrix_of(outputs, inputs), kind)


@pytest.mark.parametrize("rows", [9, 16])
@pytest.mark.parametrize("kind", ["plain", "norm+gated"])
def test_streams_of_more_rows(rows: int, kind: str) -> None:
    check_kind(STREAMS["32, cluster"], rows, matrix_of(992, 1024), kind)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("rows", [9, 100, 300])
@pytest.mark.parametrize("kind", ["plain", "residual", "bias+gated"])
def test_tiles(name: str, rows: int, kind: str) -> None:
    tile = TILES[name]
    if columns_of(rows, tile.block_m) % (8 * tile.splits):
        pytest.skip("each of a cluster finishes eights of rows")
    for outputs, inputs in SIZES:
        check_kind(tile, rows, matrix_of(outputs, inputs), kind)


FORMS = [
    (32, torch.bfloat16, False),
    (64, torch.bfloat16, True),
    (128, torch.float16, True),
    (128, torch.float32, False),
    (32, torch.float16, True),
    (64, torch.float32, True),
]


@pytest.mark.parametrize(("group", "scale_dtype", "zeros"), FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["stream", "tile", "unpack"])
def test_forms(
    group: int, scale_dtype: torch.dtype, zeros: bool, dtype: torch.dtype, name: str
) -> None:
    matrix = matrix_of(320, 1024, group, scale_dtype=scale_dtype, zeros=zeros)
    records, exact = pack_records(matrix), matrix.dequantize()
    if name == "unpack":
        assert torch.equal(unpack(records, dtype, 32, 320), exact[32:].to(dtype))
        return
    tile = STREAMS["32"] if name == "stream" else TILES["128, all over"]
    x = noise(5 if name == "stream" else 70, 1024, seed=2, dtype=dtype)
    want = small_linear_reference(x.float(), exact, gated=True)
    assert_near(by_tile(x, records, tile, Beside(gated=True)), want)


def test_products_of_ones_are_exact() -> None:
    """Sums of whole numbers: a wrong index or a rounded weight shows to the last bit."""
    generator = torch.Generator("cuda").manual_seed(11)
    matrix = matrix_of(64, 512, 32, zeros=True)
    scale = torch.exp2(
        torch.randint(-3, 1, matrix.scale.shape, generator=generator, device="cuda").float()
    )
    matrix = replace(matrix, scale=scale.to(torch.bfloat16))
    x = torch.zeros(40, 512, device="cuda", dtype=torch.float16)
    places = torch.randint(0, 512, (40,), generator=generator, device="cuda")
    x[torch.arange(40, device="cuda"), places] = 1.0
    want = matrix.dequantize()[:, places].T.half()
    records = pack_records(matrix)
    assert torch.equal(by_tile(x, records, TILES["64"], Beside()), want)
    assert torch.equal(by_tile(x[:7], records, STREAMS["16"], Beside()), want[:7])


@pytest.mark.parametrize("rows", [1, 8, 33, 256, MAX_TILED + 1])
def test_the_home(rows: int) -> None:
    layout, matrix = Int4Layout(), matrix_of(4096, 1024, 64, zeros=True)
    assert layout.takes(matrix, torch.bfloat16)
    assert not layout.takes(matrix, torch.float32)
    parameters = layout.keep(matrix)
    assert sum(p.nbytes for p in parameters.values()) == matrix.nbytes
    back = layout.matrix(parameters)
    assert back.zero is not None
    assert matrix.zero is not None
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.scale, matrix.scale)
    assert torch.equal(back.zero, matrix.zero)
    x, bias, exact = noise(rows, 1024, seed=1), noise(4096, seed=2), matrix.dequantize()
    norm, residual = InputNorm(noise(1024, seed=3), 1e-5), noise(rows, 4096, seed=4)
    want = small_linear_reference(x.float(), exact, bias_N=bias)
    assert_close(layout.linear(x, parameters, bias), want)
    odd = torch.cat((x[:, :1], x), 1)[:, 1:]  # rows that begin anywhere
    assert_close(layout.linear(odd, parameters, None), small_linear_reference(x.float(), exact))
    got = layout.fused(x, parameters, None, Fusion(norm=norm, is_gated=True))
    if rows <= 8:
        assert got is not None
        assert_close(got, small_linear_reference(x.float(), exact, norm=norm, gated=True))
    else:
        assert got is None
    got = layout.fused(x, parameters, None, Fusion(is_gated=True))
    assert got is not None
    assert_close(got, small_linear_reference(x.float(), exact, gated=True))
    want = small_linear_reference(x.float(), exact, residual_MO=residual)
    got = layout.fused(x, parameters, None, Fusion(residual_TO=residual))
    if rows > MAX_TILED:
        assert got is None
    else:
        assert got is residual
        assert_close(got, want)
    assert layout.linear(x[:0], parameters, None).shape == (0, 4096)
    assert layout.fused(x, parameters, None, Fusion(of_gated=True)) is None


def test_the_format_finds_its_home() -> None:
    plain = int4()
    parameters = plain.parameters(256, 512, torch.bfloat16, torch.device("cuda"))
    parameters["weight"].copy_(noise(256, 512, seed=1))
    kept = plain.finish(parameters)
    assert isinstance(plain.layout(kept), Int4Layout)
    x, exact = noise(3, 512, seed=2), plain.dequantize(kept)
    assert_near(plain.linear(x, kept, None), small_linear_reference(x.float(), exact))
    got = plain.rows(kept, torch.tensor([7, 0, 255], device="cuda"), torch.float32)
    assert torch.equal(got, exact[[7, 0, 255]])


@pytest.mark.parametrize("rows", [1, 4, 48])
def test_a_chain_of_dependent_launches_in_a_graph(rows: int) -> None:
    """Each product waits for the one before it, though its weights do not."""
    matrices = [matrix_of(512, 512, seed=i) for i in range(20)]
    kept: list[Records] = [records_of(Int4Layout().keep(m)) for m in matrices]
    x = noise(rows, 512, seed=99)
    want, norm = x.float(), InputNorm(torch.ones(512, device="cuda").bfloat16(), 1e-5)
    for matrix in matrices:
        want = small_linear_reference(want, matrix.dequantize(), norm=norm)

    def chain() -> torch.Tensor:
        y = x
        for records in kept:
            fused = int4_fused(y, records, None, Fusion(norm=norm))
            if fused is None:
                normed = torch.nn.functional.rms_norm(y, (512,), norm.weight_K, norm.eps)
                fused = int4_linear(normed, records)
            y = fused
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    first = None
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        first = out.clone() if first is None else first
        assert torch.equal(out, first)
    assert (out.float() - want).norm() <= 0.05 * want.norm()
