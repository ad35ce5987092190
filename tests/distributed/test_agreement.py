"""Is a rank found that has other tokens than the others, as soon as all have said theirs?"""

from __future__ import annotations

import random

import pytest

from ridgeline.distributed.agreement import PERIOD, Agreement, Digest
from ridgeline.step import StepResult


def digests(num_steps: int, wrong_at: int | None = None) -> list[tuple[int, bytes]]:
    """Of random steps, one of them with another token in one row."""
    rng, digest, found = random.Random(5), Digest(), []
    for step_id in range(1, num_steps + 1):
        rows: dict[str, tuple[int, ...]] = {
            f"r{row}": (rng.randrange(1000),) for row in range(rng.randint(0, 5))
        }
        if step_id == wrong_at:
            rows["r0"] = (1000,)
        if (said := digest.add(step_id, StepResult(rows))) is not None:
            found.append((step_id, said))
    return found


def test_digests_are_said_every_so_many_steps_and_never_agree_again() -> None:
    good, bad = digests(3 * PERIOD), digests(3 * PERIOD, wrong_at=PERIOD + 7)
    assert [step_id for step_id, _ in good] == [PERIOD, 2 * PERIOD, 3 * PERIOD]
    assert good == digests(3 * PERIOD)
    assert [one == other for one, other in zip(good, bad, strict=True)] == [True, False, False]


def test_rows_are_told_apart() -> None:
    """The same numbers, by other rows."""
    one: dict[str, tuple[int, ...]] = {"a": (1, 2)}
    two: dict[str, tuple[int, ...]] = {"a": (1,), "b": (2,)}
    assert len({Digest().add(0, StepResult(rows)) for rows in (one, two)}) == 2


@pytest.mark.parametrize(
    ("said", "apart"),
    [
        ("aaaa", ()),
        ("aaba", (2,)),
        ("baaa", (0,)),
        ("abca", (0, 1, 2, 3)),  # half of them are no majority
        ("abab", (0, 1, 2, 3)),
        ("ab", (0, 1)),
    ],
)
def test_who_is_apart(said: str, apart: tuple[int, ...]) -> None:
    agreement = Agreement([range(len(said))])
    order = list(enumerate(said))
    random.Random(3).shuffle(order)
    for rank, word in order[:-1]:
        assert agreement.add(rank, 64, word.encode()) == ()
    rank, word = order[-1]
    assert agreement.add(rank, 64, word.encode()) == apart


def test_groups_and_steps_are_compared_by_themselves() -> None:
    agreement = Agreement([[0, 1], [2, 3]])
    assert not agreement.add(0, 64, b"a")
    assert not agreement.add(2, 64, b"b")
    assert not agreement.add(0, 128, b"c")
    assert not agreement.add(1, 64, b"a")
    assert agreement.add(3, 64, b"a") == (2, 3)
    assert agreement.add(1, 128, b"a") == (0, 1)
    assert agreement.add(4, 128, b"x") == ()  # of a stage without tokens
