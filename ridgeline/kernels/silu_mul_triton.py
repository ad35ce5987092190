"""`silu_mul` in Triton: one program a piece of a row."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import await_inputs
from ridgeline.kernels.launching import launches_early

BLOCK = 1024


def silu_mul_triton(
    gate_up_TG: torch.Tensor, *, block: int = BLOCK, pdl: bool | None = None
) -> torch.Tensor:
    tokens, both = gate_up_TG.shape
    check(both % 2 == 0, "gate and up have one width", both=both)
    check(gate_up_TG.stride(1) == 1, "rows of silu_mul are contiguous")
    out_TF = gate_up_TG.new_empty((tokens, both // 2))
    if out_TF.numel() == 0:
        return out_TF
    pdl = launches_early(gate_up_TG.device) if pdl is None else pdl
    _silu_mul[(tokens, triton.cdiv(both // 2, block))](
        gate_up_TG, out_TF, both // 2, gate_up_TG.stride(0), BLOCK=block, PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    return out_TF


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, width, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < width
    await_inputs(PDL)
    places = gate_up_ptr + row * stride + f
    gate = tl.load(places, inside, 0.0).to(tl.float32)
    up = tl.load(places + width, inside, 0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * width + f, out.to(out_ptr.dtype.element_ty), inside)
