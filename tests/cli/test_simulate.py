"""Does `ridgeline simulate` answer, draw, and say clearly what it cannot do?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.main import parse
from ridgeline.cli.simulate import drafts, lengths
from ridgeline.cli.simulate_case import make_case
from ridgeline.cli.values import time_span
from ridgeline.cost.constants import default_calibration
from ridgeline.cost.hardware import find_device
from ridgeline.figures import number
from ridgeline.formats import TOKEN_BUCKETS
from tests.cli.conftest import Cli
from tests.tiny_model import tiny_config

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
DEVICE = ("--device", "h100-sxm")
SHORT = ("--requests", 60, "--input", 64, "--output", 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json alone, of a model with a billion parameters."""
    folder = tmp_path_factory.mktemp("1b")
    (folder / "config.json").write_text(json.dumps(tiny_config(**LLAMA_1B)))
    return folder


def simulate(cli: Cli, model: Path, *argv: object) -> dict[str, Any]:
    code, out, err = cli("simulate", model, *DEVICE, "--json", *argv)
    assert code == 0, err
    return dict(json.loads(out))


def refusal(cli: Cli, model: Path, *argv: object) -> str:
    code, out, err = cli("simulate", model, *DEVICE, *argv)
    assert (code, out) == (2, "")
    return err


# ---------------------------------------------------------------------- answers


def test_steps_in_which_prompts_join_are_as_long_as_those_that_are_captured(model: Path) -> None:
    def bound(*argv: str) -> int | None:
        words = ("simulate", str(model), *DEVICE, "--rate", "1", *argv)
        return make_case(parse(words)).options.max_num_mixed_tokens

    assert bound() in TOKEN_BUCKETS
    assert bound("--max-num-mixed-tokens", "100") == 100
    assert bound("--no-chunked-prefill") is None


def test_figures_for_programs(model: Path, cli: Cli) -> None:
    found = simulate(cli, model, "--rate", 20, *SHORT, "--ttft", "1s", "--tpot", 50)
    assert found["num_finished"] == 60
    assert found["saturated"] is False
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms"):
        assert found[name]["p50"] <= found[name]["p99"] <= found[name]["max"]
    assert found["e2e_ms"]["mean"] == pytest.approx(
        found["ttft_ms"]["mean"] + 15 * found["tpot_ms"]["mean"], rel=1e-6
    )
    assert found["goodput_per_s"] == found["requests_per_s"]
    assert found["slo_share"] == 1.0
    assert found["pricing"] == "assumed"
    assert found["usd_per_million_output"] > 0
    assert 0 < found["kv_max_share"] < 1
    flops = 60 * (64 + 15) * 2 * 1.24e9  # twice the parameters for each token
    expected = flops / (989e12 * found["duration_s"])
    assert found["flop_share"] == pytest.approx(expected, rel=0.3)
    assert len(found["kv_over_time"]) > 10


def test_tables_for_people(model: Path, cli: Cli) -> None:
    _, out, err = cli("simulate", model, *DEVICE, "--rate", 20, *SHORT, "--ttft", "300ms")
    assert err == ""
    for words in ("h100-sxm", "TTFT", "goodput", "KV cache", "preemptions", "kept TTFT 300 ms"):
        assert words in out
    assert "assumed efficiencies" in out


def test_the_same_seed_gives_the_same_answer(model: Path, cli: Cli) -> None:
    argv = ("--rate", 20, *SHORT, "--arrivals", "bursty", "--input", "10-90")
    assert simulate(cli, model, *argv) == simulate(cli, model, *argv)
    assert simulate(cli, model, *argv) != simulate(cli, model, *argv, "--seed", 1)


def test_what_is_not_kept_up_with_has_no_waiting_time(model: Path, cli: Cli) -> None:
    argv = ("--rate", 5000, "--requests", 400, "--output", 64, "--max-num-seqs", 8)
    found = simulate(cli, model, *argv)
    assert found["saturated"] is True
    assert found["ttft_ms"]["p50"] is None
    assert found["tpot_ms"]["p50"] > 0
    assert "saturated" in cli("simulate", model, *DEVICE, *argv)[1]


