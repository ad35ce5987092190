"""`ridgeline predict`: how fast would this model be on that machine, what would bind it, and what
would it cost?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ridgeline.architectures.spec import missing
from ridgeline.cli.flags import add_model
from ridgeline.cli.machine import THIS, add_machine_flags, make_setup, price_band
from ridgeline.cli.parser import Parser, add_json_flag
from ridgeline.cli.session import stage
from ridgeline.cli.tables import Column, answer, grid, places, plain, table, unbroken, whole_percent
from ridgeline.cli.values import positive, share
from ridgeline.cost.constants import Origin
from ridgeline.cost.memory import MemoryPlan
from ridgeline.cost.money import (
    Band,
    device_kilowatts,
    kwh_per_million_tokens,
    per_million_tokens,
    split_cost,
)
from ridgeline.cost.roofline import OpCost, StepCost
from ridgeline.cost.setup import Setup
from ridgeline.cost.steady_state import Part, SteadyState, context_limit, steady_state
from ridgeline.cost.throughput import Throughput
from ridgeline.figures import ROUNDING_S, number, percent, seconds

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

EXAMPLES = """Nothing is run: the operators of a step are priced one by one. B requests are in
flight all the time, each that ends is replaced. A folder with config.json is enough, or the name of
a public model.

examples:
  ridgeline predict llama-3.1-8b --device h100-sxm
  ridgeline predict user/model --device h100-sxm --tp 8 --weights fp8 --batch 64 \\
      --input 1000 --output 500
  ridgeline predict path/to/model --device this --json
  ridgeline predict user/model --device m3-ultra --weights int4 --kv int8
"""
DEFAULT_INPUT, DEFAULT_OUTPUT = 512, 128
BAR = 24  # characters of the longest bar
SMALL = 0.01  # operators with less of the time are shown as one


def add_arguments(parser: Parser) -> None:
    add_model(parser, takes_names=True)
    add_machine_flags(parser)
    flag = parser.flags("load")
    flag("--batch B", "requests in flight", positive, default=1)
    flag("--input I", "prompt tokens of each (512)", positive)
    flag("--output O", "answer tokens of each (128)", positive)
    flag("--max-num-batched-tokens N", "most tokens computed in one step", positive)
    flag("--memory-utilization SHARE", "of the device", share, default=0.9)
    parser.mark_expert("--max-num-batched-tokens", "--memory-utilization")
    add_json_flag(parser.flag)
    parser.flag("-q --quiet", "no progress")


def run(args: argparse.Namespace) -> int:
    with stage(args, "measuring this machine" if args.device == THIS else "pricing"):
        prediction = predict(args)
    answer(args, lambda: as_json(prediction), lambda: shown(prediction))
    return 0


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
    found: SteadyState
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
    found = steady_state(
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


def costs(found: SteadyState, device_hour: Band) -> Costs:
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


def _caveats(found: SteadyState) -> list[str]:
    setup, device = found.setup, found.setup.device
    said = calibration_caveats(setup, found.origin)
    if not setup.precision.fast_on(*device.traits):
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


PREDICTION = """
model device=found.setup.device.name batch=found.throughput.load.batch
input=found.throughput.load.num_input output=found.throughput.load.num_output
max_num_batched_tokens=found.throughput.load.max_num_batched_tokens
decode_step_ms=found.throughput.decode_s prompt_alone_ms=found.throughput.prompt_alone_s
bound=found.bound bound_decode=found.decode.bound bound_prefill=found.prefill.bound
origin=found.origin calibrated=is_calibrated caveats max_batch=found.max_batch
max_batch_limit=found.batch_limited_by kwh_per_million_output=kwh
"""
THROUGHPUT = "ttft_ms tpot_ms e2e_ms tokens_per_s tokens_per_s_per_user requests_per_s=request_rate"
MEMORY = "kv_bytes_per_token block_bytes num_blocks"
OPERATOR = """
name=op.name kind=op.kind count=op.count dtype=op.dtype ideal_ms expected_ms bound origin
"""
MONEY = """
usd_per_device_hour=device_hour usd_per_million_output=output
usd_per_million_input_share=input_share usd_per_million_output_share=output_share
"""


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Times in ms, memory in bytes, GB and GiB, money in dollars."""
    found, setup = prediction.found, prediction.found.setup
    calibration = setup.calibration
    weights, kv = setup.precision.names
    return {
        **plain(prediction, PREDICTION),
        **_throughput_json(found.throughput),
        "layout": asdict(setup.layout) | {"devices": setup.layout.devices},
        "precision": {"dtype": setup.precision.dtype, "weights": weights, "kv": kv},
        "served_today": setup.precision.fast_on(*setup.device.traits) and not missing(setup.spec),
        "ms_by_bound": {name: 1e3 * s for name, s in found.seconds_by_bound.items()},
        "calibration": calibration
        and plain(calibration, "device=device_name date held_out_error=held_out"),
        "saturated": {"batch": found.saturated.load.batch, **_throughput_json(found.saturated)},
        "waterfall": {
            name: [{"what": part.what, "ms": 1e3 * part.seconds} for part in parts]
            for name, parts in (("ttft", found.ttft_parts), ("tpot", found.tpot_parts))
        },
        "memory": _memory_json(found.memory),
        "operators": {
            name: [_operator_json(cost) for cost in by_time(step.ops)]
            for name, step in (("decode", found.decode), ("prefill", found.prefill))
        },
        "cost": prediction.costs and plain(prediction.costs, MONEY),
    }


