"""The hidden states between the parts of a decoder, and what is still to be added to them.

A part leaves what it adds as `partial_TE`, so that the sum and the norm in front of the next part
are one kernel; or a product adds it in place, where it can. Letters: T tokens, R of them, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn import functional

from ridgeline.architectures.parts import HEAD
from ridgeline.architectures.spec import NormKind
from ridgeline.distributed.placement import Collective, Placement, Shard
from ridgeline.kernels.rms_norm import add_norm, rms_norm
from ridgeline.kernels.small_linear import Fusion, InputNorm
from ridgeline.layers.piece import Piece


class Hidden:
    """`ranks`: `partial_TE` is still to be summed over them."""

    __slots__ = ("partial_TE", "ranks", "sum_TE")

    def __init__(self, sum_TE: torch.Tensor) -> None:
        self.sum_TE = sum_TE
        self.partial_TE: torch.Tensor | None = None
        self.ranks: Collective | None = None

    def normed(self, norm: RMSNorm | None) -> torch.Tensor:
        """[T, E], of the whole sum; without a norm the sum itself."""
        if norm is None:
            return self.whole()
        ranks = self.ranks
        if ranks is not None and not norm.fuses:
            self._sum_ranks(ranks)
        partial_TE, self.partial_TE = self.partial_TE, None
        if partial_TE is None or ranks is None or not norm.fuses:
            return norm.of_sum(partial_TE, self.sum_TE)
        self.ranks = None
        return ranks.all_reduce_norm(partial_TE, self.sum_TE, norm.weight_E, norm.eps)

    def unnormed(self, norm: RMSNorm, *, is_gated: bool = False) -> tuple[torch.Tensor, Fusion]:
        """x, and what makes the normed states of it, for a product that takes both; nothing is
        changed here but what ranks have still to add up."""
        if self.ranks is not None:
            self._sum_ranks(self.ranks)
        if self.partial_TE is None:
            return self.sum_TE, Fusion(norm=norm.as_input, is_gated=is_gated)
        fusion = Fusion(norm=norm.as_input, is_gated=is_gated, sum_TI=self.sum_TE)
        return self.partial_TE, fusion

    def last_of(self, num_new: int) -> Hidden:
        """The same of the last of each `num_new` tokens alone: views, of which one is to be used,
        not both."""
        if num_new == 1:
            return self
        some = Hidden(self.sum_TE[num_new - 1 :: num_new])
        some.ranks = self.ranks
        if self.partial_TE is not None:
            some.partial_TE = self.partial_TE[num_new - 1 :: num_new]
        return some

    def keep(self, logits_indices_R: torch.Tensor) -> None:
        """These tokens alone, from here on."""
        if not len(logits_indices_R):  # no kernel for nothing
            self.sum_TE, self.partial_TE, self.ranks = self.sum_TE[:0], None, None
            return
        self.sum_TE = self.sum_TE.index_select(0, logits_indices_R)
        if self.partial_TE is not None:
            self.partial_TE = self.partial_TE.index_select(0, logits_indices_R)

    def add(self, y_TE: torch.Tensor, norm: RMSNorm | None = None) -> None:
        """y, or its norm, is still to be added."""
        self.whole()
        self.partial_TE = y_TE if norm is None else norm(y_TE)

    def add_share(self, y_TE: torch.Tensor, ranks: Collective) -> None:
        """The sum of the y of all ranks is still to be added."""
        self.add(y_TE)
        self.ranks = ranks

    def _sum_ranks(self, ranks: Collective) -> None:
        self.ranks = None
        if self.partial_TE is not None:
            self.partial_TE = ranks.all_reduce(self.partial_TE)

    def whole(self) -> torch.Tensor:
        """[T, E], nothing pending any more."""
        if self.ranks is not None:
            self._sum_ranks(self.ranks)
        if self.partial_TE is not None:
            self.sum_TE.add_(self.partial_TE)
            self.partial_TE = None
        return self.sum_TE


class Beside(Hidden):
    """Hidden states to which attention and feed-forward add what they make of the same states,
    normed already; attention asks for its own first."""

    __slots__ = ("_attended_TE", "_fed_TE")

    def __init__(
        self, sum_TE: torch.Tensor, attended_TE: torch.Tensor, fed_TE: torch.Tensor
    ) -> None:
        super().__init__(sum_TE)
        self._attended_TE: torch.Tensor | None = attended_TE
        self._fed_TE = fed_TE

    def normed(self, norm: RMSNorm | None) -> torch.Tensor:
        asked_TE, self._attended_TE = self._attended_TE, None
        return self._fed_TE if asked_TE is None else asked_TE

    def keep(self, logits_indices_R: torch.Tensor) -> None:
        super().keep(logits_indices_R)
        self._fed_TE = self._fed_TE.index_select(0, logits_indices_R)


class RMSNorm:
    """`offset` is added to the weight that was read, and `scale` multiplies the sum."""

    fuses = True  # products take it as what they do to their input

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offset: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self.weight_E = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self.name = name
        self.heir: RMSNorm | None = None  # read before this one, takes its weight over
        self._offset, self._scale = offset, scale

    def finish(self) -> None:
        """Called once, when the weight is in place."""
        self.weight_E.add_(self._offset).mul_(self._scale)
        if self.heir is not None:
            self.heir.weight_E.mul_(self.weight_E)
            self.weight_E.fill_(1.0)

    @property
    def as_input(self) -> InputNorm:
        """For kernels that norm what they read."""
        return InputNorm(self.weight_E, self.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., E] -> [..., E]"""
        return rms_norm(x, self.weight_E, self.eps)

    def of_sum(self, delta_TE: torch.Tensor | None, hidden_TE: torch.Tensor) -> torch.Tensor:
        """The normed sum, [T, E]; `hidden_TE` becomes the sum. None adds nothing."""
        if delta_TE is None:
            return self(hidden_TE)
        return add_norm(delta_TE, hidden_TE, self.weight_E, self.eps)

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight_E]

    def kept(self) -> dict[str, torch.Tensor]:
        """What a later start `adopt`s."""
        return {"weight": self.weight_E}

    def adopt(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Be as the norm that kept this."""
        self.weight_E.copy_(kept["weight"])

    def pieces(self) -> list[Piece]:
        return [Piece(self.name, self.weight_E)]


class LayerNorm(RMSNorm):
    """(x - mean) / deviation * weight, + bias where there is one."""

    fuses = False

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        bias: str | None = None,
        *,
        offset: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        super().__init__(name, size, eps, dtype, device, offset=offset, scale=scale)
        self.bias_name = bias
        self.bias_E = None if bias is None else torch.empty_like(self.weight_E)

    def finish(self) -> None:
        super().finish()
        if self.bias_E is not None:
            self.bias_E.mul_(self._scale)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight_E.shape, self.weight_E, self.bias_E, self.eps)

    def of_sum(self, delta_TE: torch.Tensor | None, hidden_TE: torch.Tensor) -> torch.Tensor:
        return self(hidden_TE if delta_TE is None else hidden_TE.add_(delta_TE))

    def tensors(self) -> list[torch.Tensor]:
        return list(self.kept().values())

    def kept(self) -> dict[str, torch.Tensor]:
        bias = {} if self.bias_E is None else {"bias": self.bias_E}
        return {"weight": self.weight_E, **bias}

    def adopt(self, kept: Mapping[str, torch.Tensor]) -> None:
        super().adopt(kept)
        if self.bias_E is not None:
            self.bias_E.copy_(kept["bias"])

    def pieces(self) -> list[Piece]:
        found = super().pieces()
        if self.bias_name is not None and self.bias_E is not None:
            found.append(Piece(self.bias_name, self.bias_E))
        return found


class SplitRMSNorm(RMSNorm):
    """Of all `num_heads` together, of which this rank has some, and other ranks perhaps the same:
    the squares of all meet in one sum, see `normed_together`."""

    fuses = False

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        heads: Shard,
        num_heads: int,
        placement: Placement,
        offset: float = 0.0,
    ) -> None:
        super().__init__(name, size, eps, dtype, device, offset=offset)
        each = size // heads.length
        self.placement, self._first, self._size = placement, heads.start * each, num_heads * each
        self._is_counted = placement.is_first_of(num_heads)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        return next(normed_together([self], [x_TC]))

    def squares(self, x_TC: torch.Tensor) -> torch.Tensor:
        """[T, 1], what this rank adds to their sum."""
        if not self._is_counted:
            return x_TC.new_zeros(len(x_TC), 1, dtype=torch.float32)
        return x_TC.float().square().sum(-1, keepdim=True)

    def of_squares(self, x_TC: torch.Tensor, squares_T1: torch.Tensor) -> torch.Tensor:
        factor_T1 = torch.rsqrt(squares_T1 / self._size + self.eps)
        return (x_TC.float() * factor_T1 * self.weight_E).to(x_TC.dtype)

    def pieces(self) -> list[Piece]:
        return [Piece(self.name, self.weight_E, 0, self._first)]


def normed_together(
    norms: Sequence[SplitRMSNorm], xs: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Each x by its norm, with one message for all."""
    own_TN = torch.cat([norm.squares(x) for norm, x in zip(norms, xs, strict=True)], -1)
    sums_TN = norms[0].placement.all_reduce(own_TN)
    for norm, x, squares_T1 in zip(norms, xs, torch.split(sums_TN, 1, -1), strict=True):
        yield norm.of_squares(x, squares_T1)


class HeadLayerNorm(LayerNorm):
    """Of each head alone, with weights of its own. `heads`: those of this rank."""

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        heads: Shard,
        offset: float = 0.0,
    ) -> None:
        super().__init__(name, size, eps, dtype, device, offset=offset)
        self.weight_E = torch.empty(heads.length, size, dtype=dtype, device=device)
        self._first = heads.start

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads * size], all in float32 and rounded once."""
        by_head = x.reshape(*x.shape[:-1], *self.weight_E.shape).float()
        normed = functional.layer_norm(by_head, self.weight_E.shape[1:], eps=self.eps)
        return normed.mul_(self.weight_E).flatten(-2).to(x.dtype)

    def pieces(self) -> list[Piece]:
        if HEAD not in self.name:
            return [Piece(self.name, self.weight_E, 0, self._first)]
        heads = enumerate(self.weight_E, self._first)
        return [Piece(self.name.format(head=head), row) for head, row in heads]


def make_norm(
    kind: NormKind,
    role: str,
    name: Callable[[str], str],
    size: int,
    eps: float,
    dtype: torch.dtype,
    device: torch.device,
    *,
    offset: float = 0.0,
    scale: float = 1.0,
) -> RMSNorm:
    """`name(role)` is the checkpoint name of a parameter."""
    if kind == "rms":
        return RMSNorm(name(role), size, eps, dtype, device, offset=offset, scale=scale)
    bias = name(f"{role}_bias") if kind == "layer and bias" else None
    return LayerNorm(name(role), size, eps, dtype, device, bias, offset=offset, scale=scale)