def test_a_sweep_finds_where_it_saturates(model: Path, cli: Cli) -> None:
    argv = ("--rate", 1, "--requests", 150, "--output", 32, "--max-num-seqs", 8, "--sweep")
    found = simulate(cli, model, *argv, "--ttft", "100ms")
    assert found["capacity_per_s"] == pytest.approx(found["closed_form_per_s"], rel=0.15)
    rates = [point["rate"] for point in found["points"]]
    assert rates == sorted(rates)
    for point in found["points"]:
        share = point["rate"] / found["capacity_per_s"]
        assert point["saturated"] or share < 1
        assert not point["saturated"] or share > 0.9
        assert (point["ttft_ms"]["p50"] is None) == point["saturated"]
    code, out, _ = cli("simulate", model, *DEVICE, *argv)
    assert code == 0
    assert f"saturated at {number(found['capacity_per_s'])} requests/s" in out


def test_a_sweep_of_too_few_requests_says_so(model: Path, cli: Cli) -> None:
    """Requests that fill empty places wait for nobody: 40 of them do not show 64 places."""
    argv = ("--rate", 1, "--output", 32, "--max-num-seqs", 64, "--sweep", "--requests")
    few = simulate(cli, model, *argv, 40)
    assert (few["enough_requests"], few["least_requests"]) == (False, 5 * 64)
    assert few["capacity_per_s"] > 1.3 * few["closed_form_per_s"]
    _, out, _ = cli("simulate", model, *DEVICE, *argv, 40)
    assert "too few requests: 40 fill the 64 places 0.625 times" in out
    assert "--requests 320 or more" in out
    enough = simulate(cli, model, *argv, 320)
    assert enough["enough_requests"]
    assert enough["capacity_per_s"] == pytest.approx(enough["closed_form_per_s"], rel=0.1)
    assert "too few requests" not in cli("simulate", model, *DEVICE, *argv, 320)[1]


def test_nothing_served_costs_nothing_per_token(model: Path, cli: Cli) -> None:
    argv = ("--rate", 8, "--requests", 20, "--num-blocks", 10)
    found = simulate(cli, model, *argv)
    assert (found["num_finished"], found["usd_per_million_output"]) == (0, None)
    out = cli("simulate", model, *DEVICE, *argv)[1]
    assert "nothing was served, so there is no cost per token" in out
    assert "no price is known" not in out
    unpriced = cli("simulate", model, "--device", "a10", *argv)[1]
    assert "no price is known; say --price" in unpriced


def test_a_calibration_of_another_device_is_named_as_predict_does(
    model: Path, tmp_path: Path, cli: Cli
) -> None:
    made = replace(
        default_calibration(find_device("l4")),
        origin="calibrated",
        ranges={"matmul.m": (64.0, 4096.0)},
    )
    record = tmp_path / "l4.json"
    record.write_text(json.dumps(made.to_json()))
    argv = ("--rate", 20, *SHORT, "--calibration", record)
    found = simulate(cli, model, *argv)
    told = cli("predict", model, *DEVICE, "--calibration", record, "--json")[1]
    assert found["caveats"] == json.loads(told)["caveats"]
    assert found["caveats"][0] == "the calibration is of l4, not h100-sxm"
    assert found["caveats"][1].startswith("extrapolated")
    assert found["pricing"] == "extrapolated"
    for more in ((), ("--sweep",)):
        _, out, _ = cli("simulate", model, *DEVICE, *argv, *more)
        assert "the calibration is of l4, not h100-sxm" in out
    record.write_text(json.dumps(replace(made, device_name="h100-sxm", ranges={}).to_json()))
    own = simulate(cli, model, *argv)
    assert (own["pricing"], own["caveats"]) == ("calibrated", [])
    assert "step times: cost model, calibrated" in cli("simulate", model, *DEVICE, *argv)[1]


def test_a_policy_that_keeps_promises_keeps_more_of_them(model: Path, cli: Cli) -> None:
    argv = ("--rate", 2000, "--requests", 400, "--output", 64, "--max-num-seqs", 16)
    promise = ("--ttft", "200ms", "--tpot", "5ms")
    plain = simulate(cli, model, *argv, *promise)
    kept = simulate(cli, model, *argv, *promise, "--policy", "slo")
    assert kept["num_refused"] > 0
    assert kept["goodput_per_s"] > 1.3 * plain["goodput_per_s"]


