"""`large_m_linear` in Gluon: one warp loads, two groups of four multiply, on every multiprocessor.

A program takes one tile of y after the other. The copy engine fills a ring of stages with tiles of
x and W, and goes on with the next tile while the results of the last one are gated and stored. Each
of the two groups has half of a tile's rows of x and all of its rows of W: some of the gate and the
same rows of the other half. Triton's own way of dividing the work among warps (3.6) hangs here.
Letters: M rows, K inputs, N rows of W, O outputs, N / 2.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.errors import check
from ridgeline.kernels.small_linear_triton import multiprocessors


@dataclass(frozen=True, slots=True)
class LargeMTile:
    """`block_m` rows of x and `block_n` of W, half of them of the gate, make a tile; `group` tiles
    of rows of x go before the next rows of W. `stages` of the ring hold `block_k` columns each."""

    block_m: int = 256
    block_n: int = 128
    block_k: int = 64
    group: int = 8
    stages: int = 4


def gated_linear_gluon(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    out_MO: torch.Tensor | None = None,
    tile: LargeMTile | None = None,
) -> torch.Tensor:
    """As `large_m_linear`, by our kernel, cut by `tile`; bfloat16."""
    (rows, inputs), (outputs, columns) = x_MK.shape, weight_NK.shape
    tile, width = tile or LargeMTile(), outputs // 2
    is_half = x_MK.dtype == weight_NK.dtype == torch.bfloat16
    check(is_half and columns == inputs, "x and W agree", inputs=inputs, columns=columns)
    check(outputs % 2 == 0, "gate and up have one height", outputs=outputs)
    y_MO = x_MK.new_empty((rows, width)) if out_MO is None else out_MO
    check(y_MO.shape == (rows, width) and y_MO.dtype == x_MK.dtype, "out has the shape of y")
    if y_MO.numel() == 0:
        return y_MO
    half = tile.block_n // 2
    m_tiles, o_tiles = -(-rows // tile.block_m), -(-width // half)
    _gated_linear[(min(m_tiles * o_tiles, multiprocessors(x_MK.device)),)](
        _descriptor(x_MK, [tile.block_m, tile.block_k]),
        _descriptor(weight_NK, [half, tile.block_k]), _descriptor(y_MO, [tile.block_m // 2, half]),
        width, m_tiles, o_tiles, STEPS=-(-inputs // tile.block_k), BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group, STAGES=tile.stages,
        num_warps=4,
    )  # fmt: skip
    return y_MO


def _descriptor(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], block, layout)


@gluon.jit
def _place(
    tile,
    m_tiles,
    o_tiles,
    BLOCK_M: gl.constexpr,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The first row of x and of the gate of a tile."""
    group = tile // (GROUP * o_tiles)
    inside = tile - group * GROUP * o_tiles
    size = gl.minimum(m_tiles - group * GROUP, GROUP)
    return (group * GROUP + inside % size) * BLOCK_M, inside // size * HALF


@gluon.jit
def _load(
    x_desc, w_desc, xs, ws, full, free, width, m_tiles, o_tiles, STEPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_N // 2
    count = 0
    for tile in range(gl.program_id(0), m_tiles * o_tiles, gl.num_programs(0)):
        at_m, at_o = _place(tile, m_tiles, o_tiles, BLOCK_M, HALF, GROUP)
        for step in range(STEPS):
            stage = count % STAGES
            at_k = step * BLOCK_K
            mbarrier.wait(free.index(stage), count // STAGES & 1 ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            gate, up = ws.index(stage).slice(0, HALF), ws.index(stage).slice(HALF, HALF)
            tma.async_copy_global_to_shared(x_desc, [at_m, at_k], ready, xs.index(stage))
            tma.async_copy_global_to_shared(w_desc, [at_o, at_k], ready, gate)
            tma.async_copy_global_to_shared(w_desc, [width + at_o, at_k], ready, up)
            count += 1


@gluon.jit
def _multiply(
    GROUP_OF_WARPS: gl.constexpr, y_desc, xs, ws, y_buffer, full, free, m_tiles, o_tiles,
    STEPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M // 2
    HALF: gl.constexpr = BLOCK_N // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    count = 0
    for tile in range(gl.program_id(0), m_tiles * o_tiles, gl.num_programs(0)):
        at_m, at_o = _place(tile, m_tiles, o_tiles, BLOCK_M, HALF, GROUP)
        sums = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        for step in range(STEPS):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), count // STAGES & 1)
            x = xs.index(stage).slice(GROUP_OF_WARPS * ROWS, ROWS)
            w = ws.index(stage).permute((1, 0))
            under_way = warpgroup_mma(x, w, sums, is_async=True)
            # The step before has been multiplied, so that its stage is free.
            sums = warpgroup_mma_wait(1, deps=[under_way])
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        gate, up = sums.reshape([ROWS, 2, HALF]).permute([0, 2, 1]).split()
        y = gate / (1.0 + gl.exp(-gate)) * up
        tma.store_wait(0)  # what the buffer held has left it
        gl.thread_barrier()
        y_buffer.store(y.to(y_desc.dtype))
        fence_async_shared()
        gl.thread_barrier()
        place = [at_m + GROUP_OF_WARPS * ROWS, at_o]
        tma.async_copy_shared_to_global(y_desc, place, y_buffer)
    tma.store_wait(0)


# A number of rows is no reason to compile anew.
@gluon.jit(do_not_specialize=["m_tiles", "o_tiles"])
def _gated_linear(
    x_desc, w_desc, y_desc, width, m_tiles, o_tiles, STEPS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M // 2
    HALF: gl.constexpr = BLOCK_N // 2
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    ws = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    y0 = gl.allocate_shared_memory(y_desc.dtype, [ROWS, HALF], y_desc.layout)
    y1 = gl.allocate_shared_memory(y_desc.dtype, [ROWS, HALF], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)  # both groups must be done with it
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    0, y_desc, xs, ws, y0, full, free, m_tiles, o_tiles, STEPS, BLOCK_M, BLOCK_N,
                    GROUP, STAGES,
                ),
            ),
            (
                _multiply,
                (
                    1,
                    y_desc,
                    xs,
                    ws,
                    y1,
                    full,
                    free,
                    m_tiles,
                    o_tiles,
                    STEPS,
                    BLOCK_M,
                    BLOCK_N,
                    GROUP,
                    STAGES,
                ),
            ),
            (
                _load,
                (
                    x_desc,
                    w_desc,
                    xs,
                    ws,
                    full,
                    free,
                    width,
                    m_tiles,
                    o_tiles,
                    STEPS,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    GROUP,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
