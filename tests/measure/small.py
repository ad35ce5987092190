"""The smallest grid that has a point of every class."""

from __future__ import annotations

import pytest

from ridgeline.measure import calibrate, machine, points
from ridgeline.measure.models import Grid, Sample, config

SAMPLE = Sample(
    "tiny",
    config(32, 2, 4, 2, 64, 260, head_dim=8),
    prefills=(9, 13, 17, 24, 33),
    decodes=((1, 20), (2, 40), (3, 30), (4, 10), (2, 15)),
    mixes=((12, 2, 30), (10, 1, 20), (20, 3, 9)),
    answers=(2, 20),
)
SMALL = Grid(
    samples=(SAMPLE,),
    tokens=(1, 2, 4, 8, 16),
    attention=((4, 2, 8),),
    decodes=((1, 16), (3, 40), (2, 70), (4, 9)),
    skewed=((60, 5, 5),),
    prefills=((9, 0), (16, 0), (10, 30), (12, 5), (30, 0)),
    mixes=((10, 2, 20), (12, 1, 30), (14, 3, 9), (9, 2, 40), (20, 1, 8)),
    hosts=(1, 3),
    max_call_s=0.05,
)


def quiet(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point is measured as briefly as can be."""
    monkeypatch.setattr(calibrate, "QUICK_OPERATOR_S", {"cpu": 0.002})
    monkeypatch.setattr(points, "STEP_BUDGET_S", 0.01)
    monkeypatch.setattr(machine, "CPU_BYTES", 8 << 20)