def test_toggles_change_what_they_should(model: Path, cli: Cli) -> None:
    argv = ("--rate", 2000, "--requests", 80, "--input", 200, "--output", "10-200")
    small = (*argv, "--max-num-seqs", 16)
    plain = simulate(cli, model, *small)
    static = simulate(cli, model, *small, "--batching", "static")
    assert static["slot_share"] < plain["slot_share"]
    assert static["requests_per_s"] < plain["requests_per_s"]
    reserved = simulate(
        cli, model, *argv, "--no-paging", "--num-blocks", 1024, "--max-model-len", 4096
    )
    assert reserved["max_num_seqs"] == 4
    assert (
        simulate(cli, model, *small, "--weights", "fp8")["tpot_ms"]["p50"]
        < (plain["tpot_ms"]["p50"])
    )
    drafted = simulate(cli, model, *SHORT, "--rate", 5, "--speculate", "3:0.9")
    assert (
        drafted["tpot_ms"]["p50"]
        < 0.6 * simulate(cli, model, *SHORT, "--rate", 5)["tpot_ms"]["p50"]
    )


def test_plans_wait_for_who_comes_on_a_gpu(model: Path, cli: Cli) -> None:
    argv = ("--rate", 40, "--requests", 200, "--input", 64, "--output", 64, "--json")
    for device, waits in (("a10", True), ("xeon-8480", False)):
        late, plain = (
            json.loads(cli("simulate", model, "--device", device, *argv, *more)[1])
            for more in ((), ("--no-deferred-scheduling",))
        )
        assert (late["ttft_ms"]["mean"] < 0.97 * plain["ttft_ms"]["mean"]) is waits
        assert (late == plain) is not waits


def test_a_draft_model_costs_time(model: Path, bare: Path, cli: Cli) -> None:
    argv = (*SHORT, "--rate", 5, "--speculate", "3:0.5")
    free = simulate(cli, model, *argv)["tpot_ms"]["mean"]
    assert simulate(cli, model, *argv, "--draft", bare)["tpot_ms"]["mean"] > free


def test_more_devices_cost_more_and_are_faster(model: Path, cli: Cli) -> None:
    argv = ("--rate", 20, *SHORT, "--price", 2.5)
    one = simulate(cli, model, *argv)
    many = simulate(cli, model, *argv, "--tp", 2, "--replicas", 2, "--router", "two-choices")
    assert one["usd_per_hour"]["mid"] == 2.5
    assert (many["num_devices"], many["usd_per_hour"]["mid"]) == (4, 10.0)
    assert many["tpot_ms"]["p50"] < one["tpot_ms"]["p50"]


# ---------------------------------------------------------------------- traces and files


def trace(folder: Path) -> Path:
    """Four conversations whose second turn repeats the first."""
    lines = []
    for turn in range(2):
        for who in range(4):
            hashes = [10 * who, 10 * who + 1][: turn + 1]
            record = {"timestamp": 5000 * turn + who, "input_length": 512 * (turn + 1)}
            lines.append(json.dumps(record | {"output_length": 4, "hash_ids": hashes}))
    path = folder / "turns.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_a_trace_with_shared_prefixes(model: Path, tmp_path: Path, cli: Cli) -> None:
    found = simulate(cli, model, "--trace", trace(tmp_path))
    assert found["cached_share"] == pytest.approx(4 * 512 / (12 * 512))
    assert (
        simulate(cli, model, "--trace", trace(tmp_path), "--no-prefix-cache")["cached_share"] == 0
    )
    faster = simulate(cli, model, "--trace", trace(tmp_path), "--rate", 100)
    assert faster["duration_s"] < found["duration_s"]


