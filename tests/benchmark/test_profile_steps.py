"""Does the profile of a step give each kernel its time once, and each product its name?"""

from __future__ import annotations

import pytest

from bench.gpu import profile_steps
from bench.gpu.profile_steps import Launch, profile_of

LAYER = ("_add_norm", "nvjet_tst", "paged_decode", "nvjet_splitK", "_add_norm", "sm90_gemm")
NAMES = ("_step_inputs", *LAYER, "splitKreduce_kernel", "_silu_mul", "stream_linear", "nvjet_head")


def chain(names: tuple[str, ...], us: float, gap: float) -> list[Launch]:
    return [
        Launch(name, at * (us + gap), at * (us + gap) + us) for at, name in enumerate(names * 2)
    ]


def times(launches: list[Launch], num_layers: int = 1) -> dict[str, float]:
    found = profile_of(launches, 2, num_layers)
    return {kind.kind: kind.us for kind in found.kinds} | {"gaps": found.gaps_us}


def test_products_are_told_apart_by_their_place() -> None:
    found = times(chain(NAMES, 3.0, 1.0))
    assert found.pop("gaps") == pytest.approx((2 * len(NAMES) - 1) / 2)
    assert found == {
        "inputs of a step": 3.0,
        "norm": 6.0,
        "qkv": 3.0,
        "attention": 3.0,
        "o": 3.0,
        "gate and up": 6.0,  # with the second half of it
        "SiLU": 3.0,
        "down": 3.0,
        "LM head": 3.0,
    }


def test_unknown_numbers_of_products_stay_products() -> None:
    assert times(chain(NAMES, 3.0, 0.0), num_layers=2)["product"] == 18.0


def test_a_kernel_that_waits_for_another_is_given_what_follows_it() -> None:
    waits = [Launch("stream_linear", 0.0, 10.0), Launch("_silu_mul", 2.0, 13.0)]
    found = profile_of([*waits, Launch("odd", 14.0, 15.0), Launch("odd", 14.5, 14.8)], 1, 1)
    assert {kind.kind: kind.us for kind in found.kinds} == {"product": 10, "SiLU": 3, "other": 1}
    assert (found.gaps_us, found.span_us, found.kernels) == (1.0, 15.0, 4.0)


def test_no_kernel_is_said_and_each_kind_has_its_own_marks() -> None:
    with pytest.raises(SystemExit, match="no kernel"):
        profile_of([], 1, 1)
    marks = [mark for marks in profile_steps.KINDS.values() for mark in marks]
    assert len(marks) == len(set(marks))
    assert all(mark == mark.lower() for mark in marks)
