"""What can a device do at best, what does it cost, and who says so?

The data are in `catalogue/*.json`, one file a device, in the units people use (TFLOP/s, GB/s); here
everything is in FLOP/s, bytes and seconds. Peaks are dense with FP32 accumulation, links are per
direction and device, memory is what is usable, 1 GB is 1e9 bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from ridgeline.errors import ConfigError

CATALOGUE = Path(__file__).parent / "catalogue"
DTYPES = ("fp32", "bf16", "fp16", "fp8", "int8", "fp4")
KINDS = ("gpu", "cpu", "tpu", "apple")
SOURCE_TYPES = ("datasheet", "cloud-list", "marketplace", "index", "tco-model", "user")
HOPPER = ("h100-", "h200-")  # how the names of that generation begin
# Where a device without a unit for a dtype computes it: after converting to the next one here.
FALLBACK = {
    "fp4": "fp8",
    "int4": "bf16",
    "fp8": "bf16",
    "int8": "bf16",
    "fp16": "bf16",
    "bf16": "fp32",
}
PRODUCT = re.compile(r"[a-z]\d|\d{4}")  # h100, l4, mi300x, 4090; not a memory size
HBM_OF_SXM = {"hbm3", "hbm3e"}  # drivers call an SXM part by its memory
OTHER_PRODUCTS = {"nvl", "laptop", "mobile", "max", "super", "ti"}  # same number, other part


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars for one device for one hour, as a band."""

    low: float
    mid: float
    high: float
    source_type: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Link:
    """The fast way between the devices of one node, up to `max_devices` of them.

    `bytes_per_s` is per direction and device with all peers talking; `pair_bytes_per_s` is what
    two alone get, less where each peer has its own wires. `latency_s` is of one small message.
    """

    kind: str
    bytes_per_s: float
    latency_s: float
    max_devices: int
    pair_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OnChip:
    """Memory of all multiprocessors together, that each kernel fills anew: size, and bytes a second
    that they read from it."""

    bytes: int
    bytes_per_s: float


ASSUMED_SOURCES = {"all": "assumed; calibrate to know"}  # of hardware that nobody knows


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the processor of one socket.

    `peak_flops` maps a dtype (of DTYPES) to dense FLOP/s, or operations/s of integers. `l2_bytes`
    is the last cache before memory. `network_bytes_per_s` is per direction, this device's share of
    its node's network. `all_in_kw` is its share of the node with cooling. `sources` says for every
    figure where it is from.
    """

    name: str
    label: str
    kind: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    bandwidth: float
    l2_bytes: int
    link: Link | None
    host_link_bytes_per_s: float
    network_bytes_per_s: float
    watts: float
    all_in_kw: float | None
    prices: tuple[Price, ...]
    sources: Mapping[str, str] = field(hash=False)
    vendor: str
    measured: bool = False
    sram: OnChip | None = None  # None: nobody says
    network_latency_s: float = 25e-6  # one hop between nodes

    @property
    def is_assumed(self) -> bool:
        """Its figures are neither measured nor from a data sheet."""
        return dict(self.sources) == ASSUMED_SOURCES

    @property
    def traits(self) -> tuple[str, ...]:
        """By which a line of `formats` may mean this device: its kind, and its generation where
        kernels are made for one."""
        is_hopper = self.name.startswith(HOPPER)
        return (self.kind, "hopper") if is_hopper else (self.kind,)

    @property
    def threads(self) -> int | None:
        """Of a CPU that was measured with so many; None: nobody says."""
        digits = self.name.rpartition("-")[2].removesuffix("t")
        return int(digits) if self.kind == "cpu" and self.measured and digits.isdigit() else None

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of matrix products in `dtype`, or in what it is converted to here."""
        name: str | None = dtype
        while name is not None:
            if name in self.peak_flops:
                return self.peak_flops[name]
            if name == "bf16" and "fp16" in self.peak_flops:  # older and Apple parts
                return self.peak_flops["fp16"]
            name = FALLBACK.get(name)
        if dtype not in {*DTYPES, *FALLBACK}:
            known = ", ".join(sorted({*DTYPES, *FALLBACK}))
            raise ConfigError(f"there is no dtype {dtype!r}; dtypes are {known}")
        known = ", ".join(self.peak_flops)
        way_out = "; `ridgeline calibrate` measures others with --dtype" if self.measured else ""
        raise ConfigError(f"{self.name} has no peak for {dtype!r}, only for {known}{way_out}")

    def ridge(self, dtype: str) -> float:
        """FLOP per byte above which arithmetic binds, not memory."""
        return self.peak(dtype) / self.bandwidth

    def critical_batch(self, dtype: str, weight_bits: float) -> float:
        """Tokens of a step from which on a product of weights of so many bits is bound by
        arithmetic: a weight is read once, and takes 2 operations for each token."""
        return self.ridge(dtype) * weight_bits / 16

    @property
    def rent(self) -> Price | None:
        """What renting one costs, over all price sources: lowest, median and highest.

        Total-cost models say what it costs its owner; they are used where nothing else is known.
        """
        rented = [price for price in self.prices if price.source_type != "tco-model"]
        return price_band(rented or self.prices)


