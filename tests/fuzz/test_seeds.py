"""Do the cases that once went wrong stay right, and a few random ones?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.fuzz import SEEDS, TARGETS, draw, load, run_case

CASES = 300  # for each target


@pytest.mark.parametrize("path", sorted(SEEDS.glob("*/*")), ids=lambda path: path.parent.name)
def test_a_kept_case(path: Path) -> None:
    fault = run_case(load(path.parent.name), path.read_bytes())
    if fault is not None:
        raise fault


@pytest.mark.parametrize("name", TARGETS)
def test_random_cases(name: str) -> None:
    target = load(name)
    for number in range(CASES):
        fault = run_case(target, draw(target, name, 1, number))
        if fault is not None:
            raise AssertionError(f"case {number} of seed 1") from fault
