"""Is every figure written with its unit, without an exponent, and never finer than it is known?"""

from __future__ import annotations

import pytest

from ridgeline.figures import count, fixed, memory, number, percent, scaled, seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (2.17e-19, "0"),  # what rounding leaves of a sum
        (-2.78e-17, "0"),
        (2.45e-9, "< 0.1 us"),
        (9.9e-8, "< 0.1 us"),
        (5.31e-7, "0.531 us"),
        (9.996e-4, "1 ms"),
        (0.0548, "54.8 ms"),
        (-0.0031, "-3.1 ms"),
        (0.99961, "1 s"),
        (48.0, "48 s"),
        (4130.2, "4,130 s"),
    ],
)
def test_times(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-9, "< 0.0001"),
        (-1e-9, "0"),
        (0.00037612, "0.000376"),
        (45.64, "45.6"),
        (999.7, "1,000"),
        (2513.4, "2,513"),
        (321234.0, "321,200"),
        (1e12, "1,000,000,000,000"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_columns_say_what_is_too_small_for_them() -> None:
    assert [fixed(value, 3) for value in (0.0, 0.0004, 0.0006, 22748.8634)] == [
        *("0.000", "< 0.001", "0.001", "22,748.863")
    ]
    assert fixed(-1e-9, 1) == "0.0"
    assert [percent(value) for value in (0.0, 0.0004, 0.0994, 1.0)] == [
        *("0.0 %", "< 0.1 %", "9.9 %", "100.0 %")
    ]
    assert percent(0.004, 0) == "< 1 %"


def test_amounts_have_the_prefix_that_suits() -> None:
    assert scaled(23.8e6, "B") == "23.8 MB"
    assert scaled(999.9e6, "B/s") == "1 GB/s"
    assert scaled(6.17e9, "FLOP/s") == "6.17 GFLOP/s"
    assert scaled(12, "B") == "12 B"
    assert scaled(0.0, "B/s") == "0 B/s"
    assert [count(value) for value in (260_000, 11_899_776, 8.03e9, 999_999)] == [
        *("260 K", "11.9 M", "8.03 B", "1 M")
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (402_653_184, "403 MB (384 MiB)"),
        (42_949_672_960, "42.9 GB (40 GiB)"),
        (327_680, "328 kB (320 KiB)"),
        (999, "999 B"),
    ],
)
def test_memory_is_told_in_both_units(num_bytes: int, text: str) -> None:
    assert memory(num_bytes) == text
