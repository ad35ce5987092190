"""Are decodes priced as an H200 took them, in formats that nobody calibrated too?

The record has points of plain weights only. Its host and card are not those of the decodes.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ridgeline.cost.captured import as_served
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Precision, Setup
from tests.cost.known_models import LLAMA_3_8B

RESULTS = Path(__file__).parents[2] / "bench/gpu/results"
RECORD = "2026-11-22-calibration-third-host-h200.json.gz"
H200 = find_device("h200-sxm")


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return Calibration.from_json(json.loads(gzip.decompress((RESULTS / RECORD).read_bytes())))


@pytest.mark.parametrize(
    ("weights", "name", "furthest"),
    [
        ("plain", "2026-11-22-chain-llama31-8b.json", 0.1),
        ("fp8", "2026-11-21-formats-fp8-again.json", 0.15),
        ("int8", "2026-11-21-formats-int8.json", 0.15),
        ("int4", "2026-11-21-formats-int4-last.json", 0.25),
    ],
)
def test_an_8b_shape(calibration: Calibration, weights: str, name: str, furthest: float) -> None:
    precision = Precision("bfloat16", weights)
    constants = as_served(calibration, LLAMA_3_8B, H200, precision)
    pricer = Pricer(Setup(LLAMA_3_8B, H200, precision=precision, calibration=constants))
    rows = json.loads((RESULTS / name).read_text())["rows"]
    decodes = [row for row in rows if row["workload"] == "decode" and row["avg_ctx"] == 256]
    assert len(decodes) >= 3
    for row in decodes:
        measured_s = row["batch"] / row["median"]["decode_tok_s"]
        expected_s = pricer.seconds(((1, 256),) * row["batch"])
        assert expected_s == pytest.approx(measured_s, rel=furthest), row["batch"]


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ("plain", "2026-11-22-wanted-llama31-8b.json"),
        ("fp8", "2026-11-22-wanted-llama31-8b-fp8.json"),
    ],
)
def test_prompts_of_an_8b_shape(calibration: Calibration, weights: str, name: str) -> None:
    """Who multiplies 8 bits comes less near to the peak."""
    precision = Precision("bfloat16", weights)
    constants = as_served(calibration, LLAMA_3_8B, H200, precision)
    pricer = Pricer(Setup(LLAMA_3_8B, H200, precision=precision, calibration=constants))
    rows = json.loads((RESULTS / name).read_text())["rows"]
    prompts = [row for row in rows if row["workload"] == "prefill"]
    assert prompts
    for row in prompts:
        measured_s = row["median"]["ttft_ms"] / 1e3
        expected_s = pricer.seconds(((row["prompt_len"], 0),))
        assert expected_s == pytest.approx(measured_s, rel=0.12), row["prompt_len"]
