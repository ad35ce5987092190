"""The bugs that `make mutants` plants still have their places in the code."""

from __future__ import annotations

import pytest

from tools.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_has_one_place(mutant: Mutant) -> None:
    text = (ROOT / "ridgeline" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, mutant.old
    assert mutant.new != mutant.old


def test_each_mutant_is_named_once() -> None:
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
