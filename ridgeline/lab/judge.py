"""Does a fleet keep what a sheet asks, and what is in its way?

The memory is planned, a lone request is run, then the traffic comes for some seconds; of many
replicas a few are run, each with its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf

import msgspec

from ridgeline.cost.memory import MemoryPlan, memory_plan
from ridgeline.cost.money import Band, rent_band
from ridgeline.errors import DoesNotFit
from ridgeline.figures import number, scaled, seconds
from ridgeline.lab.fleet import Fleet, Traffic
from ridgeline.simulator.report import Summary
from ridgeline.simulator.simulation import SimulationReport
from ridgeline.simulator.sweep import capacity_seen, is_saturated
from ridgeline.simulator.workload import Arrival

ARRIVALS_S = 10.0  # of the run, but for FEWEST and MOST requests
FEWEST, MOST = 200, 1000
RUN = 4  # replicas at most; of more, so many get their share of the traffic


class Sheet(msgspec.Struct, frozen=True):
    """What is asked. Promises are 99th percentiles in seconds, a budget is dollars an hour, and
    `devices` is the most that may be used; 0: not asked."""

    model: str
    rate: float
    num_input: int
    num_output: int
    text: str
    answer_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    budget: float = 0.0
    devices: int = 0


SHEETS = {
    "70B, 100 req/s, P99 < 1 s": Sheet(
        "llama-3.1-70b", 100, 500, 200,
        "A textbook's: the whole answer within a second, for 99 of 100.", answer_s=1.0,
    ),
    "70B, first token < 100 ms": Sheet(
        "llama-3.1-70b", 50, 500, 200,
        "50 requests a second; the first token must come at once.", ttft_s=0.1,
    ),
    "7B on one A100, thrice the rate": Sheet(
        "llama-2-7b", 6, 500, 200,
        "Two requests a second go well; six must, and nothing may be bought.", tpot_s=0.05,
        devices=1,
    ),
    "8B chat for $10 an hour": Sheet(
        "llama-3.1-8b", 20, 800, 250,
        "A chat that feels quick, for little money.", ttft_s=0.5, tpot_s=0.04, budget=10.0,
    ),
    "Long documents": Sheet(
        "llama-3.1-8b", 2, 12000, 300,
        "Prompts of 12,000 tokens: reading them is the work.", ttft_s=2.0, tpot_s=0.05,
    ),
}  # fmt: skip


class Check(msgspec.Struct, frozen=True):
    """One line of the sheet. `share` is what is had over what may be: above 1 it is not met."""

    name: str
    had: str
    limit: str
    share: float
    is_met: bool


class Verdict(msgspec.Struct, frozen=True):
    """What the judge found; without a plan of the memory nothing was run. `capacity`: requests a
    second of all replicas. `weights_s`: reading all weights once."""

    sheet: Sheet
    fleet: Fleet
    weights_s: float
    band: Band | None
    shortage: DoesNotFit | None = None
    plan: MemoryPlan | None = None
    report: SimulationReport | None = None
    alone_s: float = 0.0
    capacity: float = 0.0
    is_full: bool = False

    @property
    def summary(self) -> Summary | None:
        return None if self.report is None else self.report.summary()

    @property
    def dollars(self) -> float:
        return 0.0 if self.band is None else self.band.mid * self.fleet.num_devices


def judged(sheet: Sheet, fleet: Fleet, seed: int) -> Iterator[float | Verdict]:
    """Progress from 0 to 1, and at last the verdict."""
    yield 0.0
    known = Verdict(sheet, fleet, _weights_s(fleet), rent_band(fleet.setup.device))
    some = replace(fleet, replicas=min(fleet.replicas, RUN))
    rate = sheet.rate * some.replicas / fleet.replicas
    traffic = Traffic(rate, sheet.num_input, sheet.num_output, seed=seed)
    work = traffic.workload(max(FEWEST, min(MOST, round(rate * ARRIVALS_S))))
    try:
        plan = memory_plan(
            fleet.setup,
            max_model_len=max(one.num_input + one.num_output for one in work),
            max_num_seqs=fleet.max_num_seqs,
            max_num_batched_tokens=max(fleet.max_num_batched_tokens, fleet.max_num_seqs),
        )
    except DoesNotFit as fault:
        yield msgspec.structs.replace(known, shortage=fault)
        return
    lone = some.run((Arrival(0.0, sheet.num_input, sheet.num_output),)).requests[0]
    yield 0.1
    report = some.run(work)
    yield 0.9
    is_full = bool(is_saturated(report.requests))
    seen = capacity_seen(report.requests) if is_full else None
    yield msgspec.structs.replace(
        known,
        plan=plan,
        report=report,
        alone_s=lone.e2e_s or 0.0,
        capacity=(seen or some.estimate(traffic)) * sheet.rate / rate,
        is_full=is_full,
    )


def _weights_s(fleet: Fleet) -> float:
    """What a device takes to read its share of all weights once, at its full bandwidth."""
    ops = fleet.pricer.cost(((1, 1),)).ops
    size = sum(one.op.count * one.op.weight_bytes for one in ops)
    return size / fleet.setup.device.bandwidth


def checks_of(found: Verdict) -> list[Check]:
    """The lines of the sheet, the one that binds first."""
    sheet, fleet = found.sheet, found.fleet
    lines = []
    if found.shortage is not None:
        need = sum(size for _, size in found.shortage.items)
        room = fleet.setup.device.memory_bytes
        lines.append(_check("memory of a device", need, room, lambda v: scaled(v, "B")))
    if sheet.devices:
        lines.append(_check("devices", fleet.num_devices, sheet.devices, number))
    summary = found.summary
    if summary is not None:
        lines.append(
            Check(
                "requests a second",
                f"{number(found.capacity)} can be done",
                f"{number(sheet.rate)} come",
                sheet.rate / found.capacity,
                not found.is_full,
            )
        )
        for name, limit, spread in (
            ("first token, p99", sheet.ttft_s, summary.ttft_s),
            ("time per token, p99", sheet.tpot_s, summary.tpot_s),
            ("whole answer, p99", sheet.answer_s, summary.e2e_s),
        ):
            if limit:
                lines.append(_check(name, spread.p99 or inf, limit, seconds))
    if sheet.budget:
        lines.append(_check("dollars an hour", found.dollars, sheet.budget, number))
    return lines


def _check(name: str, had: float, limit: float, say: Callable[[float], str]) -> Check:
    return Check(name, say(had), f"{say(limit)} allowed", had / limit, had <= limit)


def binding_of(found: Verdict, checks: list[Check]) -> str:
    """What is in the way, in the order in which it must be mended."""
    missed = {one.name for one in checks if not one.is_met}
    sheet = found.sheet
    if not missed:
        return ""
    if found.shortage is not None:
        return "memory: a replica does not fit"
    if "devices" in missed:
        return "the number of devices"
    if sheet.answer_s and found.alone_s > sheet.answer_s:
        return "the step itself: even a lone request takes too long"
    if "requests a second" in missed:
        return "the capacity: the queue grows"
    if "dollars an hour" in missed and len(missed) == 1:
        return "the budget"
    if "time per token, p99" in missed or "whole answer, p99" in missed:
        return "the step: this batch makes it too long"
    if "first token, p99" in missed:
        return "the prompts: the first token comes too late"
    return "the budget"
