"""Which experts change ranks, and when do they stay where they are?"""

from __future__ import annotations

import random

import pytest

from ridgeline.architectures import read_spec
from ridgeline.cost.constants import default_calibration
from ridgeline.cost.expert_placement import (
    HORIZON_S,
    ExchangePrice,
    exchange_price,
    group_loads,
    worthwhile,
)
from ridgeline.cost.setup import Layout, Setup
from ridgeline.costing import unknown_device
from tests.tiny_model import tiny_config

FREE = ExchangePrice(token_s=1e-6, exchange_s=0.0)


def exchanged(groups: list[int], pairs: list[tuple[int, int]]) -> list[int]:
    after = list(groups)
    for one, other in pairs:
        assert after[one] != after[other]
        after[one], after[other] = after[other], after[one]
    return after


@pytest.mark.parametrize("num_groups", [2, 3, 8])
def test_the_fullest_group_gets_less(num_groups: int) -> None:
    rng = random.Random(num_groups)
    tokens = [int(10000 * rng.paretovariate(1.2)) for _ in range(48)]
    tokens.sort(reverse=True)  # the worst that there is: the busiest are all in one group
    groups = [expert * num_groups // 48 for expert in range(48)]
    pairs = worthwhile(tokens, groups, num_groups, FREE, 1.0)
    after = exchanged(groups, pairs)
    assert sorted(after) == sorted(groups)  # as many in each
    before, now = (group_loads(tokens, one, num_groups) for one in (groups, after))
    assert sum(now) == sum(before)
    least = max(sum(tokens) / num_groups, max(tokens))  # no placement is better
    assert max(now) < 0.85 * max(before)
    assert max(now) < 1.25 * least


def test_chance_moves_nothing() -> None:
    rng = random.Random(1)
    tokens = [0] * 16
    for _ in range(20000):
        tokens[rng.randrange(16)] += 1
    assert not worthwhile(tokens, [expert // 4 for expert in range(16)], 4, FREE, 1.0)
    assert not worthwhile([0] * 16, [expert // 4 for expert in range(16)], 4, FREE, 1.0)


def test_an_exchange_has_to_pay() -> None:
    """Both busy experts are in one group, which saves 500 tokens a second: the exchange may take as
    long as these do within the horizon."""
    tokens, groups, elapsed_s = [5000, 5000, 1000, 1000], [0, 0, 1, 1], 8.0
    worth_s = (10000 - 6000) * 1e-6 * HORIZON_S / elapsed_s
    cheap, dear = (ExchangePrice(1e-6, worth_s * factor) for factor in (0.99, 1.01))
    assert len(worthwhile(tokens, groups, 2, cheap, elapsed_s)) == 1
    assert not worthwhile(tokens, groups, 2, dear, elapsed_s)


def test_price_follows_from_the_set_up() -> None:
    """A token of an expert takes at least its multiplications, and an exchange its bytes."""
    config = tiny_config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    spec = read_spec(config | {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 256})
    device = unknown_device("", is_cpu=True, threads=1, memory_bytes=1 << 34)
    setup = Setup(spec, device, Layout(tp=2, ep=2), calibration=default_calibration(device))
    small, large = exchange_price(setup, 1 << 20), exchange_price(setup, 1 << 26)
    flops = 2 * 3 * 1024 * 2048
    assert (
        flops / device.peak_flops["bf16"]
        <= small.token_s
        <= 4 * flops / min(device.peak_flops.values())
    )
    assert small.token_s == large.token_s
    assert large.exchange_s > 2 * (1 << 26) / device.host_link_bytes_per_s
    assert 30 < large.exchange_s / small.exchange_s < 65
