"""What does a prediction say? Speed, memory, money and caveats, ready for people or programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ridgeline.architectures.spec import missing
from ridgeline.cli.machine import make_setup, price_band
from ridgeline.cost.constants import Origin
from ridgeline.cost.memory import MemoryPlan
from ridgeline.cost.money import (
    Band,
    device_kilowatts,
    kwh_per_million_tokens,
    per_million_tokens,
    split_cost,
)
from ridgeline.cost.pace import Pace
from ridgeline.cost.roofline import OpCost
from ridgeline.cost.setup import Setup
from ridgeline.cost.steady import Part, Steady, context_limit, steady

DEFAULT_INPUT, DEFAULT_OUTPUT = 512, 128


@dataclass(frozen=True, slots=True)
class Costs:
    """Dollars. `device_hour` is one device for an hour; `output` is a million answer tokens that
    carry all costs, `input_share` and `output_share` a million of each that share them."""

    device_hour: Band
    output: Band
    input_share: Band
    output_share: Band


@dataclass(frozen=True, slots=True)
class Prediction:
    """All that is shown. `costs` None: there is no price."""

    model: str
    found: Steady
    costs: Costs | None

    @property
    def is_calibrated(self) -> bool:
        return self.found.setup.calibration is not None

    @property
    def kwh(self) -> float | None:
        """Energy of a million answer tokens; None where nobody knows the power."""
        setup = self.found.setup
        if not setup.device.watts:
            return None
        return kwh_per_million_tokens(
            device_kilowatts(setup.device),
            self.found.tokens_per_s,
            num_devices=setup.layout.devices,
        )

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the figures are not."""
        return tuple(_caveats(self.found))


def predict(args: argparse.Namespace) -> Prediction:
    """Raises ConfigError for what cannot be asked, DoesNotFit with the ways out."""
    setup = make_setup(args)
    num_input, num_output = _lengths(args, context_limit(setup.spec))
    found = steady(
        setup,
        batch=args.batch,
        num_input=num_input,
        num_output=num_output,
        max_num_batched_tokens=args.max_num_batched_tokens,
        utilization=args.memory_utilization,
    )
    band = price_band(args, setup.device)
    return Prediction(args.model, found, None if band is None else costs(found, band))


