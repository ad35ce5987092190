"""Gated products with many rows equal their reference, whatever is left over at the ends of tiles.

Triton's interpreter cannot run Gluon: without a GPU only the choice and the library's way are
tried.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.large_m_linear import LEAST_ROWS, fits_large_m, large_m_linear
from ridgeline.kernels.small_linear import Fusion, InputNorm
from tests.kernels.references import small_linear_reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
GATED = Fusion(is_gated=True)


def layer(rows: int, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and W; results of about 1."""
    torch.manual_seed(rows + outputs)
    device = "cuda" if HOPPER else "cpu"
    x_MK = torch.randn(rows, inputs, device=device)
    weight_NK = torch.randn(outputs, inputs, device=device) * inputs**-0.5
    return x_MK.bfloat16(), weight_NK.bfloat16()


def error(found: torch.Tensor, x_MK: torch.Tensor, weight_NK: torch.Tensor) -> float:
    wanted = small_linear_reference(x_MK.float(), weight_NK.float(), gated=True)
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.skipif(HOPPER, reason="what other devices do")
def test_without_the_copy_engine_the_library_does_it() -> None:
    x_MK, weight_NK = layer(LEAST_ROWS, 128, 32)
    out_MO = torch.full((LEAST_ROWS, 64), torch.nan, dtype=torch.bfloat16)
    assert large_m_linear(x_MK, weight_NK, out_MO=out_MO) is out_MO
    assert error(out_MO, x_MK, weight_NK) < 5e-3
    assert torch.equal(large_m_linear(x_MK, weight_NK), out_MO)
    assert not fits_large_m(x_MK, torch.zeros(4096, 1024, dtype=torch.bfloat16), GATED)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0")
@pytest.mark.parametrize("rows", [1, 128, 300, 1500])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 1024), (208, 72), (28672, 4096)])
def test_the_kernel_equals_its_reference_every_time(rows: int, outputs: int, inputs: int) -> None:
    x_MK, weight_NK = layer(rows, outputs, inputs)
    out_MO = torch.full((rows, outputs // 2), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert large_m_linear(x_MK, weight_NK, out_MO=out_MO) is out_MO
    assert error(out_MO, x_MK, weight_NK) < 4e-3
    assert torch.equal(large_m_linear(x_MK, weight_NK), out_MO)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0")
def test_other_tiles_and_rows_with_gaps() -> None:
    ours = pytest.importorskip("ridgeline.kernels.large_m_linear_gluon")
    x_MK, weight_NK = layer(700, 1024, 512)
    wide_MO = torch.full((700, 640), 7.0, dtype=torch.bfloat16, device="cuda")
    for tile in (
        ours.LargeMTile(),
        replace(ours.LargeMTile(), group=1, stages=3),
        replace(ours.LargeMTile(), block_m=128, block_n=256),
    ):
        found = ours.gated_linear_gluon(
            x_MK[:, :448], weight_NK[:, :448], out_MO=wide_MO[:, 64:576], tile=tile
        )
        assert error(found, x_MK[:, :448], weight_NK[:, :448]) < 4e-3
    assert bool((wide_MO[:, :64] == 7).all())
    assert bool((wide_MO[:, 576:] == 7).all())


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0")
def test_it_is_chosen_for_gated_layers_of_prompts_only() -> None:
    x_MK, weight_NK = layer(LEAST_ROWS, 6144, 1024)
    assert fits_large_m(x_MK, weight_NK, GATED)
    assert not fits_large_m(x_MK[1:], weight_NK, GATED)
    assert not fits_large_m(x_MK, weight_NK[:1024], GATED)
    assert not fits_large_m(x_MK.float(), weight_NK.float(), GATED)
    assert not fits_large_m(x_MK[:, 4:], weight_NK[:, 4:], GATED)
    assert not fits_large_m(x_MK, weight_NK, Fusion())
    norm = InputNorm(x_MK[0], 1e-5)
    assert not fits_large_m(x_MK, weight_NK, Fusion(norm=norm, is_gated=True))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a CUDA device of capability 9.0")
def test_wrong_shapes_are_named() -> None:
    ours = pytest.importorskip("ridgeline.kernels.large_m_linear_gluon")
    x_MK, weight_NK = layer(64, 128, 64)
    with pytest.raises(InternalError, match="x and W agree"):
        ours.gated_linear_gluon(x_MK, weight_NK[:, :32])
    with pytest.raises(InternalError, match="one height"):
        ours.gated_linear_gluon(x_MK, weight_NK[:127])
    with pytest.raises(InternalError, match="shape of y"):
        ours.gated_linear_gluon(x_MK, weight_NK, out_MO=x_MK[:32])
