"""What is the least one could change so that it fits?

Settings come first, then formats that lose a little accuracy, then more or larger devices. Every
change is tried before it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.cost.hardware import Device, catalogue
from ridgeline.cost.setup import Setup
from ridgeline.errors import ConfigError

SHORTEST_CONTEXT = 1024  # a shorter limit than this is no way out
FEWEST_TOKENS = 256  # a smaller step is no way out
MOST_UTILIZATION = 0.95
MAX_DEVICES = 64
HOST_DEVICES = 8  # in a node, where no link says how many


@dataclass(frozen=True, slots=True)
class Limits:
    """How much at once: what memory is planned for. `utilization` is the share of the device that
    may be taken, `min_sequences` how many requests of full length must have room at once."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    utilization: float = 0.9
    min_sequences: int = 1

    @property
    def least_sequences(self) -> int:
        """More than may run at once are never needed."""
        return min(self.min_sequences, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Change:
    """A way to make it fit: in words, and what to plan with instead."""

    text: str
    setup: Setup
    limits: Limits


Fits = Callable[[Setup, Limits], bool]
Found = Change | None


def fit_suggestions(setup: Setup, limits: Limits, fits: Fits, count: int = 3) -> tuple[Change, ...]:
    """The cheapest changes that fit, cheapest first."""
    found: list[Change] = []
    for change in _candidates(setup, limits, fits):
        if change is not None and fits(change.setup, change.limits):
            found.append(change)
            if len(found) == count:
                break
    return tuple(found)


def _candidates(setup: Setup, limits: Limits, fits: Fits) -> Iterator[Found]:
    """The least change of each sort; None where a sort does not help."""
    yield _more_of_the_device(setup, limits)
    yield _first(_fewer_tokens(setup, limits), fits)
    yield _first(_fewer_requests(setup, limits), fits)
    yield _kv_format(setup, limits)
    yield _shorter(setup, limits, fits)
    yield _first(_weight_formats(setup, limits), fits)
    for change in _weight_formats(setup, limits):
        if not fits(change.setup, limits):
            yield _shorter(change.setup, limits, fits, f"{change.text} and ")
    yield _first(_spread(setup, limits), fits)
    yield _first(_larger(setup, limits), fits)
    small = _with(setup, weights="int4", kv="fp8")
    yield _first(_spread(small, limits, "int4 weights, fp8 KV cache and "), fits)
    for device in _larger_devices(setup.device):
        other = replace(setup, device=device, calibration=None)
        yield _first(_spread(other, limits, f"{device.name}: "), fits)


def _first(changes: Iterator[Change], fits: Fits) -> Found:
    return next((one for one in changes if fits(one.setup, one.limits)), None)


# ------------------------------------------------------------------------ settings


def _more_of_the_device(setup: Setup, limits: Limits) -> Found:
    if limits.utilization >= MOST_UTILIZATION:
        return None
    more = replace(limits, utilization=MOST_UTILIZATION)
    return Change(f"memory_utilization {MOST_UTILIZATION}", setup, more)


def _fewer_tokens(setup: Setup, limits: Limits) -> Iterator[Change]:
    for value in _halves(limits.max_num_batched_tokens, FEWEST_TOKENS):
        fewer = replace(limits, max_num_batched_tokens=value)
        yield Change(f"max_num_batched_tokens {value}", setup, fewer)


def _fewer_requests(setup: Setup, limits: Limits) -> Iterator[Change]:
    for value in _halves(limits.max_num_seqs, 1):
        yield Change(f"max_num_seqs {value}", setup, replace(limits, max_num_seqs=value))


def _halves(value: int, lowest: int) -> Iterator[int]:
    while value // 2 >= lowest:
        value //= 2
        yield value


def _shorter(setup: Setup, limits: Limits, fits: Fits, prefix: str = "") -> Found:
    """The longest context that fits, in whole blocks."""
    size = limits.block_size
    low, high = 0, (limits.max_model_len - 1) // size
    while low < high:
        middle = (low + high + 1) // 2
        if fits(setup, replace(limits, max_model_len=middle * size)):
            low = middle
        else:
            high = middle - 1
    if low * size < min(SHORTEST_CONTEXT, max(1, limits.max_model_len // 2)):
        return None
    shorter = replace(limits, max_model_len=low * size)
    return Change(f"{prefix}max_model_len {low * size}", setup, shorter)


# ------------------------------------------------------------------------ formats


def _with(setup: Setup, *, weights: str = "", kv: str = "") -> Setup:
    old = setup.precision
    new = replace(old, weights=weights or old.weights, kv=kv or old.kv)
    return replace(setup, precision=new)


def _kv_format(setup: Setup, limits: Limits) -> Found:
    if setup.precision.kv != "auto":
        return None
    return Change("an fp8 KV cache", _with(setup, kv="fp8"), limits)


def _weight_formats(setup: Setup, limits: Limits) -> Iterator[Change]:
    precision = setup.precision
    if precision.dtype == "float32":
        half = replace(precision, dtype="bfloat16")
        yield Change("dtype bfloat16", replace(setup, precision=half), limits)
    for name in ("fp8", "int4"):
        packed = _with(setup, weights=name)
        if packed.precision.weight_bits < precision.weight_bits:
            yield Change(f"{name} weights", packed, limits)


# ------------------------------------------------------------------------ devices


def _spread(setup: Setup, limits: Limits, prefix: str = "") -> Iterator[Change]:
    """Over more devices: inside a node first, then stages of such nodes."""
    layout, link = setup.layout, setup.device.link
    node = max(layout.tp, link.max_devices if link else HOST_DEVICES)
    for pp in _doublings(layout.pp, MAX_DEVICES):
        for tp in _doublings(layout.tp, min(node, MAX_DEVICES // pp)):
            wider = replace(layout, tp=tp, pp=pp)
            try:
                spread = replace(setup, layout=wider)
            except ConfigError:  # the model cannot be split so
                continue
            if wider.devices > layout.devices or prefix:
                yield Change(f"{prefix}{_count(wider.devices)}{_how(wider.text)}", spread, limits)


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"


def _how(words: str) -> str:
    return "" if words == "1 device" else f" ({words})"


def _doublings(start: int, limit: int) -> Iterator[int]:
    while start <= limit:
        yield start
        start *= 2


def _larger_devices(device: Device) -> Sequence[Device]:
    """Of the same kind, its own maker's first, the smallest first."""
    larger = (one for one in catalogue().values() if one.memory_bytes > device.memory_bytes)
    return sorted(
        (one for one in larger if one.kind == device.kind),
        key=lambda one: (one.vendor != device.vendor, one.memory_bytes),
    )


def _larger(setup: Setup, limits: Limits) -> Iterator[Change]:
    for device in _larger_devices(setup.device):
        size = f"{device.memory_bytes / 1e9:.0f} GB"
        changed = replace(setup, device=device, calibration=None)
        yield Change(f"a larger device: {device.name}, {size}", changed, limits)
