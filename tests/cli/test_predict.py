"""Does `ridgeline predict` say what the cost model says, and what it does not know?"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.architectures import read_spec
from ridgeline.cli.machine import open_device
from ridgeline.cost.constants import HostConstants, default_calibration
from ridgeline.cost.hardware import device_to_json, find_device
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.cost.steady_state import steady_state
from ridgeline.formats import KV_FORMATS, WEIGHT_FORMATS
from ridgeline.records import record_folder
from tests.cli.conftest import Cli
from tests.tiny_model import tiny_config

LLAMA_70B = tiny_config(
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    torch_dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had calibrated this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 70B, as a config alone."""
    folder = tmp_path_factory.mktemp("big")
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return folder


def predict(cli: Cli, *argv: object) -> dict[str, Any]:
    code, out, err = cli("predict", *argv, "--json")
    assert code == 0, err
    return dict(json.loads(out))


EIGHT = ("--device", "h100-sxm", "--tp", 8, "--weights", "fp8", "--batch", 64)
LOAD = ("--input", 500, "--output", 200)


def test_the_figures_are_those_of_the_cost_model(big: Path, cli: Cli) -> None:
    found = predict(cli, big, *EIGHT, *LOAD)
    setup = Setup(
        read_spec(LLAMA_70B), find_device("h100-sxm"), Layout(tp=8), Precision.named("fp8")
    )
    exact = steady_state(setup, batch=64, num_input=500, num_output=200)
    assert found["ttft_ms"] == pytest.approx(1e3 * exact.ttft_s)
    assert found["tpot_ms"] == pytest.approx(1e3 * exact.tpot_s)
    assert found["tokens_per_s"] == pytest.approx(exact.tokens_per_s)
    assert found["tokens_per_s_per_user"] == pytest.approx(1e3 / found["tpot_ms"])
    assert found["bound"] == exact.bound
    assert found["max_batch"] == exact.max_batch > 64
    assert found["layout"]["devices"] == 8
    assert found["precision"] == {"dtype": "bfloat16", "weights": "fp8", "kv": "bf16"}


def test_parts_of_the_answer_sum_to_the_whole(big: Path, cli: Cli) -> None:
    found = predict(cli, big, *EIGHT, *LOAD)
    for name in ("ttft", "tpot"):
        parts = [part["ms"] for part in found["waterfall"][name]]
        assert sum(parts) == pytest.approx(found[f"{name}_ms"])
    memory = found["memory"]
    assert sum(item["bytes"] for item in memory["items"]) == memory["total"]["bytes"]
    assert memory["total"]["bytes"] < memory["capacity"]["bytes"] < 80e9
    assert memory["total"]["gb"] == pytest.approx(memory["total"]["gib"] * 2**30 / 1e9)
    for step in ("decode", "prefill"):
        times = [op["expected_ms"] for op in found["operators"][step]]
        assert times == sorted(times, reverse=True)
        assert all(op["ideal_ms"] <= op["expected_ms"] for op in found["operators"][step])
        assert {op["bound"] for op in found["operators"][step]} <= {
            *("compute", "memory", "link", "latency")
        }
    assert sum(found["ms_by_bound"].values()) == pytest.approx(found["e2e_ms"])


def test_money_is_a_band_and_its_shares_sum_to_the_bill(big: Path, cli: Cli) -> None:
    cost = predict(cli, big, *EIGHT, *LOAD)["cost"]
    for key in ("low", "mid", "high"):
        share_in = cost["usd_per_million_input_share"][key] * 500
        share_out = cost["usd_per_million_output_share"][key] * 200
        whole = cost["usd_per_million_output"][key] * 200
        assert share_in + share_out == pytest.approx(whole)
    assert cost["usd_per_device_hour"]["low"] < cost["usd_per_device_hour"]["high"]
    typed = predict(cli, big, *EIGHT, *LOAD, "--price", 2)
    per_hour = typed["tokens_per_s"] * 3600
    assert typed["cost"]["usd_per_million_output"]["mid"] == pytest.approx(16 / per_hour * 1e6)
    assert typed["kwh_per_million_output"] == pytest.approx(8 * 1.73 / per_hour * 1e6)


def test_no_price_is_said_and_not_made_up(bare: Path, cli: Cli) -> None:
    assert predict(cli, bare, "--device", "a10")["cost"] is None
    assert "no price is known for a10" in cli("predict", bare, "--device", "a10")[1]


