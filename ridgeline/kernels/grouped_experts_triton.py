"""`grouped_experts` in Triton: pairs sorted by expert, two grouped products, the sums of tokens.

A tile is some pairs of one expert that stand one behind the other in the sorted order; tiles that
so many pairs could have needed and do not have expert -1, and their programs end at once.
Programs of neighbouring numbers take other pairs and the same rows of W. A single token needs no
order: each of its pairs is a tile, and the second product adds all its experts up. The choice of
the experts is one launch too, of few tokens with the product of the router.
Letters: T tokens, E hidden, X experts, A active experts of a token, P = T * A pairs, M pairs of a
tile, N rows and K columns of an expert's matrix, F width of an expert, Q blocks of columns.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.errors import check
from ridgeline.kernels.arrival_triton import arrived_last, await_inputs, reset
from ridgeline.kernels.fp8_block_linear import BLOCK
from ridgeline.kernels.grouped_experts import (
    Choice,
    ExpertsCut,
    ExpertTile,
    StackedMatrix,
    most_tiles,
)
from ridgeline.kernels.launching import Workspace, launches_early, shared_workspace
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.small_linear_triton import call_lines

SORTED = 4096  # pairs that a program looks at together
SUMMED = 1024  # numbers of a token that a program adds up
ROUTED = 1  # rows of the router that a program multiplies by
ROUTED_BY_WARP = 2048  # numbers of them, all of which it holds: one warp needs no barriers
GATHERED = 1024  # numbers of a row of x that a program copies
LEAST = tl.constexpr(-3.0e38)
NO_KEY = tl.constexpr(-(1 << 31))
LEAST_BINS = 64  # of a count of experts
TALL_ROWS = 64  # pairs from which on x is the tall operand; never beside codes, which are widened
PLAIN, ROWS, BLOCKS, GROUPS = 0, 1, 2, 3  # scales of W


@dataclass(frozen=True, slots=True)
class Order:
    """`pairs_P` in the order of their experts; of each tile its expert or -1, where it begins there
    and where it ends, [3, tiles]."""

    pairs_P: torch.Tensor
    tiles: torch.Tensor

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[1]


def grouped_experts_triton(
    x_TE: torch.Tensor, weights_TA: torch.Tensor, experts_TA: torch.Tensor, gate_up: StackedMatrix,
    down: StackedMatrix, activation: str = "silu", *, cut: ExpertsCut,
    residual_TE: torch.Tensor | None = None, load_X: torch.Tensor | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `grouped_experts`, cut by `cut`."""
    (tokens, width), active = x_TE.shape, experts_TA.shape[1]
    experts, both, _ = gate_up.codes.shape
    fits = down.codes.shape[:2] == (experts, width) and down.columns == both // 2
    check(gate_up.columns == width and fits, "sizes agree")
    check(weights_TA.is_contiguous() and experts_TA.is_contiguous(), "no gaps between pairs")
    check(x_TE.stride(1) == 1, "rows of x have no gaps")
    pdl = launches_early(x_TE.device) if pdl is None else pdl
    if cut.block_m == 1:
        y_TE = torch.empty_like(x_TE) if residual_TE is None else residual_TE
        _launch_single(x_TE, weights_TA, experts_TA, gate_up, down, activation, cut, y_TE,
                       residual_TE is not None, load_X, pdl)  # fmt: skip
        return y_TE
    order = sort_pairs(experts_TA, experts, cut.block_m, load_X=load_X, pdl=pdl)
    inner_PF = x_TE.new_empty((tokens * active, both // 2))
    _launch_product(x_TE, gate_up, inner_PF, order, weights_TA, cut.block_m, cut.gate_up,
                    activation, pdl)  # fmt: skip
    each_PE = x_TE.new_empty((tokens * active, width))
    _launch_product(inner_PF, down, each_PE, order, weights_TA, cut.block_m, cut.down, "", pdl)
    y_TE = x_TE.new_empty((tokens, width)) if residual_TE is None else residual_TE
    _sum_pairs[(tokens, triton.cdiv(width, SUMMED))](
        each_PE, y_TE, width, y_TE.stride(0), ACTIVE=active,
        RESIDUAL=residual_TE is not None, SIZE=SUMMED, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return y_TE


def _launch_single(
    x_1E: torch.Tensor, weights_1A: torch.Tensor, experts_1A: torch.Tensor, gate_up: StackedMatrix,
    down: StackedMatrix, activation: str, cut: ExpertsCut, y_1E: torch.Tensor, is_added: bool,
    load_X: torch.Tensor | None, pdl: bool,
) -> None:  # fmt: skip
    check(len(x_1E) == 1, "a single token", tokens=len(x_1E))
    inner, width, active = down.columns, gate_up.columns, experts_1A.shape[1]
    inner_AF = x_1E.new_empty((active, inner))
    _gate_up_row[(active * triton.cdiv(inner, cut.gate_up.block_n),)](
        x_1E, *_matrix(gate_up, x_1E), inner_AF, experts_1A,
        experts_1A if load_X is None else load_X, inner, LOAD=load_X is not None,
        INPUTS=width, ACTIVATION=activation, **_cut_of(gate_up, cut.gate_up, is_row=True), PDL=pdl,
        num_warps=cut.gate_up.warps, launch_pdl=pdl,
    )  # fmt: skip
    _down_row[(triton.cdiv(width, cut.down.block_n),)](
        inner_AF, *_matrix(down, x_1E), y_1E, experts_1A, weights_1A, width,
        INPUTS=inner, ACTIVE=active, RESIDUAL=is_added,
        **_cut_of(down, cut.down, is_row=True), PDL=pdl,
        num_warps=cut.down.warps, launch_pdl=pdl,
    )  # fmt: skip


def choose_experts_triton(
    logits_TX: torch.Tensor, choice: Choice, *, pdl: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and experts (int32) of each token by the product of the router."""
    tokens, device = len(logits_TX), logits_TX.device
    check(logits_TX.stride(1) == 1, "logits of a token have no gaps")
    weights_TA, experts_TA = _routes(tokens, choice, device)
    if not tokens:
        return weights_TA, experts_TA
    pdl = launches_early(device) if pdl is None else pdl
    _choose_rows[(tokens,)](
        logits_TX, weights_TA if choice.bias_X is None else choice.bias_X, weights_TA, experts_TA,
        logits_TX.stride(0), choice.scale, **_rule_of(choice), PDL=pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return weights_TA, experts_TA


def route_triton(
    x_TE: torch.Tensor, weight_XE: torch.Tensor, choice: Choice, *, norm: InputNorm | None = None,
    workspace: Workspace | None = None, routed: int = ROUTED, pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same by the product too, and the norm of x, of few tokens, in one launch; and the normed
    x. Without `workspace` the one of the device is used."""
    (tokens, width), device = x_TE.shape, x_TE.device
    check(x_TE.stride(1) == 1 and weight_XE.is_contiguous(), "rows have no gaps")
    room = workspace or shared_workspace(device)
    room.check_room(tokens * choice.experts, tokens)
    weights_TA, experts_TA = _routes(tokens, choice, device)
    normed_TE = x_TE if norm is None else x_TE.new_empty((tokens, width))
    pdl = launches_early(device) if pdl is None else pdl
    routed = min(routed, int(triton.next_power_of_2(choice.experts)))
    _route_rows[(tokens * triton.cdiv(choice.experts, routed),)](
        x_TE, weight_XE, weights_TA if choice.bias_X is None else choice.bias_X, room.partial_P,
        room.arrivals_A, weights_TA, experts_TA, x_TE if norm is None else norm.weight_K, normed_TE,
        norm.eps if norm else 0.0, x_TE.stride(0), choice.scale, NORM=norm is not None,
        ROUND=not choice.in_float32, INPUTS=width, BLOCK_X=routed,
        BLOCK_K=triton.next_power_of_2(width), **_rule_of(choice), PDL=pdl,
        num_warps=max(1, routed * triton.next_power_of_2(width) // ROUTED_BY_WARP),
        launch_pdl=pdl,
    )  # fmt: skip
    return weights_TA, experts_TA, normed_TE


def _routes(tokens: int, choice: Choice, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    shape = tokens, choice.active + choice.shared
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


def _rule_of(choice: Choice) -> dict[str, int | bool]:
    return {
        "EXPERTS": choice.experts,
        "SLOTS_X": triton.next_power_of_2(max(choice.experts, choice.shared)),
        "ACTIVE": choice.active,
        "SHARED": choice.shared,
        "SIGMOID": choice.is_sigmoid,
        "BIAS": choice.bias_X is not None,
        "RENORMALIZE": choice.renormalize,
    }


def sort_pairs(
    experts_TA: torch.Tensor,
    experts: int,
    block_m: int,
    *,
    load_X: torch.Tensor | None = None,
    pdl: bool | None = None,
) -> Order:
    """Stable: pairs of one expert stay in the order of their tokens. `load_X` (int64) grows by the
    number of each expert's."""
    pairs, device = experts_TA.numel(), experts_TA.device
    pdl = launches_early(device) if pdl is None else pdl
    num_tiles = most_tiles(pairs, experts, block_m)
    order = Order(
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty((3, num_tiles), dtype=torch.int32, device=device),
    )
    bins = max(LEAST_BINS, triton.next_power_of_2(experts + 1))
    size = min(SORTED, max(128, triton.next_power_of_2(pairs)))
    _sort_pairs[(experts,)](
        experts_TA, order.pairs_P, order.tiles, experts_TA if load_X is None else load_X, pairs,
        num_tiles, LOAD=load_X is not None, EXPERTS=experts, BINS=bins, SIZE=size,
        BLOCK_M=block_m, PDL=pdl, num_warps=4 if size <= 1024 else 8, launch_pdl=pdl,
    )  # fmt: skip
    return order


def _launch_product(
    x: torch.Tensor, weight: StackedMatrix, y_PN: torch.Tensor, order: Order,
    weights_TA: torch.Tensor, block_m: int, tile: ExpertTile, activation: str, pdl: bool,
) -> None:  # fmt: skip
    """Gated with an activation: of tokens, in sorted order. Else of sorted rows, in the order of
    pairs and times the weights of the router."""
    outputs, inputs = y_PN.shape[1], x.shape[1]
    experts, rows, _ = weight.codes.shape
    codes, *beside = _matrix(weight, x)
    described: object = codes
    x_described: object = x
    is_sorted = not activation
    if tile.tma:
        flat = weight.codes.view(experts * rows, inputs)
        block = [tile.block_n, tile.block_k]
        described = TensorDescriptor(flat, list(flat.shape), [inputs, 1], block)
    if tile.tma and block_m >= TALL_ROWS and weight.scale is None:
        x = x if is_sorted else _gathered(x, order, weights_TA.shape[1], pdl)
        is_sorted = True
        x_described = TensorDescriptor(x, list(x.shape), [inputs, 1], [block_m, tile.block_k])
    _expert_product[(order.num_tiles * triton.cdiv(outputs, tile.block_n),)](
        x, x_described, codes, described, *beside, y_PN, order.pairs_P, order.tiles, weights_TA,
        order.num_tiles, outputs, x.stride(0), INPUTS=inputs,
        ACTIVE=weights_TA.shape[1], SORTED=is_sorted,
        ACTIVATION=activation, BLOCK_M=block_m, STAGES=tile.stages, TMA=tile.tma,
        TALL_X=block_m >= TALL_ROWS and weight.scale is None, **_cut_of(weight, tile), PDL=pdl,
        num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip


def _gathered(x_TE: torch.Tensor, order: Order, active: int, pdl: bool) -> torch.Tensor:
    """[P, E], the rows of the tokens in sorted order, for the copy engine."""
    pairs, width = len(order.pairs_P), x_TE.shape[1]
    x_PE = x_TE.new_empty((pairs, width))
    _gather_pairs[(pairs, triton.cdiv(width, GATHERED))](
        x_TE, x_PE, order.pairs_P, width, x_TE.stride(0), ACTIVE=active, SIZE=GATHERED, PDL=pdl,
        launch_pdl=pdl,
    )  # fmt: skip
    return x_PE


def _matrix(weight: StackedMatrix, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zero points and bias; what there is not is not read."""
    beside = weight.scale, weight.zero, weight.bias_XN
    return weight.codes, *(like if tensor is None else tensor for tensor in beside)


def _cut_of(
    weight: StackedMatrix, tile: ExpertTile, *, is_row: bool = False
) -> dict[str, int | bool]:
    kind = PLAIN if weight.scale is None else BLOCKS if weight.has_blocks else ROWS
    if weight.group:
        kind = GROUPS
        check(weight.group % tile.block_k == 0, "a step lies in a group")
        check(weight.columns % 2 == 0, "bytes are whole")
    if kind == BLOCKS:
        step = BLOCK % tile.block_n == 0 and (tile.block_k <= BLOCK or is_row)
        check(step, "a step lies in a block")
    return {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SCALES": kind,
        "GROUP": max(1, weight.group),
        "ZERO": weight.zero is not None,
        "BIAS": weight.bias_XN is not None,
    }


@triton.jit(do_not_specialize=["pairs", "num_tiles"])
def _sort_pairs(
    experts_ptr, order_ptr, tiles_ptr, load_ptr, pairs, num_tiles, LOAD: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program finds the pairs of one expert, and from the counts of all where they go."""
    await_inputs(PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for at in range(0, pairs, SIZE):
        p = at + tl.arange(0, SIZE)
        chosen = tl.load(experts_ptr + p, p < pairs, EXPERTS).to(tl.int32)
        counts += tl.histogram(chosen, BINS)
    counts = tl.where(bins < EXPERTS, counts, 0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    begin = tl.sum(tl.where(bins < expert, counts, 0))
    end = begin + tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tiles, 0))
    if LOAD:
        tl.store(load_ptr + expert, tl.load(load_ptr + expert) + end - begin)
    done = begin
    if end > begin:
        for at in range(0, pairs, SIZE):
            p = at + tl.arange(0, SIZE)
            is_own = tl.load(experts_ptr + p, p < pairs, EXPERTS).to(tl.int32) == expert
            place = done + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(order_ptr + place, p, is_own)
            done += tl.sum(is_own.to(tl.int32))
    for first in range(begin, end, BLOCK_M):
        tl.store(tiles_ptr + tile, expert)
        tl.store(tiles_ptr + num_tiles + tile, first)
        tl.store(tiles_ptr + 2 * num_tiles + tile, tl.minimum(first + BLOCK_M, end))
        tile += 1
    if expert == EXPERTS - 1:
        for at in range(tile, num_tiles, BINS):
            tl.store(tiles_ptr + at + bins, -1, at + bins < num_tiles)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * inner))
    else:
        tl.static_assert(ACTIVATION == "relu" or ACTIVATION == "relu2")
        gate = tl.maximum(gate, 0.0)
        if ACTIVATION == "relu2":
            gate = gate * gate
    return gate


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped":
        gate = tl.minimum(gate, 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.clamp(up, -7.0, 7.0) + 1.0)
    else:
        return _activated(gate, ACTIVATION) * up


@triton.jit
def _wide(w, dtype: tl.constexpr):
    """Codes as numbers of the dtype of x."""
    if w.dtype == tl.float8e4nv:  # straight to bfloat16 goes through the slow unit for conversions
        w = w.to(tl.float16).to(tl.float32).to(dtype)
    elif w.dtype == tl.int8:
        w = w.to(tl.float32).to(dtype)
    return w


@triton.jit
def _added(total, x, w, TALL_X: tl.constexpr):
    """[M, N] or [N, M], whichever operand is tall."""
    if TALL_X:
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    else:
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit
def _loaded(places, at, k, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """A step of rows of W or x."""
    if INPUTS % BLOCK_K == 0:
        found = tl.load(places + at)
    else:
        found = tl.load(places + at, (at + k < INPUTS)[None], 0.0)
    return found


@triton.jit
def _by_row(total, values, TALL_X: tl.constexpr, SCALED: tl.constexpr):
    """Times or plus a number of each row of W."""
    wide = values.to(tl.float32)
    wide = wide[None] if TALL_X else wide[:, None]
    if SCALED:
        total *= wide
    else:
        total += wide
    return total


@triton.jit
def _nibbles(codes, zero, dtype: tl.constexpr):
    """Codes of 4 bits less the code of 0."""
    if dtype == tl.bfloat16:  # 0x4300 is 128, whose last bits are ones: no conversion is needed
        wide = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        wide = wide - (zero.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        wide = (codes.to(tl.float32) - zero.to(tl.float32)).to(dtype)
    return wide


@triton.jit
def _step(
    total, x, w_places, w_described, row, scales, zeros, at, k_read, INPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr, TMA: tl.constexpr, TALL_X: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Adds one step of K. Bytes of two numbers are multiplied by the even and the odd columns."""
    if SCALES == 3:
        both = _loaded(w_places, at // 2, k_read, INPUTS // 2, BLOCK_K // 2)
        even, odd = tl.split(tl.reshape(x, (x.shape[0], BLOCK_K // 2, 2)))
        zero = tl.full((both.shape[0],), 8, tl.uint8)
        if ZERO:
            zero = tl.load(zeros + at // GROUP)
        part = tl.zeros_like(total)
        part = _added(part, even, _nibbles(both & 15, zero[:, None], x.dtype), TALL_X)
        part = _added(part, odd, _nibbles(both >> 4, zero[:, None], x.dtype), TALL_X)
        total += part * tl.load(scales + at // GROUP).to(tl.float32)[:, None]
    else:
        if TMA:
            w = w_described.load([row, at])
        if not TMA:
            w = _loaded(w_places, at, k_read, INPUTS, BLOCK_K)
        if SCALES == 2:
            part = tl.zeros_like(total)
            part = _added(part, x, _wide(w, x.dtype), TALL_X)
            total += part * tl.load(scales + at // 128)
        else:
            total = _added(total, x, _wide(w, x.dtype), TALL_X)
    return total


@triton.jit(do_not_specialize=["num_tiles"])
def _expert_product(
    x_ptr, x_described, w_ptr, w_described, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr,
    tiles_ptr, router_ptr, num_tiles, outputs, x_stride, INPUTS: tl.constexpr, ACTIVE: tl.constexpr,
    SORTED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, TALL_X: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != ""
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    Q: tl.constexpr = (INPUTS + 127) // 128
    if PDL and GATED:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    begin = tl.load(tiles_ptr + num_tiles + tile)
    end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    n = tl.program_id(0) // num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = begin + tl.arange(0, BLOCK_M)
    inside = m < end
    m_read = tl.minimum(m, end - 1)
    pair = tl.load(order_ptr + m_read)
    x_row = m_read if SORTED else pair // ACTIVE
    BYTES: tl.constexpr = 2 if SCALES == 3 else 1  # numbers of W in one that is loaded
    HALVES: tl.constexpr = 2 if GATED else 1
    k = tl.arange(0, BLOCK_K)
    k_read = tl.arange(0, BLOCK_K // BYTES)
    at_n = (tl.program_id(0) // num_tiles * BLOCK_N).to(tl.int32)
    first = expert.to(tl.int64) * HALVES * outputs  # of the expert's rows of W
    n_read = tl.minimum(n, outputs - 1)
    w_places = w_ptr + (first + n_read)[:, None] * (INPUTS // BYTES) + k_read[None]
    x_places = x_ptr + x_row.to(tl.int64)[:, None] * x_stride + k[None]
    if PDL and not GATED:  # the order was there before the first product began
        LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
        ahead = tl.minimum(tl.arange(0, 2) * LINE, INPUTS // BYTES - 1)
        call_lines(w_ptr + (first + n_read)[:, None] * (INPUTS // BYTES) + ahead[None], 1)
        gdc_wait()
        gdc_launch_dependents()
    if SCALES == 3:
        scales = scale_ptr + (first + n_read) * GROUPS
        zeros = zero_ptr + (first + n_read) * GROUPS
        up_scales, up_zeros = scales + outputs * GROUPS, zeros + outputs * GROUPS
    else:
        blocks = expert.to(tl.int64) * ((HALVES * outputs + 127) // 128)
        scales = scale_ptr + (blocks + at_n // 128) * Q
        up_scales = scale_ptr + (blocks + (outputs + at_n) // 128) * Q
        zeros, up_zeros = zero_ptr, zero_ptr
    if TALL_X:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up_total = total
    row = first.to(tl.int32) + at_n
    up_places = w_places + outputs * (INPUTS // BYTES)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = step * BLOCK_K
        if TMA and TALL_X:  # rows past the end of the tile are other experts'
            x = x_described.load([begin, at])
        if not (TMA and TALL_X):
            x = _loaded(x_places, at, k, INPUTS, BLOCK_K)
        total = _step(total, x, w_places, w_described, row, scales, zeros, at, k_read,
                      INPUTS, BLOCK_K, TMA, TALL_X, SCALES, GROUP, ZERO)  # fmt: skip
        if GATED:
            up_total = _step(up_total, x, up_places, w_described, row + outputs, up_scales,
                             up_zeros, at, k_read, INPUTS, BLOCK_K, TMA, TALL_X, SCALES, GROUP,
                             ZERO)  # fmt: skip
    if SCALES == 1:
        total = _by_row(total, tl.load(scale_ptr + first + n_read), TALL_X, True)
    if BIAS:
        total = _by_row(total, tl.load(bias_ptr + first + n_read), TALL_X, False)
    if GATED:
        if SCALES == 1:
            scale = tl.load(scale_ptr + first + outputs + n_read)
            up_total = _by_row(up_total, scale, TALL_X, True)
        if BIAS:
            bias = tl.load(bias_ptr + first + outputs + n_read)
            up_total = _by_row(up_total, bias, TALL_X, False)
        total = _gated(total, up_total, ACTIVATION)
        y_row = m
    else:
        factor = tl.load(router_ptr + pair).to(tl.float32)
        total *= factor[:, None] if TALL_X else factor[None]
        y_row = pair
    y_row = y_row.to(tl.int64) * outputs
    out = total.to(y_ptr.dtype.element_ty)
    if TALL_X:
        places = y_ptr + y_row[:, None] + n[None]
        tl.store(places, out, inside[:, None] & (n < outputs)[None])
    else:
        places = y_ptr + y_row[None] + n[:, None]
        tl.store(places, out, inside[None] & (n < outputs)[:, None])


@triton.jit
def _times_step(
    w, x_places, at, scales, zeros, INPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """[R, ..]: a step of rows of W times those of x, every TOGETHER products added up."""
    TOGETHER: tl.constexpr = min(8, BLOCK_K // 2)
    ROWS: tl.constexpr = w.shape[0]
    if SCALES == 3:
        here = (at + 2 * tl.arange(0, BLOCK_K // 2) < INPUTS)[None]
        even = tl.load(x_places + at, here, 0.0).to(tl.float32)
        odd = tl.load(x_places + at + 1, here, 0.0).to(tl.float32)
        zero = tl.full((ROWS,), 8, tl.uint8)
        if ZERO:
            zero = tl.load(zeros + at // GROUP)
        found = _nibbles(w & 15, zero[:, None], tl.float32) * even
        found += _nibbles(w >> 4, zero[:, None], tl.float32) * odd
        found *= tl.load(scales + at // GROUP).to(tl.float32)[:, None]
    else:
        k = at + tl.arange(0, BLOCK_K)
        x = tl.load(x_places + at, (k < INPUTS)[None], 0.0).to(tl.float32)
        found = _wide(w, tl.float32).to(tl.float32) * x
        if SCALES == 2:
            found *= tl.load(scales[:, None] + (k // 128)[None], (k < INPUTS)[None], 0.0)
    return tl.sum(tl.reshape(found, (ROWS, found.shape[1] // TOGETHER, TOGETHER)), 2)


@triton.jit
def _of_rows(
    x_ptr, x_row, w_ptr, scale_ptr, zero_ptr, bias_ptr, expert, n, outputs, INPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """[R]: row `n` of an expert's matrix of `outputs` rows times a row of x, each. A step of W is
    on its way while the one before it is multiplied; with WAIT the first one is before x is there.
    """
    STEPS: tl.constexpr = (INPUTS + BLOCK_K - 1) // BLOCK_K
    BYTES: tl.constexpr = 2 if SCALES == 3 else 1  # numbers of W in one that is loaded
    row = expert * outputs + n
    k = tl.arange(0, BLOCK_K // BYTES)
    w_places = w_ptr + row[:, None] * (INPUTS // BYTES) + k[None]
    x_places = x_ptr + x_row[:, None] * INPUTS + (BYTES * k)[None]
    scales, zeros = scale_ptr + row, zero_ptr + row
    if SCALES == 3:
        GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
        scales, zeros = scale_ptr + row * GROUPS, zero_ptr + row * GROUPS
    elif SCALES == 2:
        Q: tl.constexpr = (INPUTS + 127) // 128
        scales = scale_ptr + (expert * ((outputs + 127) // 128) + n // 128) * Q
    w = _loaded(w_places, 0, k, INPUTS // BYTES, BLOCK_K // BYTES)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((n.shape[0], BLOCK_K // BYTES // min(8, BLOCK_K // 2)), tl.float32)
    for step in tl.range(0, STEPS - 1):
        at = (step + 1) * BLOCK_K
        ahead = _loaded(w_places, at // BYTES, k, INPUTS // BYTES, BLOCK_K // BYTES)
        total += _times_step(w, x_places, at - BLOCK_K, scales, zeros, INPUTS, BLOCK_K, SCALES,
                             GROUP, ZERO)  # fmt: skip
        w = ahead
    total += _times_step(w, x_places, (STEPS - 1) * BLOCK_K, scales, zeros, INPUTS, BLOCK_K, SCALES,
                         GROUP, ZERO)  # fmt: skip
    out = tl.sum(total, 1)
    if SCALES == 1:
        out *= tl.load(scale_ptr + row)
    if BIAS:
        out += tl.load(bias_ptr + row).to(tl.float32)
    return out


@triton.jit
def _gate_up_row(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, experts_ptr, load_ptr, outputs,
    LOAD: tl.constexpr, INPUTS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a single token: some rows of gate and of up of one of its experts."""
    await_inputs(PDL)
    tiles = (outputs + BLOCK_N - 1) // BLOCK_N
    pair = tl.program_id(0) // tiles
    at_n = tl.program_id(0) % tiles * BLOCK_N
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if LOAD:
        tl.store(load_ptr + expert, tl.load(load_ptr + expert) + 1, at_n == 0)
    both = tl.arange(0, 2 * BLOCK_N)  # gate and up of each row, side by side
    rows = tl.minimum(at_n + both // 2, outputs - 1) + both % 2 * outputs
    found = _of_rows(x_ptr, both * 0, w_ptr, scale_ptr, zero_ptr, bias_ptr, expert, rows,
                     2 * outputs, INPUTS, BLOCK_K, SCALES, GROUP, ZERO, BIAS, False)  # fmt: skip
    gate, up = tl.split(tl.reshape(found, (BLOCK_N, 2)))
    n = at_n + tl.arange(0, BLOCK_N)
    out = _gated(gate, up, ACTIVATION)
    tl.store(y_ptr + pair * outputs + n, out.to(y_ptr.dtype.element_ty), n < outputs)


@triton.jit
def _down_row(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, experts_ptr, router_ptr, outputs,
    INPUTS: tl.constexpr, ACTIVE: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a single token: some rows of all of its experts, side by side and added up. These were
    known before the first product began, so that their rows are loaded before its end."""
    SLOTS: tl.constexpr = triton.next_power_of_2(ACTIVE)
    slot = tl.arange(0, SLOTS * BLOCK_N) // BLOCK_N
    pair = tl.minimum(slot, ACTIVE - 1)
    at_n = tl.program_id(0) * BLOCK_N
    rows = tl.minimum(at_n + tl.arange(0, SLOTS * BLOCK_N) % BLOCK_N, outputs - 1)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    factor = tl.load(router_ptr + pair).to(tl.float32)
    found = _of_rows(x_ptr, pair, w_ptr, scale_ptr, zero_ptr, bias_ptr, expert, rows, outputs,
                     INPUTS, BLOCK_K, SCALES, GROUP, ZERO, BIAS, PDL)  # fmt: skip
    found = tl.where(slot < ACTIVE, found * factor, 0.0)
    y = tl.sum(tl.reshape(found, (SLOTS, BLOCK_N)), 0)
    n = at_n + tl.arange(0, BLOCK_N)
    if RESIDUAL:
        y += tl.load(y_ptr + n, n < outputs, 0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), n < outputs)


@triton.jit
def _choose(
    logits, bias_ptr, weights_ptr, experts_ptr, token, scale, EXPERTS: tl.constexpr,
    SLOTS_X: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr,
    BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Writes the experts of a token, best first, and their weights, then those that are shared;
    `logits` are -inf past the last expert."""
    x = tl.arange(0, SLOTS_X)
    is_expert = x < EXPERTS
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if BIAS:
        choice += tl.load(bias_ptr + x, is_expert, 0.0)
    choice = tl.where(choice == choice, choice, LEAST)  # NaN is the worst, before what is padding
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # as ordered integers, whose maximum is fast
    keys = tl.where(is_expert, bits ^ ((bits >> 31) & 0x7FFFFFFF), NO_KEY)
    place = tl.full((SLOTS_X,), ACTIVE, tl.int32)
    for number in tl.static_range(ACTIVE):
        best = tl.max(keys, 0)
        is_best = x == tl.min(tl.where(keys == best, x, SLOTS_X), 0)  # the first of equal ones
        place = tl.where(is_best, number, place)
        keys = tl.where(is_best, NO_KEY, keys)
    is_chosen = place < ACTIVE
    weights = tl.where(is_chosen, scores, 0.0)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 0), 1e-20)
    places = token * (ACTIVE + SHARED) + place
    tl.store(weights_ptr + places, weights * scale, is_chosen)
    tl.store(experts_ptr + places, x, is_chosen)
    if SHARED > 0:
        places = token * (ACTIVE + SHARED) + ACTIVE + x
        tl.store(weights_ptr + places, tl.full((SLOTS_X,), 1.0, tl.float32), x < SHARED)
        tl.store(experts_ptr + places, EXPERTS + x, x < SHARED)


@triton.jit
def _choose_rows(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, stride, scale, EXPERTS: tl.constexpr,
    SLOTS_X: tl.constexpr, ACTIVE: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr,
    BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program for each token."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, SLOTS_X)
    places = logits_ptr + token * stride + x
    logits = tl.load(places, x < EXPERTS, float("-inf")).to(tl.float32)
    _choose(logits, bias_ptr, weights_ptr, experts_ptr, token, scale, EXPERTS, SLOTS_X, ACTIVE,
            SHARED, SIGMOID, BIAS, RENORMALIZE)  # fmt: skip


@triton.jit
def _route_rows(
    x_ptr, w_ptr, bias_ptr, logits_ptr, arrivals_ptr, weights_ptr, experts_ptr, norm_ptr,
    normed_ptr, eps, stride, scale, INPUTS: tl.constexpr, NORM: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr, SLOTS_X: tl.constexpr,
    ACTIVE: tl.constexpr, SHARED: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some programs for each token multiply by the router; the last to arrive chooses. Their rows
    of it are there before the kernel before has ended. Each writes its share of the normed row."""
    PROGRAMS: tl.constexpr = (EXPERTS + BLOCK_X - 1) // BLOCK_X
    SHARE: tl.constexpr = (INPUTS + PROGRAMS - 1) // PROGRAMS
    token = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    program = tl.program_id(0) % PROGRAMS
    x = program * BLOCK_X + tl.arange(0, BLOCK_X)
    k = tl.arange(0, BLOCK_K)
    here = k < INPUTS
    w_places = w_ptr + tl.minimum(x, EXPERTS - 1)[:, None] * INPUTS + k[None]
    w = tl.load(w_places, here[None], 0.0)
    gain = tl.load(norm_ptr + k, here, 0.0) if NORM else k
    await_inputs(PDL)
    row = tl.load(x_ptr + token * stride + k, here, 0.0)
    if NORM:
        wide = row.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / INPUTS + eps)
        row = (wide * factor * gain.to(tl.float32)).to(row.dtype)
        tl.store(normed_ptr + token * INPUTS + k, row, here & (k // SHARE == program))
    logits = tl.sum(w.to(tl.float32) * row.to(tl.float32)[None], 1)
    if ROUND:
        logits = logits.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(logits_ptr + token * EXPERTS + x, logits, x < EXPERTS)
    if arrived_last(arrivals_ptr, token, PROGRAMS):
        every = tl.arange(0, SLOTS_X)
        places = logits_ptr + token * EXPERTS + every
        found = tl.load(places, every < EXPERTS, float("-inf"), cache_modifier=".cg")
        _choose(found, bias_ptr, weights_ptr, experts_ptr, token, scale, EXPERTS, SLOTS_X, ACTIVE,
                SHARED, SIGMOID, BIAS, RENORMALIZE)  # fmt: skip
        reset(arrivals_ptr, token)


@triton.jit
def _gather_pairs(
    x_ptr, y_ptr, order_ptr, width, stride, ACTIVE: tl.constexpr, SIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(order_ptr + place).to(tl.int64) // ACTIVE
    e = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    found = tl.load(x_ptr + token * stride + e, e < width, 0.0)
    tl.store(y_ptr + place * width + e, found, e < width)


@triton.jit
def _sum_pairs(
    each_ptr, y_ptr, width, y_stride, ACTIVE: tl.constexpr, RESIDUAL: tl.constexpr,
    SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = e < width
    y_places = y_ptr + token * y_stride + e
    total = tl.zeros((SIZE,), tl.float32)
    for active in tl.static_range(ACTIVE):
        total += tl.load(each_ptr + (token * ACTIVE + active) * width + e, inside, 0.0)
    if RESIDUAL:
        total += tl.load(y_places, inside, 0.0).to(tl.float32)
    tl.store(y_places, total.to(y_ptr.dtype.element_ty), inside)
