"""Dollars, energy, and owning against renting."""

from __future__ import annotations

import pytest

from ridgeline.cost.hardware import find_device
from ridgeline.cost.money import (
    Band,
    Ownership,
    device_kilowatts,
    fixed_price,
    kwh_per_million_tokens,
    own_versus_rent,
    per_million_tokens,
    rent_band,
    split_cost,
    tokens_per_dollar,
)
from ridgeline.errors import ConfigError


def test_devices_and_idle_hours_multiply_the_price() -> None:
    one = per_million_tokens(3.0, 1000)
    assert per_million_tokens(3.0, 1000, num_devices=8) == pytest.approx(8 * one)
    assert per_million_tokens(3.0, 1000, utilisation=0.25) == pytest.approx(4 * one)
    assert per_million_tokens(3.0, 2000) == pytest.approx(one / 2)


def test_tokens_per_dollar_is_the_inverse() -> None:
    cost = per_million_tokens(2.0, 500, num_devices=4, utilisation=0.5)
    bought = tokens_per_dollar(2.0, 500, num_devices=4, utilisation=0.5)
    assert bought * cost == pytest.approx(1e6)


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_no_tokens_have_no_price(rate: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        per_million_tokens(1.0, rate)
    with pytest.raises(ConfigError, match="above 0"):
        kwh_per_million_tokens(1.0, rate)


@pytest.mark.parametrize("utilisation", [0.0, 1.01])
def test_utilisation_is_a_share(utilisation: float) -> None:
    with pytest.raises(ConfigError, match="utilisation"):
        per_million_tokens(1.0, 10, utilisation=utilisation)
    with pytest.raises(ConfigError, match="utilisation"):
        split_cost(1.0, 1e-6, 1e-6, utilisation=utilisation)


def test_free_hours_buy_no_tokens_per_dollar() -> None:
    with pytest.raises(ConfigError, match="energy"):
        tokens_per_dollar(0.0, 10)


def test_a_band_comes_from_all_sources_and_keeps_its_order() -> None:
    band = rent_band(find_device("h100-sxm"))
    assert band is not None
    assert band.low <= band.mid <= band.high
    assert band.high > 1.5 * band.low  # offers for one product differ that much
    cost = band.map(lambda price: per_million_tokens(price, 800))
    assert cost.low < cost.mid < cost.high
    assert rent_band(find_device("a10")) is None  # nobody's price is in the catalogue


def test_a_typed_price_is_a_band_of_one_figure() -> None:
    assert fixed_price(2.5) == Band(2.5, 2.5, 2.5)
    with pytest.raises(ConfigError, match="at least 0"):
        fixed_price(-1.0)


def test_input_and_output_shares_sum_to_the_bill() -> None:
    """An hour at 3 $ in which 40 % of the time read 10 M tokens and 60 % wrote 1 M."""
    split = split_cost(3.0, 0.4 * 3600 / 10e6, 0.6 * 3600 / 1e6)
    assert split.request(10_000_000, 1_000_000) == pytest.approx(3.0)
    assert split.output_per_million == pytest.approx(15 * split.input_per_million)


def test_power_includes_host_and_cooling_where_known() -> None:
    assert device_kilowatts(find_device("h100-sxm")) == pytest.approx(1.73)
    assert device_kilowatts(find_device("rtx-4090")) == pytest.approx(0.45)


def test_owning_pays_above_its_break_even() -> None:
    owned = Ownership(capex=30_000, kilowatts=1.7, dollars_per_kwh=0.1, hosting_per_hour=0.2)
    both = own_versus_rent(owned, 3.0, utilisation=0.9)
    assert both.break_even is not None
    assert 0 < both.break_even < 0.9
    assert both.own_per_hour < both.rent_per_hour
    assert owned.per_hour(both.break_even) == pytest.approx(3.0)
    seldom = own_versus_rent(owned, 3.0, utilisation=both.break_even / 2)
    assert seldom.own_per_hour > seldom.rent_per_hour


@pytest.mark.parametrize("rent", [0.1, 1.0])
def test_a_low_rent_is_never_beaten(rent: float) -> None:
    """0.1 $ is below the energy alone; at 1 $ the purchase is not earned back in its years."""
    owned = Ownership(capex=30_000, kilowatts=1.7, dollars_per_kwh=0.1)
    both = own_versus_rent(owned, rent, utilisation=1.0)
    assert both.break_even is None
    assert both.own_per_hour >= both.rent_per_hour
