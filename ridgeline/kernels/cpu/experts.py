"""How are all experts of a layer, and the router before them, computed by native calls?

The pairs of a token and one of its experts are sorted by expert in C, so that the matrices of each
are read once for all of its tokens, and a decode step with experts can be recorded. The meaning of
a route is that of `layers.routing`, that of the products of `kernels.grouped_experts`.
Letters: T tokens, E hidden, X experts, A active experts of a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ridgeline.errors import check
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.elementwise import kernel_of
from ridgeline.kernels.cpu.native import numbers, pointers, small_numbers
from ridgeline.kernels.cpu.packed_linear import (
    PANEL,
    MatrixArguments,
    PackedMatrix,
    matrix_arguments,
    takes_rows,
)
from ridgeline.kernels.cpu.recorder import launch, pointer
from ridgeline.kernels.silu_mul import CLAMPED

GATES = {"silu": 1, CLAMPED: 2}  # as linear.h numbers them


class _Experts(ctypes.Structure):
    _fields_ = (
        *pointers("gate_up", "down", "x", "y", "gate_up_bias", "down_bias", "weights", "chosen"),
        *pointers("load", "beside", "beside_weights"),
        *numbers("tokens", "active", "experts", "x_stride", "beside_stride"),
        *small_numbers("x_dtype", "bias_dtype", "gate", "unused"),
    )


class _Route(ctypes.Structure):
    _fields_ = (
        *pointers("logits", "bias", "weights", "chosen", "shared"),
        *numbers("tokens", "experts", "active", "logits_stride"),
        *numbers("groups", "active_groups", "group_best"),
        *numbers("logits_dtype", "is_sigmoid", "renormalizes"),
        ("scale", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True)
class Route:
    """The rules of a router, as fields of ExpertsSpec; `bias_X` (float32) counts for the choice
    alone, and `has_shared`: the logits have one more column, of the shared experts."""

    num_experts: int
    num_active: int
    is_sigmoid: bool
    renormalize: bool
    scale: float
    num_groups: int = 1
    num_active_groups: int = 1
    group_best: int = 1
    bias_X: torch.Tensor | None = None
    has_shared: bool = False


class PackedExperts:
    """Gate and up in one, and down, of each expert, all alike; a bias of each or of none. They are
    those of these `numbers` of `num_experts`, by default all; who computes the others is not
    known here."""

    def __init__(
        self,
        gate_up: Sequence[PackedMatrix],
        down: Sequence[PackedMatrix],
        activation: str,
        gate_up_bias: Sequence[torch.Tensor | None],
        down_bias: Sequence[torch.Tensor | None],
        *,
        numbers: Sequence[int] | None = None,
        num_experts: int | None = None,
    ) -> None:
        self.num_experts = len(gate_up) if num_experts is None else num_experts
        self.inputs, self.outputs = gate_up[0].inputs, down[0].outputs
        self.gate = GATES[activation]
        self.gate_up, self.down = ((MatrixArguments * self.num_experts)() for _ in range(2))
        has_bias = any(bias is not None for bias in (*gate_up_bias, *down_bias))
        made = [(ctypes.c_void_p * self.num_experts)() if has_bias else None for _ in range(2)]
        self.gate_up_bias, self.down_bias = made
        self.bias_dtype = 0
        numbers = range(len(gate_up)) if numbers is None else numbers
        self.place(numbers, gate_up, down, gate_up_bias, down_bias)

    def place(
        self,
        numbers: Sequence[int],
        gate_up: Sequence[PackedMatrix],
        down: Sequence[PackedMatrix],
        gate_up_bias: Sequence[torch.Tensor | None],
        down_bias: Sequence[torch.Tensor | None],
    ) -> None:
        """From now on the experts here are these, in recorded steps too."""
        for matrices in (gate_up, down):
            check(len(set(map(_form, matrices))) == 1, "matrices of experts are alike")
        check(gate_up[0].outputs == 2 * down[0].inputs, "gate and up are as wide as down reads")
        check(gate_up[0].outputs % (2 * PANEL) == 0, "gate and up are whole panels")
        check(down[0].outputs % PANEL == 0, "down has whole panels")
        _place(self.gate_up, numbers, gate_up)
        _place(self.down, numbers, down)
        _place_biases(self.gate_up_bias, numbers, gate_up_bias)
        _place_biases(self.down_bias, numbers, down_bias)
        biases = [bias for bias in (*gate_up_bias, *down_bias) if bias is not None]
        self.bias_dtype = 0 if not biases else native.DTYPES[biases[0].dtype]
        self._kept = gate_up, down, biases

    @staticmethod
    def takes(gate_up: PackedMatrix, down: PackedMatrix, activation: str) -> bool:
        """There is a kernel for experts such as this one."""
        is_whole = gate_up.outputs % (2 * PANEL) == 0 and down.outputs % PANEL == 0
        return is_whole and activation in GATES


def packed_experts(
    x_TE: torch.Tensor,
    weights_TA: torch.Tensor,
    experts_TA: torch.Tensor,
    experts: PackedExperts,
    *,
    beside_TE: torch.Tensor | None = None,
    beside_weights_T1: torch.Tensor | None = None,
    load_X: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over the experts (int64) of each token of down(act(gate(x)) * up(x)) times their
    weight (float32), plus `beside_TE` times its weight (1), [T, E]. It is added up in float32 in
    the order of the experts' numbers and rounded once. `load_X` (int64) grows by the tokens of each
    expert. InternalError for an expert that there is not."""
    tokens, active = experts_TA.shape
    check(takes_rows(x_TE) and x_TE.shape == (tokens, experts.inputs), "rows of x", got=x_TE.shape)
    given = weights_TA.dtype, weights_TA.shape, experts_TA.dtype
    check(given == (torch.float32, experts_TA.shape, torch.int64), "a weight of each expert")
    check(weights_TA.is_contiguous() and experts_TA.is_contiguous(), "routes without gaps")
    y_TE = torch.empty((tokens, experts.outputs), dtype=x_TE.dtype)
    if beside_TE is not None:
        check(
            takes_rows(beside_TE) and beside_TE.shape == y_TE.shape, "what is added has the shape"
        )
        check(beside_TE.dtype == x_TE.dtype, "what is added has the dtype", got=beside_TE.dtype)
    if beside_weights_T1 is not None:
        is_right = beside_weights_T1.dtype == torch.float32 and beside_weights_T1.is_contiguous()
        check(is_right, "weights of what is added")
    if load_X is not None:
        is_right = load_X.dtype == torch.int64 and load_X.shape == (experts.num_experts,)
        check(is_right and load_X.is_contiguous(), "a count for each expert")
    arguments = _Experts(
        ctypes.addressof(experts.gate_up), ctypes.addressof(experts.down),
        pointer(x_TE), pointer(y_TE), _address(experts.gate_up_bias), _address(experts.down_bias),
        pointer(weights_TA), pointer(experts_TA), pointer(load_X), pointer(beside_TE),
        pointer(beside_weights_T1), tokens, active, experts.num_experts, x_TE.stride(0),
        0 if beside_TE is None else beside_TE.stride(0),
        native.DTYPES[x_TE.dtype], experts.bias_dtype, experts.gate, 0,
    )  # fmt: skip
    kept = weights_TA, experts_TA, experts, beside_TE, beside_weights_T1, load_X
    launch(kernel_of("rl_experts"), arguments, x_TE, y_TE, *kept)
    return y_TE


