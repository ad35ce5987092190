"""The hidden states between the parts of a decoder, and what is still to be added to them.

A part leaves what it adds as `partial_TE`, so that the sum and the norm in front of the next part
are one kernel; or a product adds it in place, where it can. Letters: T tokens, R of them, E hidden.
"""

from __future__ import annotations

import torch

from ridgeline.kernels.small_linear import Fusion
from ridgeline.layers.norm import RMSNorm


class Hidden:
    __slots__ = ("partial_TE", "sum_TE")

    def __init__(self, sum_TE: torch.Tensor) -> None:
        self.sum_TE = sum_TE
        self.partial_TE: torch.Tensor | None = None

    def normed(self, norm: RMSNorm | None) -> torch.Tensor:
        """[T, E], of the whole sum; without a norm the sum itself."""
        if norm is None:
            return self.whole()
        partial_TE, self.partial_TE = self.partial_TE, None
        return norm.of_sum(partial_TE, self.sum_TE)

    def unnormed(self, norm: RMSNorm, *, is_gated: bool = False) -> tuple[torch.Tensor, Fusion]:
        """x, and what makes the normed states of it, for a product that takes both; nothing is
        changed here."""
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
        if self.partial_TE is not None:
            some.partial_TE = self.partial_TE[num_new - 1 :: num_new]
        return some

    def keep(self, logits_indices_R: torch.Tensor) -> None:
        """These tokens alone, from here on."""
        if not len(logits_indices_R):  # no kernel for nothing
            self.sum_TE, self.partial_TE = self.sum_TE[:0], None
            return
        self.sum_TE = self.sum_TE.index_select(0, logits_indices_R)
        if self.partial_TE is not None:
            self.partial_TE = self.partial_TE.index_select(0, logits_indices_R)

    def add(self, y_TE: torch.Tensor, norm: RMSNorm | None = None) -> None:
        """y, or its norm, is still to be added."""
        self.whole()
        self.partial_TE = y_TE if norm is None else norm(y_TE)

    def whole(self) -> torch.Tensor:
        """[T, E], nothing pending any more."""
        if self.partial_TE is not None:
            self.sum_TE.add_(self.partial_TE)
            self.partial_TE = None
        return self.sum_TE