def test_a_prediction_without_calibration_says_so(
    big: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = predict(cli, big, *EIGHT, *LOAD)
    assert (found["origin"], found["calibrated"], found["calibration"]) == ("assumed", False, None)
    assert found["served_today"]
    said = " ".join(found["caveats"])
    assert "not calibrated" in said
    assert "ridgeline calibrate" in said
    monkeypatch.setitem(KV_FORMATS, "int4", replace(KV_FORMATS["int4"], where=""))
    packed = predict(cli, big, *EIGHT, *LOAD, "--weights", "int8", "--kv", "int4")
    assert not packed["served_today"]
    said = " ".join(packed["caveats"])
    assert "int8 weights with a int4 cache on a gpu are priced" in said
    assert "by this version they are not served" in said
    unpacked = replace(WEIGHT_FORMATS["int8"], fast_on=("cpu",))
    monkeypatch.setitem(WEIGHT_FORMATS, "int8", unpacked)
    slow = predict(cli, big, *EIGHT, *LOAD, "--weights", "int8")
    assert not slow["served_today"]
    assert "served slower than priced" in " ".join(slow["caveats"])


def write_calibration(path: Path, e_m: float = 0.4, **changes: Any) -> Path:
    """A record of an H100 that reaches 40 % of its bandwidth."""
    device = find_device("h100-sxm")
    base = default_calibration(device)
    matmul = {name: replace(c, e_m=e_m) for name, c in base.matmul.items()}
    made = replace(base, matmul=matmul, origin="calibrated", date="2026-01-01", **changes)
    path.write_text(json.dumps(made.to_json() | {"device": device_to_json(device)}))
    return path


def test_a_calibration_replaces_what_is_assumed(bare: Path, tmp_path: Path, cli: Cli) -> None:
    record = write_calibration(tmp_path / "record.json", held_out={"matmul": 0.05})
    base = predict(cli, bare, "--device", "h100-sxm")
    found = predict(cli, bare, "--device", "h100-sxm", "--calibration", record)
    assert found["origin"] == "calibrated"
    assert found["caveats"] == []
    assert found["calibration"] == {
        "device": "h100-sxm",
        "date": "2026-01-01",
        "held_out_error": {"matmul": 0.05},
    }
    assert found["tpot_ms"] > base["tpot_ms"]


def test_a_record_knows_what_a_launch_costs_and_not_how_many_there_are(
    bare: Path, tmp_path: Path, cli: Cli
) -> None:
    """It is of no engine: nothing is captured in it."""
    slow = HostConstants(per_launch_s=1e-3)
    record = write_calibration(tmp_path / "record.json", e_m=0.8, host=slow)
    base = predict(cli, bare, "--device", "h100-sxm")
    found = predict(cli, bare, "--device", "h100-sxm", "--calibration", record)
    assert found["tpot_ms"] == pytest.approx(base["tpot_ms"], rel=0.1)


def test_a_record_of_the_cache_folder_is_found_by_its_name(bare: Path, cli: Cli) -> None:
    record_folder().mkdir(parents=True)
    write_calibration(record_folder() / "h100-sxm.json")
    assert predict(cli, bare, "--device", "h100-sxm")["calibrated"]
    assert not predict(cli, bare, "--device", "h200-sxm")["calibrated"]


def test_outside_of_what_was_measured_is_said(bare: Path, tmp_path: Path, cli: Cli) -> None:
    record = write_calibration(tmp_path / "r.json", ranges={"matmul.m": (64.0, 4096.0)})
    found = predict(cli, bare, "--device", "h100-sxm", "--calibration", record)
    assert found["origin"] == "extrapolated"
    assert found["caveats"][0].startswith("extrapolated")
    other = predict(cli, bare, "--device", "h200-sxm", "--calibration", record)
    assert other["caveats"][0] == "the calibration is of h100-sxm, not h200-sxm"


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"matmul": 3}'])
def test_a_broken_calibration_is_named(bare: Path, tmp_path: Path, content: str, cli: Cli) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    code, out, err = cli("predict", bare, "--device", "h100-sxm", "--calibration", path)
    assert (code, out) == (2, "")
    assert "broken.json" in err
    assert "Traceback" not in err


def test_this_is_the_machine_one_stands_on(bare: Path, tmp_path: Path, cli: Cli) -> None:
    found = predict(cli, bare)
    assert found["device"] not in ("", "this")
    assert found["origin"] == "assumed"  # measured figures, assumed efficiencies
    record = write_calibration(tmp_path / "record.json")
    device, calibration = open_device("this", record)
    assert device == find_device("h100-sxm")
    assert calibration is not None


def test_a_device_may_be_a_file(bare: Path, tmp_path: Path, cli: Cli) -> None:
    data = device_to_json(find_device("l4")) | {"name": "my-card", "bandwidth_gb_per_s": 3000}
    (tmp_path / "my.json").write_text(json.dumps(data))
    found = predict(cli, bare, "--device", tmp_path / "my.json")
    assert found["device"] == "my-card"
    assert found["tpot_ms"] < predict(cli, bare, "--device", "l4")["tpot_ms"]


def test_what_does_not_fit_shows_the_lines_and_three_ways_out(big: Path, cli: Cli) -> None:
    code, out, err = cli("predict", big, "--device", "h100-sxm")
    assert (code, out) == (2, "")
    assert "feed-forward" in err
    assert "GiB" in err
    assert err.count("would help:") == 3
    assert "Traceback" not in err


