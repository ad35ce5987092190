"""Which model on which machine? What the flags of `machine_flags` mean."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ridgeline.architectures.spec import ModelSpec
from ridgeline.architectures.stored_config import is_stored
from ridgeline.cli.described import describe
from ridgeline.cli.machine_flags import THIS
from ridgeline.cost.captured import as_served
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import Device, find_device, load_device_file
from ridgeline.cost.layout import Layout
from ridgeline.cost.money import Band, fixed_price, rent_band
from ridgeline.cost.precision import SHORT, Precision
from ridgeline.cost.setup import Setup
from ridgeline.errors import ConfigError
from ridgeline.formats import STORED
from ridgeline.measure.here import as_it_is_now, this_device, this_key
from ridgeline.records import find_calibration, find_record, read_record


def read_model(model: str) -> ModelSpec:
    """The spec of MODEL; weights are not needed."""
    return describe(model).spec


def make_setup(args: argparse.Namespace) -> Setup:
    """Raises ConfigError for a model, device, format or layout that is not there."""
    spec = read_model(args.model)
    device, calibration = open_device(args.device, args.calibration)
    own = own_format(spec, device)
    weights = args.weights or (STORED if is_stored(spec) else own)
    precision = Precision.named(weights, args.kv, dtype=own)
    constants = as_served(calibration, spec, device, precision)
    return Setup(spec, device, Layout(args.tp, args.pp, args.ep), precision, constants)


def own_format(spec: ModelSpec, device: Device) -> str:
    """The checkpoint's format, as the engine would serve it: a CPU computes fp16 in fp32."""
    own = SHORT.get(spec.dtype, "bf16")
    return "fp32" if own == "fp16" and device.kind == "cpu" else own


def open_device(name: str, record: Path | None = None) -> tuple[Device, Calibration | None]:
    """The device, and its calibration: that of the file `record`, or one made here before.

    "this" is the machine one stands on: its record, or a measurement of a few seconds.
    """
    if name == THIS:
        return _open_this(record)
    device = load_device_file(Path(name)) if name.endswith(".json") else find_device(name)
    if record is not None:
        return device, read_calibration(record)
    return device, find_calibration(device.name)


def _open_this(path: Path | None) -> tuple[Device, Calibration | None]:
    if path is not None:  # perhaps of another machine
        named = read_record(path)
        return named.device, named.calibration
    record = find_record(this_key())
    if record is None:
        return this_device(), None
    return as_it_is_now(record.device), record.calibration


def read_calibration(path: Path) -> Calibration:
    """A record of `ridgeline calibrate`. ConfigError if it cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a calibration: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: a calibration is a JSON object, not {type(record).__name__}")
    return Calibration.from_json(record, str(path))


def price_band(args: argparse.Namespace, device: Device) -> Band | None:
    """Dollars of one device for an hour: --price, or the catalogue's; None: nobody knows."""
    return rent_band(device) if args.price is None else fixed_price(args.price)
