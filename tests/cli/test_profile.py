"""Does `ridgeline profile` show a step, as tables and as JSON?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cli import main
from tests.captures import captures
from tests.tiny_model import make_tiny_model

FEW = ["--num-blocks", "64", "--dtype", "float32", "--input", "16", "--steps", "2", "-q"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, head_dim=16)  # the least that a GPU captures
    return str(folder)


def test_tables_and_trace(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.json"
    assert main.main(["profile", model, *FEW, "--trace", str(trace), "--top", "3"]) == 0
    out, _ = capsys.readouterr()
    for word in ("matmul", "attention", "expected ms", "ideal ms", "longest kernels", "bound by"):
        assert word in out
    assert json.loads(trace.read_text())["traceEvents"]


def test_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile", model, *FEW, "--json", "--phase", "prefill"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shape"] == [[16, 0]]
    assert found["step_s"] > 0
    assert found["kernels_s"] == pytest.approx(sum(row["seconds"] for row in found["classes"]))


def test_a_folder_that_is_not_there(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile", model, *FEW, "--trace", "/nowhere/t.json"]) == 2
    assert "--trace /nowhere/t.json: there is no folder /nowhere" in capsys.readouterr().err


def test_a_folder_is_no_trace(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["profile", model, *FEW, "--trace", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ridgeline: error: --trace {tmp_path}: this is a folder; name a file in it\n"
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob(tmp_path.name + ".*"))


@captures
def test_drafts_are_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["profile", model, *FEW, "--speculate", "early:1:3"]
    assert main.main(asked) == 0
    out, _ = capsys.readouterr()
    assert "a decode step of 4 tokens, 3 of them drafts" in out
    assert "not calibrated: ridgeline" in out
    assert main.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draft_tokens"] == [3, 3]
    assert 0 < found["drafting_expected_s"] < found["expected_s"]
