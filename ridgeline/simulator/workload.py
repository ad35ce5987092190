"""What work arrives, and when? Requests as lengths and arrival times; the generators of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from ridgeline.clock import Rng
from ridgeline.errors import ConfigError

HASH_BLOCK_TOKENS = 512  # tokens that one entry of Arrival.prefix_hashes stands for
DEFAULT_REQUESTS = 1000
MAX_REQUESTS = 10_000_000
MAX_LENGTH = 1 << 30
FRESH_TOKEN = 1 << 40  # ids from here on belong to one prompt alone
DEFAULT_CV = 3.0  # of bursty gaps: standard deviation over mean


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: `num_input` prompt tokens at `time_s` from the start, `num_output` answered.

    Equal leading `prefix_hashes` (each of HASH_BLOCK_TOKENS tokens) mean an equal beginning of the
    prompt. `prompt` are its token ids where they are known. An empty `id` is named by its place.
    """

    time_s: float
    num_input: int
    num_output: int
    prefix_hashes: tuple[int, ...] = ()
    id: str = ""
    prompt: tuple[int, ...] = ()
    tenant: bytes = b""
    weight: float = 1.0  # of the tenant

    def tokens(self, index: int) -> tuple[int, ...]:
        """Token ids that make the prefix cache find what the hashes say is shared, and no more.

        A block of cache is found by the hash of all tokens up to its end, so one id may fill a
        whole hash block. What no hash covers is filled with an id of its own: `index` must differ
        between requests.
        """
        if self.prompt:
            return self.prompt
        if not self.prefix_hashes:
            return (FRESH_TOKEN + index,) * self.num_input
        tokens: list[int] = []
        for block_hash in self.prefix_hashes:
            tokens += [block_hash] * min(HASH_BLOCK_TOKENS, self.num_input - len(tokens))
        return (*tokens, *[FRESH_TOKEN + index] * (self.num_input - len(tokens)))


Workload = tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_LENGTH:
            raise ConfigError(
                f"a length of {self.low} to {self.high} tokens: it must be at least 1, at most "
                f"{MAX_LENGTH}, and the lower bound comes first"
            )

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: Rng) -> int:
        return self.low if self.low == self.high else rng.randint(self.low, self.high)


def fixed(num_tokens: int) -> Lengths:
    return Lengths(num_tokens, num_tokens)


Gaps = Callable[[Rng, float], float]  # (rng, rate per second) -> seconds to the next arrival


def _poisson(rng: Rng, rate: float) -> float:
    return rng.gammavariate(1.0, 1.0 / rate)


def _bursty(rng: Rng, rate: float) -> float:
    """Gamma gaps: shape 1 / cv^2 keeps the mean and spreads the gaps (CV 1 would be Poisson)."""
    shape = DEFAULT_CV**-2
    return rng.gammavariate(shape, 1.0 / (rate * shape))


def _uniform(rng: Rng, rate: float) -> float:
    return 1.0 / rate


ARRIVALS: dict[str, Gaps] = {"poisson": _poisson, "bursty": _bursty, "uniform": _uniform}


def generate(
    rng: Rng,
    *,
    rate: float,
    num_requests: int,
    num_input: Lengths,
    num_output: Lengths,
    arrivals: str = "poisson",
) -> Workload:
    """`num_requests` arriving at `rate` a second on average; the same rng state, the same work."""
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise ConfigError(f"{num_requests} requests: it must be 1 to {MAX_REQUESTS}")
    times = islice(arrival_times(rng, rate, arrivals), num_requests)
    return tuple(
        Arrival(when, num_input.draw(rng), num_output.draw(rng), id=str(index))
        for index, when in enumerate(times)
    )


def arrival_times(rng: Rng, rate: float, arrivals: str) -> Iterator[float]:
    """Seconds from the start, without end, at `rate` a second on average. Raises ConfigError."""
    check_rate(rate)
    if arrivals not in ARRIVALS:
        raise ConfigError(f"arrivals {arrivals!r} are unknown; choose from {', '.join(ARRIVALS)}")
    return accumulate(_gaps(ARRIVALS[arrivals], rng, rate))


def _gaps(gap: Gaps, rng: Rng, rate: float) -> Iterator[float]:
    while True:
        yield gap(rng, rate)


def rearranged(workload: Sequence[Arrival], rng: Rng, rate: float, arrivals: str) -> Workload:
    """The same requests in the same order, arriving anew at `rate` a second on average."""
    times = arrival_times(rng, rate, arrivals)
    return tuple(replace(a, time_s=when) for a, when in zip(workload, times, strict=False))


def check_rate(rate: float) -> None:
    """A rate is a positive, finite number of requests a second. Raises ConfigError."""
    if not 0 < rate < float("inf"):
        raise ConfigError(f"the rate is {rate:g} requests a second; it must be above 0 and finite")


def all_at_once(lengths: Iterable[tuple[int, int]]) -> Workload:
    """(prompt, answer) lengths that all arrive at time 0."""
    return tuple(Arrival(0.0, i, o, id=str(n)) for n, (i, o) in enumerate(lengths))


def at_rate(workload: Sequence[Arrival], rate: float) -> Workload:
    """The same requests with all gaps stretched alike, so that they come at `rate` a second."""
    check_rate(rate)
    now = mean_rate(workload)
    if now <= 0:
        raise ConfigError("these requests all arrive at once, so they cannot be given a rate")
    start = workload[0].time_s
    return tuple(replace(a, time_s=(a.time_s - start) * now / rate) for a in workload)


def mean_rate(workload: Sequence[Arrival]) -> float:
    """Requests a second: gaps over the time between first and last; 0 for fewer than two."""
    if len(workload) < 2 or (span := workload[-1].time_s - workload[0].time_s) <= 0:
        return 0.0
    return (len(workload) - 1) / span


def in_order(arrivals: Iterable[Arrival]) -> Workload:
    """By time, counted from the first arrival; each has an id."""
    ordered = sorted(arrivals, key=lambda a: a.time_s)
    start = ordered[0].time_s if ordered else 0.0
    return tuple(
        replace(a, time_s=a.time_s - start, id=a.id or str(n)) for n, a in enumerate(ordered)
    )