def by_time(ops: Sequence[OpCost]) -> list[OpCost]:
    """Longest first; those of no time left out."""
    return sorted((one for one in ops if one.expected_s), key=lambda one: -one.expected_s)


def _throughput_json(throughput: Throughput) -> dict[str, Any]:
    return plain(throughput, THROUGHPUT) | (
        {} if throughput.load.num_output > 1 else {"tpot_ms": None}
    )


def _memory_json(plan: MemoryPlan) -> dict[str, Any]:
    items = [{**plain(item, "what note"), **_sizes(item.bytes)} for item in plan.items]
    total, capacity = _sizes(plan.total_bytes), _sizes(plan.capacity_bytes)
    return {"items": items, "total": total, "capacity": capacity, **plain(plan, MEMORY)}


def _sizes(num_bytes: int) -> dict[str, float]:
    return {"bytes": num_bytes, "gb": num_bytes / 1e9, "gib": num_bytes / 2**30}


def _operator_json(cost: OpCost) -> dict[str, Any]:
    op = cost.op
    work = {name: op.count * getattr(op, name) for name in ("flops", "bytes", "sent_bytes")}
    return {**plain(cost, OPERATOR), **work}


# ---------------------------------------------------------------------- for people


def shown(prediction: Prediction) -> Iterator[Table | Text | str]:
    """The largest figures first."""
    found = prediction.found
    yield _speed(prediction)
    for title, parts, total in (
        ("where the time to the first token goes", found.ttft_parts, found.ttft_s),
        ("where the time between two tokens goes", found.tpot_parts, found.tpot_s),
    ):
        if parts:
            yield _waterfall(title, parts, total)
    yield _operators("a step of decodes", found.decode)
    yield _operators("a step that reads a prompt", found.prefill)
    yield _memory(found.memory)
    if prediction.costs is not None:
        yield _money(prediction.costs, found)
    for line in _notes(prediction):
        yield unbroken(f"  {line}")


def _speed(prediction: Prediction) -> Table:
    found = prediction.found
    setup, load = found.setup, found.throughput.load
    weights, kv = setup.precision.names
    both = (found.throughput, found.saturated)
    limit = "memory" if found.batch_limited_by == "memory" else "--max-num-batched-tokens"
    per_token = ("time per token (TPOT)", *(seconds(p.tpot_s) for p in both))
    rows = (
        ("time to first token (TTFT)", *(seconds(p.ttft_s) for p in both)),
        *((per_token,) if load.num_output > 1 else ()),
        ("whole request", *(seconds(p.e2e_s) for p in both)),
        ("tokens/s per user", *(number(p.tokens_per_s_per_user) for p in both)),
        ("tokens/s in all", *(number(p.tokens_per_s) for p in both)),
        ("requests/s", *(number(p.request_rate) for p in both)),
        ("most requests that fit", f"{found.max_batch} ({limit})"),
        ("what binds", _bounds(found)),
        ("figures are", found.origin),
    )
    title = (
        f"{prediction.model} on {setup.device.label}:\n"
        f"{setup.layout.text}, {weights} weights, {kv} cache; "
        f"{load.num_input} + {load.num_output} tokens"
    )
    full = f"{found.saturated.load.batch} in flight (full)"
    return grid(("", f"{load.batch} in flight", full), rows, title)


