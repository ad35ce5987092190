"""Does `ridgeline bench` measure what it says, and say where it was measured?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.measure import bandwidth
from tests.cli.conftest import Cli

RANDOM = ("--load-format", "random", "--num-blocks", "200", "-q")
SHORT = ("--prompt-len", 16, "--output-len", 12, "--repeats", 1)


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "CPU_BYTES", 1 << 20)


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
        assert cost["padded_share"] == 0
    assert [row["batch"] for row in results["decode"]] == [1, 3]
    for row in results["decode"]:
        assert row["note"] == ""
        assert row["tokens_per_s"] > 0
        ratio = row["achieved_bytes_per_s"] / found["bandwidth"]["read_bytes_per_s"]
        assert row["share_of_bandwidth"] == pytest.approx(ratio)
    [split] = results["split"]
    share = split["decode_s"] / (split["decode_s"] + split["prefill_s"])
    assert split["decode_share"] == pytest.approx(share)
    assert found["environment"]["date"].startswith("20")
    assert set(found["environment"]["packages"]) >= {"torch", "numpy"}
    assert found["model"]["device"] == ("cuda:0" if torch.cuda.is_available() else "cpu")
    assert "decisions" not in found["model"]
    assert "model_path" not in found["model"]


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
    assert "of read bandwidth" in out
    assert "ran at once" in out
    assert "fewer steps" in out
    assert "achieved against the limit" in out
    assert set(json.loads(file.read_text())["results"]) == {
        *("decode", "prefill", "mixed", "caching", "batching", "cost")
    }


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--workload", "speed"), "unknown workload 'speed'"),
        (("--compare", "paged,magic"), "unknown mode 'magic'"),
        (
            ("--workload", "decode", "--batch", "9", "--max-num-seqs", "8"),
            "9 needs --max-num-seqs 9",
        ),
        (("--workload", "serving", "--rate", "0"), "must be above 0"),
        (("--url", "http://127.0.0.1:1", "--workload", "decode"), "serving workload only"),
        (("--url", "localhost"), "is no server"),
        (("--url", "http://127.0.0.1:1"), "--url http://127.0.0.1:1: "),
        (("--workload", "prefill", "--output", "/no/such/x", *SHORT), "--output /no/such/x"),
    ],
)
def test_what_cannot_be_measured_is_explained(
    argv: tuple[object, ...], why: str, bare: Path, cli: Cli
) -> None:
    code, out, err = cli("bench", bare, *RANDOM, *argv)
    assert (code, out) == (2, "")
    assert why in err
