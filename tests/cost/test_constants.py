"""Calibration records: there and back, and what is refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from ridgeline.cost.constants import (
    NARROW_SHARE,
    UNPACKING,
    AttentionConstants,
    Calibration,
    MatmulConstants,
    MessageConstants,
    StreamConstants,
    default_calibration,
)
from ridgeline.cost.hardware import catalogue
from ridgeline.errors import ConfigError
from tests.cost.random_setups import device, random_calibration


@pytest.mark.parametrize("seed", range(20))
def test_a_record_survives_json(seed: int) -> None:
    calibration = random_calibration(random.Random(seed), device())
    text = json.dumps(calibration.to_json(), allow_nan=False)
    assert Calibration.from_json(json.loads(text)) == calibration


def test_broken_records_are_refused_by_name() -> None:
    record = default_calibration(device()).to_json()
    for key in ("matmul", "device_name", "elementwise"):
        broken = {name: value for name, value in record.items() if name != key}
        with pytest.raises(ConfigError, match=r"file\.json is no calibration record"):
            Calibration.from_json(broken, "file.json")
    with pytest.raises(ConfigError, match="no calibration record"):
        Calibration.from_json(record | {"origin": "guessed"})
    with pytest.raises(ConfigError, match="no calibration record"):
        Calibration.from_json(record | {"matmul": {"bf16": {"speed": 3}}})


@pytest.mark.parametrize(
    "make",
    [
        lambda: MatmulConstants(1.2, 0.5, 0.0),
        lambda: MatmulConstants(0.5, 0.0, 0.0),
        lambda: MatmulConstants(0.5, 0.5, -1e-6),
        lambda: MatmulConstants(0.5, 0.5, 0.0, q=0.5),
        lambda: MatmulConstants(0.5, 0.5, math.nan),
        lambda: AttentionConstants(1.5, 0.0, 0.5, 0.5, 0.0),
        lambda: AttentionConstants(0.5, 0.0, 0.5, 0.5, 0.0, skew=-1.0),
        lambda: StreamConstants(2.0, 0.0),
        lambda: MessageConstants(0.0),
    ],
)
def test_constants_that_would_beat_the_data_sheet(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_which_constants_serve_for_which_dtype() -> None:
    plain, own = MatmulConstants(0.5, 0.8, 1e-6), MatmulConstants(0.4, 0.7, 2e-6)
    base = default_calibration(device())
    table = Calibration(
        device_name="x",
        matmul={"bf16": plain, "bf16-int8": own},
        attention=base.attention,
        elementwise=base.elementwise,
        sampling=base.sampling,
        messages=base.messages,
    )
    assert table.matmul_for("bf16") == table.matmul_for("fp16") == plain
    assert table.matmul_for("bf16", "int8") == table.matmul_for("bf16", "int8-outliers") == own
    assert table.matmul_for("bf16", "int4").e_c == 0.5 * UNPACKING
    fp8 = table.matmul_for("fp8", "fp8")  # nothing is unpacked, but a peak is harder to reach
    assert fp8 == replace(plain, e_c=0.5 * NARROW_SHARE)
    measured = replace(table, matmul=dict(table.matmul) | {"fp8": own})
    assert measured.matmul_for("fp8", "fp8") == measured.matmul_for("fp4") == own
    with pytest.raises(ConfigError, match="x has no constants for bf16"):
        Calibration("x", {}, {}, *(base.elementwise,) * 2, base.messages).matmul_for("bf16")


def test_assumed_efficiencies_lie_in_the_bands_that_were_seen() -> None:
    for one in catalogue().values():
        calibration = default_calibration(one)
        assert calibration.origin == "assumed"
        low, high = {"gpu": (0.55, 0.85), "apple": (0.6, 0.75), "cpu": (0.4, 0.6)}.get(
            one.kind, (0.5, 0.9)
        )
        assert low <= calibration.matmul["bf16"].e_c <= high
        assert 0.6 <= calibration.matmul["bf16"].e_m <= 0.85
        assert calibration.host.c0_s == calibration.host.c1_s == 0.0  # measured or not counted
