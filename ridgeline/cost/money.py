"""What does a token cost? Dollars and energy from a price per hour and a rate of tokens.

Prices are bands (low, mid, high): offers for one product differ by more than any error of the
speed model. "Utilisation" is the share of the paid hours in which the rate is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.cost.hardware import Device, Price
from ridgeline.errors import ConfigError

SECONDS_PER_HOUR = 3600.0
HOURS_PER_YEAR = 8760.0
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Band:
    """One figure at the lowest, a middle and the highest price."""

    low: float
    mid: float
    high: float

    def map(self, function: Callable[[float], float]) -> Band:
        return Band(function(self.low), function(self.mid), function(self.high))


def rent_band(device: Device) -> Band | None:
    """Dollars per device and hour over all sources of the catalogue; None: no price is known."""
    price = device.rent
    return None if price is None else price_as_band(price)


def price_as_band(price: Price) -> Band:
    return Band(price.low, price.mid, price.high)


def fixed_price(dollars_per_hour: float) -> Band:
    """A price that the person typed."""
    if dollars_per_hour < 0:
        raise ConfigError(f"a price per hour must be at least 0, not {dollars_per_hour:g}")
    return Band(dollars_per_hour, dollars_per_hour, dollars_per_hour)


def per_million_tokens(
    dollars_per_hour: float, tokens_per_s: float, *, num_devices: int = 1, utilisation: float = 1.0
) -> float:
    """Dollars for a million tokens: price per hour over tokens per hour."""
    _check_rate(tokens_per_s, utilisation)
    tokens_per_hour = tokens_per_s * utilisation * SECONDS_PER_HOUR
    return dollars_per_hour * num_devices / tokens_per_hour * MILLION


def tokens_per_dollar(
    dollars_per_hour: float, tokens_per_s: float, *, num_devices: int = 1, utilisation: float = 1.0
) -> float:
    """The same the other way round. ConfigError for a price of zero."""
    if dollars_per_hour <= 0:
        raise ConfigError("tokens per dollar need a price above 0; count the energy at least")
    cost = per_million_tokens(
        dollars_per_hour, tokens_per_s, num_devices=num_devices, utilisation=utilisation
    )
    return MILLION / cost


@dataclass(frozen=True, slots=True)
class SplitCost:
    """Dollars for a million prompt tokens and for a million answer tokens."""

    input_per_million: float
    output_per_million: float

    def request(self, num_input: int, num_output: int) -> float:
        """Dollars for one request."""
        return (num_input * self.input_per_million + num_output * self.output_per_million) / MILLION


def split_cost(
    dollars_per_hour: float,
    input_s_per_token: float,
    output_s_per_token: float,
    *,
    num_devices: int = 1,
    utilisation: float = 1.0,
) -> SplitCost:
    """The price of the time that each kind of token keeps all `num_devices` busy.

    `input_s_per_token` is the busy time that one prompt token adds, `output_s_per_token` that of
    one answer token; over a mix of requests the two parts sum to the whole bill.
    """
    if input_s_per_token < 0 or output_s_per_token < 0 or not 0 < utilisation <= 1:
        raise ConfigError("busy seconds must be at least 0, utilisation in 0 .. 1")
    rate = dollars_per_hour * num_devices / SECONDS_PER_HOUR / utilisation * MILLION
    return SplitCost(rate * input_s_per_token, rate * output_s_per_token)


def kwh_per_million_tokens(
    kilowatts: float, tokens_per_s: float, *, num_devices: int = 1, utilisation: float = 1.0
) -> float:
    """Energy of a million tokens. Hours without use are taken to draw the same power."""
    _check_rate(tokens_per_s, utilisation)
    hours = MILLION / (tokens_per_s * utilisation) / SECONDS_PER_HOUR
    return kilowatts * num_devices * hours


def device_kilowatts(device: Device) -> float:
    """Power of one device with its share of host, network and cooling where that is known."""
    return device.watts / 1000 if device.all_in_kw is None else device.all_in_kw


@dataclass(frozen=True, slots=True)
class Ownership:
    """What one device costs its owner. `hosting` is rack, network and people, paid at all hours."""

    capex: float  # dollars
    kilowatts: float
    dollars_per_kwh: float = 0.12
    hosting_per_hour: float = 0.0
    years: float = 3.0

    @property
    def standing_per_hour(self) -> float:
        """Dollars per hour of its life, used or not."""
        return self.capex / (self.years * HOURS_PER_YEAR) + self.hosting_per_hour

    @property
    def energy_per_hour(self) -> float:
        """Dollars per hour of use."""
        return self.kilowatts * self.dollars_per_kwh

    def per_hour(self, utilisation: float) -> float:
        """Dollars per hour of use, when it is used for this share of all hours."""
        if not 0 < utilisation <= 1:
            raise ConfigError(f"utilisation must be in 0 .. 1, not {utilisation:g}")
        return self.standing_per_hour / utilisation + self.energy_per_hour


@dataclass(frozen=True, slots=True)
class OwnVersusRent:
    """Dollars per hour of use; `break_even` is the utilisation above which owning is cheaper,
    None when renting is cheaper even around the clock."""

    own_per_hour: float
    rent_per_hour: float
    break_even: float | None


def own_versus_rent(owned: Ownership, rent_per_hour: float, *, utilisation: float) -> OwnVersusRent:
    """Owning for its whole life against renting for the hours of use only."""
    saved_per_hour = rent_per_hour - owned.energy_per_hour
    break_even = owned.standing_per_hour / saved_per_hour if saved_per_hour > 0 else None
    if break_even is not None and break_even > 1:
        break_even = None
    return OwnVersusRent(owned.per_hour(utilisation), rent_per_hour, break_even)


def requests_to_pay(dollars_per_hour: float, request_dollars: float) -> float:
    """Requests an hour from which devices that are paid by the hour cost less than an offer that
    takes so much for each request; infinite where requests are free."""
    if dollars_per_hour < 0 or request_dollars < 0:
        raise ConfigError("a price per hour and a price per request must be at least 0")
    return dollars_per_hour / request_dollars if request_dollars else math.inf


def _check_rate(tokens_per_s: float, utilisation: float) -> None:
    if not tokens_per_s > 0:
        raise ConfigError(f"tokens per second must be above 0, not {tokens_per_s:g}")
    if not 0 < utilisation <= 1:
        raise ConfigError(f"utilisation must be in 0 .. 1, not {utilisation:g}")
