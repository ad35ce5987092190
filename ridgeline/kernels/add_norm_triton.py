"""`add_norm` and `rms_norm` in Triton: one program a row, the whole row in registers."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.errors import check
from ridgeline.kernels.launching import launches_early


def add_norm_triton(
    x_TE: torch.Tensor | None,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    *,
    pdl: bool | None = None,
) -> torch.Tensor:
    """Without `x_TE` the residual is normed as it is, and stays so."""
    tokens, size = residual_TE.shape
    fits = weight_E.shape == (size,) and (x_TE is None or x_TE.shape == residual_TE.shape)
    check(fits, "shapes of add_norm agree", residual=tuple(residual_TE.shape))
    added_TE = residual_TE if x_TE is None else x_TE
    dense = added_TE.stride(1) == residual_TE.stride(1) == weight_E.stride(0) == 1 or size == 1
    check(dense, "rows of add_norm are contiguous")
    normed_TE = torch.empty((tokens, size), dtype=residual_TE.dtype, device=residual_TE.device)
    if tokens == 0:
        return normed_TE
    block = triton.next_power_of_2(size)
    pdl = launches_early(residual_TE.device) if pdl is None else pdl
    _add_norm[(tokens,)](
        added_TE, residual_TE, weight_E, normed_TE, size, added_TE.stride(0), residual_TE.stride(0),
        eps, BLOCK=block, ADDS=x_TE is not None, PDL=pdl, num_warps=min(max(block // 512, 1), 16),
        launch_pdl=pdl,
    )  # fmt: skip
    return normed_TE


@triton.jit
def _add_norm(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, size, x_stride, residual_stride, eps,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < size
    weight = tl.load(weight_ptr + e, inside, 0.0).to(tl.float32)
    if PDL:
        # Before the wait: the product behind it calls in its weights while the one before it runs.
        gdc_launch_dependents()
        gdc_wait()
    places = residual_ptr + row * residual_stride + e
    wide = tl.load(places, inside, 0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(x_ptr + row * x_stride + e, inside, 0.0).to(tl.float32)
        rounded = wide.to(residual_ptr.dtype.element_ty)
        tl.store(places, rounded, inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale * weight).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * size + e, normed, inside)
