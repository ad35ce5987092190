"""Does `ridgeline plan` ask what was meant and say what was found?"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace as replace_device
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ridgeline.build import build
from ridgeline.cli.main import parse
from ridgeline.cli.serve import serve_config
from ridgeline.cost.hardware import device_to_json, find_device
from ridgeline.server.config import ServeConfig
from tests.cli.conftest import Cli

ASKED = ("--input", 100, "--output", 20, "--ttft", "1s", "--tpot", "50ms")


def plan(cli: Cli, folder: Path, *argv: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = cli("plan", folder, "--json", *ASKED, *argv)
    return code, dict(json.loads(out))


def test_the_answer_is_a_command_that_serve_understands(bare: Path, cli: Cli) -> None:
    code, found = plan(cli, bare, "--rate", 5, "--devices", "l4,rtx-4090", "--seed", 3)
    assert code == 0
    assert found["feasible"] is True
    answer = found["answer"]
    assert answer["served"] is True
    assert answer["share_of_saturation"] <= 0.8 + 1e-9
    assert answer["share_kept"] >= 0.95
    assert answer["goodput_per_s"] == pytest.approx(5 * answer["share_kept"])
    assert answer["usd_per_hour"]["low"] <= answer["usd_per_hour"]["mid"]
    assert answer["price"]["date"]
    assert answer["origin"] == "assumed"
    (command,) = answer["commands"]
    words = shlex.split(command)
    config = serve_config(parse(words[1:]))
    assert config.engine.model == str(bare)
    assert config.engine.max_num_seqs == answer["max_num_seqs"]
    assert {reason["what"] for reason in found["reasons"]} >= {"device", "replicas"}


def test_the_command_starts(bare: Path, cli: Cli) -> None:
    """Here with random weights, as the folder has none."""
    argv = ("--rate", 1, "--devices", "xeon-8480", "--price", "xeon-8480=3")
    (command,) = plan(cli, bare, *argv)[1]["answer"]["commands"]
    asked = serve_config(parse(shlex.split(command)[1:])).engine
    built = build(replace(asked, load_format="random"))
    resolved = built.resolved
    built.close()
    assert (resolved.device, resolved.dtype) == ("cpu", "float32")
    assert resolved.max_num_seqs == asked.max_num_seqs
    assert resolved.max_model_len == asked.max_model_len


def test_serve_starts_what_plan_has_written(
    bare: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a part of a processor for each rank, behind a router; what this machine lacks is named."""
    slow = replace_device(find_device("xeon-8480"), bandwidth=4e8, peak_flops={"fp32": 2e8})
    half = replace_device(slow, name="cpu-some-cpu-2t", measured=True)
    here, plan_file, info = (tmp_path / name for name in ("half.json", "p.toml", "cpuinfo"))
    here.write_text(json.dumps(device_to_json(half)))
    info.write_text("model name\t: Some CPU\n")
    monkeypatch.setattr("ridgeline.cli.planned.CPU_INFO", info)
    served: list[ServeConfig] = []

    def serve(config: ServeConfig, on_listening: object) -> int:
        served.append(config)
        return 0

    monkeypatch.setattr("ridgeline.server.replicas.serve_replicas", serve)
    rate = ("--rate", 50, "--devices", here, "--price", "cpu-some-cpu-2t=3", "--out", plan_file)
    answer = plan(cli, bare, *rate)[1]["answer"]
    needed = answer["num_devices"]
    assert answer["replicas"] > 1
    for cores in (2 * needed, 2 * needed - 1):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        code, _, err = cli("serve", "--plan", plan_file, "--port", 9000)
        assert code == (0 if cores % 2 == 0 else 2)
    assert f"needs {needed} x cpu-some-cpu-2t" in err
    assert f"has {needed - 1} x cpu-some-cpu-2t" in err
    (config,) = served
    assert config == serve_config(
        parse([*shlex.split(answer["commands"][0])[1:], "--port", "9000"])
    )
    assert (config.replicas, config.engine.threads) == (str(answer["replicas"]), 2)


