"""How are the matrices of one layer quantized, given the states that come into it?

`round_layer` changes the layer to what will be served and says what it became. Letters: I inputs,
O outputs, E hidden, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import torch

from ridgeline.compression.layer import Input, InputHook, Layer, Names, States
from ridgeline.errors import ConfigError
from ridgeline.quantization.algorithms.awq import clip_and_round, search_scales
from ridgeline.quantization.algorithms.gptq import GptqSettings, InputStatistics, gptq
from ridgeline.quantization.algorithms.grid import Grid, Quantized, round_to_nearest

METHODS = ("rtn", "gptq", "awq")


@dataclass(frozen=True, slots=True)
class Method:
    """`scheme`: dtype of the norms in the checkpoint, which AWQ's scales are folded into."""

    name: str
    grid: Grid
    scheme: torch.dtype
    gptq: GptqSettings = field(default_factory=GptqSettings)

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ConfigError(f"unknown method {self.name!r}; choose one of {', '.join(METHODS)}")

    @property
    def needs_text(self) -> bool:
        return self.name != "rtn"

    def least_tokens(self, inputs: int) -> int:
        """Fewer tokens say less about so many inputs than they mislead: by GPTQ with 1/8 to 1/2 of
        these the products are up to 1.5 times as far off as by rounding to nearest (4 bits, inputs
        that are independent), by AWQ with half of these 1.05 to 1.5 times."""
        return {"rtn": 0, "gptq": inputs, "awq": -(-inputs // 8)}[self.name]


@dataclass(frozen=True, slots=True)
class Rounded:
    """By name: `matrices`, and `folded`, other parameters that changed, in the stored dtype.
    `few`: how many tokens came to those matrices that too few came to; they are rounded to nearest.
    """

    matrices: dict[str, Quantized]
    folded: dict[str, torch.Tensor]
    few: dict[str, int] = field(default_factory=dict)


def round_layer(layer: Layer, states: States, method: Method) -> Rounded:
    """Afterwards `layer` holds the dequantized matrices and `states` are what it makes of them."""
    if method.name == "gptq":
        return _by_stages(layer, states, method)
    if method.name == "rtn":
        names = layer.matrices
        made = {name: round_to_nearest(layer.tensors[name], method.grid) for name in names}
        rounded = Rounded(made, {})
    else:
        rounded = _by_scales(layer, states, method)
    put(layer, rounded)
    states.advance(layer, layer.device)
    return rounded


def put(layer: Layer, rounded: Rounded) -> None:
    """The layer computes with what was made of it."""
    for name, one in rounded.matrices.items():
        layer.tensors[name].copy_(one.dequantize())
    for name, parameter in rounded.folded.items():
        if layer.parts[name].role in ("q_norm", "k_norm"):
            continue  # nothing is folded into them
        layer.tensors[name].copy_(parameter.float() + layer.offset_of(name))


def _by_stages(layer: Layer, states: States, method: Method) -> Rounded:
    """GPTQ: each matrix sees inputs made by the quantized ones before it. Matrices of a stage do
    not see each other: those of one product, or of that product of all experts."""
    made: dict[str, Quantized] = {}
    few: dict[str, int] = {}
    stages: dict[str, list[Input]] = {}
    for one in layer.inputs:
        stages.setdefault(one.product, []).append(one)
    halves = groupby(
        stages.values(), key=lambda stage: not layer.is_parallel and stage[0].is_of_attention
    )
    for is_of_attention, own in halves:
        half = layer if layer.is_parallel else layer.attend if is_of_attention else layer.feed
        for stage in own:
            seen = watched(half, states, layer, stage)
            few |= _few(layer, seen, method)
            for name, statistics in ((n, seen[one.names]) for one in stage for n in one.names):
                weight_OI, hessian_II = layer.tensors[name], statistics.hessian_II
                made[name] = (
                    round_to_nearest(weight_OI, method.grid)
                    if name in few
                    else gptq(weight_OI, hessian_II, method.grid, method.gptq)
                )
                weight_OI.copy_(made[name].dequantize())
        states.advance(half, layer.device)
    return Rounded(made, {}, few)


def _few(layer: Layer, seen: Mapping[Names, InputStatistics], method: Method) -> dict[str, int]:
    """See Rounded."""
    return {
        name: one.num_tokens
        for names, one in seen.items()
        for name in names
        if one.num_tokens < method.least_tokens(layer.tensors[name].shape[1])
    }


def watched(
    run: Callable[[torch.Tensor, InputHook], torch.Tensor],
    states: States,
    layer: Layer,
    inputs: list[Input],
) -> dict[Names, InputStatistics]:
    """Statistics of these inputs over all states."""
    seen = {
        one.names: InputStatistics(layer.tensors[one.names[0]].shape[1], layer.device)
        for one in inputs
    }

    def hook(names: Names, x_TI: torch.Tensor) -> None:
        if names in seen:
            seen[names].add(x_TI)

    for part_BSE in states.parts():
        run(part_BSE.to(layer.device), hook)
    return seen


def _by_scales(layer: Layer, states: States, method: Method) -> Rounded:
    """AWQ: all scales of the layer first, as one changes the rows that another's columns meet."""
    inputs, tensors = layer.inputs, layer.tensors
    seen = watched(layer, states, layer, inputs)
    few = _few(layer, seen, method)
    found = [
        torch.ones_like(seen[one.names].magnitude_I)
        if one.names[0] in few
        else _scale_of(layer, one, seen[one.names], method.grid)
        for one in inputs
    ]
    folded: dict[str, torch.Tensor] = {}
    scales = [
        _fold(layer, one, scale_I, method.scheme, folded)
        for one, scale_I in zip(inputs, found, strict=True)
    ]
    for one, scale_I in zip(inputs, scales, strict=True):
        for name in one.names:
            tensors[name].mul_(scale_I)
    made: dict[str, Quantized] = {}
    for one, scale_I in zip(inputs, scales, strict=True):
        hessian_II = seen[one.names].hessian_II / torch.outer(scale_I, scale_I)
        for name in one.names:
            made[name] = (
                round_to_nearest(tensors[name], method.grid)
                if name in few
                else clip_and_round(tensors[name], hessian_II, method.grid)
            )
    return Rounded(made, folded, few)


def _scale_of(layer: Layer, one: Input, seen: InputStatistics, grid: Grid) -> torch.Tensor:
    weights = [layer.tensors[name] for name in one.names]
    magnitude_I = seen.magnitude_I
    if one.made_by is None:
        return torch.ones_like(magnitude_I)
    if one.product != "attention_out":
        return search_scales(weights, seen.hessian_II, magnitude_I, grid)
    spec = layer.spec.layers[layer.index].attention

    def share(values_I: torch.Tensor) -> torch.Tensor:
        heads_KRD = values_I.view(spec.num_kv_heads, -1, spec.head_dim)
        return heads_KRD.mean(1, keepdim=True).expand_as(heads_KRD).reshape(-1)

    # Query heads that share a value must share its scale, for it is folded into the value.
    return search_scales(weights, seen.hessian_II, magnitude_I, grid, share=share)


def _fold(
    layer: Layer,
    one: Input,
    scale_I: torch.Tensor,
    scheme: torch.dtype,
    folded: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Divide what makes this input by the scale; the scale that this comes to, as stored."""
    if one.made_by is None:
        return scale_I
    made_by = layer.tensors[one.made_by]
    if made_by.dim() == 1:
        norm_E, offset = made_by.clone(), layer.offset_of(one.made_by)
        stored_E = (norm_E / scale_I - offset).to(scheme)
        divided_E = stored_E.float() + offset
        holds_E = torch.isfinite(divided_E) & (divided_E != 0)
        folded[one.made_by] = torch.where(holds_E, stored_E, (norm_E - offset).to(scheme))
        made_by.copy_(folded[one.made_by].float() + offset)
        kept_E = torch.where(holds_E, norm_E / made_by, torch.ones_like(norm_E))
        _fold_bias(layer, one.made_by, kept_E, scheme, folded)
        return kept_E
    rows_O = scale_I
    if one.product == "attention_out":
        spec = layer.spec.layers[layer.index].attention
        rows_O = scale_I.view(spec.num_kv_heads, -1, spec.head_dim)[:, 0].reshape(-1)
    made_by.div_(rows_O[:, None])
    _fold_bias(layer, one.made_by, rows_O, scheme, folded)
    return scale_I


def _fold_bias(
    layer: Layer,
    made_by: str,
    scale_O: torch.Tensor,
    scheme: torch.dtype,
    folded: dict[str, torch.Tensor],
) -> None:
    if (bias := layer.bias_of(made_by)) is not None:
        folded[bias] = (layer.tensors[bias] / scale_O).to(scheme)
        layer.tensors[bias].copy_(folded[bias])
