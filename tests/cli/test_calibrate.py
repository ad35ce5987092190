"""Does `ridgeline calibrate` show, keep and print what it measured?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cost.constants import Calibration
from ridgeline.measure import calibrate as measuring
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
    for word in ("TFLOP/s", "GB/s", "products fp32", "decode attention fp32", "norm fp32"):
        assert word in out
    assert "does it predict?" in out
    assert "matmul fp32" in out
    assert "matrix products, float32" in err  # one line a stage where there is no terminal
    assert "kept in" in err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--device", "cpu", "--dtype", "float64"), "float64"),
        (("--device", "abacus"), "abacus"),
        (("--output", "/dev/null/x.json", *FLAGS), "cannot be written"),
        (("--output", "/", *FLAGS), "this is a folder"),
    ],
)
def test_what_cannot_be_done_is_said(cli: Cli, flags: tuple[str, ...], word: str) -> None:
    code, _, err = cli("calibrate", "--quick", "-q", *flags)
    assert code == 2
    assert word in err
