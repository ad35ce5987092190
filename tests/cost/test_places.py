"""Memory tiers and what attention moves between them."""

from __future__ import annotations

import pytest

from ridgeline.cost.hardware import catalogue
from tests.cost.attention_traffic import tiled_traffic, written_out_traffic
from tests.cost.hierarchy import ON_CHIP, tiers


def test_every_tier_is_larger_and_slower_than_the_one_before() -> None:
    for device in catalogue().values():
        found = tiers(device)
        sizes = [tier.capacity_bytes for tier in found if tier.capacity_bytes is not None]
        if device.name in ON_CHIP:
            assert found[0].name == "on chip"
            sizes = sizes[1:]  # the last cache may be smaller than all of the chip's together
        speeds = [tier.bytes_per_s for tier in found if tier.bytes_per_s]
        assert sizes == sorted(sizes), device.name
        assert speeds == sorted(speeds, reverse=True), device.name


def test_structures_are_of_devices_in_the_catalogue() -> None:
    assert ON_CHIP.keys() <= catalogue().keys()


@pytest.mark.parametrize(("tokens", "width", "chip"), [(1000, 64, 50_000), (5000, 128, 100_000)])
def test_tiles_counted_one_by_one(tokens: int, width: int, chip: int) -> None:
    tile, moved = chip // (4 * width), 0
    for start in range(0, tokens, tile):
        rows = min(tile, tokens - start)
        moved += 2 * rows * width  # this tile's keys and values
        moved += 3 * tokens * width  # queries in, results in and out
    assert tiled_traffic(tokens, width, chip) == moved
    assert moved < written_out_traffic(tokens, width) < 4.5 * tokens * tokens
