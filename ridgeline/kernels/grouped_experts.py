"""A few of many gated feed-forwards per token, all in a fixed number of launches.

Which experts have tokens is known to the device alone: the pairs of a token and one of its experts
are sorted by expert, cut into tiles of one expert each, and the grid has programs for as many tiles
as so many tokens can need at the most. So a step with experts can be captured.
Letters: T tokens, E hidden, X experts, A active experts of a token, P = T * A pairs, F width of an
expert, G = 2 * F, N rows and K columns of an expert's matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from ridgeline.errors import check
from ridgeline.kernels.fp8_block_linear import Fp8Blocks, dequantize_blocks, num_blocks
from ridgeline.kernels.launching import shared_memory_bytes
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, num_groups
from ridgeline.kernels.silu_mul import gated
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.kernels.tiles import bucket

# Measured on an H100 (weights in bfloat16, other experts in each call), the layer with the choice
# of its experts in us, and TB/s of each touched expert read once; a plain sum there reads 3.1:
#     tokens   8 x 14336 of 4096   128 x 768 of 2048   64 x 1408 of 2048
#          1          232 / 3.0           33.2 / 2.3          43.5 / 2.4
#         32          941 / 3.0            363 / 2.9
#        128          964 / 2.9
#        256        1,030 / 2.7            444 / 2.7           415 / 2.7
# Without a sort, all tokens standing in the tile of each expert that has some, 32 tokens took 399
# us for the second shape: each program looks for its expert, and multiplies by twice the rows.
# The copy engine took 256 tokens of the first from 1,039 to 1,057 us in the gated product.
# With tiles of 32 pairs 128 tokens of the first took 989 us, and with tiles of 16 pairs 256 tokens
# of the second took 450. The copy engine took 2,048 tokens of the first shape from 3,035 to 2,893
# us in one run; for the gated product of the second, where eight experts of a token make the copy
# of x eight times as large, from 780 to 928.
WIDE = 4096
ROW_NUMBERS = 1 << 13  # of W in a step of a program of a single token
SHORT_ROW, SHORT_STEP, LONG_STEP = 2048, 256, 2048
MOST_ROWS = 16  # of W for each expert, in a program of a single token
IN_ANY_BATCH = 64  # tokens whose tiles all steps have that must not depend on their size


@dataclass(frozen=True, slots=True)
class StackedMatrix:
    """One matrix of every expert. `codes` [X, N, K] are numbers of the dtype of x, or e4m3 or int8
    with float32 scales: [X, N], one for each row, or [X, N / 128, K / 128], one for each block. Or
    they are bytes [X, N, K / 2] of two numbers of 4 bits, as a QuantizedMatrix has them, with a
    scale (and a zero point) for each `group` neighbours of a row."""

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    bias_XN: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    group: int = 0

    def __post_init__(self) -> None:
        experts, rows, _ = self.codes.shape
        check(self.codes.is_contiguous(), "matrices of experts lie one behind the other")
        if self.scale is None:
            return
        blocks = (experts, num_blocks(rows), num_blocks(self.columns))
        groups = (experts, rows, num_groups(self.columns, self.group))
        shapes = (groups,) if self.group else ((experts, rows), blocks)
        check(self.scale.shape in shapes, "a scale for each row, block or group")

    @property
    def columns(self) -> int:
        return self.codes.shape[2] * (2 if self.group else 1)

    @property
    def has_blocks(self) -> bool:
        return self.scale is not None and self.scale.dim() == 3 and not self.group

    def dequantize(self, expert: int) -> torch.Tensor:
        """[N, K]; float32 where it has scales."""
        codes_NK = self.codes[expert]
        if self.scale is None:
            return codes_NK
        scale = self.scale[expert]
        if self.group:
            zero = None if self.zero is None else self.zero[expert]
            return QuantizedMatrix(codes_NK, scale, zero, self.columns, 4, self.group).dequantize()
        if not self.has_blocks:
            return codes_NK.float() * scale[:, None]
        return dequantize_blocks(Fp8Blocks(codes_NK, scale))


@dataclass(frozen=True, slots=True)
class Choice:
    """How a token's experts follow from the product of the router: `active` of `experts` by the
    softmax or sigmoid of it, plus `bias_X` (float32); their weights are these scores without the
    bias, made to sum to one if so, times `scale`. `in_float32`: the product is not rounded.
    So many `shared` experts, behind the others, get every token with the weight one."""

    experts: int
    active: int
    is_sigmoid: bool = False
    renormalize: bool = True
    scale: float = 1.0
    bias_X: torch.Tensor | None = None
    in_float32: bool = False
    shared: int = 0


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """A program multiplies `block_n` rows of W (of a gated product as many of gate and of up) by
    some rows of x, `block_k` columns a step, with `stages` steps under way. `tma`: the copy engine
    loads W."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3
    tma: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsCut:
    """Tiles of `block_m` pairs. 1: a single token, whose pairs are not sorted, by products without
    tensor cores."""

    block_m: int
    gate_up: ExpertTile
    down: ExpertTile


