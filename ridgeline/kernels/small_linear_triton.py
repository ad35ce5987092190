"""`small_linear` in Triton: a program takes tiles of rows of W, and of each all or some of K.

Where several programs share a tile, each leaves its sums in the workspace and the last to arrive
adds them up, always in the order of K. The factor of the norm is one number a row, so it is applied
to the finished sums; the squares it needs are summed beside them. Of a gated layer, a tile is some
rows of the gate and the same rows of the other half. Rows past the end, of x and of W, are the last
one again, so that no load needs a mask for them; they are not stored.
Letters: M rows, K inputs, N rows of W, O outputs: N, or N / 2 if gated.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import arrived_last, reset
from ridgeline.kernels.launching import Workspace, launches_early, make_workspace
from ridgeline.kernels.rms_norm import rms_norm
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.tiles import MAX_ROWS, Tile, bucket


@dataclass(frozen=True, slots=True)
class Cut:
    """What a tile comes to for one shape. A step is `block_k` of one tile of rows of W."""

    rows: int  # of x, as the kernel is compiled for
    tiles: int
    steps: int  # of a tile
    share: int  # steps of a program, at most
    programs: int
    merges: bool  # some tile is shared
    is_loose: bool  # a program is not tied to one tile

    @property
    def slots(self) -> int:
        """Places for unfinished sums; a program that begins and ends inside a tile has two."""
        return self.programs * (2 if self.is_loose else 1) if self.merges else 0


def cut_work(tile: Tile, rows: int, outputs: int, inputs: int, multiprocessors: int) -> Cut:
    tiles, steps = -(-outputs // tile.block_n), -(-inputs // tile.block_k)
    padded = max(bucket(rows), tile.least_rows) if tile.dot else 1
    if tile.per_sm == 0:
        share = -(-steps // tile.splits)
        splits = -(-steps // share)
        return Cut(padded, tiles, steps, share, tiles * splits, splits > 1, False)
    share = -(-tiles * steps // (tile.per_sm * multiprocessors))
    return Cut(padded, tiles, steps, share, -(-tiles * steps // share), share % steps != 0, True)


def small_linear_triton(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, *, tile: Tile, norm: InputNorm | None = None,
    bias_N: torch.Tensor | None = None, gated: bool = False,
    residual_MO: torch.Tensor | None = None, out_MO: torch.Tensor | None = None,
    workspace: Workspace | None = None, pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `small_linear`, cut by `tile`. Between launches with `pdl` that share a workspace there
    may only be kernels that wait as well."""
    (rows, inputs), outputs = x_MK.shape, weight_NK.shape[0]
    width = outputs // 2 if gated else outputs
    _check(x_MK, weight_NK, tile, gated, norm, bias_N)
    ends = [t for t in (residual_MO, out_MO) if t is not None]
    check(all(t.shape == (rows, width) for t in ends), "residual and out have the shape of y")
    check(all(t.stride(-1) == 1 or width == 1 for t in ends), "rows of the ends are contiguous")
    y_MO = x_MK.new_empty((rows, width)) if out_MO is None else out_MO
    if y_MO.numel() == 0:
        return y_MO
    if norm is not None and tile.dot and x_MK.dtype == torch.float16:
        # x * weight before the factor can be too large for float16
        x_MK, norm = rms_norm(x_MK, norm.weight_K, norm.eps), None
    cut = cut_work(tile, rows, outputs, inputs, multiprocessors(x_MK.device))
    room = _room(workspace, y_MO, cut, tile)
    pdl = (launches_early(x_MK.device) if pdl is None else pdl) and tile.pdl
    _small_linear[(cut.programs,)](
        x_MK, weight_NK, _descriptor(weight_NK, tile, gated) if tile.tma else weight_NK,
        norm.weight_K if norm else x_MK, x_MK if bias_N is None else bias_N,
        y_MO if residual_MO is None else residual_MO, y_MO, room.partial_P if room else y_MO,
        room.arrivals_A if room else y_MO, rows, width, inputs, cut.tiles, cut.steps, cut.share,
        x_MK.stride(0), weight_NK.stride(0), 0 if residual_MO is None else residual_MO.stride(0),
        y_MO.stride(0), norm.eps if norm else 0.0, ROWS=cut.rows, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, STAGES=tile.stages, DOT=tile.dot, TMA=tile.tma,
        PER_SM=tile.per_sm > 0, MERGE=cut.merges, EVEN_K=inputs % tile.block_k == 0, GATED=gated,
        NORM=norm is not None, BIAS=bias_N is not None, RESIDUAL=residual_MO is not None, PDL=pdl,
        EARLY=tile.early, LINES=_lines(tile, weight_NK) if pdl else 0, num_warps=tile.warps,
        launch_pdl=pdl,
    )  # fmt: skip
    return y_MO


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _descriptor(weight_NK: torch.Tensor, tile: Tile, gated: bool) -> TensorDescriptor:
    """Of a gated layer three dimensions, so that one load brings the rows of both halves."""
    (outputs, inputs), stride = weight_NK.shape, weight_NK.stride(0)
    if not gated:
        block = [tile.block_n, tile.block_k]
        return TensorDescriptor(weight_NK, [outputs, inputs], [stride, 1], block)
    shape, strides = [2, outputs // 2, inputs], [outputs // 2 * stride, stride, 1]
    return TensorDescriptor(weight_NK, shape, strides, [2, tile.block_n // 2, tile.block_k])


def _lines(tile: Tile, weight_NK: torch.Tensor) -> int:
    """Cache lines of each row of W to call before the wait: a power of two."""
    if tile.ahead == 0:
        return 0
    return bucket(max(1, tile.ahead * tile.block_k * weight_NK.element_size() // 128))


def _room(
    workspace: Workspace | None, y_MO: torch.Tensor, cut: Cut, tile: Tile
) -> Workspace | None:
    if not cut.merges:
        return None
    partials = cut.slots * cut.rows * (tile.block_n + 1)
    room = workspace or make_workspace(y_MO.device, partials, cut.tiles)
    room.check_room(partials, cut.tiles)
    return room


def _check(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    tile: Tile,
    gated: bool,
    norm: InputNorm | None,
    bias_N: torch.Tensor | None,
) -> None:
    (rows, inputs), (outputs, columns) = x_MK.shape, weight_NK.shape
    check(rows <= MAX_ROWS, "small_linear is for few rows", rows=rows, limit=MAX_ROWS)
    check(tile.dot or rows <= 1, "more than one row takes tensor cores", rows=rows)
    fits = columns == inputs and x_MK.dtype == weight_NK.dtype
    check(fits, "x and W agree", inputs=inputs, columns=columns, dtype=x_MK.dtype)
    check(norm is None or norm.weight_K.shape == (inputs,), "the norm has the width of x")
    check(bias_N is None or bias_N.shape == (outputs,), "the bias has the height of W")
    check(not gated or outputs % 2 == 0, "gate and up have one height", outputs=outputs)
    vectors = [t for t in (bias_N, norm.weight_K if norm else None) if t is not None]
    tensors = [x_MK, weight_NK, *vectors]
    check(all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors), "rows are contiguous")
    reach = weight_NK.stride(0) * (outputs // 2 + tile.block_n if gated else tile.block_n)
    check(reach < 1 << 31, "a tile of W is within 32 bits of its first number", reach=reach)


@triton.jit
def call_lines(places, SIZE: tl.constexpr):
    """Asks for the cache lines of `places` to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=SIZE,
    )


@triton.jit
def _weight_rows(i, tile, width, H: tl.constexpr, GATED: tl.constexpr):
    """The rows of W of a tile, counted from the tile's first."""
    if GATED:
        inside = tl.minimum(i % H, width - 1 - tile * H)
        return inside + (i // H) * width
    return tl.minimum(i, width - 1 - tile * H)


@triton.jit
def _weights(
    w_ptr, w_desc, places, tile, at, inputs, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    H: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] from `at` on; `w_ptr` is the tile's first row."""
    if TMA:
        if GATED:
            w = w_desc.load([0, tile * H, at]).reshape(BLOCK_N, BLOCK_K)
        else:
            w = w_desc.load([tile * H, at])
    elif EVEN_K:
        w = tl.load(w_ptr + at + places, eviction_policy="evict_first")
    else:
        inside = (at + tl.arange(0, BLOCK_K) < inputs)[None]
        w = tl.load(w_ptr + at + places, inside, 0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _add(
    w, total, squares, x_ptr, norm_ptr, places, at, inputs, BLOCK_K: tl.constexpr,
    GRAIN: tl.constexpr, DOT: tl.constexpr, EVEN_K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Adds one step of products to `total` and, for the norm, of squares to `squares`."""
    k = at + tl.arange(0, BLOCK_K)
    if EVEN_K:
        x = tl.load(x_ptr + at + places)
    else:
        x = tl.load(x_ptr + at + places, (k < inputs)[None], 0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += wide * wide
        gain = tl.load(norm_ptr + k) if EVEN_K else tl.load(norm_ptr + k, k < inputs, 0.0)
        wide *= gain.to(tl.float32)[None]
        x = wide.to(w.dtype) if DOT else wide
    if DOT:
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        # What one load of a thread brings is added up at once: fewer registers for the sums.
        parts: tl.constexpr = (w.shape[0], BLOCK_K // GRAIN, GRAIN)
        total += tl.sum(tl.reshape(w.to(tl.float32) * x.to(tl.float32), parts), 2)
    return total, squares


@triton.jit
def _sums(
    x_ptr, w_ptr, w_desc, norm_ptr, x_places, w_places, tile, begin, count, inputs,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, H: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The products [BLOCK_N, ROWS] and squares [ROWS] of `count` steps from step `begin` on."""
    grain: tl.constexpr = min(BLOCK_K, 128 // x_ptr.dtype.element_ty.primitive_bitwidth)
    total = tl.zeros((BLOCK_N, ROWS if DOT else BLOCK_K // grain), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    if STAGES == 1:
        at = begin * BLOCK_K
        w = _weights(
            w_ptr, w_desc, w_places, tile, at, inputs, BLOCK_N, BLOCK_K, H, GATED, TMA, EVEN_K
        )
        for step in tl.range(1, count, num_stages=1):
            at = (begin + step) * BLOCK_K
            following = _weights(
                w_ptr, w_desc, w_places, tile, at, inputs, BLOCK_N, BLOCK_K, H, GATED, TMA, EVEN_K
            )
            total, squares = _add(
                w, total, squares, x_ptr, norm_ptr, x_places, at - BLOCK_K, inputs, BLOCK_K, grain,
                DOT, EVEN_K, NORM,
            )  # fmt: skip
            w = following
        at = (begin + count - 1) * BLOCK_K
        total, squares = _add(
            w, total, squares, x_ptr, norm_ptr, x_places, at, inputs, BLOCK_K, grain, DOT, EVEN_K,
            NORM,
        )  # fmt: skip
    else:
        for step in tl.range(0, count, num_stages=STAGES):
            at = (begin + step) * BLOCK_K
            w = _weights(
                w_ptr, w_desc, w_places, tile, at, inputs, BLOCK_N, BLOCK_K, H, GATED, TMA, EVEN_K
            )
            total, squares = _add(
                w, total, squares, x_ptr, norm_ptr, x_places, at, inputs, BLOCK_K, grain, DOT,
                EVEN_K, NORM,
            )  # fmt: skip
    sums = total if DOT else tl.sum(total, 1)[:, None]
    lengths = tl.sum(squares, 1) if NORM else tl.zeros((ROWS,), tl.float32)
    return sums, lengths


@triton.jit
def _sharers(tile, steps, share, PER_SM: tl.constexpr):
    """The first and the last program with a part of this tile."""
    if PER_SM:
        first = tile * steps // share
        last = ((tile + 1) * steps - 1) // share
    else:
        splits = (steps + share - 1) // share
        first = tile * splits
        last = first + splits - 1
    return first, last


@triton.jit
def _slot(program, tile, steps, share, PER_SM: tl.constexpr):
    """Where a program leaves its part of this tile: its first tile, or a later one."""
    return 2 * program + (program * share // steps < tile) if PER_SM else program


@triton.jit
def merged(
    sums, lengths, partial_ptr, arrivals_ptr, program, tile, steps, share, i, m, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, PER_SM: tl.constexpr, LENGTHS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """(is complete, sums, lengths) of a tile, in the last of its programs to arrive; the others
    leave theirs, with LENGTHS both, in their ROOM of the workspace."""
    first, last = _sharers(tile, steps, share, PER_SM)
    is_mine = first == last
    if first != last:
        inner = i[:, None] * ROWS + m[None]
        part = partial_ptr + _slot(program, tile, steps, share, PER_SM) * ROOM
        tl.store(part + inner, sums)
        if LENGTHS:
            tl.store(part + BLOCK_N * ROWS + m, lengths)
        is_mine = arrived_last(arrivals_ptr, tile, last - first + 1)
        if is_mine:
            sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
            lengths = tl.zeros((ROWS,), tl.float32)
            for sharer in range(first, last + 1):
                part = partial_ptr + _slot(sharer, tile, steps, share, PER_SM) * ROOM
                sums += tl.load(part + inner, cache_modifier=".cg")
                if LENGTHS:
                    lengths += tl.load(part + BLOCK_N * ROWS + m, cache_modifier=".cg")
            reset(arrivals_ptr, tile)
    return is_mine, sums, lengths


@triton.jit
def steps_of(program, tiles, steps, share, PER_SM: tl.constexpr):
    """The first step of a program, among those of all tiles, and the end."""
    if PER_SM:
        at = program * share
        end = tl.minimum(at + share, tiles * steps)
    else:
        splits = (steps + share - 1) // share
        at = program // splits * steps + program % splits * share
        end = tl.minimum(at + share, (program // splits + 1) * steps)
    return at, end


@triton.jit
def _finish(
    sums, lengths, bias_ptr, residual_ptr, y_ptr, tile, rows, width, inputs, residual_stride,
    y_stride, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, H: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """From finished sums [BLOCK_N, ROWS] to outputs [ROWS, H], stored."""
    if NORM:
        sums *= tl.rsqrt(lengths / inputs + eps)[None]
    if BIAS:
        i = tl.arange(0, BLOCK_N)
        n = tile * H + _weight_rows(i, tile, width, H, GATED)
        sums += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, H, ROWS)), (1, 2, 0)))
        sums = gate / (1.0 + tl.exp(-gate)) * up
    m = tl.arange(0, ROWS)[None]
    o = (tile * H + tl.arange(0, H))[:, None]
    given = (o < width) & (m < rows)
    if RESIDUAL:
        sums += tl.load(residual_ptr + m * residual_stride + o, given, 0.0).to(tl.float32)
    tl.store(y_ptr + m.to(tl.int64) * y_stride + o, sums.to(y_ptr.dtype.element_ty), given)


@triton.jit
def _part(
    x_ptr, w_ptr, w_desc, norm_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, arrivals_ptr,
    program, tile, begin, count, i, m, k, x_places, rows, width, inputs, steps, share, w_stride,
    residual_stride, y_stride, eps, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, H: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
    TMA: tl.constexpr, PER_SM: tl.constexpr, MERGE: tl.constexpr, EVEN_K: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    """Steps `begin` to `begin + count` of one tile; its outputs, if no sums are missing after."""
    w_places = (_weight_rows(i, tile, width, H, GATED) * w_stride)[:, None] + k[None]
    sums, lengths = _sums(
        x_ptr, w_ptr + (tile * H).to(tl.int64) * w_stride, w_desc, norm_ptr, x_places, w_places,
        tile, begin, count, inputs, ROWS, BLOCK_N, BLOCK_K, H, STAGES, DOT, TMA, EVEN_K, GATED,
        NORM,
    )  # fmt: skip
    if TRIGGER:
        gdc_launch_dependents()
    is_mine = True
    if MERGE:
        is_mine, sums, lengths = merged(
            sums, lengths, partial_ptr, arrivals_ptr, program, tile, steps, share, i, m, ROWS,
            BLOCK_N, PER_SM, True, ROWS * (BLOCK_N + 1),
        )  # fmt: skip
    if is_mine:
        _finish(
            sums, lengths, bias_ptr, residual_ptr, y_ptr, tile, rows, width, inputs,
            residual_stride, y_stride, eps, ROWS, BLOCK_N, H, GATED, NORM, BIAS, RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "steps", "share"])
def _small_linear(
    x_ptr, w_ptr, w_desc, norm_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr, arrivals_ptr, rows,
    width, inputs, tiles, steps, share, x_stride, w_stride, residual_stride, y_stride, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, TMA: tl.constexpr, PER_SM: tl.constexpr, MERGE: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    H: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    program = tl.program_id(0)
    at, end = steps_of(program, tiles, steps, share, PER_SM)
    i = tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    x_places = tl.minimum(m, rows - 1)[:, None] * x_stride + k[None]

    # Weights depend on no earlier kernel: some are on their way before the wait.
    if LINES > 0:
        tile = at // steps
        begin = at - tile * steps
        last = tl.minimum(begin + end - at, steps) * BLOCK_K - 1
        line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
        ks = tl.minimum(begin * BLOCK_K + tl.arange(0, LINES) * line, tl.minimum(last, inputs - 1))
        ns = _weight_rows(i, tile, width, H, GATED) * w_stride
        call_lines((w_ptr + (tile * H).to(tl.int64) * w_stride) + (ns[:, None] + ks[None]), 1)
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()

    if PER_SM:
        while at < end:
            tile = at // steps
            begin = at - tile * steps
            count = tl.minimum(end - at, steps - begin)
            at += count
            _part(
                x_ptr, w_ptr, w_desc, norm_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr,
                arrivals_ptr, program, tile, begin, count, i, m, k, x_places, rows, width, inputs,
                steps, share, w_stride, residual_stride, y_stride, eps, ROWS, BLOCK_N, BLOCK_K, H,
                STAGES, DOT, TMA, PER_SM, MERGE, EVEN_K, GATED, NORM, BIAS, RESIDUAL,
                PDL and not EARLY,
            )  # fmt: skip
    else:
        tile = at // steps
        begin = at - tile * steps
        count = end - at
        _part(
            x_ptr, w_ptr, w_desc, norm_ptr, bias_ptr, residual_ptr, y_ptr, partial_ptr,
            arrivals_ptr, program, tile, begin, count, i, m, k, x_places, rows, width, inputs,
            steps, share, w_stride, residual_stride, y_stride, eps, ROWS, BLOCK_N, BLOCK_K, H,
            STAGES, DOT, TMA, PER_SM, MERGE, EVEN_K, GATED, NORM, BIAS, RESIDUAL, PDL and not EARLY,
        )  # fmt: skip
