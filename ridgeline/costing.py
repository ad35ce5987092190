"""What do steps cost on the device of this engine? From a calibration where there is one, else from
the data sheet with assumed efficiencies; the prices say which."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ridgeline.architectures.spec import ModelSpec
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.cost.constants import HostConstants, default_calibration
from ridgeline.cost.hardware import ASSUMED_SOURCES, Device, catalogue, match, slug
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import SHORT, Layout, Precision, Setup
from ridgeline.devices import Device as OpenDevice
from ridgeline.errors import ConfigError
from ridgeline.formats import RATE, AskedDrafts
from ridgeline.kernels.cpu.native import level
from ridgeline.log import say
from ridgeline.observe.engine_header import EngineHeader, header_of, setup_record
from ridgeline.records import Record, find_record, read_record
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.speculation.controller import DraftLengthController
from ridgeline.speculation.price import draft_prices

# Of hardware that nobody has measured and no data sheet is known for; said to be assumed.
CORE_FLOPS = {  # of one CPU core, float32 and bfloat16, by the instructions of its kernels
    "none": (40e9, 40e9),
    "avx2": (60e9, 60e9),
    "avx512": (100e9, 100e9),
    "bf16": (100e9, 300e9),
    "amx": (100e9, 1000e9),
}
CPU_BANDWIDTH = 40e9  # what a thread or two read of today's memory
GPU_FLOPS, GPU_BANDWIDTH = 100e12, 1e12

logger = logging.getLogger(__name__)


def engine_pricer(
    config: EngineConfig, resolved: ResolvedConfig, spec: ModelSpec, device: OpenDevice
) -> Pricer:
    """Prices of this engine's steps. Raises ConfigError for an unreadable --calibration file."""
    known = kept_record(config.calibration, resolved, device)
    if known is None:
        figures = device_figures(resolved, device)
        constants = default_calibration(figures)
    else:
        figures, constants = known.device, known.calibration
    overlapped = resolved.max_in_flight > 1 and not computes_in_submit(resolved)
    host = replace(engine_host(constants.host, resolved), overlapped=overlapped)
    precision = Precision(resolved.dtype, resolved.weight_format, resolved.kv_cache_dtype)
    return Pricer(
        Setup(
            spec,
            figures,
            Layout(
                tp=resolved.tp,
                pp=max(1, len(resolved.stages)),
                ep=resolved.ep,
                dp=resolved.dp,
                starts=tuple(first for first, _ in resolved.stages[1:]),
            ),
            precision=precision,
            calibration=replace(constants, host=host),
        )
    )


def engine_host(host: HostConstants, resolved: ResolvedConfig) -> HostConstants:
    """The host of an engine that captures steps as this one does."""
    return replace(
        host,
        captured_tokens=max(resolved.max_captured_rows, resolved.max_verified_tokens),
        captured_prompt_tokens=resolved.max_captured_tokens,
    )


def asked_drafts(resolved: ResolvedConfig) -> AskedDrafts | None:
    """Who drafts in this engine; None where nobody does."""
    if resolved.draft_method is None:
        return None
    return AskedDrafts(resolved.draft_method, resolved.draft_argument, resolved.num_draft_tokens)


def draft_length_controller(
    resolved: ResolvedConfig, pricer: Pricer, draft: ModelSpec | None
) -> DraftLengthController | None:
    """Says how many draft tokens each step of this engine verifies; `draft` is the draft model, if
    there is one. None where nothing is drafted."""
    asked = asked_drafts(resolved)
    if asked is None:
        return None
    acceptance = asked.line.acceptance
    if asked.line.argument == RATE:
        acceptance = float(asked.argument)
    return DraftLengthController(
        draft_prices(pricer, asked, draft).seconds,
        acceptance=acceptance,
        max_drafts=resolved.max_draft_tokens,
        max_verified_tokens=resolved.max_verified_tokens,
        num_drafts=resolved.num_draft_tokens,
        looks_ahead=asked.line.looks_ahead,
        has_cache=asked.line.has_cache,
    )


