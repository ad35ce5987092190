"""Is the right device priced, and is it said where its figures are from?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from ridgeline import costing
from ridgeline.build import build
from ridgeline.config import EngineConfig
from ridgeline.cost.constants import default_calibration
from ridgeline.cost.hardware import catalogue, device_to_json, find_device, match
from ridgeline.cost.pricer import Pricer
from ridgeline.costing import device_key
from ridgeline.devices import open_device
from ridgeline.errors import ConfigError
from ridgeline.observe.engine_header import read_setup
from ridgeline.records import record_path
from tests.tiny_model import make_tiny_model


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-80-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4070", None),
        ("NVIDIA H100 NVL", None),
        ("Tesla T4", None),
        ("Intel(R) Xeon(R) Platinum 8480+", None),
    ],
)
def test_a_drivers_words_and_the_catalogue(driver: str, name: str | None) -> None:
    found = match(driver, catalogue().values())
    assert (found and found.name) == name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return folder


def test_without_a_calibration_figures_are_called_assumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = build(EngineConfig(model=str(folder), device="cpu", num_blocks=8))
    setup = built.run_record.pricer.setup
    assert setup.constants.origin == "assumed"
    assert "assumed" in setup.device.label
    assert built.run_record.header.computes_in_submit
    assert built.run_record.header.num_blocks == 8


@pytest.mark.parametrize(("of_kernels", "times"), [("none", 1.0), ("bf16", 7.5), ("amx", 25.0)])
def test_a_cpu_nobody_measured_is_as_fast_as_its_instructions_allow(
    monkeypatch: pytest.MonkeyPatch, of_kernels: str, times: float
) -> None:
    """bfloat16 products, of each thread, over those of a core without kernels of ours."""
    monkeypatch.setattr(costing, "level", lambda: of_kernels)
    found = costing.unknown_device("a CPU", is_cpu=True, threads=3, memory_bytes=1 << 30)
    assert found.peak_flops["bf16"] == pytest.approx(3 * 40e9 * times)
    assert found.peak_flops["fp32"] <= found.peak_flops["bf16"]
    assert found.bandwidth == costing.CPU_BANDWIDTH


def test_a_calibration_file_is_used_and_a_wrong_one_refused(folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    for path in (wrong, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=path.name):
            build(EngineConfig(model=str(folder), device="cpu", calibration=str(path)))


def test_a_calibration_without_the_dtype_is_passed_over_or_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = replace(find_device("xeon-8480"), peak_flops={"bf16": 1e12}, measured=True)
    found = replace(default_calibration(device), origin="calibrated")
    path = tmp_path / "bf16.json"
    path.write_text(json.dumps({**found.to_json(), "device": device_to_json(device)}))
    asked = EngineConfig(model=str(folder), device="cpu", dtype="float32", num_blocks=8, threads=1)
    with pytest.raises(ConfigError, match=r"fp32.*only for bf16.*--dtype"):
        build(structs.replace(asked, calibration=str(path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_device("cpu")
    kept = record_path(device_key(opened, opened.describe(), 1))
    kept.parent.mkdir(parents=True)
    kept.write_text(path.read_text())
    built = build(asked)
    assert built.pricer.setup.constants.origin == "assumed"
    assert "a calibration is not used" in caplog.text


def test_a_calibration_of_this_very_kind_of_device_sets_the_prices(
    folder: Path, tmp_path: Path
) -> None:
    device = find_device("xeon-8480")
    found = replace(default_calibration(device), origin="calibrated")
    record = {**found.to_json(), "device": device_to_json(device)}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(record))
    built = build(EngineConfig(model=str(folder), device="cpu", calibration=str(path)))
    setup = built.run_record.pricer.setup
    assert (setup.device.name, setup.constants.origin) == ("xeon-8480", "calibrated")
    back = read_setup(built.run_record.header.setup)
    assert Pricer(back).seconds(((1, 9),)) == built.run_record.pricer.seconds(((1, 9),))
