"""Which experts does each token go to, and with what weight?

Every rule is a field of `ExpertsSpec`. In this order: scores of all experts from the router's
product (softmax or sigmoid, in float32), the choice (by the scores, or scores plus a learned bias;
where experts stand in groups, from the best groups alone), and the weights (the scores of the
chosen experts, made to sum to one if the spec says so, times a constant).

A softmax over the logits of the chosen experts alone is the softmax over all of them, made to sum
to one over the chosen: one rule serves families that do either.

Letters: T tokens, E hidden, X experts, A active experts of a token, G groups, B best of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import torch
from torch.nn import functional

from ridgeline.architectures.spec import ExpertsSpec
from ridgeline.distributed.placement import Shard
from ridgeline.errors import InternalError
from ridgeline.kernels.cpu.experts import Route, route, takes_logits
from ridgeline.kernels.cpu.packed_linear import linear
from ridgeline.kernels.grouped_experts import Choice, choose_experts, route_experts
from ridgeline.kernels.small_linear import InputNorm
from ridgeline.layers.linear import Linear, Part
from ridgeline.layers.piece import Vector

# Of the router's product, up to which it and the choice are one launch on a GPU: few tokens.
MOST_NUMBERS = 1 << 11
LEAST_SUM = 1e-20  # of weights that are divided by their sum


class Routes(NamedTuple):
    """`shared_T1`: the weight of shared experts that are a feed-forward of their own; None: one."""

    weights_TA: torch.Tensor
    experts_TA: torch.Tensor
    shared_T1: torch.Tensor | None = None


class Router:
    """`name(role)` is the checkpoint name of a tensor of this layer. The gate of the shared experts
    reads the same states, so it is one more row of the same product.

    `deterministic`: no sum is left to a kernel that may add in another order for other tokens.
    `slices`: so many experts behind the others are the shared ones, which every token goes to.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        name: Callable[[str], str],
        linear: Callable[..., Linear],
        *,
        deterministic: bool = False,
        slices: int = 0,
    ) -> None:
        self.spec, self.slices = spec, slices
        bias = name("router_bias") if spec.router_bias else None
        rows = [Part(name("router"), bias, Shard(0, spec.num_experts))]
        if spec.shared_gate:
            rows.append(Part(name("shared_score"), None, Shard(0, 1)))
        self.linear = linear(rows, hidden_size)
        weight = next(iter(self.linear.parameters.values()))
        self.score_bias: Vector | None = None
        if spec.score_bias:
            self.score_bias = Vector(name("score_bias"), Shard(0, spec.num_experts), weight.device)
        is_wide = spec.float32_scores and weight.dtype != torch.float32 and not deterministic
        self._logits = self._in_float32 if is_wide else self.linear
        self._score = _softmax if spec.scoring == "softmax" else _sigmoid
        self._sum = _sum_in_order if deterministic else _sum
        self._choice = self._one_launch()
        self._rules = None if deterministic else self._native()
        is_bare = bias is None and not spec.shared_gate
        self._most_tokens = MOST_NUMBERS // spec.num_experts if is_bare else 0
        if deterministic or self._choice is None:
            self._most_tokens = 0

    def _one_launch(self) -> Choice | None:
        """What a kernel chooses by, where one does."""
        spec = self.spec
        device = next(iter(self.linear.parameters.values())).device
        if device.type != "cuda" or spec.num_groups > 1:
            return None
        bias_X = None if self.score_bias is None else self.score_bias.values
        return Choice(
            spec.num_experts,
            spec.num_active,
            is_sigmoid=spec.scoring != "softmax",
            renormalize=spec.renormalize,
            scale=spec.weight_scale,
            bias_X=bias_X,
            in_float32=spec.float32_scores,
            shared=self.slices,
        )

    def _native(self) -> Route | None:
        """The same for the native kernels of a CPU."""
        spec = self.spec
        if next(iter(self.linear.parameters.values())).device.type != "cpu" or self.slices:
            return None
        return Route(
            spec.num_experts,
            spec.num_active,
            is_sigmoid=spec.scoring != "softmax",
            renormalize=spec.renormalize,
            scale=spec.weight_scale,
            num_groups=spec.num_groups,
            num_active_groups=spec.num_active_groups,
            group_best=spec.group_best,
            bias_X=None if self.score_bias is None else self.score_bias.values,
            has_shared=spec.shared_gate,
        )

    def takes_norm(self, num_tokens: int) -> bool:
        """`route_normed` of so many tokens is one launch."""
        return 0 < num_tokens <= self._most_tokens

    def route(self, x_TE: torch.Tensor) -> Routes:
        if self._choice is not None and self.takes_norm(len(x_TE)):
            weight_XE = self.linear.parameters["weight"]
            return Routes(*route_experts(x_TE, weight_XE, self._choice)[:2])
        return self.choose(self._logits(x_TE))

    def route_normed(self, x_TE: torch.Tensor, norm: InputNorm) -> tuple[Routes, torch.Tensor]:
        """Of the normed x, and that itself, where `takes_norm` says so."""
        if (choice := self._choice) is None:
            raise InternalError("no kernel chooses by this rule")
        weight_XE = self.linear.parameters["weight"]
        weights_TA, experts_TA, normed_TE = route_experts(x_TE, weight_XE, choice, norm)
        return Routes(weights_TA, experts_TA), normed_TE

    def _in_float32(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The product of the serving dtype's numbers, which is not rounded to it."""
        bias_X = self.linear.added_bias_O
        packed = self.linear.format.packed(self.linear.parameters)
        if packed is not None:
            logits_TX = torch.empty(len(x_TE), packed.outputs, dtype=torch.float32)
            return linear(x_TE, packed, bias_N=bias_X, out_MO=logits_TX)
        weight_XE = self.linear.format.dequantize(self.linear.parameters)
        bias_X = None if bias_X is None else bias_X.float()
        return functional.linear(x_TE.float(), weight_XE.float(), bias_X)

    def choose(self, logits_TX: torch.Tensor) -> Routes:
        """Of the router's product, which has one more column where there is a gate."""
        spec, shared_T1 = self.spec, None
        if self._rules is not None and takes_logits(logits_TX):
            return Routes(*route(logits_TX, self._rules))
        if spec.shared_gate:
            shared_T1 = logits_TX[:, -1:].sigmoid()
            logits_TX = logits_TX[:, :-1]
        if self._choice is not None:
            weights_TA, experts_TA = choose_experts(logits_TX, self._choice)
            if self.slices and shared_T1 is not None:
                weights_TA[:, spec.num_active :] = shared_T1
            return Routes(weights_TA, experts_TA, None if self.slices else shared_T1)
        scores_TX = self._score(logits_TX)
        choice_TX = scores_TX
        if self.score_bias is not None:
            choice_TX = scores_TX + self.score_bias.values
        if spec.num_groups > 1:
            choice_TX = _of_best_groups(choice_TX, spec)
        weights_TA, experts_TA = choice_TX.topk(spec.num_active, dim=-1)
        if choice_TX is not scores_TX:
            weights_TA = scores_TX.gather(1, experts_TA)
        if spec.renormalize:
            weights_TA = weights_TA / self._sum(weights_TA).clamp_min(LEAST_SUM)
        if spec.weight_scale != 1.0:
            weights_TA = weights_TA * spec.weight_scale
        if not self.slices:
            return Routes(weights_TA, experts_TA, shared_T1)
        shared = torch.arange(self.slices, device=experts_TA.device) + spec.num_experts
        ones_T1 = weights_TA.new_ones(len(weights_TA), 1)
        every_TS = (ones_T1 if shared_T1 is None else shared_T1).expand(-1, self.slices)
        return Routes(
            torch.cat((weights_TA, every_TS.to(weights_TA.dtype)), 1),
            torch.cat((experts_TA, shared.expand(len(experts_TA), -1)), 1),
        )

    def parts(self) -> list[Linear | Vector]:
        """All that holds parameters."""
        return [self.linear] if self.score_bias is None else [self.linear, self.score_bias]


def _softmax(logits_TX: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits_TX, dim=-1, dtype=torch.float32)


def _sigmoid(logits_TX: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(logits_TX.float())


def _sum(weights_TA: torch.Tensor) -> torch.Tensor:
    """[T, 1]"""
    return weights_TA.sum(-1, keepdim=True)


def _sum_in_order(weights_TA: torch.Tensor) -> torch.Tensor:
    return reduce(torch.add, torch.unbind(weights_TA, -1)).unsqueeze(-1)


def _of_best_groups(choice_TX: torch.Tensor, spec: ExpertsSpec) -> torch.Tensor:
    """The same with minus infinity for experts of other groups. A group is as good as the sum of
    its best `group_best` experts."""
    each_TGX = choice_TX.reshape(len(choice_TX), spec.num_groups, -1)
    best_TGB = each_TGX.topk(spec.group_best, dim=-1).values
    groups = best_TGB.sum(-1).topk(spec.num_active_groups, dim=-1).indices
    left_out_TG = torch.ones_like(each_TGX[..., 0], dtype=torch.bool).scatter_(1, groups, False)
    return each_TGX.masked_fill(left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)
