"""Which model and which machine did the person name, and how is the one spread on the other?

A model is a bundled one, then a folder or a GGUF file, then a name of the catalogue, then a hub id;
weights are not needed. Importing this loads no library, as flags are read before anything else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.parser import Parser
from ridgeline.cli.values import number, positive
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.architectures.catalogue import Entry
    from ridgeline.architectures.spec import ModelSpec
    from ridgeline.cost.constants import Calibration
    from ridgeline.cost.hardware import Device
    from ridgeline.cost.money import Band
    from ridgeline.cost.setup import Setup

THIS = "this"
NUMBER_FORMATS = ("bf16", "fp16", "fp32", "fp8", "int8", "int4")


def add_machine_flags(parser: Parser) -> None:
    """--device, how the model is spread and stored, and what a device costs."""
    flag = parser.flags("machine")
    flag(
        "--device D",
        "a name of the catalogue such as h100-sxm, a device file (.json), or this: the "
        "machine you are on (default: %(default)s)",
        default=THIS,
    )
    add_layout_flags(parser, flag)
    flag("--weights", "number format of weights (the checkpoint's own)", choices=NUMBER_FORMATS)
    flag("--kv", "and of the KV cache", default="auto", choices=("auto", *NUMBER_FORMATS))
    flag("--calibration FILE", "of ridgeline calibrate", Path)
    flag("--price USD", "of one device for an hour, not the catalogue's", number(0))


def add_layout_flags(parser: Parser, flag: Callable[..., object]) -> None:
    """How many devices have what of a model."""
    for name, what in (
        ("tp", "devices that split every layer"),
        ("pp", "stages that split the layers"),
        ("dp", "groups of tp devices that attend for requests of their own"),
        ("ep", "of the tp x dp devices, groups that divide the experts"),
    ):
        flag(f"--{name} N", what, positive, default=1)
    parser.mark_expert("--pp", "--dp", "--ep")


# ---------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True)
class Described:
    """`source` says where the description is from. `folder` None: from `entry`."""

    spec: ModelSpec
    source: str
    folder: Path | None
    entry: Entry | None = None


def describe(model: str) -> Described:
    """What MODEL is. Of a hub id only config.json is fetched; the catalogue asks nobody. Raises
    ConfigError."""
    from ridgeline import demo
    from ridgeline.architectures import read_spec
    from ridgeline.architectures.catalogue import find_entry
    from ridgeline.loader import read_config
    from ridgeline.loader.hub import find_config

    path, entry = Path(demo.located(model)).expanduser(), find_entry(model)
    if entry is not None and not path.exists():
        return Described(read_spec(entry.config), entry.source, None, entry)
    if entry is not None:
        said = f"{model} is a folder here, and a name of the catalogue; the folder is used"
        print(f"ridgeline: {said}", file=sys.stderr)
    folder = path if path.exists() else find_config(model)
    return Described(read_spec(read_config(folder)), f"config.json of {model}", folder)


def read_model(model: str) -> ModelSpec:
    """The spec of MODEL; weights are not needed."""
    return describe(model).spec


# ---------------------------------------------------------------------- the machine


def make_setup(args: argparse.Namespace) -> Setup:
    """Raises ConfigError for a model, device, format or layout that is not there."""
    from ridgeline.architectures.scheme_config import is_quantized
    from ridgeline.cost.captured import as_served
    from ridgeline.cost.pipeline import with_cuts
    from ridgeline.cost.setup import Layout, Precision, Setup
    from ridgeline.formats import CHECKPOINT

    spec = read_model(args.model)
    device, calibration = open_device(args.device, args.calibration)
    own = own_format(spec, device)
    weights = args.weights or (CHECKPOINT if is_quantized(spec) else own)
    precision = Precision.named(weights, args.kv, dtype=own)
    layout = Layout(args.tp, args.pp, args.ep, dp=args.dp)
    constants = as_served(calibration, spec, device, precision, layout)
    return with_cuts(Setup(spec, device, layout, precision, constants))


def own_format(spec: ModelSpec, device: Device) -> str:
    """The checkpoint's format, as the engine would serve it: a CPU computes fp16 in fp32."""
    from ridgeline.cost.setup import SHORT

    own = SHORT.get(spec.dtype, "bf16")
    return "fp32" if own == "fp16" and device.kind == "cpu" else own


def open_device(name: str, record: Path | None = None) -> tuple[Device, Calibration | None]:
    """The device, and its calibration: that of the file `record`, or one made here before.

    "this" is the machine one stands on: its record, or a measurement of a few seconds.
    """
    from ridgeline.cost.hardware import find_device, load_device_file
    from ridgeline.records import find_calibration

    if name == THIS:
        return _open_this(record)
    device = load_device_file(Path(name)) if name.endswith(".json") else find_device(name)
    if record is not None:
        return device, read_calibration(record)
    return device, find_calibration(device.name)


def _open_this(path: Path | None) -> tuple[Device, Calibration | None]:
    from ridgeline.records import find_record, read_record

    if path is not None:  # perhaps of another machine
        named = read_record(path)
        return named.device, named.calibration
    record = find_record(this_key())
    if record is None:
        return this_device(), None
    return as_it_is_now(record.device), record.calibration


def read_calibration(path: Path) -> Calibration:
    """A record of `ridgeline calibrate`. ConfigError if it cannot be read."""
    from ridgeline.cost.constants import Calibration

    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a calibration: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: a calibration is a JSON object, not {type(record).__name__}")
    return Calibration.from_json(record, str(path))


def price_band(args: argparse.Namespace, device: Device) -> Band | None:
    """Dollars of one device for an hour: --price, or the catalogue's; None: nobody knows."""
    from ridgeline.cost.money import fixed_price, rent_band

    return rent_band(device) if args.price is None else fixed_price(args.price)


# ---------------------------------------------------------------------- this machine


def this_key(device: str = "auto", threads: int | None = None) -> str:
    """What the records of this machine's device are called."""
    from ridgeline.measure.machine import key_here

    return key_here(device, threads)


def as_it_is_now(recorded: Device, device: str = "auto") -> Device:
    """With no more memory than this process may have: limits may have come since."""
    from ridgeline.devices import open_device

    total = open_device(device).memory_total()
    return replace(recorded, memory_bytes=min(recorded.memory_bytes, total))


def this_device(device: str = "auto", threads: int | None = None) -> Device:
    """The machine one stands on: the figures of its calibration, else measured in seconds."""
    from ridgeline.records import find_record

    if (found := find_record(this_key(device, threads))) is not None:
        return as_it_is_now(found.device, device)
    from ridgeline.measure.machine import measured_here

    return measured_here(device, threads)
