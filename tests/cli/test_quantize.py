"""`ridgeline quantize` from the words on the command line to the files and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline import LLM
from ridgeline.cost.memory_items import WEIGHTS
from tests.cli.conftest import Cli
from tests.tiny_model import make_tiny_model

FEW = ("--window", 64, "--num-windows", 4, "--num-held-out", 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("quantize") / "model")


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_model_is_written_and_reported(
    cli: Cli, model: Path, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "small"
    flags = ("--method", method, "--bits", 4, "--group-size", 32, "--json", *FEW)
    code, said, _ = cli("quantize", model, "-o", out, *flags)
    assert code == 0
    record = json.loads(said)
    assert record == json.loads((out / "quantize-report.json").read_text())
    assert (record["method"], record["bits"], record["group_size"]) == (method, 4, 32)
    assert record["act_order"] is (method == "gptq")
    assert record["calibration"]["tokens"] == (0 if method == "rtn" else 4 * 64)
    assert record["quality"]["kl"] > 0
    assert len(record["layers"]) == 2
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    code, said, _ = cli("generate", out, "-p", "x", "--max-tokens", 4)
    assert code == 0
    assert said
    check_bytes(cli, out)


def check_bytes(cli: Cli, model: Path) -> None:
    """What is allocated is what `inspect` and `predict` say."""
    with LLM(str(model), dtype="float32", num_blocks=20) as llm:
        [said] = [one for one in llm.resolved.decisions if one.field == "weight_format"]
        [weights] = [row for row in llm.memory if row.what == "weights"]
    assert "pack-quantized, 4 bits, groups of 32" in said.because
    shown = json.loads(cli("inspect", model, "--json")[1])["memory_bytes"]["float32"]["weights"]
    assert weights.measured == weights.predicted == shown
    found = json.loads(cli("predict", model, "--device", "h100-sxm", "--json")[1])
    assert found["precision"]["weights"] == "checkpoint"
    items = {item["what"]: item["bytes"] for item in found["memory"]["items"]}
    assert sum(items.get(what, 0) for what in WEIGHTS) == shown


def test_tables_with_each_layer_and_scores(cli: Cli, model: Path, tmp_path: Path) -> None:
    flags = ("--method", "rtn", "--group-size", 0, "--per-layer", "--score", 1)
    code, said, noted = cli("quantize", model, "-o", tmp_path / "small", *flags, *FEW)
    assert code == 0
    for words in ("KL, nats a token", "perplexity alone", "arithmetic", "original", "quantized"):
        assert words in said
    assert "written to" in noted
    assert not list((tmp_path / "small").glob("plain-*"))


def test_a_prediction_and_mixed_bits(cli: Cli, model: Path, tmp_path: Path) -> None:
    flags = ("--method", "rtn", "--group-size", 0, "--json", *FEW)
    device = ("--predict-on", "h100-sxm")
    code, said, _ = cli("quantize", model, "-o", tmp_path / "a", *flags, *device)
    assert code == 0
    speeds = json.loads(said)["predicted"]
    assert speeds["int4"] > speeds["original"] > 0
    code, said, noted = cli("quantize", model, "-o", tmp_path / "b", *flags, "--mixed", 4)
    assert code == 0
    record = json.loads(said)
    assert record["bits"] == [layer["bits"] for layer in record["layers"]]
    assert record["advice"]["num_bytes"] <= record["advice"]["budget_bytes"]
    assert "measuring 3 bits" in noted
    assert cli("generate", tmp_path / "b", "-p", "x", "--max-tokens", 4)[0] == 0


def test_the_group_size_that_fits_is_decided_once_and_said(
    cli: Cli, model: Path, tmp_path: Path
) -> None:
    flags = ("--method", "rtn", "--json", *FEW)
    code, said, noted = cli("quantize", model, "-o", tmp_path / "small", *flags)
    assert code == 0
    assert json.loads(said)["group_size"] == 32
    assert noted.count("group size") == 1
    assert "group size 32: the largest usual one that divides the columns of every" in noted


def test_texts_of_ones_own(cli: Cli, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The fox ran over the hill and the dog slept. " * 20)
    flags = ("--calibration", text, "--held-out", text, "--group-size", 16, "--json", *FEW)
    code, said, _ = cli("quantize", model, "-o", tmp_path / "small", *flags)
    assert code == 0
    record = json.loads(said)
    assert record["calibration"] == {"text": str(text), "tokens": 4 * 64}
    assert record["held_out"] == {"text": str(text), "tokens": 14 * 64}


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--group-size", 128), "--group-size 128 does not divide the 32 columns of model.layers"),
        (("--bits", 3, "--predict-on", "h100-sxm"), "--predict-on: the cost model knows 4 and 8"),
        (
            ("--mixed", 9, "--group-size", 0),
            "--mixed: '9' is no number of at least 2 and at most 8",
        ),
        (("--mixed", 4, "--bits", 4, "--group-size", 0), "--mixed is in place of --bits; leave"),
        (("--group-size", -1), "--group-size is -1; give 0"),
        (("--damping", 0), "--damping is 0.0; it lies above 0"),
        (
            ("--group-size", 0, "--window", 32, "--num-held-out", 1),
            "--num-held-out is 1; so little",
        ),
        (("--window", 1024), "--window is 1024; this model's context is 512"),
        (("--calibration", "missing.txt"), "missing.txt: cannot be read"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    cli: Cli, model: Path, tmp_path: Path, flags: tuple[object, ...], why: str
) -> None:
    out = tmp_path / "small"
    code, said, error = cli("quantize", model, "-o", out, *flags)
    assert (code, said) == (2, "")
    assert why in error
    assert error.removesuffix("Try 'ridgeline quantize --help'.\n").count("\n") == 1
    assert not out.exists()


def test_a_short_text_is_refused(cli: Cli, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Too short.")
    flags = ("--held-out", text, "--group-size", 0)
    code, _, error = cli("quantize", model, "-o", tmp_path / "small", *flags)
    assert code == 2
    assert "short.txt: has 10 tokens, less than one window of 512" in error
