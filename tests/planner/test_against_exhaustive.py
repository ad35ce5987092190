"""How good is the planner's choice beside the best of all candidates, each simulated?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.exhaustive import CASES, GRID, Case, compare, table


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_goodput_per_dollar_is_close_to_the_best(case: Case) -> None:
    found = compare(case)
    print(table([found]))
    assert found.ratio >= 0.9


def test_a_small_case_of_it() -> None:
    grid = replace(GRID, token_budgets=(512,), batch_limits=(8, 32))
    found = compare(replace(CASES[1], rate=4), grid)
    print(table([found]))
    assert found.ratio >= 0.9
