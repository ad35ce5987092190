"""What is priced: which model, on which devices, spread how, in which formats?"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import Calibration, default_calibration
from ridgeline.cost.hardware import Device
from ridgeline.cost.layout import ONE_DEVICE, Layout
from ridgeline.cost.precision import PLAIN, Precision


@dataclass(frozen=True, slots=True)
class Setup:
    """Raises ConfigError when the model cannot be spread like that. Without a calibration the
    constants are assumed."""

    spec: ModelSpec
    device: Device
    layout: Layout = ONE_DEVICE
    precision: Precision = PLAIN
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        self.layout.check(self.spec)

    @property
    def constants(self) -> Calibration:
        return self.calibration or default_calibration(self.device)
