"""The CUDA kernel for few rows equals its reference in float32, whatever it is fused with."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.stream_linear import Scales, can_stream, shared_bytes, stream_linear
from ridgeline.kernels.tiles import Tile
from tests.kernels.references import rounded_reference, small_linear_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

E4M3 = torch.float8_e4m3fn
MOST_SHARED_BYTES = 227 << 10  # of a block on an H100 or H200
BOUND = {torch.bfloat16: 6e-3, torch.float16: 2e-3}  # of the largest number
TILES = {
    "16": (16, 1, 2, 8, 0),
    "16, cluster": (16, 2, 3, 4, 0),
    "16, many warps": (16, 1, 2, 16, 0),
    "32": (32, 1, 3, 8, 0),
    "32, cluster": (32, 4, 2, 8, 0),
    "48": (48, 1, 2, 4, 0),
    "64": (64, 1, 2, 4, 0),
    "two programs": (32, 1, 3, 4, 2),
}


def tile_of(name: str) -> Tile:
    block_n, splits, stages, warps, per_sm = TILES[name]
    return Tile(block_n, 64, splits, warps, stages, per_sm=per_sm, stream=True)


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same rows, further apart, with NaN between them."""
    wide = x.new_full((x.shape[0], x.shape[1] + 64), torch.nan)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    off = (got.float() - want.float()).abs().max()
    assert off <= BOUND[got.dtype] * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 17, 32])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 512), (1000, 1024), (4128, 2048)])
@pytest.mark.parametrize("kind", ["plain", "norm", "gated", "norm+gated", "residual", "bias"])
def test_equals_its_reference(name: str, rows: int, outputs: int, inputs: int, kind: str) -> None:
    tile, gated = tile_of(name), "gated" in kind
    if gated and tile.block_n % 32:
        pytest.skip("gate and up are pairs of tiles")
    x, w = spread(noise(rows, inputs, seed=1)), noise(outputs, inputs, seed=2) * inputs**-0.5
    norm = InputNorm(noise(inputs, seed=3), 1e-5) if "norm" in kind else None
    width = outputs // 2 if gated else outputs
    residual = noise(rows, width, seed=4) if kind == "residual" else None
    bias = noise(outputs, seed=5) if kind == "bias" else None
    assert can_stream(x, w)
    want = small_linear_reference(
        x.float(),
        w,
        norm=norm,
        bias_N=bias,
        gated=gated,
        residual_MO=None if residual is None else residual.clone(),
    )
    runs = []
    for pdl in (True, False):
        out = spread(x.new_full((rows, width), torch.nan)) if residual is None else residual.clone()
        given = None if residual is None else out
        stream_linear(
            x, w, tile=tile, norm=norm, bias_N=bias, gated=gated, residual_MO=given, out_MO=out,
            pdl=pdl,
        )  # fmt: skip
        runs.append(out)
    assert_near(runs[0], want)
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", ["16, cluster", "32", "64"])
@pytest.mark.parametrize("rows", [1, 8, 20])
@pytest.mark.parametrize("kind", ["plain", "norm+gated", "residual"])
def test_e4m3_weights(name: str, rows: int, kind: str) -> None:
    tile, gated = tile_of(name), "gated" in kind
    if gated and tile.block_n % 32:
        pytest.skip("gate and up are pairs of tiles")
    if shared_bytes(tile, rows, pieces=2) > MOST_SHARED_BYTES:
        pytest.skip("more shared memory than there is")
    codes = (noise(320, 1024, seed=1).float() * 100).clamp(-448, 448).to(E4M3)
    codes[0, :8] = torch.tensor([0.0, 2**-9, -(2**-9), 448, -448, 2**-6, 0.875 * 2**-6, 1.0])
    scale = torch.rand(320, device="cuda") * 1e-3
    exact = codes.float() * scale[:, None]
    x, norm = noise(rows, 1024, seed=2), InputNorm(noise(1024, seed=3), 1e-5)
    x[0, 128:256] = 0.0
    residual = noise(rows, 320, seed=4) if kind == "residual" else None
    taken = rounded_reference(x)
    if "norm" in kind:
        factor = torch.rsqrt(x.float().square().mean(1, keepdim=True) + norm.eps)
        taken = rounded_reference(x * norm.weight_K) * factor
    want = small_linear_reference(taken, exact, gated=gated, residual_MO=residual)
    got = stream_linear(
        x,
        codes,
        tile=tile,
        norm=norm if "norm" in kind else None,
        gated=gated,
        residual_MO=residual,
        scales=Scales(scale),
    )
    # Numbers half way between two of e4m3 may go to either.
    assert (got.float() - want).norm() <= 0.01 * want.norm()


@pytest.mark.parametrize("name", ["16, cluster", "32", "64"])
def test_e4m3_on_both_sides(name: str) -> None:
    codes = (noise(320, 1024, seed=1).float() * 100).clamp(-448, 448).to(E4M3)
    rows = (noise(5, 1024, seed=2).float() * 50).clamp(-448, 448).to(E4M3)
    scale, x_scale = torch.rand(320, device="cuda") * 1e-3, torch.rand(5, device="cuda") * 1e-2
    got = stream_linear(rows, codes, tile=tile_of(name), scales=Scales(scale, x_scale))
    want = (rows.float() * x_scale[:, None]) @ (codes.float() * scale[:, None]).T
    assert_near(got, want)


def test_a_chain_of_dependent_launches_in_a_graph() -> None:
    """Each product waits for the one before it, though its weights do not."""
    weights = [noise(512, 512, seed=i) * 512**-0.5 for i in range(20)]
    x, tile = noise(4, 512, seed=99), tile_of("32")
    want = x.float()
    for w in weights:
        want = (want @ w.float().T).to(torch.bfloat16).float()

    def chain() -> torch.Tensor:
        y = x
        for w in weights:
            y = stream_linear(y, w, tile=tile)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(3):
        graph.replay()
    assert (out.float() - want).norm() <= 0.02 * want.norm()