def price_band(prices: Sequence[Price]) -> Price | None:
    """Several prices as one: lowest low, median of the middles, highest high; the latest date."""
    if not prices:
        return None
    return Price(
        min(price.low for price in prices),
        median(price.mid for price in prices),
        max(price.high for price in prices),
        "/".join(dict.fromkeys(price.source_type for price in prices)),
        "; ".join(dict.fromkeys(price.source for price in prices)),
        max(price.date for price in prices),
    )


@cache
def catalogue() -> Mapping[str, Device]:
    """All devices of the data files, by name."""
    devices = (load_device_file(path) for path in sorted(CATALOGUE.glob("*.json")))
    return MappingProxyType({device.name: device for device in devices})


def find_device(name: str) -> Device:
    """The catalogue's device of this name. ConfigError lists those with a name like it."""
    devices = catalogue()
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    if plain in devices:
        return devices[plain]
    raise ConfigError(f"unknown device {name!r}; {_suggestion(plain, devices)}")


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    inside = [other for other in names if name and (name in other or other in name)]
    close = list(dict.fromkeys(inside + get_close_matches(name, names, n=4, cutoff=0.5)))
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"choose one of {', '.join(names)}"


def match(description: str, devices: Iterable[Device]) -> Device | None:
    """The GPU of `devices` that a driver's description means: every product word of its name (such
    as h100 or 4090) is said, and more of its other words than of any other's."""
    said = set(re.findall(r"[a-z0-9]+", description.lower()))
    said |= {re.sub(r"\d+$", "", word) for word in said}  # sxm4 is an sxm
    said |= {re.sub(r"gb$", "", word) for word in said}  # 80gb is 80
    said |= {"sxm"} if said & HBM_OF_SXM and "pcie" not in said else set()
    found = [
        (len(words & said), -len(words - said), device)
        for device in devices
        if device.kind == "gpu"
        and (words := set(device.name.lower().split("-")))
        and (products := {word for word in words if PRODUCT.search(word)})
        and products <= said
        and not said & (OTHER_PRODUCTS - words)
    ]
    return max(found, key=lambda row: row[:2])[2] if found else None


def slug(name: str) -> str:
    """A description as the name of a record."""
    words = re.sub(r"\(.*?\)|[^a-z0-9]+", " ", name.lower()).split()
    return "-".join(words) or "unknown"


def load_device_file(path: Path) -> Device:
    """A device from a JSON file with the keys of those in `catalogue/`. Raises ConfigError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a device: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a device is a JSON object, not {type(data).__name__}")
    return device_from_json(data, str(path))


def device_from_json(data: Mapping[str, Any], where: str) -> Device:
    """The inverse of `device_to_json`. ConfigError names `where` and the key."""
    reader = _Reader(data, where)
    peaks = reader.table("peak_tflops")
    if unknown := set(peaks) - set(DTYPES):
        raise ConfigError(f"{where}: peak_tflops has unknown dtypes {sorted(unknown)}")
    return Device(
        name=reader.text("name"),
        label=reader.text("label"),
        kind=reader.choice("kind", KINDS),
        peak_flops={dtype: reader.positive("peak_tflops", peaks[dtype]) * 1e12 for dtype in peaks},
        memory_bytes=round(reader.number("memory_gb") * 1e9),
        bandwidth=reader.number("bandwidth_gb_per_s") * 1e9,
        l2_bytes=round(reader.number("l2_mib") * (1 << 20)),
        link=_link(data.get("link"), where),
        host_link_bytes_per_s=reader.number("host_link_gb_per_s") * 1e9,
        network_bytes_per_s=reader.number("network_gb_per_s") * 1e9,
        watts=reader.number("watts"),
        all_in_kw=None if data.get("all_in_kw") is None else reader.number("all_in_kw"),
        prices=tuple(_price(price, where) for price in data.get("prices", ())),
        sources={key: str(text) for key, text in reader.table("sources").items()},
        vendor=reader.text("vendor"),
        measured=bool(data.get("measured", False)),
        sram=_sram(data.get("sram"), where),
        network_latency_s=reader.number_or("network_latency_us", 25.0) / 1e6,
    )


def device_to_json(device: Device) -> dict[str, Any]:
    """The device as one of the catalogue's files says it."""
    link = device.link
    return {
        "name": device.name,
        "label": device.label,
        "kind": device.kind,
        "vendor": device.vendor,
        "measured": device.measured,
        "peak_tflops": {dtype: flops / 1e12 for dtype, flops in device.peak_flops.items()},
        "memory_gb": device.memory_bytes / 1e9,
        "bandwidth_gb_per_s": device.bandwidth / 1e9,
        "l2_mib": device.l2_bytes / (1 << 20),
        "sram": None if device.sram is None else _sram_to_json(device.sram),
        "link": None if link is None else _link_to_json(link),
        "host_link_gb_per_s": device.host_link_bytes_per_s / 1e9,
        "network_gb_per_s": device.network_bytes_per_s / 1e9,
        "network_latency_us": device.network_latency_s * 1e6,
        "watts": device.watts,
        "all_in_kw": device.all_in_kw,
        "prices": [_price_to_json(price) for price in device.prices],
        "sources": dict(device.sources),
    }


