"""Which layers deserve more bits, when all together may take so many bytes?"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.errors import ConfigError


def choose(
    costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int
) -> tuple[int, ...]:
    """For each layer the index of one of its options, such that their sizes sum to at most
    `budget` and their costs (taken to add up) to little.

    All begin with their smallest option; then, again and again, the step that saves most cost for
    a byte is taken of those that still fit. ConfigError if the smallest ones exceed the budget.
    """
    chosen = [min(range(len(of)), key=of.__getitem__) for of in sizes]
    used = sum(of[at] for of, at in zip(sizes, chosen, strict=True))
    if used > budget:
        raise ConfigError(
            f"the fewest bits of every layer take {used} bytes, more than the {budget} allowed;"
            " allow more"
        )
    while True:
        best, step = 0.0, None
        for layer, at in enumerate(chosen):
            for option, size in enumerate(sizes[layer]):
                more, less = size - sizes[layer][at], costs[layer][at] - costs[layer][option]
                if 0 < more <= budget - used and less / more > best:
                    best, step = less / more, (layer, option)
        if step is None:
            return tuple(chosen)
        layer, option = step
        used += sizes[layer][option] - sizes[layer][chosen[layer]]
        chosen[layer] = option
