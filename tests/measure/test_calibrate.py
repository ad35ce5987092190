"""Does a calibration, small but whole, give a record that predictions can be made from?"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.calibration import Unseen, look, median_error
from bench.calibration import main as bench_main
from ridgeline import records
from ridgeline.cli.machine import as_it_is_now, this_device, this_key
from ridgeline.cost.constants import Calibration
from ridgeline.cost.hardware import catalogue, find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.costing import device_key
from ridgeline.devices import open_device
from ridgeline.devices.cpu import CpuDevice
from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu.native import level
from ridgeline.kernels.tiles import own_products
from ridgeline.measure import machine
from ridgeline.measure.calibrate import (
    Answer,
    Question,
    calibrate,
    calibrate_on,
    launch_seconds,
)
from ridgeline.measure.machine import figures, last_cache_bytes
from ridgeline.measure.steps import StepBench
from ridgeline.records import (
    find_calibration,
    find_record,
    read_record,
    record_folder,
    record_path,
    write_record,
)
from tests.measure.small import SAMPLE, SMALL, hurry, quiet

CLASSES = {
    "matmul",
    "elementwise",
    "embedding",
    "sampling",
    "decode_attention",
    "prefill_attention",
    "mixed_attention",
    "decode_step",
    "prefill_step",
    "mixed_step",
}


@pytest.fixture(scope="module")
def answer() -> Answer:
    question = Question("cpu", ("float32",), threads=1, is_quick=True)
    stages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        patch.setattr(StepBench, "answers", lambda bench, context, num: (9e-4, 2e-4, -1e-4))
        found = calibrate_on(
            open_device("cpu"), SMALL, question, lambda stage, done, total: stages.append(stage)
        )
    assert any(stage.startswith("whole steps") for stage in stages)
    assert stages[-1] == "fitting"
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return record_folder({"XDG_CACHE_HOME": str(tmp_path)})


def test_every_class_was_measured(answer: Answer) -> None:
    points = [*answer.fit.fitted, *answer.fit.held_out]
    assert {point.what for point in points} == CLASSES
    assert all(point.seconds > 0 for point in points)
    assert len(answer.fit.held_out) >= len(answer.fit.errors) > 3
    assert answer.fit.calibration.origin == "calibrated"


def test_the_begin_of_answers_is_the_hosts(answer: Answer) -> None:
    assert answer.fit.calibration.host.begin_s == 2e-4


def test_products_with_kernels_of_our_own_are_told(answer: Answer) -> None:
    known = own_products("NVIDIA H200", "bfloat16")
    assert {(6144, 4096), (4096, 14336)} <= set(known)
    assert (384, 1152) not in known
    assert own_products("NVIDIA H200", "float32") == own_products("another", "bfloat16") == ()
    assert answer.fit.calibration.own_products == ()  # a CPU has one way for all of them
    assert answer.fit.calibration.own_least == 0


def test_the_device_has_what_was_measured(answer: Answer) -> None:
    device = answer.device
    assert device.measured
    assert device.name.startswith("cpu-")
    assert device.name.endswith("-1t")
    assert set(device.peak_flops) == {"fp32"}
    rates = [p.ops[0].flops / p.seconds for p in answer.fit.fitted if p.what == "matmul"]
    assert device.peak("fp32") >= max(rates)
    assert device.bandwidth >= answer.record["about"]["read_bytes_per_s"]


def test_the_record_reads_back_and_prices_steps(answer: Answer, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    write_record(answer.record, path)
    again = read_record(path)
    assert again.calibration == answer.fit.calibration
    assert again.device.name == answer.device.name
    direct = Calibration.from_json(json.loads(path.read_text()))  # the record is a calibration
    assert direct == again.calibration
    setup = Setup(SAMPLE.spec, again.device, calibration=direct)
    pricer = Pricer(setup)
    assert 0 < pricer.seconds(((1, 30),)) < pricer.seconds(((1, 30),) * 64)
    assert pricer.cost(((1, 30),)).origin in ("calibrated", "extrapolated")
    assert pricer.cost(((1, 9),) * 500).origin == "extrapolated"
    assert not list(path.parent.glob("*.part"))


def test_the_record_shows_points_and_errors(answer: Answer) -> None:
    rows = answer.record["points"]
    kept = [row for row in rows if row["held_out"]]
    assert len(kept) == len(answer.fit.held_out)
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in rows)
    assert set(answer.record["errors"]) == {f"{p.what} {p.dtype}" for p in answer.fit.held_out}
    assert torch.__version__.startswith(answer.record["versions"]["torch"])
    assert answer.record["date"][:2] == "20"
    assert answer.record["about"]["threads"] == 1


def test_predictions_can_be_held_against_unseen_steps(answer: Answer, tmp_path: Path) -> None:
    SAMPLE.write(tmp_path)
    record = records.Record(answer.device, answer.fit.calibration)
    unseen = Unseen(decodes=((1, 25), (2, 10**6)), prefills=(21,))
    rows = look(str(tmp_path), "float32", record, unseen, quiet, device="cpu", threads=1)
    assert [row.what for row in rows] == ["decode", "prefill"]  # the huge one does not fit
    for row in rows:
        assert row.measured_s > 0
        assert row.predicted_s > 0
        assert row.error == pytest.approx(row.predicted_s / row.measured_s - 1)
    flipped = [replace(row, predicted_s=2 * row.measured_s) for row in rows]
    assert median_error(flipped) == pytest.approx(1.0)


# ---------------------------------------------------------------------- where records are


def test_a_record_is_found_by_the_name_of_its_device(answer: Answer, folder: Path) -> None:
    assert find_calibration(answer.device.name) is None
    write_record(answer.record, record_path(answer.device.name))
    assert record_path(answer.device.name).parent == folder
    assert find_calibration(answer.device.name) == answer.fit.calibration
    if torch.get_num_threads() == 1 and not torch.cuda.is_available():
        assert this_key() == answer.device.name
        assert this_device() == read_record(record_path(answer.device.name)).device
        assert find_calibration(this_key()) == answer.fit.calibration


def test_other_thread_counts_extrapolate(answer: Answer, folder: Path) -> None:
    write_record(answer.record, record_path(answer.device.name))
    other = answer.device.name.replace("-1t", "-7t")
    found = find_record(other)
    assert found is not None
    assert found.calibration.origin == "extrapolated"
    assert find_record("cpu-of-somebody-else-1t") is None
    assert find_record("h100-sxm") is None


def test_an_uncalibrated_machine_is_measured_in_seconds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine.PROBE_SIZE, "cpu", 64)
    device = this_device("cpu", threads=1)
    assert device.measured
    assert device.bandwidth > 1e8
    assert set(device.peak_flops) == {"fp32", "bf16", "fp16"}
    assert level() == "none" or device.peak("bf16") >= device.peak("fp32")


@pytest.mark.parametrize("text", ["{", "[]", '{"device": 3}', '{"device": {}}'])
def test_a_broken_record_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.json"):
        read_record(path)


def test_a_record_that_cannot_be_written(answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_record(answer.record, tmp_path / "file" / "record.json")


def test_a_record_does_not_take_the_place_of_a_device(answer: Answer, tmp_path: Path) -> None:
    link = tmp_path / "nothing"
    link.symlink_to(os.devnull)
    write_record(answer.record, link)
    assert link.is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["nothing"]


# ---------------------------------------------------------------------- which machine is this


class Gpu:
    """What `figures` asks of an open device."""

    name = "cuda:0"
    torch_device = torch.device("cuda", 0)
    best_dtype = "bfloat16"

    def memory_total(self) -> int:
        return 150 * 10**9


def test_a_known_gpu_keeps_its_data_sheet() -> None:
    gpu = Gpu()
    assert device_key(gpu, "NVIDIA H200", 8) == "h200-sxm"  # type: ignore[arg-type]
    found = figures(gpu, "NVIDIA H200", 8, {"bf16": 7e14}, 4e12)  # type: ignore[arg-type]
    assert found.bandwidth == find_device("h200-sxm").bandwidth
    assert found.peak("bf16") == find_device("h200-sxm").peak("bf16")
    assert found.memory_bytes == 150 * 10**9
    assert found.measured


def test_a_cpu_is_named_after_itself_and_its_threads() -> None:
    cpu = open_device("cpu")
    assert device_key(cpu, "Some(R) CPU @ 2.40GHz", 4) == "cpu-some-cpu-2-40ghz-4t"
    assert "cpu-some" not in catalogue()
    assert last_cache_bytes(cpu) >= 1 << 20
    assert 0 < launch_seconds(torch.device("cpu")) < 1e-2


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        calibrate(Question("cpu", ("float64",)), quiet)
    with pytest.raises(ConfigError, match="unknown device"):
        calibrate(Question("abacus"), quiet)


# ---------------------------------------------------------------------- the script for a GPU


def test_the_bench_script_writes_its_table(
    answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    SAMPLE.write(model)
    write_record(answer.record, tmp_path / "record.json")
    flags = f"--device cpu --dtype float32 --threads 1 --quick --record {tmp_path}/record.json"
    out = tmp_path / "table.json"
    monkeypatch.setattr(
        "sys.argv", ["calibration.py", *flags.split(), "--out", str(out), str(model)]
    )
    assert bench_main() == 0
    table = json.loads(out.read_text())
    assert len(table["rows"]) == 7
    for row in table["rows"]:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    errors = sorted(abs(row["error"]) for row in table["rows"])
    assert table["median_error"] == pytest.approx(errors[3])
    assert set(table["by_class"]) == {"model float32 decode", "model float32 prefill"}


def test_a_record_has_no_more_memory_than_there_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDevice, "memory_total", lambda self: 5 * 10**9)
    recorded = find_device("h200-sxm")
    assert as_it_is_now(recorded, "cpu").memory_bytes == 5 * 10**9
    small = replace(recorded, memory_bytes=10**9)
    assert as_it_is_now(small, "cpu") == small
