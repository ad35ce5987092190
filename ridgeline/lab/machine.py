"""Which models, devices and formats may be chosen on a page, and what does a choice mean?"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, lru_cache
from typing import Annotated, Literal

from ridgeline import architectures
from ridgeline.architectures.catalogue import catalogue as models
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost import hardware
from ridgeline.cost.constants import Origin
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import ONE_DEVICE, Layout, Precision, Setup
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.lab.page import control

WEIGHTS = ("bf16", "fp8", "int8", "int4")
KV = ("auto", "fp8", "int8", "int4")

Model = Annotated[str, control("model", "by its name in the catalogue", choices=tuple(models()))]
Device = Annotated[
    str,
    control("device", "by its name in the catalogue", choices=tuple(hardware.catalogue())),
]
Weights = Annotated[str, control("weights", "number format of the weights", choices=WEIGHTS)]
Cache = Annotated[str, control("KV cache", "its number format", choices=KV, is_folded=True)]
FoldedDevice = Annotated[
    str,
    control(
        "device",
        "by its name in the catalogue",
        choices=tuple(hardware.catalogue()),
        is_folded=True,
    ),
]
FoldedWeights = Annotated[
    str, control("weights", "number format of the weights", choices=WEIGHTS, is_folded=True)
]
Devices = Annotated[
    int, control("devices", "that split every layer", choices=(1, 2, 4, 8), is_folded=True)
]
Config = Annotated[
    str,
    control(
        "config.json",
        "pasted here, it is the model instead of the one chosen above",
        length=20_000,
        is_folded=True,
    ),
]
Kind = Literal["ideal", "assumed", "calibrated", "measured"]


@cache
def spec_of(model: str) -> ModelSpec:
    """The layers of a model of the catalogue."""
    return architectures.read_spec(models()[model].config)


@lru_cache(maxsize=64)
def pricer_of(
    model: str,
    device: str,
    weights: str = "bf16",
    kv: str = "auto",
    layout: Layout = ONE_DEVICE,
    peak_tflops: float = 0.0,
    bandwidth_gb_s: float = 0.0,
) -> Pricer:
    """What prices steps of the set-up of these words, kept for the next move of a slider. A peak or
    a bandwidth above 0 stands for the data sheet's. Raises ConfigError for what cannot be had, as a
    layout that does not divide the model."""
    spec, found = spec_of(model), hardware.find_device(device)
    precision = Precision.named(weights, kv)
    if peak_tflops:
        found = replace(found, peak_flops={precision.compute_dtype: peak_tflops * 1e12})
    if bandwidth_gb_s:
        found = replace(found, bandwidth=bandwidth_gb_s * 1e9)
    if not found.bandwidth:
        raise RequestFault(f"{device} has no known memory bandwidth", param="device")
    return Pricer(Setup(spec, found, layout, precision))


def kind_of(origin: Origin) -> Kind:
    """The badge of a figure of the cost model."""
    return "assumed" if origin == "extrapolated" else origin


def described(model: str, config: str) -> ModelSpec:
    """The model of a pasted config.json, or where there is none, of this name."""
    if not config.strip():
        return spec_of(model)
    try:
        values = json.loads(config)
        if not isinstance(values, dict):
            raise ValueError("it is no object")
        return architectures.read_spec(values)
    except (ValueError, RecursionError) as error:
        said = f"config is not the JSON of a whole config.json: {error}"
    except ConfigError as error:
        said = f"config cannot be read: {error}"
    raise RequestFault(said, param="config")


def setup_with(spec: ModelSpec, device: str, weights: str, kv: str, devices: int) -> Setup:
    """That model, split over so many of these devices."""
    found, precision = hardware.find_device(device), Precision.named(weights, kv)
    try:
        return Setup(spec, found, Layout(tp=devices), precision)
    except ConfigError as error:
        raise RequestFault(f"devices: {error}", param="devices") from None
