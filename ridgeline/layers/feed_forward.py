"""down(act(gate(x)) * up(x)), with gate and up as one product; or down(act(up(x))).

Letters: T tokens, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline.architectures.spec import DenseSpec
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.kernels.silu_mul import ACTIVATIONS
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear, Part


class FeedForward:
    """`name(role)` is the checkpoint name of a tensor of this layer. `inner`: those of its inner
    numbers that this one has; None: the share of this rank, in whole `unit`s."""

    def __init__(
        self,
        spec: DenseSpec,
        hidden_size: int,
        name: Callable[[str], str],
        linear: Callable[..., Linear],
        placement: Placement,
        *,
        unit: int = 1,
        inner: Shard | None = None,
    ) -> None:
        inner = inner or placement.shard(spec.intermediate_size, "intermediate_size", unit)

        def part(role: str, rows: Shard) -> Part:
            return Part(name(role), name(f"{role}_bias") if spec.bias else None, rows)

        self.activation = spec.activation
        roles = ("gate", "up") if spec.gated else ("up",)
        self.gate_up = linear([part(role, inner) for role in roles], hidden_size)
        self.down = linear(
            [part("down", Shard(0, hidden_size))], spec.intermediate_size, columns=inner
        )

    def __call__(
        self, hidden: Hidden, norm: RMSNorm | None, norm_out: RMSNorm | None = None
    ) -> None:
        """Adds what the layer makes of the normed states, and its own norm of that."""
        later = self.activation == "silu" and self.down.gates_input(hidden.sum_TE)
        inner_TF = self.gate_up.of_normed(hidden, norm, None if later else self.activation)
        self.down.add_to(hidden, inner_TF, of_gated=later, norm=norm_out)

    def of(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E], with nothing around it."""
        return self.down(self.gate_up.gated(x_TE, self.activation))

    @property
    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def parts(self) -> list[Linear]:
        """All that holds parameters."""
        return self.linears


class UngatedFeedForward(FeedForward):
    """`gate_up` is up alone."""

    def __call__(
        self, hidden: Hidden, norm: RMSNorm | None, norm_out: RMSNorm | None = None
    ) -> None:
        up_TF = self.gate_up.of_normed(hidden, norm)
        self.down.add_to(hidden, ACTIVATIONS[self.activation](up_TF), norm=norm_out)

    def of(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.down(ACTIVATIONS[self.activation](self.gate_up(x_TE)))