def test_a_plan_for_gpus_wants_those(
    bare: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.toml"
    plan(cli, bare, "--rate", 5, "--devices", "h100-sxm", "--out", path)
    monkeypatch.setattr("ridgeline.server.lifecycle.serve", lambda *_, **__: 0)
    monkeypatch.setattr("ridgeline.cli.planned.GPU_INFO", tmp_path)
    code, _, err = cli("serve", "--plan", path)
    assert (code, "needs 1 x h100-sxm" in err, "no such device" in err) == (2, True, True)
    for name, expected in (("NVIDIA L4", 2), ("NVIDIA H100 80GB HBM3", 0)):
        (tmp_path / "0000").mkdir(exist_ok=True)
        (tmp_path / "0000" / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert cli("serve", "--plan", path)[0] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "m"', "not of ridgeline plan --out"),
        ("[plan]\ndevice = 3", "plan --out"),
        ("port = 1\n[plan]\nport = 1", "missing required field"),
    ],
)
def test_other_files_are_no_plans(cli: Cli, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    code, _, err = cli("serve", "--plan", path)
    assert (code, words in err) == (2, True), err


def test_a_plan_and_settings_are_two(cli: Cli, tmp_path: Path) -> None:
    code, _, err = cli("serve", "--plan", tmp_path / "p.toml", "--config", tmp_path / "c.toml")
    assert (code, "not both" in err) == (2, True)


def test_a_plan_is_written_as_toml_or_not_at_all(bare: Path, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    code, _, err = cli("plan", bare, *ASKED, "--rate", 1, "--devices", "l4", "--out", out)
    assert (code, ".toml" in err, out.exists()) == (2, True, False)
    out = out.with_suffix(".toml")
    assert plan(cli, bare, "--rate", 1, "--devices", "l4", "--tpot", "1us", "--out", out)[0] == 1
    assert not out.exists()


def test_users_make_a_rate(bare: Path, cli: Cli) -> None:
    # 1 s to the first token, 19 more at 50 ms: 1.95 s, and 8.05 s to think
    argv = ("--users", 20, "--think", "8.05s", "--devices", "l4")
    assert plan(cli, bare, *argv)[1]["rate_per_s"] == pytest.approx(2.0)


def test_a_typed_price_counts(bare: Path, cli: Cli) -> None:
    found = plan(cli, bare, "--rate", 1, "--devices", "l4", "--price", "l4=2.5")[1]
    band = found["answer"]["usd_per_hour"]
    assert band == {"low": 2.5, "mid": 2.5, "high": 2.5}
    assert found["answer"]["price"]["type"] == "user"
    dear = ("--price", "l4=9", "--price", "rtx-4090=1")
    other = plan(cli, bare, "--rate", 1, "--devices", "l4,rtx-4090", *dear)[1]
    assert other["answer"]["device"] == "rtx-4090"
    assert any(change["what"] == "price of l4" for change in other["sensitivity"])


def test_where_nothing_keeps_the_promise(bare: Path, cli: Cli) -> None:
    code, found = plan(cli, bare, "--rate", 1, "--devices", "l4", "--tpot", "1us")
    assert code == 1
    assert (found["feasible"], found["answer"]) == (False, None)
    assert found["because"].startswith("infeasible because")
    assert found["rejected"][0]["kind"] == "infeasible"


def test_all_marks_what_is_not_served(bare: Path, cli: Cli) -> None:
    found = plan(cli, bare, "--rate", 1, "--devices", "l4", "--all")[1]
    other = found["not_served_yet"]
    assert other["served"] is False
    assert other["commands"] == []
    assert other["why_not_served"]
    assert found["answer"]["served"] is True


def test_people_read_tables(bare: Path, cli: Cli) -> None:
    code, out, _ = cli("plan", bare, *ASKED, "--rate", 5, "--devices", "l4,a10g", "--all", "-q")
    assert code == 0
    assert f"ridgeline serve {bare}" in out
    for words in ("--policy slo", "NOT SERVED", "no price", "assumed, not calibrated", "why"):
        assert words in out
    code, out, _ = cli("plan", bare, *ASKED, "--rate", 5, "--devices", "m3-ultra", "-q")
    assert code == 1
    assert "serves none of these devices" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--rate or --users"),
        (("--rate", 1, "--users", 1), "--rate or --users"),
        (("--rate", 1, "--think", "5s"), "--think is for --users"),
        (("--rate", 1, "--devices", "h1000"), "h100-sxm"),
        (("--rate", 1, "--devices", ","), "no device"),
        (("--rate", 1, "--devices", "l4", "--price", "l4"), "DEVICE=DOLLARS"),
        (("--rate", 1, "--devices", "l4", "--price", "b200=1"), "not among"),
        (("--rate", 1, "--devices", "l4", "--price", "l4=-1"), "0 or more"),
        (("--rate", 0, "--devices", "l4"), "rate"),
        (("--rate", 1, "--devices", "l4", "--input", 5000), "context"),
    ],
)
def test_bad_questions(bare: Path, cli: Cli, argv: tuple[object, ...], words: str) -> None:
    code, out, err = cli("plan", bare, *ASKED, *argv)
    assert (code, out) == (2, "")
    assert words in err


def test_the_command_for_a_name_of_the_catalogue_has_its_hub_id(cli: Cli) -> None:
    code, found = plan(cli, Path("llama-3.1-8b"), "--rate", 1, "--devices", "h100-sxm")
    assert code == 0
    assert "ridgeline serve meta-llama/Llama-3.1-8B " in found["answer"]["commands"][0]


def test_a_model_that_is_not_served_is_planned_for_without_a_command(cli: Cli) -> None:
    argv = ("internlm3-8b", "--rate", 1, "--devices", "h100-sxm", *ASKED)
    code, out, _ = cli("plan", *argv, "--json")
    found = json.loads(out)
    assert (code, found["answer"]) == (1, None)
    assert found["because"].startswith("this version cannot serve this model, which needs a reader")
    assert found["not_served_yet"]["device"] == "h100-sxm"
    assert found["not_served_yet"]["commands"] == []
    _, table, _ = cli("plan", *argv)
    assert "NOT SERVED" in table
    assert "in simulation" in table
