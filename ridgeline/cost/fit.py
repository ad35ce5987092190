"""Which constants explain what was measured? A few for each class of operator, then the host's.

First each class by its own points, then all together, with most weight on whole steps: there
operators meet caches that others have filled. Residuals are logarithms of predicted over measured
seconds under a soft-L1 loss, so a point that someone disturbed does not draw the rest. A fifth of
the points of every class is kept out; the errors on them are what the record promises. The formulas
are those of `roofline` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import median
from typing import Any

from ridgeline.cost.constants import (
    AttentionConstants,
    Calibration,
    HostConstants,
    MatmulConstants,
    StreamConstants,
    default_calibration,
)
from ridgeline.cost.execution_mode import ExecutionMode, Own
from ridgeline.cost.hardware import Device
from ridgeline.cost.least_squares import minimise
from ridgeline.cost.ops import COLLECTIVES, Op
from ridgeline.cost.roofline import QUANTITIES, combine, op_cost

HELD_OUT_SHARE = 5  # one of so many points
FEWEST_POINTS = 3  # of a class; with fewer its constants stay as assumed
OPERATOR_WEIGHT = 0.15  # of an operator's residual beside a whole step's
CHECK = "check_step"
STEPS = ("decode_step", CHECK, "prefill_step", "mixed_step")
# The device's part of captured steps. Where the host is slow no step of a small model shows it.
ALONE = ("decode_device", "draft_device")
WHOLE = (*STEPS, *ALONE)
CHECKS = (CHECK, "draft_device")
ATTENTION = ("decode_attention", "prefill_attention", "mixed_attention")

Path = tuple[str, str, str]  # (field of Calibration, key of its table or "", constant)

# What each constant can be. The search is in logarithms, so nothing starts at or reaches zero.
BOUNDS: dict[str, tuple[float, float]] = {
    "e_c": (0.005, 1.0),
    "e_m": (0.005, 1.0),
    "e_v": (0.005, 1.0),
    "q": (1.0, 12.0),
    "k0": (0.1, 4000.0),
    "k_m": (0.1, 10000.0),
    "k_s": (1e-11, 2e-8),
    "t0_s": (1e-7, 1e-2),
    "decode_e_c": (0.001, 1.0),
    "decode_e_m": (0.001, 1.0),
    "decode_t0_s": (1e-7, 1e-2),
    "skew": (1e-3, 1.0),
    "prefill_e_c": (0.001, 1.0),
    "prefill_e_m": (0.001, 1.0),
    "prefill_t0_s": (1e-7, 1e-2),
    "mixed_prefill": (1.0, 3.0),
    "mixed_decode": (1.0, 4.0),
    "c0_s": (1e-6, 1e-1),
    "c1_s": (1e-8, 1e-2),
    "per_launch_s": (1e-7, 1e-3),
    "captured_t0": (0.01, 1.0),
    "own_t0": (0.01, 1.0),
    "own_rows_t0": (0.01, 1.0),
    "warm_t0": (0.1, 1.0),
    "lone_s": (1e-7, 1e-1),
    "lone_request_s": (1e-8, 1e-2),
    "lone_least_s": (1e-7, 1e-1),
    "captured_s": (1e-6, 1e-3),  # at least as long as a copy
    "pass_s": (1e-6, 1e-3),
    "verify_token": (1e-3, 1.0),
    "check_request_s": (1e-8, 1e-3),
}
START_MATMUL = MatmulConstants(0.7, 0.7, 4e-6, q=2.0, k0=50.0, e_v=0.8, k_m=50.0)
START_ATTENTION = AttentionConstants(
    decode_e_m=0.5,
    decode_t0_s=2e-5,
    prefill_e_c=0.4,
    prefill_e_m=0.5,
    prefill_t0_s=2e-5,
    decode_e_c=0.3,
    skew=0.05,
    mixed_prefill=1.05,
    mixed_decode=1.1,
    verify_token=0.1,
)
START_STREAM = StreamConstants(0.6, 5e-6)
LONE_START_S = 3e-4
BESIDE_START_S = 5e-6
CHECK_START_S = 5e-6
EDGE = 1.05
WARM_START = 0.7
CHAIN_START_S = 1e-9
MATMUL = ("e_c", "e_m", "t0_s", "q", "k0", "e_v", "k_m")
# Of these whole steps say nothing (their requests are as long as each other) or too little.
ALONE_SHOWN = ("skew", "mixed_prefill", "mixed_decode")
ATTENTION_CONSTANTS = {
    "decode_attention": ("decode_e_m", "decode_e_c", "decode_t0_s", "skew"),
    "prefill_attention": ("prefill_e_m", "prefill_e_c", "prefill_t0_s"),
    "mixed_attention": ("mixed_prefill", "mixed_decode"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """`ops` together took `seconds`. `num_requests`: the point is a whole step of so many
    requests, with the host's part; None: device work alone. `captured`, `own` and `warm` are those
    of its `ExecutionMode`. `is_lone`: it was measured from its plan to its tokens, with nothing
    that ran before it. `num_passes` that draft are among the ops. `dtype` as in
    `Device.peak_flops`."""

    what: str
    dtype: str
    ops: tuple[Op, ...]
    seconds: float
    num_requests: int | None = None
    label: str = ""
    captured: bool = False
    own: Own = Own.NONE
    is_lone: bool = False
    num_passes: int = 0
    warm: float = 0.0

    @property
    def mode(self) -> ExecutionMode:
        return ExecutionMode(self.captured, self.own, self.warm)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors |predicted / measured - 1| of `count` points."""

    count: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`errors` are by class of point and dtype ("decode_step bf16"), on points kept out."""

    calibration: Calibration
    errors: Mapping[str, Errors]
    fitted: tuple[Point, ...]
    held_out: tuple[Point, ...]


def predict(point: Point, device: Device, calibration: Calibration) -> float:
    """Seconds that the model gives to a point."""
    captured, mode = point.captured, point.mode
    kernels = sum(op_cost(op, device, calibration, mode).expected_s for op in point.ops)
    host, requests = calibration.host, point.num_requests
    if captured:
        kernels += host.captured_s + host.pass_s * point.num_passes
    if requests is None:
        return kernels
    launches = 0 if captured else sum(op.count for op in point.ops)
    num_verified = requests if point.what == CHECK else 0
    return combine(
        host, kernels, requests, launches, is_lone=point.is_lone, num_verified=num_verified
    )[2]


def relative_error(point: Point, device: Device, calibration: Calibration) -> float:
    """Predicted over measured, less one."""
    return predict(point, device, calibration) / point.seconds - 1


def fit(points: Sequence[Point], device: Device, host: HostConstants) -> Fit:
    """Constants for `device` from measured points. `host` is what the host was seen to do by
    itself; whole steps show what comes on top."""
    fitted, held_out = split(points)
    found = _start(points, device, host)
    for knobs, own in _classes(fitted, found):
        found = _turned(own, device, found, knobs)
    found = _alike(found)  # before whole steps, which have those passes too
    found = _turned(fitted, device, found, _host_knobs(fitted, host))
    found = _together(fitted, device, found)
    errors = errors_by_class(held_out, device, found)
    found = replace(
        found,
        ranges=ranges(points),
        assumed_kinds=_assumed(points),
        held_out={name: error.median for name, error in errors.items()},
    )
    return Fit(found, errors, tuple(fitted), tuple(held_out))


# ------------------------------------------------------------------------ keeping points out


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """(to fit, to keep out): of every class and dtype a fifth, chosen by the hash of its label,
    so the same whatever was measured before or after."""
    kept: set[int] = set()
    for group in _groups(points).values():
        ordered = sorted(group, key=lambda i: _digest(points[i]))
        kept.update(ordered[: len(group) // HELD_OUT_SHARE])
    return (
        [point for i, point in enumerate(points) if i not in kept],
        [point for i, point in enumerate(points) if i in kept],
    )


def _groups(points: Sequence[Point]) -> dict[tuple[str, str], list[int]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for i, point in enumerate(points):
        groups.setdefault((point.what, point.dtype), []).append(i)
    return groups


def _digest(point: Point) -> bytes:
    text = f"{point.what} {point.dtype} {point.label}"
    return blake2b(text.encode(), digest_size=8).digest()


def errors_by_class(
    points: Iterable[Point], device: Device, calibration: Calibration
) -> dict[str, Errors]:
    """Errors of each class in each dtype."""
    found: dict[str, list[float]] = {}
    for point in points:
        error = abs(relative_error(point, device, calibration))
        found.setdefault(f"{point.what} {point.dtype}", []).append(error)
    return {name: _errors(values) for name, values in found.items()}


def _errors(values: Sequence[float]) -> Errors:
    ordered = sorted(values)
    return Errors(len(values), median(ordered), ordered[math.ceil(0.9 * len(ordered)) - 1])


def ranges(points: Iterable[Point]) -> dict[str, tuple[float, float]]:
    """Lowest and highest m, n, k, bytes, flops of every kind of operator that was measured."""
    found: dict[str, tuple[float, float]] = {}
    for point in points:
        for op in point.ops:
            for quantity in QUANTITIES:
                name, value = f"{op.kind}.{quantity}", float(getattr(op, quantity))
                low, high = found.get(name, (value, value))
                found[name] = (min(low, value), max(high, value))
    return found


def _assumed(points: Iterable[Point]) -> tuple[str, ...]:
    measured = {op.kind for point in points for op in point.ops}
    return tuple(kind for kind in COLLECTIVES if kind not in measured)


# ------------------------------------------------------------------------ turning constants


def _start(points: Sequence[Point], device: Device, host: HostConstants) -> Calibration:
    dtypes = tuple(dict.fromkeys(point.dtype for point in points))
    return replace(
        default_calibration(device),
        origin="calibrated",
        host=_host_start(points, host),
        matmul=dict.fromkeys(dtypes, _matmul_start(device)),
        attention=dict.fromkeys(dtypes, START_ATTENTION),
        elementwise=START_STREAM,
        sampling=START_STREAM,
        streams={name: START_STREAM for point in points if (name := _stream(point))},
    )


def _matmul_start(device: Device) -> MatmulConstants:
    """Chains are seen on GPUs, where a product is one wave of blocks."""
    return replace(START_MATMUL, k_s=CHAIN_START_S if device.kind == "gpu" else 0.0)


def _chains(start: Calibration, dtype: str) -> tuple[str, ...]:
    return ("k_s",) if start.matmul[dtype].k_s else ()


def _host_start(points: Sequence[Point], host: HostConstants) -> HostConstants:
    """Where the search for the host begins. If it is hidden behind the device it is seen only
    where it is the longer of the two, so it begins with as much as the steps allow."""
    if any(p.what in ALONE for p in points):
        host = replace(host, captured_s=BESIDE_START_S)
    if any(p.num_passes for p in points):
        host = replace(host, pass_s=BESIDE_START_S)
    if any(p.what == CHECK for p in points):
        host = replace(host, check_request_s=CHECK_START_S)
    if any(p.own is Own.ROWS for p in points):
        host = replace(host, own_rows_t0=host.own_t0)
    if any(p.warm for p in points):
        host = replace(host, warm_t0=WARM_START)
    steps = [p for p in points if p.what in STEPS and p.num_requests]
    if not host.overlapped or not steps:
        return replace(host, c0_s=max(2 * host.c0_s, 1e-4), c1_s=max(host.c1_s, 1e-6))
    if any(p.is_lone for p in steps):
        least_s = min(p.seconds for p in steps if p.is_lone)
        host = replace(
            host, lone_s=LONE_START_S, lone_request_s=LONE_START_S / 100, lone_least_s=least_s
        )
    if any(p.captured for p in steps):  # hidden nearly always, so what was seen of it is better
        launched = [p for p in steps if not p.captured] or steps
        return replace(
            host,
            c0_s=max(2 * host.c0_s, 1e-4),
            c1_s=max(1.5 * host.c1_s, 1e-7),
            per_launch_s=min(p.seconds / sum(op.count for op in p.ops) for p in launched),
        )
    return replace(
        host,
        c0_s=min(p.seconds for p in steps) / 2,
        c1_s=min(p.seconds / (p.num_requests or 1) for p in steps),
        per_launch_s=min(p.seconds / sum(op.count for op in p.ops) for p in steps),
    )


def _stream(point: Point) -> str:
    """What a pass over memory is called in `Calibration.streams`; "" for other points."""
    is_pass = point.what in ("elementwise", "embedding", "sampling")
    return f"{point.ops[0].name} {point.dtype}" if is_pass else ""


def _classes(
    points: Sequence[Point], start: Calibration
) -> Iterable[tuple[list[Path], list[Point]]]:
    """Constants and the points that decide them, class by class."""
    for dtype in start.matmul:
        mine = [point for point in points if point.dtype == dtype]
        yield (
            [("matmul", dtype, name) for name in (*MATMUL, *_chains(start, dtype))],
            [point for point in mine if point.what == "matmul"],
        )
        for what, names in ATTENTION_CONSTANTS.items():
            yield (
                [("attention", dtype, name) for name in names],
                [point for point in mine if point.what == what],
            )
    for stream in start.streams:
        yield (
            [("streams", stream, "e_m"), ("streams", stream, "t0_s")],
            [point for point in points if _stream(point) == stream],
        )


def _host_knobs(points: Sequence[Point], host: HostConstants) -> list[Path]:
    knobs: list[Path] = [("host", "", "c0_s"), ("host", "", "c1_s")]
    if host.overlapped:
        knobs.append(("host", "", "per_launch_s"))
        if any(point.is_lone for point in points):
            names = ("lone_s", "lone_request_s", "lone_least_s")
            knobs += [("host", "", name) for name in names]
    if any(point.what == CHECK for point in points):
        knobs.append(("host", "", "check_request_s"))
    if any(point.captured and point.own is Own.NONE for point in points):
        knobs.append(("host", "", "captured_t0"))
    if any(point.own is Own.FEW for point in points):
        knobs.append(("host", "", "own_t0"))
    if any(point.own is Own.ROWS for point in points):
        knobs.append(("host", "", "own_rows_t0"))
    if any(point.warm for point in points):
        knobs.append(("host", "", "warm_t0"))
    return knobs


def _beside_knobs(points: Sequence[Point]) -> list[Path]:
    """Of what a captured step does beside its operators. They are turned last: next to operators
    that are still priced too dear there seems to be nothing beside them."""
    knobs: list[Path] = []
    if any(point.what in ALONE for point in points):
        knobs.append(("host", "", "captured_s"))
    if any(point.num_passes for point in points):
        knobs.append(("host", "", "pass_s"))
    return knobs


def _together(points: Sequence[Point], device: Device, start: Calibration) -> Calibration:
    """Whole steps have the last word on what they are made of."""
    steps = [point for point in points if point.what in WHOLE]
    if len(steps) < FEWEST_POINTS:
        return start
    knobs = [*_host_knobs(steps, start.host), *_beside_knobs(steps)]
    checked = dict.fromkeys(point.dtype for point in steps if point.what in CHECKS)
    knobs += [("attention", dtype, "verify_token") for dtype in checked]
    for dtype in dict.fromkeys(point.dtype for point in steps):
        names = ("e_c", "e_m", "t0_s", "e_v", "k_m", *_chains(start, dtype))
        knobs += [("matmul", dtype, name) for name in names]
        knobs += [
            ("attention", dtype, name)
            for names in ATTENTION_CONSTANTS.values()
            for name in names
            if name not in ALONE_SHOWN
        ]
    products = [point for point in points if point.what in ("matmul", *ATTENTION)]
    return _turned([*steps, *products], device, start, knobs)


def _turned(
    points: Sequence[Point], device: Device, start: Calibration, knobs: Sequence[Path]
) -> Calibration:
    """The calibration whose `knobs` are where `points` are explained best. With whole steps among
    the points, single operators count less."""
    is_host = all(knob[0] == "host" for knob in knobs)
    used = [p for p in points if p.what in WHOLE] if is_host else list(points)
    if len(used) < FEWEST_POINTS:
        return start
    weights = _weights(used)

    def at(parameters: Sequence[float]) -> Calibration:
        values = {
            knob: _bounded(knob, parameter)
            for knob, parameter in zip(knobs, parameters, strict=True)
        }
        return with_values(start, values)

    def residuals(parameters: Sequence[float]) -> list[float]:
        calibration = at(parameters)
        return [
            weight * math.log(predict(point, device, calibration) / point.seconds)
            for point, weight in zip(used, weights, strict=True)
        ]

    return at(minimise(residuals, [_inside(knob, _value(start, knob)) for knob in knobs]))


def _weights(points: Sequence[Point]) -> list[float]:
    """Whole steps decide. But where drafts were timed on the device alone, checks of drafts that
    somebody told the engine count as operators do: their host works more than any other's, and the
    device has some kernels that no other step has."""
    classes = {point.what for point in points}
    if not classes.intersection(WHOLE):
        return [1.0] * len(points)
    decide = set(WHOLE) - ({"check_step"} if "draft_device" in classes else set())
    return [1.0 if point.what in decide else OPERATOR_WEIGHT for point in points]


def _inside(knob: Path, value: float) -> float:
    """Where the search for a constant begins: at a bound nothing changes, and none comes back."""
    low, high = BOUNDS[knob[2]]
    return math.log(min(max(value, low * EDGE), high / EDGE))


def _bounded(knob: Path, parameter: float) -> float:
    low, high = BOUNDS[knob[2]]
    return min(max(math.exp(min(max(parameter, -50.0), 50.0)), low), high)


def _value(calibration: Calibration, knob: Path) -> float:
    field, key, name = knob
    owner = getattr(calibration, field)
    return float(getattr(owner[key] if key else owner, name))


def with_values(calibration: Calibration, values: Mapping[Path, float]) -> Calibration:
    """The same with some constants replaced. One row of a product is never slower than two."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for (field, key, name), value in values.items():
        groups.setdefault((field, key), {})[name] = value
    changes: dict[str, Any] = {}
    for (field, key), constants in groups.items():
        owner = changes.get(field, getattr(calibration, field))
        if not key:
            changes[field] = replace(owner, **constants)
            continue
        changed = replace(owner[key], **constants)
        if isinstance(changed, MatmulConstants):
            changed = replace(changed, e_v=max(changed.e_v or 0.0, changed.e_m))
        changes[field] = {**owner, key: changed}
    return replace(calibration, **changes)


def _alike(calibration: Calibration) -> Calibration:
    """What was not measured apart: the last norm is a norm, other passes are like an activation,
    sampling in other dtypes is like that in the first."""
    streams = dict(calibration.streams)
    changes: dict[str, Any] = {}
    for name, constants in calibration.streams.items():
        if name.startswith("norm "):
            streams[f"final_{name}"] = constants
        if name.startswith("activation "):
            changes.setdefault("elementwise", constants)
        if name.startswith("sampling "):
            changes.setdefault("sampling", constants)
    return replace(calibration, streams=streams, **changes)