def _bounds(found: SteadyState) -> str:
    by_bound = found.seconds_by_bound
    total = sum(by_bound.values())
    shares = sorted(by_bound.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {percent(value / total, 0)}" for name, value in shares if value / total > SMALL
    )


def _waterfall(title: str, parts: Sequence[Part], total: float) -> Table:
    """One part after the other; bars begin where the one above ends."""
    rows, before = [], 0.0
    for part in parts:
        if abs(part.seconds) < ROUNDING_S:
            continue
        start = round(BAR * before / total)
        end = round(BAR * (before + part.seconds) / total)
        rows.append((part.what, seconds(part.seconds), " " * start + "#" * (end - start)))
        before += part.seconds
    rows.append(("expected", seconds(total), ""))
    return grid(("", "time", ""), rows, title)


def _operators(title: str, cost: StepCost) -> Table:
    total = sum(one.expected_s for one in cost.ops)
    columns = (
        Column("operator", "op.name"),
        Column("times", "op.count"),
        Column("time", "expected_s", seconds),
        Column("share", lambda one: one.expected_s / total, whole_percent),
        Column("ideal", "ideal_s", seconds),
        Column("binds", "bound"),
        Column("GFLOP", lambda one: one.op.count * one.op.flops / 1e9, number),
        Column("MB", lambda one: one.op.count * (one.op.bytes + one.op.sent_bytes) / 1e6, number),
    )
    large = [one for one in by_time(cost.ops) if one.expected_s / total >= SMALL]
    both = f"{seconds(cost.expected_s)}, at best {seconds(cost.ideal_s)}"
    made = table(large, columns, f"{title}: {both}")
    if small := sum(one.expected_s for one in cost.ops if one.expected_s / total < SMALL):
        made.add_row("others", "", seconds(small), percent(small / total, 0))
    return made


def _memory(plan: MemoryPlan) -> Table:
    unit, decimal, binary = ("G", 1e9, 2**30) if plan.total_bytes >= 1e9 else ("M", 1e6, 2**20)
    rows = [(item.what, item.bytes, item.note) for item in plan.items]
    rows.append(("together", plan.total_bytes, ""))
    rows.append(("may be taken", plan.capacity_bytes, ""))
    columns = (
        Column("memory of each device", lambda row: row[0]),
        Column(f"{unit}B", lambda row: row[1] / decimal, places(3)),
        Column(f"{unit}iB", lambda row: row[1] / binary, places(3)),
        Column("", lambda row: row[2]),
    )
    return table(rows, columns, "what it takes")


def _money(costs: Costs, found: SteadyState) -> Table:
    rows = (
        ("a device for an hour", costs.device_hour),
        ("a million answer tokens, prompts included", costs.output),
        ("by time: a million prompt tokens", costs.input_share),
        ("by time: a million answer tokens", costs.output_share),
    )
    columns = (
        Column("", lambda row: row[0]),
        Column("low", lambda row: row[1].low, number),
        Column("middle", lambda row: row[1].mid, number),
        Column("high", lambda row: row[1].high, number),
    )
    devices = found.setup.layout.devices
    return table(rows, columns, f"dollars, {devices} x {found.setup.device.label}")


def _notes(prediction: Prediction) -> tuple[str, ...]:
    device = prediction.found.setup.device.name
    price = () if prediction.costs else (f"no price is known for {device}; say --price USD",)
    energy: tuple[str, ...] = ()
    if (kwh := prediction.kwh) is not None:
        energy = (f"energy of a million answer tokens: {number(kwh)} kWh",)
    return (*energy, *price, *prediction.caveats)
