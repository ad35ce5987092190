"""A few of many feed-forwards per token, weighted by a router.

Router weights are a softmax over all experts in float32, then the best `num_active` of them,
made to sum to one. Only experts that have tokens are computed.
Letters: T tokens, E hidden, X experts, A active experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch

from ridgeline.architectures.spec import DenseSpec, ExpertsSpec
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.layers.feed_forward import FeedForward
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear, Part


class Experts:
    """`name(role, expert)` is the checkpoint name of a tensor of this layer; each expert is
    split over the ranks like a dense feed-forward, and the sums meet once.

    `deterministic`: what a token gets does not depend on the others. Its experts are added in the
    order of their numbers in any case; here no sum is left to a kernel that may cut it otherwise.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        name: Callable[..., str],
        linear: Callable[..., Linear],
        router_linear: Callable[..., Linear],
        placement: Placement,
        *,
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.deterministic = deterministic
        self.router = router_linear(
            [Part(name("router"), None, Shard(0, spec.num_experts))], hidden_size
        )
        dense = DenseSpec(spec.intermediate_size, spec.activation)
        self.experts = [
            FeedForward(dense, hidden_size, partial(name, expert=expert), linear, placement)
            for expert in range(spec.num_experts)
        ]

    def __call__(
        self, hidden: Hidden, norm: RMSNorm | None, norm_out: RMSNorm | None = None
    ) -> None:
        """Adds what the experts make of the normed states, and its own norm of that."""
        hidden.add(self.of(hidden.normed(norm)), norm_out)

    def of(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E], with nothing around it."""
        weights_TA, experts_TA = self._route(x_TE)
        active = self.spec.num_active
        order = experts_TA.view(-1).argsort(stable=True)
        counts = torch.bincount(experts_TA.view(-1), minlength=self.spec.num_experts).tolist()
        weights = weights_TA.view(-1).index_select(0, order).unsqueeze(1)
        tokens = order.div_(active, rounding_mode="floor")
        out_TE = torch.zeros_like(x_TE)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(begin, begin + count)
                self._add(expert, x_TE, tokens[rows], weights[rows], out_TE)
                begin += count
        return out_TE

    def _route(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights_TX = torch.softmax(self.router(x_TE), dim=-1, dtype=torch.float32)
        weights_TA, experts_TA = weights_TX.topk(self.spec.num_active, dim=-1)
        if self.spec.renormalize:
            weights_TA = weights_TA / self._sum(weights_TA)
        return weights_TA, experts_TA

    def _sum(self, weights_TA: torch.Tensor) -> torch.Tensor:
        """[T, 1]"""
        if self.deterministic:
            return reduce(torch.add, torch.unbind(weights_TA, -1)).unsqueeze(-1)
        return weights_TA.sum(-1, keepdim=True)

    def _add(
        self,
        expert: int,
        x_TE: torch.Tensor,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        out_TE: torch.Tensor,
    ) -> None:
        every_token = tokens.shape[0] == x_TE.shape[0]  # sorted and distinct, hence all in order
        x = x_TE if every_token else x_TE.index_select(0, tokens)
        y = (self.experts[expert].of(x) * weights).to(x_TE.dtype)
        if every_token:
            out_TE.add_(y)
        elif self.deterministic:
            out_TE.index_copy_(0, tokens, out_TE.index_select(0, tokens).add_(y))
        else:
            out_TE.index_add_(0, tokens, y)

    @property
    def linears(self) -> list[Linear]:
        return [self.router, *(linear for e in self.experts for linear in e.linears)]
