"""Are the catalogue's figures dense, per direction and traceable, and is its reader strict?"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cost.hardware import (
    CATALOGUE,
    Device,
    Price,
    catalogue,
    device_from_json,
    device_to_json,
    find_device,
    load_device_file,
    price_band,
)
from ridgeline.errors import ConfigError

DEVICES = list(catalogue().values())
GPUS = [device for device in DEVICES if device.kind == "gpu"]
NAMES = (
    "a100-80-sxm",
    "a100-40-sxm",
    "a100-80-pcie",
    "h100-pcie",
    "h100-sxm",
    "h200-sxm",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "a10",
    "a10g",
    "l4",
    "l40s",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "rtx-pro-6000",
    "mi300x",
    "mi325x",
    "mi355x",
    "m2-max",
    "m4-max",
    "m3-ultra",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "xeon-8480",
    "xeon-8592",
    "epyc-9654",
)
# GeForce parts run 16- and 8-bit products at half rate when they sum in float32, fp4 at full rate.
HALF_RATE = {"rtx-3090", "rtx-4090", "rtx-5090"}


def names(devices: list[Device]) -> list[str]:
    return [device.name for device in devices]


def test_all_devices_are_there() -> None:
    assert set(catalogue()) == set(NAMES)
    assert len(catalogue()) >= 25
    assert {path.stem for path in CATALOGUE.glob("*.json")} == set(NAMES)


# ---------------------------------------------------------------------- traps


@pytest.mark.parametrize("device", GPUS, ids=names(GPUS))
def test_peaks_are_dense_and_of_one_kind(device: Device) -> None:
    """A sparse figure among dense ones shows as a ratio of 4 or of 1 where hardware has 2."""
    peaks = device.peak_flops
    assert peaks["bf16"] == peaks["fp16"]
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)
    if "fp4" in peaks:
        ratio = peaks["fp4"] / peaks["fp8"] / (2 if device.name in HALF_RATE else 1)
        assert 1.95 <= ratio <= 3.05


@pytest.mark.parametrize("device", GPUS, ids=names(GPUS))
def test_the_ridge_is_where_ridges_are(device: Device) -> None:
    full_rate = 2 if device.name in HALF_RATE else 1
    assert 100 <= full_rate * device.ridge("bf16") <= 700


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("h100-sxm", "bf16", 989),  # 1,979 is with sparsity
        ("h100-sxm", "fp8", 1979),
        ("l40s", "fp8", 733),  # 1,466 is with sparsity
        ("a100-80-sxm", "bf16", 312),
        ("b200", "bf16", 2250),
        ("rtx-4090", "bf16", 165),  # 330 sums in 16 bits
        ("a10g", "bf16", 70),  # no A10
    ],
)
def test_figures_that_are_often_wrong(name: str, dtype: str, tflops: float) -> None:
    assert find_device(name).peak(dtype) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [("a100-80-sxm", 300), ("h100-sxm", 450), ("b200", 900), ("tpu-v5e", 200)],
)
def test_links_are_per_direction(name: str, gb_per_s: float) -> None:
    link = find_device(name).link
    assert link is not None
    assert link.bytes_per_s == gb_per_s * 1e9


def test_a_pair_on_a_mesh_has_one_of_seven_wires() -> None:
    link = find_device("mi300x").link
    assert link is not None
    assert link.pair_bytes_per_s == pytest.approx(link.bytes_per_s / 7)
    nvlink = find_device("h100-sxm").link
    assert nvlink is not None
    assert nvlink.pair_bytes_per_s == nvlink.bytes_per_s  # through a switch


def test_blackwell_ultra_has_almost_no_int8() -> None:
    for name in ("b300", "gb300"):
        device = find_device(name)
        assert device.peak("int8") < device.peak("bf16") / 10


def test_memory_is_what_can_be_used() -> None:
    assert find_device("b200").memory_bytes == 180 * 10**9  # of 192
    assert find_device("m3-ultra").memory_bytes == 384 * 10**9  # of 512


def test_geforce_and_small_cards_have_no_link_in_the_node() -> None:
    for name in ("rtx-4090", "rtx-5090", "l4", "l40s", "a10", "a10g"):
        assert find_device(name).link is None


# ---------------------------------------------------------------------- sources and prices


@pytest.mark.parametrize("device", DEVICES, ids=names(DEVICES))
def test_every_figure_says_where_it_is_from(device: Device) -> None:
    figures = {
        "peak_flops",
        "memory_bytes",
        "bandwidth",
        "l2_bytes",
        "link",
        "host_link_bytes_per_s",
        "network_bytes_per_s",
        "watts",
    }
    if device.all_in_kw is not None:
        figures.add("all_in_kw")
    assert figures <= set(device.sources)
    assert all(len(device.sources[figure]) >= 4 for figure in figures)


@pytest.mark.parametrize("device", DEVICES, ids=names(DEVICES))
def test_prices_are_bands_with_a_date(device: Device) -> None:
    for price in device.prices:
        assert 0 < price.low <= price.mid <= price.high
        assert price.date[:2] == "20"
        assert price.source


def test_all_in_power_is_more_than_the_chip_alone() -> None:
    with_node = [device for device in DEVICES if device.all_in_kw is not None]
    assert {"h100-sxm", "b200", "gb200", "mi300x", "mi355x"} == {d.name for d in with_node}
    assert all(d.all_in_kw is not None and d.all_in_kw * 1e3 > 1.5 * d.watts for d in with_node)


def test_the_rent_is_over_all_sources_but_total_cost_models() -> None:
    rent = find_device("h100-sxm").rent
    assert rent is not None
    assert rent.low == 1.99  # 1.30 is what it costs its owner
    assert rent.high == 12.29
    assert 2.5 < rent.mid < 5
    assert rent.date == "2026-05-20"
    owned = find_device("mi300x").rent
    assert owned is not None
    assert (owned.low, owned.high, owned.source_type) == (1.12, 1.55, "tco-model")
    assert find_device("epyc-9654").rent is None


def test_a_band_is_lowest_median_highest() -> None:
    prices = [Price(2, 3, 4, "user", "a", "2026-01"), Price(1, 5, 6, "user", "b", "2025-12")]
    band = price_band(prices)
    assert band == Price(1, 4, 6, "user", "a; b", "2026-01")
    assert price_band([]) is None


# ---------------------------------------------------------------------- what is not there


def test_a_missing_unit_computes_in_the_next_wider_type() -> None:
    a100 = find_device("a100-80-sxm")
    assert a100.peak("fp8") == a100.peak("bf16")
    assert a100.peak("fp4") == a100.peak("bf16")
    assert a100.peak("int4") == a100.peak("bf16")
    assert a100.peak("int8") == 2 * a100.peak("bf16")
    assert find_device("tpu-v5e").peak("fp16") == find_device("tpu-v5e").peak("bf16")
    only_fp32 = replace(a100, peak_flops={"fp32": 1e12})
    assert only_fp32.peak("bf16") == only_fp32.peak("fp8") == 1e12
    only_fp16 = replace(a100, peak_flops={"fp32": 1e12, "fp16": 2e12})
    assert only_fp16.peak("bf16") == 2e12


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="float32"):
        find_device("h100-sxm").peak("float32")


# ---------------------------------------------------------------------- finding and reading


def test_names_are_forgiving_about_spelling() -> None:
    assert find_device(" H100 SXM ").name == "h100-sxm"
    assert find_device("RTX_4090").name == "rtx-4090"


@pytest.mark.parametrize(
    ("wrong", "suggested"), [("h100", "h100-sxm"), ("mi300", "mi300x"), ("b20", "b200")]
)
def test_an_unknown_name_gets_those_like_it(wrong: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match=suggested):
        find_device(wrong)


def test_a_name_like_none_gets_them_all() -> None:
    with pytest.raises(ConfigError, match=r"choose one of .*rtx-pro-6000"):
        find_device("abacus!!")


@pytest.mark.parametrize("device", DEVICES, ids=names(DEVICES))
def test_files_round_trip(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(device_to_json(device)))
    again = load_device_file(path)
    assert again.peak_flops == pytest.approx(dict(device.peak_flops))
    assert replace(again, peak_flops=device.peak_flops) == replace(
        device, bandwidth=again.bandwidth, l2_bytes=again.l2_bytes, link=again.link
    )
    assert (again.link is None) == (device.link is None)


def wrong_files() -> list[tuple[str, dict[str, Any]]]:
    good = json.loads((CATALOGUE / "h100-sxm.json").read_text())
    cases = []
    for match, change in (
        ("bandwidth_gb_per_s", {"bandwidth_gb_per_s": -1}),
        ("memory_gb", {"memory_gb": "80 GB"}),
        ("memory_gb", {"memory_gb": True}),
        ("kind", {"kind": "abacus"}),
        ("unknown dtypes", {"peak_tflops": {"bf17": 1}}),
        ("peak_tflops", {"peak_tflops": {"bf16": 0}}),
        ("peak_tflops", {"peak_tflops": {}}),
        ("rise from low", {"prices": [{**good["prices"][0], "low": 99}]}),
        ("source_type", {"prices": [{**good["prices"][0], "source_type": "a friend"}]}),
        ("link: gb_per_s", {"link": {**good["link"], "gb_per_s": None}}),
    ):
        cases.append((match, {**copy.deepcopy(good), **change}))
    without = copy.deepcopy(good)
    del without["watts"]
    return [*cases, ("watts is missing", without)]


@pytest.mark.parametrize(("match", "data"), wrong_files())
def test_a_broken_file_names_what_is_wrong(match: str, data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=match):
        device_from_json(data, "mine.json")


def test_a_file_that_is_no_device(tmp_path: Path) -> None:
    for text, match in (("{", "cannot be read"), ("[1]", "JSON object")):
        path = tmp_path / "device.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match=match):
            load_device_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_device_file(tmp_path / "none.json")