def computes_in_submit(resolved: ResolvedConfig) -> bool:
    """A CPU is done with a step when it has taken it."""
    return resolved.device == "cpu"


def engine_header(
    resolved: ResolvedConfig,
    scheduler: Scheduler,
    pricer: Pricer,
    model_config: Mapping[str, Any],
    draft_config: Mapping[str, Any] | None = None,
) -> EngineHeader:
    """What the event log, and whoever explains a run, must know of this engine. `draft_config` is
    the config.json of the model that drafts, if one does."""
    asked = asked_drafts(resolved)
    return header_of(
        scheduler,
        policy=resolved.policy,
        max_in_flight=resolved.max_in_flight,
        computes_in_submit=computes_in_submit(resolved),
        threads=resolved.threads,
        model=resolved.model_name,
        setup=setup_record(pricer.setup, model_config),
        ttft_slo_s=resolved.ttft_slo_ms and resolved.ttft_slo_ms / 1e3,
        tpot_slo_s=resolved.tpot_slo_ms and resolved.tpot_slo_ms / 1e3,
        speculate="off" if asked is None else asked.text,
        draft_config=draft_config,
    )


# ---------------------------------------------------------------------- calibration


def kept_record(asked: str | None, resolved: ResolvedConfig, device: OpenDevice) -> Record | None:
    """That of the file asked for (ConfigError when it holds none), else the one kept for this
    device; a kept one that cannot be read, or does not know the dtype, is passed over, and said
    so."""
    if asked is not None:
        return _knowing(read_record(Path(asked)), resolved)
    key = device_key(device, device.describe(), resolved.threads)
    try:
        found = find_record(key)
        return None if found is None else _knowing(found, resolved)
    except ConfigError as problem:
        say(logger, logging.WARNING, "a calibration is not used", reason=problem)
        return None


def _knowing(record: Record, resolved: ResolvedConfig) -> Record:
    """The record. ConfigError when the dtype was not measured."""
    record.device.peak(SHORT[resolved.dtype])
    return record


def device_key(device: OpenDevice, name: str, threads: int) -> str:
    """What records of this machine are called: the catalogue's name of a known GPU, else the
    hardware's own name, of a CPU with the number of threads."""
    if device.torch_device.type == "cpu":
        return f"cpu-{slug(name)}-{threads}t"
    known = match(name, catalogue().values())
    return slug(name) if known is None else known.name


# ---------------------------------------------------------------------- data sheets


def device_figures(resolved: ResolvedConfig, device: OpenDevice) -> Device:
    """The catalogue's device of this description, with the memory it really has; else a draft."""
    name, memory = device.describe(), device.memory_total()
    found = None if resolved.device == "cpu" else match(name, catalogue().values())
    if found is not None:
        return replace(found, memory_bytes=memory)
    return unknown_device(
        name,
        is_cpu=resolved.device == "cpu",
        threads=resolved.threads,
        memory_bytes=memory,
    )


def unknown_device(description: str, *, is_cpu: bool, threads: int, memory_bytes: int) -> Device:
    """Round figures, so that what is far from them can be seen at least."""
    float32 = bfloat16 = GPU_FLOPS
    if is_cpu:
        float32, bfloat16 = (threads * flops for flops in CORE_FLOPS[level()])
    return Device(
        name="cpu" if is_cpu else "gpu",
        label=f"{description} (assumed figures)",
        kind="cpu" if is_cpu else "gpu",
        peak_flops=MappingProxyType({"fp32": float32, "bf16": bfloat16}),
        memory_bytes=memory_bytes,
        bandwidth=CPU_BANDWIDTH if is_cpu else GPU_BANDWIDTH,
        l2_bytes=0,
        link=None,
        host_link_bytes_per_s=CPU_BANDWIDTH,
        network_bytes_per_s=0.0,
        watts=0.0,
        all_in_kw=None,
        prices=(),
        sources=MappingProxyType(ASSUMED_SOURCES),
        vendor="unknown",
    )
