"""Does the table of steps on the device alone hold real steps against their prices?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.speculation import parser
from bench.speculation_device import device_seconds
from ridgeline.build import build
from ridgeline.config import EngineConfig
from ridgeline.measure import steps
from ridgeline.measure.stopwatch import DeviceTimer
from tests.captures import records
from tests.measure.small import SAMPLE
from tests.measure.timeline import Timeline


def asked(folder: Path, *more: str) -> list[dict[str, Any]]:
    SAMPLE.write(folder)
    flags = f"--model {folder} --device cpu --dtype float32 --threads 1 --prompt-len 20 --steps 2"
    args = parser().parse_args(
        ["device", *flags.split(), "--speculate", "early:1", "--out", "none", *more]
    )
    args.load_format = "random"
    return list(args.rows(args))


@records
def test_each_number_of_drafts_has_a_row_of_both_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "open_device_timer", lambda device: DeviceTimer(Timeline(5e-6)))
    rows = asked(tmp_path, "--draft_tokens", "0,2", "--batches", "1,3")
    drafted = [(r["batch"], r["draft_tokens"]) for r in rows if r["speculate"] == "early:1"]
    assert drafted == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert all(r["draft_tokens"] == 0 for r in rows if r["speculate"] == "off")
    for row in rows:
        assert len(row["rounds"]) == 4
        assert row["device_us"] == pytest.approx(5.0)
        assert row["error"] == pytest.approx(row["predicted_us"] / 5.0 - 1)


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="clock of its own"):
        asked(tmp_path)


@records
def test_drafts_are_priced_with_their_check(tmp_path: Path) -> None:
    SAMPLE.write(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", threads=1, load_format="random",
        speculate="early:1", num_blocks=50,
    )  # fmt: skip
    built = build(config)
    few, many = (device_seconds(built, ((k + 1, 30),), k) for k in (1, 3))
    check_s = built.pricer.cost(((2, 30),), 2).device_s
    assert check_s < few < many
