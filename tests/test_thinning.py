"""Does a thinned grid of parameters have every value, or every pair, that the whole one has?"""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.thinning import covering

GRID = [
    {"kind": kind, "size": size, "twice": twice, "dtype": dtype}
    for kind, size, twice, dtype in product("abcde", (1, 7, 64), (False, True), ("half", "single"))
]
HOLES = [case for case in GRID if case["kind"] != "c" or case["size"] != 7]


@pytest.mark.parametrize("cases", [GRID, HOLES, GRID[:1]], ids=["grid", "holes", "one"])
@pytest.mark.parametrize(("width", "most"), [(1, 5), (2, 17), (9, 60)])
def test_all_that_the_grid_has_is_left(
    cases: list[dict[str, str | int]], width: int, most: int
) -> None:
    def parts(some: list[dict[str, str | int]]) -> set[tuple[tuple[str, str | int], ...]]:
        return {part for case in some for part in combinations(case.items(), min(width, 4))}

    chosen = covering(cases, width)
    assert parts([cases[i] for i in chosen]) == parts(cases)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= most


def test_values_that_are_kept_more_than_once_are_spread() -> None:
    chosen = covering([{"kind": k, "size": s} for k, s in product("abcdef", (1, 2, 3))], 1)
    assert [i % 3 for i in chosen] == [0, 1, 2, 0, 1, 2]
