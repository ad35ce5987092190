"""How are the matrices of one layer quantized, given the states that come into it?

`round_layer` changes the block to what will be served and says what it became. Letters: I inputs,
O outputs, E hidden, F feed-forward, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ridgeline.compression.block import (
    Block,
    Input,
    Watch,
    attention_inputs,
    feed_forward_inputs,
    no_watch,
)
from ridgeline.compression.states import States
from ridgeline.errors import ConfigError
from ridgeline.quantization.algorithms.awq import clip_and_round, search_scales
from ridgeline.quantization.algorithms.gptq import GptqSettings, InputStatistics, gptq
from ridgeline.quantization.algorithms.grid import Grid, Quantized, round_to_nearest

METHODS = ("rtn", "gptq", "awq")


class Half(Protocol):
    """Attention or feed-forward of a block, with what is around it."""

    def __call__(self, hidden_BSE: torch.Tensor, watch: Watch = no_watch) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Method:
    """`stored`: dtype of the norms in the checkpoint, which AWQ's scales are folded into."""

    name: str
    grid: Grid
    stored: torch.dtype
    gptq: GptqSettings = field(default_factory=GptqSettings)

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ConfigError(f"unknown method {self.name!r}; choose one of {', '.join(METHODS)}")

    @property
    def needs_text(self) -> bool:
        return self.name != "rtn"


@dataclass(frozen=True, slots=True)
class Rounded:
    """`matrices` by role; `folded`: other parameters that changed, in the stored dtype."""

    matrices: dict[str, Quantized]
    folded: dict[str, torch.Tensor]


def roles_of(block: Block) -> list[str]:
    """The matrices that are quantized: all but the router."""
    stages = (*attention_inputs(), *feed_forward_inputs(block.spec.feed_forward))
    return [role for stage in stages for one in stage for role in one.roles]


def round_layer(block: Block, states: States, method: Method, device: torch.device) -> Rounded:
    """Afterwards `block` holds the dequantized matrices and `states` are what it makes of them."""
    if method.name == "rtn":
        made = {r: round_to_nearest(block.weights[r], method.grid) for r in roles_of(block)}
        rounded = Rounded(made, {})
        put(block, rounded)
    elif method.name == "gptq":
        return _by_stages(block, states, method, device)
    else:
        rounded = _by_scales(block, states, method, device)
    states.advance(block, device)
    return rounded


def put(block: Block, rounded: Rounded) -> None:
    """The block computes with what was made of it."""
    for role, one in rounded.matrices.items():
        block.weights[role] = one.dequantize()
    for role, parameter in rounded.folded.items():
        block.weights[role] = parameter.float()


def _by_stages(block: Block, states: States, method: Method, device: torch.device) -> Rounded:
    """GPTQ: each matrix sees inputs made by the quantized ones before it."""
    made: dict[str, Quantized] = {}
    halves: tuple[tuple[Half, tuple[tuple[Input, ...], ...]], ...] = (
        (block.attend, attention_inputs()),
        (block.feed, feed_forward_inputs(block.spec.feed_forward)),
    )
    for half, stages in halves:
        for stage in stages:
            seen = watched(half, states, block, stage, device)
            for one in stage:
                for role in one.roles:
                    weight_OI, hessian_II = block.weights[role], seen[one.name].hessian_II
                    made[role] = gptq(weight_OI, hessian_II, method.grid, method.gptq)
                    block.weights[role] = made[role].dequantize()
        states.advance(half, device)
    return Rounded(made, {})


def watched(
    half: Half, states: States, block: Block, stage: Iterable[Input], device: torch.device
) -> dict[str, InputStatistics]:
    """Statistics of these inputs over all states."""
    seen = {
        one.name: InputStatistics(block.weights[one.roles[0]].shape[1], device) for one in stage
    }

    def watch(name: str, x_TI: torch.Tensor) -> None:
        if name in seen:
            seen[name].add(x_TI)

    for part_BSE in states.parts():
        half(part_BSE.to(device), watch)
    return seen