def _lengths(args: argparse.Namespace, limit: int) -> tuple[int, int]:
    """Lengths that were not asked for give way to a short context."""
    num_output = args.output or max(1, min(DEFAULT_OUTPUT, limit // 4))
    num_input = args.input or max(1, min(DEFAULT_INPUT, limit - num_output))
    return num_input, num_output


def costs(found: Steady, device_hour: Band) -> Costs:
    """The price of this load, as if it went on all the time."""
    devices, rate = found.setup.layout.devices, found.tokens_per_s

    def split(dollars: float) -> tuple[float, float]:
        both = split_cost(
            dollars, found.input_s_per_token, found.output_s_per_token, num_devices=devices
        )
        return both.input_per_million, both.output_per_million

    return Costs(
        device_hour,
        device_hour.map(lambda dollars: per_million_tokens(dollars, rate, num_devices=devices)),
        device_hour.map(lambda dollars: split(dollars)[0]),
        device_hour.map(lambda dollars: split(dollars)[1]),
    )


def calibration_caveats(setup: Setup, origin: Origin) -> list[str]:
    """What is to be said of the constants with which steps are priced; `origin` is the weakest of
    their figures'."""
    device, said = setup.device, []
    if setup.calibration is None:
        quick = "its peaks and bandwidth took seconds to measure, " if device.measured else ""
        said.append(
            f"not calibrated: {quick}the efficiencies of {device.name} are assumed and host time "
            "is left out; `ridgeline calibrate` on that machine measures them"
        )
    elif setup.calibration.device_name != device.name:
        said.append(f"the calibration is of {setup.calibration.device_name}, not {device.name}")
    if setup.calibration is not None and setup.calibration.caveat:
        said.append(setup.calibration.caveat)
    if origin == "extrapolated":
        said.append("extrapolated: some operators lie outside of what was measured")
    elif origin == "assumed" and setup.calibration is not None:
        said.append("some operators were not measured, their efficiencies are assumed")
    return said


def _caveats(found: Steady) -> list[str]:
    setup, device = found.setup, found.setup.device
    said = calibration_caveats(setup, found.origin)
    if not setup.precision.fast_on(*device.words):
        weights, kv = setup.precision.names
        served = "served slower than priced" if setup.precision.served_today else "not served"
        said.append(
            f"{weights} weights with a {kv} cache on a {device.kind} are priced as a kernel for "
            f"them would be; by this version they are {served}"
        )
    if needs := missing(setup.spec):
        said.append(f"this version does not serve this model, which needs {', '.join(needs)}")
    return said


# ---------------------------------------------------------------------- for programs


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Times in ms, memory in bytes, GB and GiB, money in dollars."""
    found, pace = prediction.found, prediction.found.pace
    setup, load = found.setup, found.pace.load
    weights, kv = setup.precision.names
    calibration = setup.calibration
    return {
        "model": prediction.model,
        "device": setup.device.name,
        "layout": asdict(setup.layout) | {"devices": setup.layout.devices},
        "precision": {"dtype": setup.precision.dtype, "weights": weights, "kv": kv},
        "served_today": setup.precision.fast_on(*setup.device.words) and not missing(setup.spec),
        "batch": load.batch,
        "input": load.num_input,
        "output": load.num_output,
        "max_num_batched_tokens": load.max_num_batched_tokens,
        **_pace_json(pace),
        "decode_step_ms": 1e3 * pace.decode_s,
        "prompt_alone_ms": 1e3 * pace.prompt_alone_s,
        "bound": found.bound,
        "bound_decode": found.decode.bound,
        "bound_prefill": found.prefill.bound,
        "ms_by_bound": {name: 1e3 * s for name, s in found.seconds_by_bound.items()},
        "origin": found.origin,
        "calibrated": prediction.is_calibrated,
        "calibration": None
        if calibration is None
        else {
            "device": calibration.device_name,
            "date": calibration.date,
            "held_out_error": dict(calibration.held_out),
        },
        "caveats": list(prediction.caveats),
        "max_batch": found.max_batch,
        "max_batch_limit": found.batch_limited_by,
        "saturated": {"batch": found.saturated.load.batch, **_pace_json(found.saturated)},
        "waterfall": {
            "ttft": _parts_json(found.ttft_parts),
            "tpot": _parts_json(found.tpot_parts),
        },
        "memory": _memory_json(found.memory),
        "operators": {
            "decode": [_operator_json(cost) for cost in by_time(found.decode.ops)],
            "prefill": [_operator_json(cost) for cost in by_time(found.prefill.ops)],
        },
        "kwh_per_million_output": prediction.kwh,
        "cost": None if prediction.costs is None else _costs_json(prediction.costs),
    }


def by_time(ops: Sequence[OpCost]) -> list[OpCost]:
    """Longest first; those of no time left out."""
    return sorted((one for one in ops if one.expected_s), key=lambda one: -one.expected_s)


def _pace_json(pace: Pace) -> dict[str, float | None]:
    return {
        "ttft_ms": 1e3 * pace.ttft_s,
        "tpot_ms": 1e3 * pace.tpot_s if pace.load.num_output > 1 else None,
        "e2e_ms": 1e3 * pace.e2e_s,
        "tokens_per_s": pace.tokens_per_s,
        "tokens_per_s_per_user": pace.tokens_per_s_per_user,
        "requests_per_s": pace.request_rate,
    }


def _parts_json(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [{"what": part.what, "ms": 1e3 * part.seconds} for part in parts]


def _memory_json(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "items": [
            {"what": item.what, **_sizes(item.bytes), "note": item.note} for item in plan.items
        ],
        "total": _sizes(plan.total_bytes),
        "capacity": _sizes(plan.capacity_bytes),
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "block_bytes": plan.block_bytes,
        "num_blocks": plan.num_blocks,
    }


def _sizes(num_bytes: int) -> dict[str, float]:
    return {"bytes": num_bytes, "gb": num_bytes / 1e9, "gib": num_bytes / 2**30}


def _operator_json(cost: OpCost) -> dict[str, Any]:
    op = cost.op
    return {
        "name": op.name,
        "kind": op.kind,
        "count": op.count,
        "dtype": op.dtype,
        "flops": op.count * op.flops,
        "bytes": op.count * op.bytes,
        "sent_bytes": op.count * op.sent_bytes,
        "ideal_ms": 1e3 * cost.ideal_s,
        "expected_ms": 1e3 * cost.expected_s,
        "bound": cost.bound,
        "origin": cost.origin,
    }


def _costs_json(money: Costs) -> dict[str, Any]:
    return {
        "usd_per_device_hour": asdict(money.device_hour),
        "usd_per_million_output": asdict(money.output),
        "usd_per_million_input_share": asdict(money.input_share),
        "usd_per_million_output_share": asdict(money.output_share),
    }
