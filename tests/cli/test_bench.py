"""Does `ridgeline bench` measure what it says, and say where it was measured?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.asked import check_writable
from ridgeline.cli import bench as command
from ridgeline.cli.main import main
from ridgeline.measure import machine
from tests.captures import captures
from tests.cli.conftest import Cli
from tests.tiny_model import make_tiny_model

RANDOM = ("--load-format", "random", "--num-blocks", "200", "-q")
SHORT = ("--prompt-len", 16, "--output-len", 12, "--repeats", 1)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CPU_BYTES", 1 << 20)


def bench(cli: Cli, folder: Path, *argv: object) -> dict[str, Any]:
    code, out, _ = cli("bench", folder, *RANDOM, "--json", *argv)
    assert code == 0
    return dict(json.loads(out))


def test_decode_prefill_and_split(bare: Path, cli: Cli) -> None:
    found = bench(cli, bare, "--batch", "1,3", *SHORT)
    results = found["results"]
    assert list(results) == ["decode", "prefill", "split", "cost"]
    for cost, what in zip(results["cost"], ("decode", "prefill", "split"), strict=True):
        assert cost["what"] == what
        assert 0 < cost["ideal_s"] < cost["expected_s"]
        assert cost["expected_ratio"] == pytest.approx(cost["measured_s"] / cost["expected_s"])
    assert [row["batch"] for row in results["decode"]] == [1, 3]
    for row in results["decode"]:
        assert row["note"] == ""
        assert row["tokens_per_s"] > 0
        ratio = row["achieved_bytes_per_s"] / found["bandwidth"]["read_bytes_per_s"]
        assert row["share_of_bandwidth"] == pytest.approx(ratio)
        assert row["tokens_per_step"] == row["batch"]
    [split] = results["split"]
    share = split["decode_s"] / (split["decode_s"] + split["prefill_s"])
    assert split["decode_share"] == pytest.approx(share)
    assert found["environment"]["date"].startswith("20")
    assert set(found["environment"]["packages"]) >= {"torch", "numpy"}
    assert found["model"]["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert "decisions" not in found["model"]
    assert "model_path" not in found["model"]


@captures
def test_steps_with_drafts_in_json_and_in_tables(tmp_path: Path, cli: Cli) -> None:
    folder = make_tiny_model(tmp_path, tokenizer=False, weights=False, head_dim=16)
    argv = (
        *("--workload", "decode,split", "--batch", 1, "--prompt-len", 16, "--output-len", 40),
        *("--repeats", 1, "--speculate", "early:1:3"),
    )
    results = bench(cli, folder, *argv)["results"]
    [decode], [split] = results["decode"], results["split"]
    steps_a_second = decode["achieved_bytes_per_s"] / decode["bytes_per_step"]
    assert decode["tokens_per_s"] == pytest.approx(decode["tokens_per_step"] * steps_a_second)
    assert "bytes are those of verifying" in decode["note"]
    assert split["note"] == decode["note"]
    code, out, _ = cli("bench", folder, *RANDOM, *argv)
    assert code == 0
    assert out.count("note: bytes are those of verifying") == 2


def test_lengths_beyond_the_context_are_scaled_and_noted(bare: Path, cli: Cli) -> None:
    code, out, _ = cli(
        *("bench", bare, *RANDOM, "--workload", "split", "--repeats", 1, "--max-model-len", 48)
    )
    assert code == 0
    assert "1024 + 512 tokens exceed the context of 48; scaled to 32 + 16" in out


def test_loads(bare: Path, cli: Cli) -> None:
    argv = ("--workload", "mixed,serving", "--num-requests", 6, "--rate", 500)
    found = bench(cli, bare, *argv, *SHORT, "--max-model-len", 64)
    mixed, serving = found["results"]["mixed"][0], found["results"]["serving"][0]
    assert (mixed["num_requests"], mixed["failed"], mixed["rate"]) == (6, 0, None)
    assert (serving["output_tokens"], serving["rate"]) == (6 * 12, 500)
    assert serving["ttft_ms"]["p50"] <= serving["ttft_ms"]["p99"] <= serving["e2e_ms"]["p99"]


def test_what_the_cache_buys(bare: Path, cli: Cli) -> None:
    argv = ("--compare", "uncached,cached,paged", "--num-requests", 8, "--max-model-len", 64)
    rows = bench(cli, bare, *argv, *SHORT)["results"]["caching"]
    assert [row["mode"] for row in rows] == ["uncached", "cached", "paged"]
    assert rows[0]["token_ids"] == rows[1]["token_ids"] == rows[2]["token_ids"]
    assert rows[1]["cache_tokens"] == rows[2]["cache_tokens"] == 4 * 64
    assert rows[1]["most_running"] == 4
    assert rows[2]["most_running"] > 4
    assert rows[0]["crowd"] is None


def test_what_continuous_batching_buys(bare: Path, cli: Cli) -> None:
    argv = ("--continuous-vs-static", "--num-requests", 40, "--slots", 4, "--max-model-len", 108)
    [row] = bench(cli, bare, *argv)["results"]["batching"]
    assert (row["num_requests"], row["slots"]) == (40, 4)
    assert row["step_ratio"] > 1.5
    assert row["step_ratio"] == pytest.approx(row["static_steps"] / row["continuous_steps"])
    steps = row["continuous_steps"] * 4
    assert row["continuous_idle_slot_steps"] == steps - row["output_tokens"]
    assert row["note"].startswith("answers scaled to 1 .. 100")


def test_everything_as_tables_and_as_a_file(bare: Path, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    argv = ("--workload", "decode,prefill,mixed", "--compare", "cached,paged", "--batch", "2")
    code, out, _ = cli(
        *("bench", bare, *RANDOM, *argv, "--continuous-vs-static", "--num-requests", 6, *SHORT),
        *("--output", file, "--max-model-len", 64),
    )
    assert code == 0
    for word in ("tokens a", "bytes a step", "of read"):  # narrow columns
        assert word in out
    assert "ran at once" in out
    assert "fewer steps" in out
    assert "achieved against the limit" in out
    assert set(json.loads(file.read_text())["results"]) == {
        *("decode", "prefill", "mixed", "caching", "batching", "cost")
    }


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--workload", "speed"), "--workload: unknown 'speed'"),
        (("--compare", "paged,magic"), "--compare: unknown 'magic'"),
        (
            ("--workload", "decode", "--batch", "9", "--max-num-seqs", "8"),
            "9 needs --max-num-seqs 9",
        ),
        (("--workload", "serving", "--rate", "0"), "'0' is no number above 0"),
        (("--url", "http://127.0.0.1:1", "--workload", "decode"), "serving workload only"),
        (("--url", "localhost"), "is no server"),
        (("--url", "http://127.0.0.1:1"), "--url http://127.0.0.1:1: "),
        (("--workload", "prefill", "--output", "/no/such/x", *SHORT), "no folder /no/such"),
        (("--output", "/"), "--output /: this is a folder"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    argv: tuple[object, ...], why: str, bare: Path, cli: Cli
) -> None:
    code, out, err = cli("bench", bare, *RANDOM, *argv)
    assert (code, out) == (2, "")
    assert why in err


def refuse_to_measure(*_: object) -> None:
    raise AssertionError("something was measured")


@pytest.mark.parametrize("name", ["no/such/x.json", "folder", "folder/file/x.json"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, bare: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_measure_here", refuse_to_measure)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("")
    code, out, err = cli("bench", bare, *RANDOM, "--output", tmp_path / name)
    assert (code, out) == (2, "")
    assert f"--output {tmp_path / name}: " in err
    assert len(err.splitlines()) == 1


def test_what_is_looked_at_beforehand_stays_as_it_was(tmp_path: Path) -> None:
    check_writable("--output", tmp_path / "new")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old").write_text("kept")
    check_writable("--output", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "kept"


def test_what_was_measured_is_shown_even_if_it_cannot_be_written_in_the_end(
    bare: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "folder" / "x.json"
    file.parent.mkdir()
    measure = command._measure_here

    def measure_and_lose(*args: Any) -> None:
        measure(*args)
        file.parent.rmdir()

    monkeypatch.setattr(command, "_measure_here", measure_and_lose)
    argv = ("--workload", "prefill", *SHORT, "--output", file)
    code, out, err = cli("bench", bare, *RANDOM, *argv)
    assert code == 2
    assert "prefill, one prompt alone" in out
    assert f"--output {file}: No such file or directory" in err


@pytest.mark.parametrize(
    ("argv", "least"),
    [
        (("eval", "--num", "0"), 1),
        (("eval", "--num", "2,3"), 1),
        (("eval", "--show", "-1"), 0),
        (("bench", "--repeats", "1,2"), 1),
        (("bench", "--prompt-len", "many"), 1),
        (("calibrate", "--threads", "0"), 1),
        (("quantize", "model", "-o", "out", "--window", "1"), 2),
        (("quantize", "model", "-o", "out", "--score", "-1"), 0),
        (("profile", "--steps", "0"), 1),
    ],
)
def test_one_number_is_one_number_with_its_least_value(
    argv: tuple[str, ...], least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    why = f"argument {argv[-2]}: {argv[-1]!r} is no whole number of at least {least}"
    assert why in capsys.readouterr().err


def test_a_list_of_numbers_names_its_least_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--batch", "0,2"])
    assert "no list of numbers such as 1,8,32, each at least 1" in capsys.readouterr().err
