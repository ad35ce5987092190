"""For whom does a program wait: for the kernel before, and for others that share its tile?"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """What kernels before have written is there; the next one may begin, which waits too."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def arrived_last(arrivals_ptr, tile, total):
    """True in one of `total` programs, which then sees all that the others stored before. It reads
    with .cg, past its own L1, and must put the counter back with `reset`."""
    tl.debug_barrier()  # all threads have stored before one of them releases
    before = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return before == total - 1


@triton.jit
def reset(arrivals_ptr, tile):
    tl.store(arrivals_ptr + tile, 0)
