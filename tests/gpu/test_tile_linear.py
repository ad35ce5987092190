"""The CUDA kernel for some rows equals its reference in float32, whatever it is fused with."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.stream_linear import Scales
from ridgeline.kernels.tile_linear import (
    can_tile,
    columns_of,
    part_of,
    tile_linear,
    tile_workspace,
)
from ridgeline.kernels.tiles import Tile
from tests.kernels.references import small_linear_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

E4M3 = torch.float8_e4m3fn
BOUND = {torch.bfloat16: 6e-3, torch.float16: 2e-3}  # of the largest number
TILES = {
    "64": Tile(64, 64, warps=4, stages=4, wgmma=True),
    "64, deep": Tile(64, 64, warps=4, stages=7, splits=2, block_m=128, wgmma=True),
    "128": Tile(128, 64, warps=8, stages=4, wgmma=True),
    "128, all over": Tile(128, 64, warps=8, stages=4, per_sm=1, wgmma=True),
    "128, split": Tile(128, 64, warps=8, stages=3, splits=2, block_m=64, wgmma=True),
    "128, wide steps": Tile(128, 128, warps=8, stages=2, per_sm=1, block_m=192, wgmma=True),
    "128, pairs": Tile(128, 64, warps=8, stages=4, per_sm=1, cluster=2, wgmma=True),
    "64, in four": Tile(64, 64, warps=4, stages=5, splits=4, block_m=128, wgmma=True),
    "64, in eight": Tile(64, 64, warps=4, stages=4, splits=8, block_m=64, wgmma=True),
    "128, in four": Tile(128, 64, warps=8, stages=4, splits=4, wgmma=True),
    "256": Tile(256, 64, warps=8, stages=3, per_sm=1, block_m=128, wgmma=True),
    "256, pairs": Tile(256, 64, warps=8, stages=3, cluster=2, block_m=96, wgmma=True),
}
ROWS = [9, 100, 300]
KINDS = ["plain", "residual", "bias+gated"]


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart, with NaN around them."""
    wide = x.new_full((x.shape[0] + 2, x.shape[1] + 64), torch.nan)
    inside = wide[1:-1, : x.shape[1]]
    inside.copy_(x)
    return inside


def assert_surrounded(inside: torch.Tensor) -> None:
    """What `spread` has put around it is there."""
    around = inside.as_strided((inside.shape[0], 64), inside.stride(), inside.storage_offset())
    after = around.as_strided(
        around.shape, around.stride(), inside.storage_offset() + inside.shape[1]
    )
    assert after.isnan().all()
    before = inside.as_strided(inside.shape, inside.stride(), 0)[0]
    assert before.isnan().all()


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    off = (got.float() - want.float()).abs().max()
    assert off <= BOUND[got.dtype] * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 512), (1008, 1032), (4144, 2048)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_reference(name: str, rows: int, outputs: int, inputs: int, kind: str) -> None:
    tile, gated = TILES[name], "gated" in kind
    if columns_of(rows, tile.block_m) % part_of(tile, columns_of(rows, tile.block_m)):
        pytest.skip("each of a cluster finishes eights of rows")
    x, w = spread(noise(rows, inputs, seed=1)), spread(noise(outputs, inputs, seed=2))
    w.mul_(inputs**-0.5)
    width = outputs // 2 if gated else outputs
    residual = noise(rows, width, seed=4) if kind == "residual" else None
    bias = noise(outputs, seed=5) if "bias" in kind else None
    assert can_tile(x, w, gated=gated)
    want = small_linear_reference(
        x.float(), w, bias_N=bias, gated=gated, residual_MO=residual
    )  # fmt: skip
    runs = []
    for pdl in (True, kind != "plain", True):
        tile_workspace(x.device).partial_P.fill_(torch.nan)
        out = spread(x.new_full((rows, width), torch.nan) if residual is None else residual)
        given = None if residual is None else out
        tile_linear(
            x, w, tile=tile, bias_N=bias, gated=gated, residual_MO=given, out_MO=out, pdl=pdl
        )  # fmt: skip
        assert_surrounded(out)
        runs.append(out.clone())
    assert_near(runs[0], want)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert not tile_workspace(x.device).arrivals_A.any()


@pytest.mark.parametrize("name", TILES)
def test_float16(name: str) -> None:
    x, w = noise(100, 512, seed=1, dtype=torch.float16), noise(640, 512, seed=2).half() * 0.05
    want = small_linear_reference(x.float(), w, gated=True)
    assert_near(tile_linear(x, w, tile=TILES[name], gated=True), want)


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("kind", ["gated", "residual"])
def test_e4m3_on_both_sides(name: str, kind: str) -> None:
    rows = 130
    codes = (noise(320, 1024, seed=1).float() * 100).clamp(-448, 448).to(E4M3)
    codes[0, :8] = torch.tensor([0.0, 2**-9, -(2**-9), 448, -448, 2**-6, 0.875 * 2**-6, 1.0])
    x = (noise(rows, 1024, seed=2).float() * 50).clamp(-448, 448).to(E4M3)
    scale = torch.rand(320, device="cuda") * 1e-3
    x_scale = torch.rand(rows, device="cuda") * 1e-2
    gated, width = kind == "gated", 160 if kind == "gated" else 320
    residual = noise(rows, width, seed=4) if kind == "residual" else None
    exact = (x.float() * x_scale[:, None]), codes.float() * scale[:, None]
    want = small_linear_reference(*exact, gated=gated, residual_MO=residual)
    tile = Tile(**{f: getattr(TILES[name], f) for f in Tile.__slots__} | {"block_k": 128})
    got = tile_linear(
        x, codes, tile=tile, gated=gated, residual_MO=residual, scales=Scales(scale, x_scale)
    )
    # Products of e4m3 are added up with about 14 bits.
    assert (got.float() - want).norm() <= 0.01 * want.norm()


def test_sizes_that_it_does_not_take() -> None:
    x, w = noise(16, 64, seed=1), noise(128, 64, seed=2)
    assert can_tile(x, w)
    assert not can_tile(x, w[:100])
    assert not can_tile(x, w[:24], gated=True)
    assert not can_tile(x[:, 1:], w[:, 1:])
    assert not can_tile(x, w.half())
    assert not can_tile(x.cpu(), w.cpu())
    assert not can_tile(noise(513, 64, seed=1), w)


@pytest.mark.parametrize("name", ["64", "128, all over", "128, in four"])
def test_a_chain_of_dependent_launches_in_a_graph(name: str) -> None:
    """Each product waits for the one before it, though its weights do not."""
    weights = [noise(512, 512, seed=i) * 512**-0.5 for i in range(20)]
    x, tile = noise(48, 512, seed=99), TILES[name]
    want = x.float()
    for w in weights:
        want = (want @ w.float().T).to(torch.bfloat16).float()

    def chain() -> torch.Tensor:
        y = x
        for w in weights:
            y = tile_linear(y, w, tile=tile)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(3):
        graph.replay()
    assert (out.float() - want).norm() <= 0.02 * want.norm()