class _Reader:
    """Values of one JSON object, checked; every complaint names the file and the key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data = data
        self._where = where

    def _value(self, key: str) -> Any:
        if key not in self._data:
            raise ConfigError(f"{self._where}: {key} is missing")
        return self._data[key]

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self._where}: {key} must be a text")
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str:
        value = self.text(key)
        if value not in choices:
            raise ConfigError(f"{self._where}: {key} {value!r} is none of {', '.join(choices)}")
        return value

    def number(self, key: str) -> float:
        """Zero is allowed: it says that there is none."""
        value = self._value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
            raise ConfigError(f"{self._where}: {key} must be a number from 0, not {value!r}")
        return float(value)

    def number_or(self, key: str, default: float) -> float:
        return self.number(key) if key in self._data else default

    def positive(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError(f"{self._where}: {key} must be above 0, not {value!r}")
        return float(value)

    def table(self, key: str) -> Mapping[str, Any]:
        value = self._value(key)
        if not isinstance(value, dict) or not value:
            raise ConfigError(f"{self._where}: {key} must be an object with entries")
        return value


def _sram(data: Mapping[str, Any] | None, where: str) -> OnChip | None:
    if data is None:
        return None
    reader = _Reader(data, f"{where}: sram")
    return OnChip(round(reader.number("kib") * (1 << 10)), reader.number("tb_per_s") * 1e12)


def _sram_to_json(sram: OnChip) -> dict[str, Any]:
    return {"kib": sram.bytes / (1 << 10), "tb_per_s": sram.bytes_per_s / 1e12}


def _link(data: Mapping[str, Any] | None, where: str) -> Link | None:
    if data is None:
        return None
    reader = _Reader(data, f"{where}: link")
    speed = reader.number("gb_per_s") * 1e9
    pair = reader.number("pair_gb_per_s") * 1e9 if "pair_gb_per_s" in data else speed
    return Link(
        reader.text("kind"),
        speed,
        reader.number("latency_us") / 1e6,
        round(reader.number("max_devices")),
        pair,
    )


def _link_to_json(link: Link) -> dict[str, Any]:
    return {
        "kind": link.kind,
        "gb_per_s": link.bytes_per_s / 1e9,
        "pair_gb_per_s": link.pair_bytes_per_s / 1e9,
        "latency_us": link.latency_s * 1e6,
        "max_devices": link.max_devices,
    }


def _price(data: Mapping[str, Any], where: str) -> Price:
    reader = _Reader(data, f"{where}: prices")
    low, mid, high = (reader.number(key) for key in ("low", "mid", "high"))
    if not low <= mid <= high:
        raise ConfigError(f"{where}: prices must rise from low to mid to high: {low} {mid} {high}")
    kind = reader.choice("source_type", SOURCE_TYPES)
    return Price(low, mid, high, kind, reader.text("source"), reader.text("date"))


def _price_to_json(price: Price) -> dict[str, Any]:
    return {
        "low": price.low,
        "mid": price.mid,
        "high": price.high,
        "source_type": price.source_type,
        "source": price.source,
        "date": price.date,
    }
