"""How is a figure written for a person? With its unit, without an exponent, and never finer than
it is known: what is too small to tell from nothing says so."""

from __future__ import annotations

LEAST_S = 1e-7  # about what reading a clock takes
ROUNDING_S = 1e-12  # what is left of sums that should be equal
PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def number(value: float) -> str:
    """Three digits, four of thousands: "0.0123", "45.6", "321,200"; "< 0.0001" below that."""
    if 0 < abs(value) < 1e-4:
        return "< 0.0001" if value > 0 else "0"
    text = f"{value:.3g}"
    return text if abs(float(text)) < 1000 else f"{float(f'{value:.4g}'):,.0f}"


def fixed(value: float, places: int) -> str:
    """So many places after the point, for columns: "0.644"; "< 0.001" below that."""
    least = 10.0**-places
    if 0 < abs(value) < least / 2:
        return f"< {least:.{places}f}" if value > 0 else f"{0:.{places}f}"
    return f"{value:,.{places}f}"


def seconds(value: float) -> str:
    """A time in the unit that suits: "54.8 ms"."""
    if abs(value) < LEAST_S:
        return "< 0.1 us" if value > ROUNDING_S else "0"
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(value) * scale >= 0.9995:
            return f"{number(value * scale)} {unit}"
    return f"{number(value * 1e6)} us"


def percent(share: float, places: int = 1) -> str:
    """A share of 1: "9.9 %"."""
    return f"{fixed(share * 100, places)} %"


def scaled(value: float, unit: str) -> str:
    """An amount with the prefix that suits: "23.8 MB", "2.32 GB/s", "6.17 GFLOP/s"."""
    for prefix, size in PREFIXES:
        if abs(value) >= 0.9995 * size:
            return f"{number(value / size)} {prefix}{unit}"
    return f"{number(value)} {unit}"


def memory(num_bytes: float) -> str:
    """In decimal and in binary units, which differ by up to 10 %: "403 MB (384 MiB)"."""
    for prefix, size, binary in (("G", 1e9, 1 << 30), ("M", 1e6, 1 << 20), ("k", 1e3, 1 << 10)):
        if abs(num_bytes) >= 0.9995 * size:
            name = "Ki" if prefix == "k" else f"{prefix}i"
            return f"{number(num_bytes / size)} {prefix}B ({number(num_bytes / binary)} {name}B)"
    return f"{number(num_bytes)} B"


def count(value: float) -> str:
    """Of parameters, with the words of the field: "11.9 M", "8.03 B"."""
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= 0.9995 * size:
            return f"{number(value / size)} {name}"
    return number(value)
