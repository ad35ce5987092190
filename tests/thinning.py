"""Which cases of a grid of parameters does `make test` run?

As few as have every value (the mark `every_value`), or every pair of values (`every_pair`), that
the whole grid has; the others become slow, so `make test-full` runs them. A GPU runs them all.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

WIDTHS = {"every_value": 1, "every_pair": 2}  # values of a case that have to occur together
IS_THINNED = os.environ.get("RIDGELINE_TEST_DEVICE", "cpu") == "cpu"
# The marks of a parameter that `make test` leaves out.
SELDOM: pytest.MarkDecorator | tuple[()] = pytest.mark.slow if IS_THINNED else ()


def covering(cases: Sequence[Mapping[str, Hashable]], width: int) -> list[int]:
    """The numbers of cases that together have all that any `width` values of one case are: always
    the one that adds most; of equally good ones that whose values are the rarest so far, or the
    first, whichever ends with fewer."""
    return min((_greedy(cases, width, spreads) for spreads in (True, False)), key=len)


def _greedy(cases: Sequence[Mapping[str, Hashable]], width: int, spreads: bool) -> list[int]:
    parts = [set(combinations(sorted(case.items()), min(width, len(case)))) for case in cases]
    left, chosen = set().union(*parts), list[int]()
    seen = Counter[tuple[str, Hashable]]()

    def worth(i: int) -> tuple[int, int]:
        rarity = -sum(seen[value] for value in cases[i].items())
        return len(parts[i] & left), rarity if spreads else 0

    while left:
        best = max(range(len(cases)), key=worth)
        left -= parts[best]
        seen.update(cases[best].items())
        chosen.append(best)
    return sorted(chosen)


def thin_out(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what the grids can do without. What is slow already covers nothing."""
    if not IS_THINNED:
        return
    for name, width in WIDTHS.items():
        grids: dict[str, list[pytest.Function]] = defaultdict(list)
        for item in items:
            if not isinstance(item, pytest.Function) or item.get_closest_marker(name) is None:
                continue
            if item.get_closest_marker("slow") is None:
                grids[item.nodeid.split("[")[0]].append(item)
        for grid in grids.values():
            kept = covering([_values(item) for item in grid], width)
            for i, item in enumerate(grid):
                if i not in kept:
                    item.add_marker(pytest.mark.slow)


def slow(*values: Any) -> list[Any]:
    """Values of a parameter that `make test` leaves to `make test-full`."""
    return [pytest.param(value, marks=SELDOM) for value in values]


def _values(item: pytest.Function) -> dict[str, str]:
    return {name: repr(value) for name, value in item.callspec.params.items()}