def test_a_batch_that_does_not_fit_says_how_many_do(big: Path, cli: Cli) -> None:
    code, _, err = cli("predict", big, "--device", "h200-sxm", "--tp", 2, "--batch", 900)
    assert code == 2
    most = int(err.partition("would help: batch ")[2].split(",")[0])
    argv = ("predict", big, "--device", "h200-sxm", "--tp", 2, "--batch")
    assert cli(*argv, most)[0] == 0
    assert cli(*argv, most + 1)[0] == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--device", "h100"), "did you mean"),
        (("--device", "h100-sxm", "--tp", 99), "attention heads"),
        (("--device", "h100-sxm", "--batch", 0), "at least 1"),
        (("--device", "h100-sxm", "--input", 600), "context of 512"),
        (("--device", "h100-sxm", "--max-num-batched-tokens", 0), "at least 1"),
        (("--device", "h100-sxm", "--memory-utilization", 1.5), "--memory-utilization: '1.5'"),
        (("--device", "h100-sxm", "--price", -1), "--price: '-1' is no number"),
        (
            (
                "--device",
                "nowhere.json",
            ),
            "nowhere.json",
        ),
    ],
)
def test_wrong_questions_get_one_line(
    bare: Path, argv: tuple[object, ...], said: str, cli: Cli
) -> None:
    code, out, err = cli("predict", bare, *argv)
    assert (code, out) == (2, "")
    assert said in err
    assert err.removesuffix("Try 'ridgeline predict --help'.\n").count("\n") == 1


def test_lengths_give_way_to_a_short_context(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(max_position_embeddings=64)))
    found = predict(cli, tmp_path, "--device", "l4")
    assert (found["input"], found["output"]) == (48, 16)


def test_one_token_has_no_time_per_token(bare: Path, cli: Cli) -> None:
    found = predict(cli, bare, "--device", "l4", "--output", 1, "--input", 20)
    assert found["tpot_ms"] is None
    assert found["waterfall"]["tpot"] == []
    assert "TPOT" not in cli("predict", bare, "--device", "l4", "--output", 1)[1]


def test_formats_have_their_usual_names(bare: Path, cli: Cli) -> None:
    """The tiny checkpoint is in float32; smaller formats read fewer bytes."""
    sizes = {}
    for name in ("fp32", "bf16", "fp16", "int8", "fp8", "int4"):
        found = predict(cli, bare, "--device", "h100-sxm", "--weights", name)
        assert found["precision"]["weights"] == name
        lines = {item["what"]: item["bytes"] for item in found["memory"]["items"]}
        of_groups = 0 if name == "fp8" else lines.get("scales", 0)  # fp8 has one a row: few
        sizes[name] = lines["feed-forward"] + of_groups
    assert sizes["fp32"] == 2 * sizes["bf16"] == 2 * sizes["fp16"] == 4 * sizes["fp8"]
    assert sizes["fp8"] < sizes["int8"]
    assert sizes["int4"] < sizes["fp8"]
    assert predict(cli, bare, "--device", "l4")["precision"]["dtype"] == "float32"


def test_a_checkpoint_in_fp16_is_computed_in_fp32_on_a_cpu(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(torch_dtype="float16")))
    for device, dtype in (("l4", "float16"), ("xeon-8480", "float32")):
        record = tmp_path / f"{device}.json"
        data = device_to_json(find_device(device)) | {"memory_gb": 64}
        record.write_text(json.dumps(data))
        assert predict(cli, tmp_path, "--device", record)["precision"]["dtype"] == dtype


def test_tables_have_both_units_and_say_everything_a_figure_needs(big: Path, cli: Cli) -> None:
    code, out, _ = cli("predict", big, *EIGHT, *LOAD)
    assert code == 0
    for words in (
        *("GB", "GiB", "tp 8", "fp8 weights", "bf16 cache", "500 + 200", "64 in flight"),
        *("TTFT", "TPOT", "what binds", "not calibrated", "all_reduce", "KV cache", "kWh"),
    ):
        assert words in out, words


def test_what_limits_the_batch_is_said(big: Path, cli: Cli) -> None:
    assert predict(cli, big, *EIGHT)["max_batch_limit"] == "memory"
    assert "(memory)" in cli("predict", big, *EIGHT)[1]
    short = (*EIGHT, "--max-num-batched-tokens", 64)
    found = predict(cli, big, *short)
    assert (found["max_batch"], found["max_batch_limit"]) == (64, "max_num_batched_tokens")
    assert "64 (--max-num-batched-tokens)" in cli("predict", big, *short)[1]


def test_nothing_heavy_is_loaded(big: Path) -> None:
    code = f"""
import sys
from ridgeline.cli.main import main
assert main(["predict", {str(big)!r}, "--device", "h100-sxm", "--tp", "8"]) == 0
loaded = {{"torch", "numpy", "transformers"}} & set(sys.modules)
sys.exit(f"loaded {{sorted(loaded)}}" if loaded else 0)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "TTFT" in run.stdout
