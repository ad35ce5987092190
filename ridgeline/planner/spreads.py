"""In which ways can one replica be spread over devices, and what is each good at?

Every layout that divides the model, in closed form: memory of the fullest device, a decode step in
steady state, one prompt alone. With pipeline stages the requests are divided among as many steps
as there are stages, so that no stage waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ridgeline.cost.fit_suggestions import Limits
from ridgeline.cost.memory import needed_items
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Layout
from ridgeline.cost.throughput import decode_shape
from ridgeline.errors import ConfigError

SHARE = 0.9  # of a device's memory that may be taken, as `Limits` has it


@dataclass(frozen=True, slots=True)
class Spread:
    """`memory_bytes` of the fullest device with the caches of all requests; `tpot_s` between two
    tokens of a request, `ttft_s` to read one prompt alone. The rates are of all requests."""

    layout: Layout
    memory_bytes: int
    fits: bool
    tpot_s: float
    ttft_s: float
    tokens_per_s: float
    tokens_a_device: float


def spreads(
    pricers: Iterator[Pricer], batch: int, context: int, max_num_batched_tokens: int
) -> tuple[Spread, ...]:
    """Of setups that differ in their layouts, with `batch` requests of `context` tokens. Those
    whose devices have no way to talk are left out."""
    found = []
    for pricer in pricers:
        layout = pricer.setup.layout
        limits = Limits(
            context + 1,
            batch,
            max(batch, max_num_batched_tokens),
            utilization=SHARE,
            min_sequences=batch,
        )
        try:
            tpot_s = pricer.seconds(decode_shape(-(-batch // layout.pp), context))
            ttft_s = pricer.seconds(((context, 0),))
        except ConfigError:
            continue
        memory = sum(item.bytes for item in needed_items(pricer.setup, limits))
        fits = memory <= SHARE * pricer.setup.device.memory_bytes
        rate = batch / tpot_s
        found.append(Spread(layout, memory, fits, tpot_s, ttft_s, rate, rate / layout.devices))
    return tuple(found)


def is_best(one: Spread, others: Sequence[Spread]) -> bool:
    """No other that fits has both less time between tokens and more tokens for each device."""
    return one.fits and not any(
        other.fits and other.tpot_s < one.tpot_s and other.tokens_a_device > one.tokens_a_device
        for other in others
    )
