"""Can this machine start what `ridgeline plan --out FILE` has written?

The file is one of settings, as `--config` reads them, with a section [plan] that says for which
devices they are and what they carry. Loads no tensor library, as the process that serves asks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.cost.hardware import catalogue, match, slug
from ridgeline.errors import ConfigError
from ridgeline.server.config import ServeConfig
from ridgeline.server.replicas import gpus

CPU_INFO = Path("/proc/cpuinfo")
GPU_INFO = Path("/proc/driver/nvidia/gpus")


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The section [plan]: `num_devices` of all replicas, `threads` of one that is a part of a CPU,
    and what all of it carries: requests a second, tokens of each, milliseconds."""

    device: str
    kind: str
    num_devices: int
    num_machines: int
    threads: int | None = None
    rate: float
    num_input: int
    num_output: int
    ttft_ms: float
    tpot_ms: float


def check_machine(found: Mapping[str, Any], config: ServeConfig, path: str) -> None:
    """ConfigError names what this machine lacks of what the plan needs."""
    try:
        plan = msgspec.convert(found, Planned)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: [plan]: {error}; write it anew: ridgeline plan --out") from None
    joins = config.engine.launcher == "join"
    needed = config.num_replicas[0] * (1 if joins else config.engine.num_ranks)
    here = _cpus(plan) if plan.kind == "cpu" else _gpus()
    if here[plan.device] >= needed:
        return
    what = ", ".join(f"{count} x {name}" for name, count in here.items()) or "no such device"
    raise ConfigError(
        f"{path} needs {needed} x {plan.device} here, and this machine has {what}; start it"
        " where they are, type fewer --replicas, or plan for this machine: ridgeline plan --devices"
        " this"
    )


def _cpus(plan: Planned) -> Counter[str]:
    """This machine's processor, or how often it has the threads of the plan."""
    if plan.threads is None:  # of a data sheet, which has no name to compare
        return Counter({plan.device: 1})
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return Counter(
        {f"cpu-{slug(names[0] if names else '')}-{plan.threads}t": cores // plan.threads}
    )


def _gpus() -> Counter[str]:
    """Those that may be used, by their names in the catalogue."""
    names = []
    for info in sorted(GPU_INFO.glob("*/information")):
        (said,) = [
            line.partition(":")[2].strip()
            for line in info.read_text(encoding="utf-8").splitlines()
            if line.startswith("Model:")
        ] or ("",)
        known = match(said, catalogue().values())
        names.append(slug(said) if known is None else known.name)
    return Counter(names[: len(gpus())])
