"""The fake engine with a weight format from outside, of which nobody knows what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeline.config import EngineConfig
from ridgeline.formats import WEIGHT_FORMATS, WeightFormatLine
from tests.server import fake_build

WEIGHT_FORMATS["unpriced"] = WeightFormatLine("tests.server.unpriced:none")


def build(config: EngineConfig, progress: Callable[[str, int, int], None]) -> fake_build.FakeBuilt:
    return replace(fake_build.build(config, progress), run_record=None)
