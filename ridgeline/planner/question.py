"""What is asked of a plan: which model, how much traffic, what is promised, what may be rented."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import Device, Price
from ridgeline.cost.laws import request_seconds
from ridgeline.errors import ConfigError

ATTAINMENT = 0.95  # share of requests that must get what was promised
MAX_LOAD = 0.8  # of saturation: the tail of waiting times grows as 1 / (1 - load)
SPREAD = 0.5  # lengths vary by so much around their mean
LENGTH_STEP = 256  # max_model_len is a multiple of it


@dataclass(frozen=True, slots=True)
class Offer:
    """A device that may be used. `price` per hour, None: unknown. Without a calibration its
    efficiency is assumed."""

    device: Device
    price: Price | None
    calibration: Calibration | None = None

    @property
    def per_hour(self) -> float | None:
        return None if self.price is None else self.price.mid


def offer(device: Device, dollars: float | None = None, record: Calibration | None = None) -> Offer:
    """At the catalogue's price, or at one that the person typed."""
    if dollars is None:
        return Offer(device, device.rent, record)
    if not 0 <= dollars < inf:
        raise ConfigError(f"the price of {device.name} is {dollars:g}; it must be 0 or more")
    return Offer(device, Price(dollars, dollars, dollars, "user", "typed", ""), record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`rate` requests a second of `num_input` and `num_output` tokens on average; each is promised
    a first token within `ttft_s` and the others at a mean distance of `tpot_s`. `budget` is dollars
    an hour for everything. `include_unserved`: also what this version cannot serve yet."""

    model: str
    spec: ModelSpec
    rate: float
    num_input: int
    num_output: int
    ttft_s: float
    tpot_s: float
    offers: tuple[Offer, ...]
    budget: float | None = None
    include_unserved: bool = False

    def __post_init__(self) -> None:
        for name in ("rate", "num_input", "num_output", "ttft_s", "tpot_s"):
            value = getattr(self, name)
            if not 0 < value < inf:
                raise ConfigError(f"{name} is {value:g}; it must be above 0")
        if self.budget is not None and not self.budget > 0:
            raise ConfigError(f"a budget of {self.budget:g} dollars an hour buys nothing")
        if not self.offers:
            raise ConfigError("there is no device to choose from")
        longest = self.spec.max_position_embeddings
        if self.num_input + self.num_output > longest:
            raise ConfigError(
                f"{self.num_input} + {self.num_output} tokens are more than the model's context of "
                f"{longest}"
            )

    @property
    def spread(self) -> float:
        """Lengths vary by this share around their means, as far as the model's context allows."""
        room = self.spec.max_position_embeddings / (self.num_input + self.num_output) - 1
        return min(SPREAD, room)

    @property
    def max_model_len(self) -> int:
        """The longest request that is planned for, in tokens."""
        longest = (1 + self.spread) * (self.num_input + self.num_output)
        whole = LENGTH_STEP * ceil(longest / LENGTH_STEP)
        return min(whole, self.spec.max_position_embeddings)

    @property
    def promised_e2e_s(self) -> float:
        return request_seconds(self.ttft_s, self.tpot_s, self.num_output)


def rate_of_users(users: float, think_s: float, e2e_s: float) -> float:
    """Requests a second of people who ask again `think_s` after each answer (Little's law), when
    answers come as late as promised. A server that carries this rate keeps the promise: were it
    slower than promised, fewer requests would come."""
    if not users > 0 or think_s < 0:
        raise ConfigError("there must be users, who think for 0 or more seconds")
    return users / (think_s + e2e_s)