def choose_experts(logits_TX: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and experts (int32) of each token on a GPU, [T, A], best first and then
    those that are shared, by the product of the router. `layers.routing` says the same in
    PyTorch."""
    from ridgeline.kernels.grouped_experts_triton import choose_experts_triton

    return choose_experts_triton(logits_TX, choice)


def route_experts(
    x_TE: torch.Tensor, router_XE: torch.Tensor, choice: Choice, norm: InputNorm | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with the product, and the norm of x, of few tokens; and the normed x."""
    from ridgeline.kernels.grouped_experts_triton import route_triton

    return route_triton(x_TE, router_XE, choice, norm=norm)


def grouped_experts(
    x_TE: torch.Tensor,
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
    gate_up: StackedMatrix,
    down: StackedMatrix,
    activation: str = "silu",
    *,
    residual_TE: torch.Tensor | None = None,
    load_X: torch.Tensor | None = None,
    in_any_batch: bool = False,
) -> torch.Tensor:
    """The sum over the experts of each token of down(act(gate(x)) * up(x)) times their router
    weight, [T, E]; added to `residual_TE` in place, if there is one. A token's experts are added in
    the order in which they are given, in float32. The host waits for nothing on a GPU.
    `in_any_batch`: one way of cutting for any number of tokens, so that a row of the answer has the
    same bits whatever the others are. `load_X` (int64) grows by the number of tokens that each
    expert gets."""
    if x_TE.is_cuda and x_TE.shape[0]:
        from ridgeline.kernels.grouped_experts_triton import grouped_experts_triton

        tokens = IN_ANY_BATCH if in_any_batch else x_TE.shape[0]
        cut = choose_cut(tokens, experts_TA.shape[1], gate_up, down)
        return grouped_experts_triton(
            x_TE, weights_TA, experts_TA, gate_up, down, activation, cut=cut,
            residual_TE=residual_TE, load_X=load_X,
        )  # fmt: skip
    if load_X is not None:
        load_X += torch.bincount(experts_TA.flatten(), minlength=len(load_X))
    y_TE = grouped_experts_reference(x_TE, weights_TA, experts_TA, gate_up, down, activation)
    return y_TE if residual_TE is None else residual_TE.add_(y_TE)


def grouped_experts_reference(
    x_TE: torch.Tensor,
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
    gate_up: StackedMatrix,
    down: StackedMatrix,
    activation: str = "silu",
) -> torch.Tensor:
    """In float32, rounded once."""
    y_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    for expert in sorted(set(experts_TA.flatten().tolist())):
        tokens, places = torch.nonzero(experts_TA == expert, as_tuple=True)
        both_TG = x_TE[tokens].float() @ gate_up.dequantize(expert).float().T
        if gate_up.bias_XN is not None:
            both_TG += gate_up.bias_XN[expert].float()
        inner_TF = gated(both_TG, activation)
        bias = None if down.bias_XN is None else down.bias_XN[expert].float()
        one_TE = functional.linear(inner_TF, down.dequantize(expert).float(), bias)
        y_TE.index_add_(0, tokens, one_TE * weights_TA[tokens, places, None].float())
    return y_TE.to(x_TE.dtype)


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """Tiles of `block_m` pairs of one expert, however the pairs are spread over the experts."""
    touched = min(pairs, experts)
    return touched + (pairs - touched) // block_m


def choose_cut(tokens: int, active: int, gate_up: StackedMatrix, down: StackedMatrix) -> ExpertsCut:
    """By the pairs that an expert has if all have as many, see the figures above. Two tiles of one
    expert read its rows twice, from the L2 cache, whose rate is the limit then: most experts, whose
    numbers of pairs differ by about a root, have one."""
    if tokens == 1:
        return ExpertsCut(1, _row_tile(gate_up, 2), _row_tile(down, active))
    cut = _measured_cut(-(-tokens * active // gate_up.codes.shape[0]), gate_up, down)
    gate_up_tile = _fitted(cut.gate_up, gate_up, 2 * cut.gate_up.block_n, cut.block_m)
    return ExpertsCut(
        cut.block_m, gate_up_tile, _fitted(cut.down, down, cut.down.block_n, cut.block_m)
    )


def _measured_cut(rows: int, gate_up: StackedMatrix, down: StackedMatrix) -> ExpertsCut:
    """For 16-bit x and a Hopper; an expert has so many `rows`."""
    block_m = next((m for m in (16, 32, 64) if rows + 2 * math.sqrt(rows) <= m), 128)
    if gate_up.group or down.group:
        steps = [min(128, matrix.group or 128) for matrix in (gate_up, down)]
        gate_up_tile, down_tile = (ExpertTile(64, step, stages=4) for step in steps)
        return ExpertsCut(min(64, block_m), gate_up_tile, down_tile)
    if block_m <= 32:
        return ExpertsCut(block_m, ExpertTile(64, 128, stages=4), ExpertTile(64, 128))
    if gate_up.scale is not None:  # codes are widened in registers
        return ExpertsCut(64, ExpertTile(64, 128), ExpertTile(128, 128))
    if block_m == 64:
        return ExpertsCut(64, ExpertTile(64, 128), ExpertTile(128, 64, stages=5))
    down_tma = _is_aligned(down)
    if rows <= 128:  # a tile of each expert
        return ExpertsCut(128, ExpertTile(128, 64, 8, 4), ExpertTile(128, 128, 8, tma=down_tma))
    # The copy engine needs rows of x in order, and so a copy of them: less than it gains where an
    # expert is wide.
    gate_up_tma = _is_aligned(gate_up) and down.columns >= WIDE
    return ExpertsCut(
        128, ExpertTile(128, 64, 8, 4, tma=gate_up_tma), ExpertTile(256, 64, 8, 3, tma=down_tma)
    )


def _fitted(tile: ExpertTile, matrix: StackedMatrix, of_w: int, of_x: int) -> ExpertTile:
    """Fewer steps under way, then shorter ones, where rows of W and of x are more than the shared
    memory of a multiprocessor: numbers of 32 bits, and smaller cards."""
    size, room = matrix.codes.element_size(), shared_memory_bytes(matrix.codes.device)
    while tile.stages * tile.block_k * (of_w * size + of_x * max(size, 2)) > room:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, block_k=tile.block_k // 2)
    return tile


def _row_tile(matrix: StackedMatrix, together: int) -> ExpertTile:
    """For a single token; a program takes its rows of so many experts, or of gate and up,
    `together`. Short rows of many experts are read in short steps, with fewer numbers past the end.
    """
    is_short = matrix.columns <= SHORT_ROW and together > 2
    most = min(SHORT_STEP if is_short else LONG_STEP, matrix.group or LONG_STEP)
    block_k = min(most, bucket(matrix.columns))
    block_n = ROW_NUMBERS // (block_k * bucket(together))
    return ExpertTile(min(MOST_ROWS, max(1, block_n)), block_k)


def _is_aligned(matrix: StackedMatrix) -> bool:
    """The copy engine finds its rows."""
    return matrix.columns * matrix.codes.element_size() % 16 == 0
