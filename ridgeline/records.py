"""Where are the calibrations of this machine, and what do they say?

One JSON file a device in the user's cache folder, under ridgeline/calibration. A record is a
calibration as `cost.constants` reads it, with the device's figures that its shares refer to, the
errors on points kept out, and the points. Loads no tensor library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.cost.constants import Calibration
from ridgeline.cost.fit import Fit, Point, predict
from ridgeline.cost.hardware import Device, device_from_json, device_to_json
from ridgeline.errors import ConfigError

FOLDER = "ridgeline/calibration"


@dataclass(frozen=True, slots=True)
class Record:
    """The shares of `calibration` refer to the figures of `device`."""

    device: Device
    calibration: Calibration
    path: Path | None = None


def record_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of all records of this user."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / FOLDER


def record_path(key: str, folder: Path | None = None) -> Path:
    return (folder or record_folder()) / f"{key}.json"


def record_of(fit: Fit, device: Device, about: Mapping[str, Any]) -> dict[str, Any]:
    """What is written: the calibration at the top level, as its own reader wants it."""
    found = fit.calibration
    return {
        **found.to_json(),
        "about": dict(about),
        "device": device_to_json(device),
        "errors": {name: asdict(error) for name, error in fit.errors.items()},
        "points": [
            *(_row(point, device, found, is_held_out=False) for point in fit.fitted),
            *(_row(point, device, found, is_held_out=True) for point in fit.held_out),
        ],
    }


def _row(
    point: Point, device: Device, calibration: Calibration, *, is_held_out: bool
) -> dict[str, Any]:
    return {
        "what": point.what,
        "dtype": point.dtype,
        "label": point.label,
        "measured_s": point.seconds,
        "predicted_s": predict(point, device, calibration),
        "held_out": is_held_out,
    }


def prepare_folder(path: Path) -> None:
    """Make the folder of a record before minutes are spent on what would be in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Raises ConfigError when the file cannot be written. Never leaves half a file, and never puts
    one in the place of a pipe or a device."""
    prepare_folder(path)
    text = json.dumps(record, indent=1) + "\n"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read_record(path: Path) -> Record:
    """A record of `ridgeline calibrate`. ConfigError names the file and what is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a calibration: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("device"), dict):
        raise ConfigError(f"{path} is no calibration record; make one with ridgeline calibrate")
    return Record(
        device_from_json(data["device"], str(path)), Calibration.from_json(data, str(path)), path
    )


def find_record(key: str, folder: Path | None = None) -> Record | None:
    """The record of the device of this name. One of the same CPU with another number of threads
    serves too, as an extrapolation. None: nobody has calibrated."""
    exact = record_path(key, folder)
    if exact.is_file():
        return read_record(exact)
    stem, _, threads = key.rpartition("-")
    if not key.startswith("cpu-") or not threads.endswith("t"):
        return None
    others = sorted(exact.parent.glob(f"{stem}-*t.json")) if exact.parent.is_dir() else []
    if not others:
        return None
    found = read_record(others[-1])
    return replace(found, calibration=replace(found.calibration, origin="extrapolated"))


def find_calibration(key: str) -> Calibration | None:
    """The calibration of the device of this name, if it was made here before."""
    found = find_record(key)
    return None if found is None else found.calibration
