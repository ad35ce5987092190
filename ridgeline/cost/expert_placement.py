"""Which experts should change ranks, and is that worth the bytes that move?

At the sum of a layer all groups of ranks wait for the fullest one. Two experts of two groups change
places, so that each group keeps as many as it has room for. An exchange pays if the seconds that
the fullest group saves within `HORIZON_S`, at the load of the last while, are more than those of
the bytes; and only if the load is no accident of a few tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from ridgeline.cost.ops import Op, step_ops
from ridgeline.cost.roofline import op_cost
from ridgeline.cost.setup import Setup

HORIZON_S = 600.0  # how long a load is thought to last
CERTAIN = 4.0  # standard deviations of a count of random tokens that a gain has at least
PRICED_TOKENS = 1024  # of a step in which a rank's time for one token of one expert is taken


@dataclass(frozen=True, slots=True)
class ExchangePrice:
    """Seconds of a rank for one token of one expert, and of an exchange of two experts."""

    token_s: float
    exchange_s: float


def exchange_price(setup: Setup, expert_bytes: int) -> ExchangePrice:
    """`expert_bytes`: of all ranks that divide an expert."""
    spec, layout = setup.spec, setup.layout
    ops = step_ops(spec, ((PRICED_TOKENS, 0),), layout, setup.precision, PRICED_TOKENS)
    experts = [op for op in ops if op.name.startswith("experts_")]
    rows = sum(op.count * op.m for op in experts if op.name == "experts_down")
    seconds = sum(op_cost(op, setup.device, setup.constants).expected_s for op in experts)
    width = layout.expert_devices // layout.ep
    sent = expert_bytes / width
    message = Op("exchange", "all_gather", 2 * width, 0, 0, 0, sent, ranks=layout.expert_devices)
    return ExchangePrice(
        seconds / max(rows, 1.0), op_cost(message, setup.device, setup.constants).expected_s
    )


def group_loads(tokens_X: Sequence[int], groups_X: Sequence[int], num_groups: int) -> list[int]:
    """Tokens of each group, by those of its experts."""
    found = [0] * num_groups
    for tokens, group in zip(tokens_X, groups_X, strict=True):
        found[group] += tokens
    return found


def worthwhile(
    tokens_X: Sequence[int],
    groups_X: Sequence[int],
    num_groups: int,
    price: ExchangePrice,
    elapsed_s: float,
) -> list[tuple[int, int]]:
    """Exchanges of experts of one layer, the best first: each takes the load of the fullest group
    and of the emptiest as near to each other as one can. Of these as many as pay most together.
    `tokens_X` came in `elapsed_s`."""
    groups, loads = list(groups_X), group_loads(tokens_X, groups_X, num_groups)
    token_s = price.token_s * HORIZON_S / max(elapsed_s, 1e-9)
    fullest, certain = max(loads), CERTAIN * sqrt(max(loads))
    found: list[tuple[int, int]] = []
    best_s, num = 0.0, 0
    while len(found) < len(groups):
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        pair = _best_pair(tokens_X, groups, full, empty, (loads[full] - loads[empty]) / 2)
        if pair is None:
            break
        groups[pair[0]], groups[pair[1]] = empty, full
        loads = group_loads(tokens_X, groups, num_groups)
        found.append(pair)
        gain = fullest - max(loads)
        saved_s = gain * token_s - len(found) * price.exchange_s
        if saved_s > best_s and gain > certain:
            best_s, num = saved_s, len(found)
    return found[:num]


def _best_pair(
    tokens_X: Sequence[int], groups_X: Sequence[int], full: int, empty: int, wanted: float
) -> tuple[int, int] | None:
    """An expert of each of two groups whose loads differ by what is nearest to `wanted`."""
    there = sorted((tokens_X[x], x) for x, group in enumerate(groups_X) if group == empty)
    best, found = wanted, None  # to move nothing is so far from what is wanted
    for expert in (x for x, group in enumerate(groups_X) if group == full):
        place = bisect_left(there, (tokens_X[expert] - wanted,))
        for tokens, other in there[max(0, place - 1) : place + 1]:
            distance = abs(tokens_X[expert] - tokens - wanted)
            if distance < best:
                best, found = distance, (expert, other)
    return found
