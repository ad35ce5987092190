"""How many bits should each layer have? As many as its own rounding, measured, says it needs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ridgeline.compression.stream import Job, Texts, quantize_model
from ridgeline.errors import ConfigError, check

CANDIDATES = (2, 3, 4, 5, 6, 8)
WINDOWS = 8  # of the calibration text that the measurement uses

Say = Callable[[int], None]  # the bits that are measured next


@dataclass(frozen=True, slots=True)
class Advice:
    """`bits` of each layer. `kl`: for each candidate, what each layer alone costs when it is
    rounded to nearest with so many bits, on calibration text."""

    bits: tuple[int, ...]
    kl: dict[int, tuple[float, ...]]
    num_bytes: int
    budget_bytes: int


def advise(job: Job, mean_bits: float, say: Say = lambda bits: None) -> Advice:
    """Bits for each layer so that the layers are no larger than with `mean_bits` each, scales
    counted alike. Measured on the first windows of the calibration text, by rounding one layer
    after the other to nearest; held-out text has no say. ConfigError if the target is out of the
    candidates' range."""
    low, high = CANDIDATES[0], CANDIDATES[-1]
    if not low <= mean_bits <= high:
        raise ConfigError(f"--mixed is {mean_bits} bits; it lies between {low} and {high}")
    kl: dict[int, tuple[float, ...]] = {}
    sizes: dict[int, tuple[int, ...]] = {}
    for bits in CANDIDATES:
        say(bits)
        kl[bits], sizes[bits] = _measured(job, bits)
    layers = range(len(kl[low]))
    options = [tuple(sizes[bits][i] for bits in CANDIDATES) for i in layers]
    costs = [tuple(kl[bits][i] for bits in CANDIDATES) for i in layers]
    # Scales and what is not quantized take the same in each option.
    per_bit = sum(size[-1] - size[0] for size in options) / (high - low)
    budget = round(sum(size[0] for size in options) + per_bit * (mean_bits - low))
    chosen = choose(costs, options, budget)
    total = sum(size[at] for size, at in zip(options, chosen, strict=True))
    return Advice(tuple(CANDIDATES[at] for at in chosen), kl, total, budget)


def _measured(job: Job, bits: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Of each layer: KL alone, bytes."""
    windows_NS = job.texts.calibration_NS[:WINDOWS]
    texts = Texts(windows_NS[:0], windows_NS, torch.ones_like(windows_NS, dtype=torch.bool))
    method = replace(job.method, name="rtn", grid=replace(job.method.grid, bits=bits))
    home = job.out.resolve().parent
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{home}: cannot be made ({error.strerror})") from None
    with tempfile.TemporaryDirectory(prefix=".measured-", dir=home) as folder:
        out = Path(folder) / "model"
        report = quantize_model(replace(job, out=out, method=method, texts=texts, alone=True))
    alone = [one.alone for one in report.layers if one.alone is not None]
    check(len(alone) == len(report.layers), "each layer was measured alone")
    return tuple(one.kl for one in alone), tuple(one.num_bytes for one in report.layers)


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
