"""x @ W.T for so few rows that reading W counts; what stands beside it in the same pass.

Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict, Unpack

import torch
from torch.nn import functional

from ridgeline.errors import check
from ridgeline.kernels.launching import Workspace, has_warpgroup_products, shared_workspace
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.silu_mul import silu_mul
from ridgeline.kernels.tiles import MAX_TILED, Place, Tile, bucket, find_tile, is_measured, kind_of

ROUNDED_NUMBERS = 1 << 18


@dataclass(frozen=True, slots=True)
class InputNorm:
    weight_K: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Fusion:
    """What may stand beside a product. Of its input: states that x is added to, in place, before
    all else, and a norm; or the gate (SiLU) of the first half of x on its second. Of its output:
    the same gate, and states that it is added to, in place."""

    norm: InputNorm | None = None
    is_gated: bool = False
    residual_TO: torch.Tensor | None = None
    sum_TI: torch.Tensor | None = None
    of_gated: bool = False


class Unfused:
    """A base, to be named first, of those that do nothing beside the product."""

    def fused(
        self,
        x_TI: torch.Tensor,
        parameters: dict[str, torch.Tensor],
        bias_O: torch.Tensor | None,
        fusion: Fusion,
    ) -> torch.Tensor | None:
        return None


def fits_small(x_MK: torch.Tensor, weight_NK: torch.Tensor, fusion: Fusion) -> bool:
    """Is one kernel for all of it known, or for sizes that nobody tuned believed, to be the fastest
    here?"""
    if fusion.of_gated or fusion.sum_TI is not None:
        return False
    has_norm, has_residual = fusion.norm is not None, fusion.residual_TO is not None
    return _tile(x_MK, weight_NK, has_norm, fusion.is_gated, has_residual) is not None


class Ends(TypedDict, total=False):
    """What a kernel does behind the product; see `small_linear`."""

    bias_N: torch.Tensor | None
    gated: bool
    residual_MO: torch.Tensor | None
    out_MO: torch.Tensor | None


class Beside(Ends, total=False):
    """And before it."""

    norm: InputNorm | None


def small_linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    workspace: Workspace | None = None,
    pdl: bool | None = None,
    **beside: Unpack[Beside],
) -> torch.Tensor:
    """y = rms_norm(x) @ W.T + bias; if gated silu(y's first half) * its second; + residual.

    Where the table of tiles has an entry for the shape, or a rule for what is not in it, all of it
    is one kernel that adds in float32 and rounds once, to the dtype of `out_MO` (that of x unless
    given); else the library and the kernels it needs beside it. `out_MO` may be `residual_MO`. The
    same input gives the same bits every time."""
    norm, gated = beside.get("norm"), beside.get("gated", False)
    residual_MO, out_MO = beside.get("residual_MO"), beside.get("out_MO")
    tile = _tile(x_MK, weight_NK, norm is not None, gated, residual_MO is not None)
    if tile is not None:
        return linear_by_tile(x_MK, weight_NK, tile, workspace=workspace, pdl=pdl, **beside)
    normed_MK = x_MK if norm is None else rms_norm(x_MK, norm.weight_K, norm.eps)
    y_MO = functional.linear(normed_MK, weight_NK, beside.get("bias_N"))
    y_MO = silu_mul(y_MO, pdl=pdl) if gated else y_MO
    y_MO = y_MO if residual_MO is None else y_MO.add_(residual_MO)
    return y_MO if out_MO is None else out_MO.copy_(y_MO)


def multiply_into(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, out_MN: torch.Tensor
) -> torch.Tensor:
    """x @ W.T by the library, into `out_MN`, of the dtype of x or float32. On a CPU it rounds to
    the dtype of x even then: to widen W before each product of one row costs 5 % of a step. No more
    than ROUNDED_NUMBERS of y are in that dtype at once."""
    if out_MN.dtype == x_MK.dtype:
        return torch.mm(x_MK, weight_NK.T, out=out_MN)
    if x_MK.is_cuda:
        return torch.mm(x_MK, weight_NK.T, out_MN.dtype, out=out_MN)
    step = max(1, ROUNDED_NUMBERS // max(1, len(x_MK)))
    for begin in range(0, out_MN.shape[1], step):
        part = slice(begin, begin + step)
        out_MN[:, part].copy_(torch.mm(x_MK, weight_NK[part].T))
    return out_MN


def linear_by_tile(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    tile: Tile,
    *,
    workspace: Workspace | None = None,
    pdl: bool | None = None,
    **beside: Unpack[Beside],
) -> torch.Tensor:
    """The same by one of our kernels, cut by `tile`."""
    if tile.stream:
        from ridgeline.kernels.stream_linear import stream_linear

        return stream_linear(x_MK, weight_NK, tile=tile, pdl=pdl is not False, **beside)
    if tile.wgmma:
        from ridgeline.kernels.tile_linear import tile_linear

        check(beside.get("norm") is None, "there is no norm in this kernel")
        return tile_linear(
            x_MK, weight_NK, tile=tile, bias_N=beside.get("bias_N"),
            gated=beside.get("gated", False), residual_MO=beside.get("residual_MO"),
            out_MO=beside.get("out_MO"), pdl=pdl is not False,
        )  # fmt: skip
    from ridgeline.kernels.small_linear_triton import small_linear_triton

    workspace = workspace or shared_workspace(x_MK.device)
    return small_linear_triton(x_MK, weight_NK, tile=tile, workspace=workspace, pdl=pdl, **beside)


def _tile(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, norm: bool, gated: bool, residual: bool
) -> Tile | None:
    if not (x_MK.is_cuda and 0 < x_MK.shape[0] <= MAX_TILED):
        return None
    kind = kind_of(norm=norm, gated=gated, residual=residual)
    dtype = str(x_MK.dtype).removeprefix("torch.")
    (outputs, inputs), rows = weight_NK.shape, bucket(x_MK.shape[0])
    place = Place(_device_name(x_MK.device), dtype, outputs, inputs, rows, kind)
    tile = find_tile(place)
    if not is_measured(place) and not (norm and residual) and has_warpgroup_products(x_MK.device):
        from ridgeline.kernels.untuned_tiles import untuned_tile

        tile = untuned_tile(rows, outputs, inputs, norm=norm, gated=gated)
    if tile is not None and tile.stream:
        from ridgeline.kernels.stream_linear import can_stream

        return tile if can_stream(x_MK, weight_NK) else None
    if tile is not None and tile.wgmma:
        from ridgeline.kernels.tile_linear import can_tile

        return tile if can_tile(x_MK, weight_NK, gated=gated) else None
    return tile


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
