"""Messages: latency and bytes, by algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.cost.communication import (
    all_reduce_s,
    message_s,
    one_shot_s,
    ring_s,
    two_shot_s,
    wire,
)
from ridgeline.errors import ConfigError
from tests.cost.random_setups import device

RATE, ALPHA = 4.5e11, 5e-6
SMALL, LARGE = 16384.0, 134e6


def test_the_formulas() -> None:
    assert ring_s(8e6, 4, 1e9, 1e-3) == pytest.approx(2 * 3 * 1e-3 + 2 * 3 / 4 * 8e-3)
    assert one_shot_s(8e6, 4, 1e9, 1e-3) == pytest.approx(1e-3 + 3 * 8e-3)
    assert two_shot_s(8e6, 4, 1e9, 1e-3) == pytest.approx(2e-3 + 2 * 3 / 4 * 8e-3)


def test_small_messages_go_in_one_shot_and_large_ones_in_two() -> None:
    assert all_reduce_s(SMALL, 8, RATE, ALPHA) == one_shot_s(SMALL, 8, RATE, ALPHA)
    assert all_reduce_s(LARGE, 8, RATE, ALPHA) == two_shot_s(LARGE, 8, RATE, ALPHA)
    # The latency is nearly all of a decode's message and nearly nothing of a prefill's.
    assert all_reduce_s(SMALL, 8, RATE, ALPHA) < 1.1 * ALPHA
    assert all_reduce_s(LARGE, 8, RATE, ALPHA) > 40 * ALPHA


def test_a_prefill_of_8192_tokens_of_width_8192() -> None:
    """134 MB per all-reduce, 0.67 ms at 350 GB/s over 8 ranks."""
    assert all_reduce_s(8192 * 8192 * 2, 8, 350e9, ALPHA) == pytest.approx(0.67e-3, rel=0.02)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "point_to_point"])
def test_one_rank_needs_no_message(kind: str) -> None:
    assert message_s(kind, 0.0, 1, RATE, ALPHA) == 0.0


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_what_operators_send_is_priced_by_the_same_formulas(ranks: int) -> None:
    size = 1e6
    share = (ranks - 1) / ranks * size
    got = {
        kind: message_s(kind, sent, ranks, RATE, ALPHA)
        for kind, sent in (
            ("all_reduce", 2 * share),
            ("all_gather", share),
            ("all_to_all", share),
            ("point_to_point", size),
        )
    }
    assert got == pytest.approx(
        {
            "all_reduce": all_reduce_s(size, ranks, RATE, ALPHA),
            "all_gather": ALPHA + share / RATE,
            "all_to_all": ALPHA + share / RATE,
            "point_to_point": ALPHA + size / RATE,
        }
    )


def test_without_sight_of_each_other_ranks_form_a_ring() -> None:
    sent = 2 * 7 / 8 * 1e6
    ring = message_s("all_reduce", sent, 8, RATE, ALPHA, is_direct=False)
    assert ring == pytest.approx(ring_s(1e6, 8, RATE, ALPHA))
    assert ring > message_s("all_reduce", sent, 8, RATE, ALPHA)


def test_what_devices_talk_over() -> None:
    h100, consumer = device("h100-sxm"), device("rtx-4090")
    assert wire(h100, 8).bytes_per_s == 450e9  # per direction, not the 900 of both
    assert wire(h100, 8).is_direct
    assert wire(h100, 16).kind == "network"
    assert wire(consumer, 2).kind == "host memory"
    assert 10e9 <= wire(consumer, 2).bytes_per_s <= 20e9
    alone = replace(consumer, host_link_bytes_per_s=0.0, network_bytes_per_s=0.0)
    with pytest.raises(ConfigError, match="no way to talk to each other"):
        wire(alone, 2)


def test_a_pair_may_have_less_than_the_whole_link() -> None:
    """Seven links of 64 GB/s to seven peers: two devices alone use one of them."""
    mi300x = device("mi300x")
    assert wire(mi300x, 2).bytes_per_s == pytest.approx(64e9)
    assert wire(mi300x, 8).bytes_per_s == pytest.approx(448e9)
