"""Does the table of GPU speed say what was measured, under the right names?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import table

KEYS = ["workload", "metric", "value", "goal", "stretch", "vllm", "date", "device", "commit"]


def record(*rows: dict[str, Any], model: str = "llama31-8b") -> dict[str, Any]:
    return {"model": model, "date": "2026-01-02", "device": "a card", "rows": list(rows)}


def decode(batch: int, tok_s: float, prompt: int = 128, out: int = 256, **more: Any) -> Any:
    lengths = {"batch": batch, "prompt_len": prompt, "out_len": out}
    return {"workload": "decode"} | lengths | {"median": {"decode_tok_s": tok_s}} | more


def prefill(length: int, ms: float) -> dict[str, Any]:
    return {"workload": "prefill", "prompt_len": length, "median": {"ttft_ms": ms}}


def mixed(label: str, tok_s: float, **more: Any) -> dict[str, Any]:
    middle = {"median": {"out_tok_s": tok_s}}
    return {"workload": "mixed256", "label": label, "sizes": [256, 100, 1024]} | middle | more


OTHERS = (
    {
        "workload": "shared_prefix",
        "label": "cold",
        "n": 64,
        "prefix": 2048,
        "unique": 64,
        "out": 64,
        "median": {"wall_s": 0.5},
    },
    {
        "workload": "poisson_http",
        "label": "warm",
        "rate": 32.0,
        "n": 512,
        "prompt_len": 512,
        "out_len": 128,
        "failed": 0,
        "ttft_ms_p99": 70.0,
        "itl_ms_p99": 15.0,
    },
    {"workload": "start", "label": "cold", "median": {"first_token_s": 30.0}},
    {"workload": "start", "label": "warm", "median": {"first_token_s": 12.0}},
)


def values(*records: dict[str, Any]) -> dict[str, float]:
    found = table.lines((("x.json", r) for r in records), "abc")
    return {row.workload: row.value for row in found if row.value is not None}


def test_names_of_all_workloads() -> None:
    fp8: Any = {"weight_format": "fp8"}
    a = record(
        decode(1, 250.0),
        decode(32, 2800.0, prompt=8192, out=128),
        decode(32, 11000.0, **fp8),
        decode(32, 12000.0, kv_cache_dtype="fp8", **fp8),
        prefill(512, 12.0),
        mixed("cold", 9000.0),
        mixed("warm", 12000.0),
        mixed("warm", 16000.0, **fp8),
        *OTHERS,
    )
    b = record(decode(8, 11000.0), prefill(2048, 6.0), mixed("warm", 32000.0), model="qwen3-06b")
    assert values(a, b) == {
        "A bf16 decode batch 1": 250.0,
        "A bf16 batch 32 at 8k context": 2800.0,
        "A fp8 decode batch 32": 11000.0,
        "A fp8 decode batch 32, fp8 cache": 12000.0,
        "A bf16 TTFT 512": 12.0,
        "A mixed256 bf16": 12000.0,
        "A mixed256 bf16, first run": 9000.0,
        "A mixed256 fp8": 16000.0,
        "A shared prefix cold": 0.5,
        "A server 32/s TTFT p99": 70.0,
        "A server 32/s ITL p99": 15.0,
        "A process start to first token, first run": 30.0,
        "A process start to first token": 12.0,
        "B bf16 decode batch 8": 11000.0,
        "B TTFT 2048": 6.0,
        "B mixed256": 32000.0,
    }


def test_other_conditions_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        decode(1, 1.0, out=64),
        decode(2, 2.0, dtype="float32"),
        {"workload": "decode", "batch": 4, "prompt_len": 128, "out_len": 256, "median": {}},
        {"workload": "prefill", "prompt_len": 512, "error": "no memory"},
        OTHERS[1] | {"failed": 3},
        mixed("warm", 5.0) | {"sizes": [8, 4, 16]},
        {"workload": "engine", "median": {}},
    )
    assert values(record(*rows)) == {}
    assert values(record(decode(1, 1.0), model="other")) == {}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(rows) + 1
    assert said[0] == "x.json: left out decode batch 1: 128 prompt and 64 output tokens"


def test_the_later_file_counts() -> None:
    assert values(record(decode(1, 250.0)), record(decode(1, 260.0))) == {
        "A bf16 decode batch 1": 260.0
    }


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (decode(1, 265.9), "no"),
        (decode(1, 266.0), "yes"),
        (decode(1, 285.0), "stretch"),
        (prefill(512, 12.6), "no"),
        (prefill(512, 12.5), "yes"),
        (prefill(512, 11.0), "stretch"),
    ],
)
def test_rates_are_wanted_high_and_times_low(row: dict[str, Any], reached: str) -> None:
    (line,) = (x for x in table.lines([("x", record(row))], "abc") if x.value is not None)
    assert line.reached == reached


def test_the_file_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record(decode(1, 250.0), prefill(512, 10.0))))
    out = tmp_path / "latest.json"
    table.main([str(tmp_path / "a.json"), "--commit", "abc", "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [list(row) for row in rows] == [KEYS, KEYS]
    first = ["A bf16 decode batch 1", "tok/s", 250.0, 266, 285, 206, "2026-01-02", "a card", "abc"]
    assert list(rows[0].values()) == first
    said = capsys.readouterr().out.splitlines()
    assert "| A bf16 decode batch 1 | **250 tok/s** | 266 | 285 | 206 | **no** |" in said
    assert "| A bf16 TTFT 512 | 10 ms | 12.5 | 11 | 15.7 | stretch |" in said
    assert "| B mixed256 |  | 31,000 | 35,000 | 23,034 |  |" in said
    assert len(said) == 2 + len(table.GOALS)


def test_what_is_missing_keeps_its_earlier_row(capsys: pytest.CaptureFixture[str]) -> None:
    old = {"date": "2025-12-31", "device": "a card", "commit": "old"}
    earlier = [
        {"workload": "A bf16 decode batch 1", "metric": "tok/s", "value": 1.0} | old,
        {"workload": "A bf16 decode batch 8", "metric": "tok/s", "value": 2.0} | old,
        {"workload": "no goal", "metric": "tok/s", "value": 3.0} | old,
    ]
    found = table.lines([("new", record(decode(1, 250.0)))], "new", earlier)
    kept = {row.workload: (row.value, row.commit) for row in found if row.value is not None}
    assert kept == {
        "A bf16 decode batch 1": (250.0, "new"),
        "A bf16 decode batch 8": (2.0, "old"),
        "no goal": (3.0, "old"),
    }
    assert "batch 8: not measured now, of old" in capsys.readouterr().err


def test_each_goal_can_be_read_and_is_ordered() -> None:
    names = [(goal.workload, goal.metric) for goal in table.GOALS]
    assert len(set(names)) == len(names)
    for goal in table.GOALS:
        if goal.goal is None or goal.stretch is None:
            continue
        better = goal.stretch > goal.goal
        assert better == (goal.metric == "tok/s"), goal.workload
