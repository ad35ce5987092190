"""Does `ridgeline calibrate` show, keep and print what it measured?"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from ridgeline.cost.constants import Calibration
from ridgeline.measure import calibrate as measuring
from ridgeline.measure import disturbance
from ridgeline.measure.models import Grid
from tests.cli.conftest import Cli
from tests.measure.small import SMALL, hurry

FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A grid of seconds, and a cache folder of its own."""

    def grid(kind: str, *, is_quick: bool) -> Grid:
        assert kind == "cpu"
        assert is_quick
        return SMALL

    hurry(monkeypatch)
    monkeypatch.setattr(disturbance, "LOOK_S", 0.0)
    monkeypatch.setattr(measuring, "grid_for", grid)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_json_is_the_record_and_is_kept(cli: Cli, small: Path, tmp_path: Path) -> None:
    output = tmp_path / "here.json"
    code, out, err = cli("calibrate", *FLAGS, "--quick", "--json", "-q", "--output", output)
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert json.loads(output.read_text()) == record
    (kept,) = (small / "ridgeline" / "calibration").glob("*.json")
    assert kept.stem == record["device"]["name"]
    assert json.loads(kept.read_text()) == record
    Calibration.from_json(record)


def test_tables_show_device_constants_and_errors(cli: Cli) -> None:
    code, out, err = cli("calibrate", *FLAGS, "--quick")
    assert code == 0
    for word in ("FLOP/s", "GB/s", "products fp32", "decode attention fp32", "norm fp32"):
        assert word in out
    assert "does it predict?" in out
    assert "matmul fp32" in out
    assert "matrix products, float32" in err  # one line a stage where there is no terminal
    assert "kept in" in err


def test_a_busy_machine_is_named_and_remembered(
    cli: Cli, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others use three quarters of the processors, whatever this machine does now."""
    seconds = itertools.count(0.0, 4.0)

    def others() -> disturbance.Processors:
        now = next(seconds)
        return disturbance.Processors(now, now * 3 / 4, 0.0)

    monkeypatch.setattr(disturbance, "read_processors", others)
    code, _, err = cli("calibrate", *FLAGS, "--quick")
    assert code == 0
    first, *_, last = err.splitlines()
    assert "processors: this machine is busy. Stop the other programs" in first
    assert last.startswith("calibrated on a busy machine: other programs used ")
    assert "calibrate again" in last
    (kept,) = (small / "ridgeline" / "calibration").glob("*.json")
    record = json.loads(kept.read_text())
    assert record["about"]["disturbance"]["others"] == 0.75
    caveat = Calibration.from_json(record).caveat
    assert caveat.startswith("calibrated on a busy machine")
    argv = ("--calibration", kept, "--device", "h100-sxm", "--input", 8, "--output", 8)
    _, out, _ = cli("predict", "demo:chat", *argv)
    assert caveat in out


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--device", "cpu", "--dtype", "float64"), "float64"),
        (("--device", "abacus"), "abacus"),
        (("--output", "/no/such/x.json", *FLAGS), "there is no folder /no/such; make it first"),
        (("--output", "/", *FLAGS), "this is a folder"),
    ],
)
def test_what_cannot_be_done_is_said(cli: Cli, flags: tuple[str, ...], word: str) -> None:
    code, _, err = cli("calibrate", "--quick", "-q", *flags)
    assert code == 2
    assert word in err