def test_a_line_for_each_request(model: Path, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "requests.jsonl"
    simulate(cli, model, "--rate", 20, *SHORT, "--timeline", path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 60
    for line in lines:
        assert line["arrival_s"] <= line["started_s"] < line["first_token_s"] < line["finished_s"]
        assert line["e2e_s"] == pytest.approx(line["finished_s"] - line["arrival_s"])


@pytest.mark.parametrize("name", ["run.svg", "run.png"])
def test_a_picture_of_a_run(model: Path, tmp_path: Path, cli: Cli, name: str) -> None:
    simulate(cli, model, "--rate", 20, *SHORT, "--replicas", 2, "--plot", tmp_path / name)
    content = (tmp_path / name).read_bytes()
    if name.endswith("svg"):
        for words in (b"Time to first token", b"KV cache in use", b"replica 1", b"waiting"):
            assert words in content
    else:
        assert content.startswith(b"\x89PNG")


def test_a_picture_of_a_sweep(model: Path, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "sweep.svg"
    argv = ("--rate", 1, "--requests", 60, "--output", 16, "--max-num-seqs", 4, "--sweep")
    simulate(cli, model, *argv, "--tpot", 10, "--plot", path)
    text = path.read_text()
    for words in ("saturated at", "kept the promise", "$ per million answer tokens"):
        assert words in text


# ---------------------------------------------------------------------- refusals


def test_a_model_that_does_not_fit(tmp_path: Path, cli: Cli) -> None:
    config = tiny_config(**LLAMA_1B | {"num_hidden_layers": 320, "hidden_size": 8192})
    (tmp_path / "config.json").write_text(json.dumps(config))
    err = refusal(cli, tmp_path, "--rate", 1)
    assert "GiB" in err
    assert err.count("would help") >= 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "--rate R, or --trace FILE"),
        (("--rate", -1), "'-1' is no number above 0"),
        (("--rate", 0), "'0' is no number above 0"),
        (("--rate", "nan"), "'nan' is no number above 0"),
        (("--rate", 1, "--requests", 0), "--requests: '0' is no whole number"),
        (("--rate", 1, "--replicas", 0), "--replicas: '0' is no whole number"),
        (("--rate", 1, "--tp", 99), "tp is 99"),
        (("--rate", 1, "--input", 200_000), "every request is longer than 131072"),
        (("--rate", 1, "--draft", "demo:draft"), "--draft needs --speculate"),
        (("--rate", 1, "--policy", "slo", "--ttft", 5), "needs what is promised"),
        (("--rate", 1, "--plot", "a.jpg"), ".svg or .png"),
        (("--rate", 1, "--sweep", "--timeline", "x"), "leave out --sweep"),
        (("--rate", 1, "--timeline", "nowhere/x"), "--timeline nowhere/x: there is no folder"),
        (("--rate", 1, "--plot", "nowhere/x.svg"), "--plot nowhere/x.svg: there is no folder"),
        (("--rate", 1, "--sweep", "--requests", 10), "too few"),
        (("--trace", "nowhere.csv"), "No such file"),
    ],
)
def test_bad_questions(model: Path, cli: Cli, argv: tuple[object, ...], said: str) -> None:
    assert said in refusal(cli, model, *argv)


def test_bad_traces(model: Path, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,Answer\n")
    assert "no column GeneratedTokens" in refusal(cli, model, "--trace", path)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert "the trace is empty" in refusal(cli, model, "--trace", path)
    assert "--input is for made-up" in refusal(cli, model, "--trace", path, "--input", 5)


def test_an_unknown_device(model: Path, cli: Cli) -> None:
    code, _, err = cli("simulate", model, "--device", "h100sxm", "--rate", 1)
    assert code == 2
    assert "h100-sxm" in err


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("80", 0.08), ("5us", 5e-6)]
)
def test_times(text: str, seconds: float) -> None:
    assert time_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-5ms", "0", "1e999s", "5 m", "1.2.3s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(Exception, match="is no time"):
        time_span(text)


def test_lengths_and_drafts() -> None:
    assert (lengths("512").low, lengths("512").high) == (512, 512)
    assert (lengths("100-2000").low, lengths("100-2000").high) == (100, 2000)
    assert drafts("4:0.8") == (4, 0.8)
    for bad in ("", "0", "9-3", "a-b", "1-"):
        with pytest.raises(Exception, match="length"):
            lengths(bad)
    for bad in ("4", "0:0.5", "4:1.5", "a:b", ":"):
        with pytest.raises(Exception, match="speculation"):
            drafts(bad)
