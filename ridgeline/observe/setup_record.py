"""How does a log say what was priced, so that another program can price it again?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ridgeline.architectures import read_spec
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import device_from_json, device_to_json
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.errors import ConfigError


def setup_record(setup: Setup, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Plain JSON values; `model_config` is the model's config.json, which its spec was read from.
    The constants are written out even where they are assumed: they may change some day."""
    return {
        "model_config": dict(model_config),
        "device": device_to_json(setup.device),
        "layout": asdict(setup.layout),
        "precision": asdict(setup.precision),
        "calibration": setup.constants.to_json(),
    }


def read_setup(record: Mapping[str, Any]) -> Setup:
    """The inverse of `setup_record`. Raises ConfigError."""
    try:
        config, device = record["model_config"], record["device"]
        layout, precision = Layout(**record["layout"]), Precision(**record["precision"])
        calibration = record["calibration"]
        for part in (config, device, calibration):
            if not isinstance(part, Mapping):
                raise TypeError(f"{part!r:.40} is no object")
    except (KeyError, TypeError) as problem:
        raise ConfigError(
            f"the record does not say what was priced: {problem!r}; it was written by an engine "
            "that could not price its steps"
        ) from None
    return Setup(
        read_spec(config),
        device_from_json(device, "device of the record"),
        layout,
        precision,
        Calibration.from_json(calibration, "calibration of the record"),
    )
