"""How do groups of ranks that attend for tokens of their own meet at the experts of each layer?

Ranks of a group are numbered one after the other, those of the first group first. Each step is a
wave: all groups take part, those without a token too. Each layer with experts gathers the tokens of
all groups (first how many: the last layer has only those that need logits), every rank computes its
share of the experts for all of them, and each group keeps the sums of its own. Letters: T tokens of
this group (or of all, after `gather`), E hidden.
"""

from __future__ import annotations

import torch

from ridgeline.distributed.placement import Collective


class Wave:
    """One rank's place in it: of group `group` of `groups`, each of `width` ranks. `collective` is
    that of all ranks."""

    def __init__(self, collective: Collective, rank: int, groups: int, width: int) -> None:
        self.collective, self.rank, self.size = collective, rank, groups * width
        self.group, self.width, self.groups = rank // width, width, groups
        self._counts: list[int] = []  # of the tokens gathered last, by group

    @property
    def own(self) -> slice:
        """Of the gathered tokens."""
        start = sum(self._counts[: self.group])
        return slice(start, start + self._counts[self.group])

    def gather(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Tokens of all groups, in their order."""
        said = self.collective.all_gather(torch.tensor([len(x_TE)]))[:: self.width]
        self._counts = counts = [int(one) for one in said]
        sent_TE = x_TE
        if len(x_TE) < max(counts):
            sent_TE = x_TE.new_zeros(max(counts), x_TE.shape[1])
            sent_TE[: len(x_TE)] = x_TE
        found = self.collective.all_gather(sent_TE)[:: self.width]
        return torch.cat([one[:count] for one, count in zip(found, counts, strict=True)])

    def all_reduce(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.collective.all_reduce(x_TE)