def _by_scales(block: Block, states: States, method: Method, device: torch.device) -> Rounded:
    """AWQ: all scales of the layer first, as one changes the rows that another's columns meet."""
    feeds = feed_forward_inputs(block.spec.feed_forward)
    inputs = [one for stage in (*attention_inputs(), *feeds) for one in stage]

    def whole(hidden_BSE: torch.Tensor, watch: Watch = no_watch) -> torch.Tensor:
        return block.feed(block.attend(hidden_BSE, watch), watch)

    seen = watched(whole, states, block, inputs, device)
    scales = {one.name: _scale_of(block, one, seen[one.name], method.grid) for one in inputs}
    folded: dict[str, torch.Tensor] = {}
    for one in inputs:
        scales[one.name] = _fold(block, one, scales[one.name], method.stored, folded)
    for one in inputs:
        for role in one.roles:
            block.weights[role] = block.weights[role] * scales[one.name]
    made: dict[str, Quantized] = {}
    for one in inputs:
        scale_I = scales[one.name]
        hessian_II = seen[one.name].hessian_II / torch.outer(scale_I, scale_I)
        for role in one.roles:
            made[role] = clip_and_round(block.weights[role], hessian_II, method.grid)
    rounded = Rounded(made, folded)
    put(block, rounded)
    return rounded


def _scale_of(block: Block, one: Input, seen: InputStatistics, grid: Grid) -> torch.Tensor:
    weights = [block.weights[role] for role in one.roles]
    magnitude_I = seen.magnitude_I
    if one.name.startswith("gate_up.") or not seen.num_tokens:
        # Experts and their router share one norm: a scale would be the same for all of them.
        return torch.ones_like(magnitude_I)
    if one.name != "o":
        return search_scales(weights, seen.hessian_II, magnitude_I, grid)
    spec = block.spec.attention

    def share(values_I: torch.Tensor) -> torch.Tensor:
        heads_KRD = values_I.view(spec.num_kv_heads, -1, spec.head_dim)
        return heads_KRD.mean(1, keepdim=True).expand_as(heads_KRD).reshape(-1)

    # Query heads that share a value must share its scale, for it is folded into the value.
    return search_scales(weights, seen.hessian_II, magnitude_I, grid, share=share)


def _fold(
    block: Block,
    one: Input,
    scale_I: torch.Tensor,
    stored: torch.dtype,
    folded: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Divide what makes this input by the scale; the scale that this comes to, as stored."""
    norms: Mapping[str, str] = {"qkv": "input_norm", "gate_up": "post_norm"}
    if one.name in norms:
        role = norms[one.name]
        norm_E = block.weights[role]
        divided_E = (norm_E / scale_I).to(stored)
        holds_E = torch.isfinite(divided_E) & (divided_E != 0)
        folded[role] = torch.where(holds_E, divided_E, norm_E.to(stored))
        block.weights[role] = folded[role].float()
        return torch.where(holds_E, norm_E / block.weights[role], torch.ones_like(norm_E))
    if one.name == "o":
        spec = block.spec.attention
        rows_O = scale_I.view(spec.num_kv_heads, -1, spec.head_dim)[:, 0].reshape(-1)
        _divide_rows(block, "v", rows_O, stored, folded)
    elif one.name.startswith("down"):
        _divide_rows(block, "up" + one.name.removeprefix("down"), scale_I, stored, folded)
    return scale_I


def _divide_rows(
    block: Block,
    role: str,
    rows_O: torch.Tensor,
    stored: torch.dtype,
    folded: dict[str, torch.Tensor],
) -> None:
    block.weights[role] = block.weights[role] / rows_O[:, None]
    bias = f"{role}_bias"
    if bias in block.weights:
        folded[bias] = (block.weights[bias] / rows_O).to(stored)
        block.weights[bias] = folded[bias].float()