def takes_logits(logits_TX: torch.Tensor) -> bool:
    """`route` reads them."""
    return takes_rows(logits_TX) and native.library() is not None


def route(
    logits_TX: torch.Tensor, rules: Route
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Weights (float32) and experts (int64) of each token, [T, A], best first, of equals the lowest
    number; and the weight of the shared experts, [T, 1], float32."""
    tokens, width = logits_TX.shape
    check(takes_logits(logits_TX), "rows of logits", dtype=logits_TX.dtype)
    check(width == rules.num_experts + rules.has_shared, "a column for each expert", got=width)
    weights_TA = torch.empty((tokens, rules.num_active), dtype=torch.float32)
    experts_TA = torch.empty((tokens, rules.num_active), dtype=torch.int64)
    shared_T1 = torch.empty((tokens, 1), dtype=torch.float32) if rules.has_shared else None
    if rules.bias_X is not None:
        is_right = rules.bias_X.dtype == torch.float32 and rules.bias_X.is_contiguous()
        check(is_right and rules.bias_X.shape == (rules.num_experts,), "a bias of each expert")
    arguments = _Route(
        pointer(logits_TX), pointer(rules.bias_X), pointer(weights_TA), pointer(experts_TA),
        pointer(shared_T1), tokens, rules.num_experts, rules.num_active, logits_TX.stride(0),
        rules.num_groups, rules.num_active_groups, rules.group_best,
        native.DTYPES[logits_TX.dtype], rules.is_sigmoid, rules.renormalize, rules.scale,
    )  # fmt: skip
    kept = weights_TA, experts_TA, shared_T1
    launch(kernel_of("rl_route"), arguments, logits_TX, rules, *kept)
    return weights_TA, experts_TA, shared_T1


def _form(matrix: PackedMatrix) -> tuple[object, ...]:
    return matrix.kind, matrix.group, matrix.outputs, matrix.inputs


def _place(
    into: ctypes.Array[MatrixArguments], numbers: Sequence[int], packed: Sequence[PackedMatrix]
) -> None:
    """By the experts' numbers; those of experts that are elsewhere have no codes."""
    elsewhere = matrix_arguments(packed[0])
    elsewhere.codes = None
    into[:] = [elsewhere] * len(into)
    for number, matrix in zip(numbers, packed, strict=True):
        into[number] = matrix_arguments(matrix)


def _place_biases(
    into: ctypes.Array[ctypes.c_void_p] | None,
    numbers: Sequence[int],
    given: Sequence[torch.Tensor | None],
) -> None:
    found = {n: bias for n, bias in zip(numbers, given, strict=True) if bias is not None}
    if into is None or not found:
        return
    is_right = len(found) == len(given) and all(bias.is_contiguous() for bias in found.values())
    check(is_right and len({bias.dtype for bias in found.values()}) == 1, "a bias of each expert")
    for number, bias in found.items():
        into[number] = bias.data_ptr()


def _address(array: ctypes.Array[ctypes.c_void_p] | None) -> int | None:
    return None if array is None else ctypes.addressof(array)
