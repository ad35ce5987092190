"""Which laws hold for any server? Little's law, pipelines, static batches, room for caches."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor

from ridgeline.errors import ConfigError


def request_seconds(ttft_s: float, tpot_s: float, num_output: int) -> float:
    """From arrival to the last token. Tokens of one request come one after the other: the time
    between two of them is that of a whole step, however many requests share it."""
    return ttft_s + (num_output - 1) * tpot_s


def in_flight(request_rate: float, e2e_s: float) -> float:
    """Little's law: how many requests are in the system on average."""
    return request_rate * e2e_s


def closed_loop_rate(batch: int, e2e_s: float) -> float:
    """Little's law again: requests per second of `batch` places that are always taken."""
    return batch / e2e_s


def people(requests_in_flight: float, think_time_s: float, e2e_s: float) -> float:
    """How many humans keep so many requests in flight when they think between two of them."""
    return requests_in_flight * (think_time_s + e2e_s) / e2e_s


def replicas(request_rate: float, rate_per_replica: float, headroom: float = 0.0) -> int:
    """How many replicas carry a rate when each keeps a share `headroom` of its own free."""
    if not rate_per_replica > 0 or not 0 <= headroom < 1:
        raise ConfigError("a replica must carry more than 0 requests/s, headroom be in 0 .. 1")
    return ceil(request_rate / (rate_per_replica * (1 - headroom)))


def static_waste(lengths: Iterable[int]) -> int:
    """Places in steps that stay empty when a batch runs until its longest answer ends."""
    every = tuple(lengths)
    return sum(max(every) - length for length in every)


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Share of time that a stage is idle: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def batch_ceiling(capacity_bytes: float, fixed_bytes: float, bytes_per_request: float) -> int:
    """How many requests' caches fit beside weights, activations and whatever else is fixed."""
    return max(0, floor((capacity_bytes - fixed_bytes) / bytes_per_request))
