"""How far from its data sheet is a device, in a few constants per class of operator?

The forms are those of `roofline`. Where no one has calibrated, the efficiencies below are assumed:
GPUs of NVIDIA reach about 70-85 % of their peak in 16 bit, 60 % in fp8 and 80 % of their bandwidth,
those of AMD 55-65 % and 75 %, Apple's 70 % and 60-75 %, CPUs 40-60 % and 70-85 %; decode attention
75 % of the bandwidth, prefill attention 55 % of the peak. Host time is not assumed: it differs too
much from machine to machine and counts only once it has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, TypeVar, cast

from ridgeline.cost.hardware import DTYPES, Device
from ridgeline.errors import ConfigError
from ridgeline.formats import weight_line

Origin = Literal["ideal", "assumed", "calibrated", "extrapolated", "measured"]
ORIGINS: tuple[Origin, ...] = ("ideal", "measured", "calibrated", "extrapolated", "assumed")
UNPACKING = 0.8  # of e_c, where weights become the serving dtype before they are multiplied
NARROW_FLOATS = ("fp8", "fp4")
NARROW_SHARE = 0.77  # of the e_c that was measured in 16 bits; as NVIDIA's are assumed
OLD_NAMES = ("check_token", "check_way")
VERIFY_TOKEN = 0.1  # as a later H200 calibration has it, for records with the form before it
STANDS_IN = {  # whose constants serve for a dtype that has none
    "fp16": "bf16",
    "bf16": "fp16",
    "fp32": "bf16",
    "fp4": "fp8",
    "fp8": "int8",
    "int8": "fp8",
}


@dataclass(frozen=True, slots=True)
class MatmulConstants:
    """Shares `e_c` of the peak and `e_m` of the bandwidth, `t0_s` per launch, `q` how sharply the
    slower of the two wins (inf: max), `k0` elements of filling per output tile, `q_b` weight of the
    pass that rounds inputs (formats that compute in fp8). `e_v` stands for `e_m` where there is one
    row (None: the same kernel); `k_m` weights are read in vain for every column of the output.
    `k_s` seconds for each element of k: sums over k are chains, which nothing else shortens where
    there is little to do (a GPU's multiprocessors are filled by other columns, or by none)."""

    e_c: float
    e_m: float
    t0_s: float
    q: float = math.inf
    k0: float = 0.0
    q_b: float = 0.0
    e_v: float | None = None
    k_m: float = 0.0
    k_s: float = 0.0

    def __post_init__(self) -> None:
        _check_shares("matmul", e_c=self.e_c, e_m=self.e_m, e_v=self.e_v or self.e_m)
        amounts = {"t0_s": self.t0_s, "k0": self.k0, "q_b": self.q_b, "k_m": self.k_m}
        _check_amounts("matmul", **amounts, k_s=self.k_s)
        if self.q < 1.0:
            raise ConfigError(f"matmul: q is {self.q:g}; it must be 1 (a sum) to inf (the larger)")


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """`decode_e_c` and `decode_e_m`, `prefill_e_c` and `prefill_e_m`: shares of peak and bandwidth;
    `skew`: how much the longest request of a decode holds up the others (0: not, 1: fully).
    In a check of drafts each further token of a request adds `verify_token` of what a decode takes:
    keys are read once for all, but compared with each. In a step that has both, prefill takes
    `mixed_prefill` times as long, decode `mixed_decode` times, and `mixed_overlap_s` are saved."""

    decode_e_m: float
    decode_t0_s: float
    prefill_e_c: float
    prefill_e_m: float
    prefill_t0_s: float
    decode_e_c: float = 1.0
    skew: float = 0.0
    mixed_prefill: float = 1.0
    mixed_decode: float = 1.0
    mixed_overlap_s: float = 0.0
    verify_token: float = 0.0

    def __post_init__(self) -> None:
        _check_shares(
            "attention",
            decode_e_c=self.decode_e_c,
            decode_e_m=self.decode_e_m,
            prefill_e_c=self.prefill_e_c,
            prefill_e_m=self.prefill_e_m,
        )
        _check_amounts(
            "attention",
            decode_t0_s=self.decode_t0_s,
            prefill_t0_s=self.prefill_t0_s,
            skew=self.skew,
            mixed_overlap_s=self.mixed_overlap_s,
            verify_token=self.verify_token,
        )

    def verify_s(self, decode_s: float, longest: int) -> float:
        """Seconds of a check with so many new tokens of a request at most, over keys that a decode
        reads in so long."""
        return decode_s * (1 + self.verify_token * (longest - 1))


@dataclass(frozen=True, slots=True)
class StreamConstants:
    """Elementwise passes, embedding and sampling: share of the bandwidth, seconds a launch."""

    e_m: float
    t0_s: float

    def __post_init__(self) -> None:
        _check_shares("stream", e_m=self.e_m)
        _check_amounts("stream", t0_s=self.t0_s)


@dataclass(frozen=True, slots=True)
class MessageConstants:
    """Share of a link's rate, and seconds of one small message (None: the link's own)."""

    efficiency: float
    alpha_s: float | None = None

    def __post_init__(self) -> None:
        _check_shares("messages", efficiency=self.efficiency)


@dataclass(frozen=True, slots=True)
class HostConstants:
    """`c0_s` + `c1_s` per request for each step, `check_request_s` more per request whose drafts
    are checked, `per_launch_s` for each kernel of a step that is not one captured graph.
    `overlapped`: the next step is planned while one runs. Steps of up to `captured_tokens` decoded
    tokens are captured, and of up to `captured_prompt_tokens` tokens with prompts among them; that
    leaves `captured_t0` of every kernel's t0. Kernels that were made for a model's products (see
    `Calibration.own_products`) leave `own_t0` in a step of a few tokens, and of theirs
    `own_rows_t0` (None: `captured_t0`) in one of some more. `warm_t0` of the t0 of products and
    decodes is left where what a captured step reads is still in the last cache (see `mode`). A
    step with prompts before which nothing runs waits `lone_s` + `lone_request_s` per request for
    the host, at its begin and its end, and takes `lone_least_s` at least: the host works beside the
    device too.

    A step for which a number of drafts is chosen takes the host `choice_s` more, and every token
    of a row behind its first `token_s`. An answer alone takes it `begin_s` longer than as many
    steps of a long run: behind a prompt its caches are cold, and at the end there is more to do.

    `captured_s` is what the device does for a captured step beside the operators of the model: it
    copies the step's numbers in and out, makes inputs of them, deals out attention's work and
    keeps the tokens. Each pass that drafts makes its inputs and keeps its drafts in `pass_s`.
    Where drafts are looked up, that is done at the end of each step, in `look_s`.
    """

    c0_s: float = 0.0
    c1_s: float = 0.0
    per_launch_s: float = 0.0
    overlapped: bool = True
    captured_tokens: int = 0
    captured_prompt_tokens: int = 0
    captured_t0: float = 0.35
    own_t0: float = 0.35
    own_rows_t0: float | None = None
    warm_t0: float = 1.0
    lone_s: float = 0.0
    lone_request_s: float = 0.0
    lone_least_s: float = 0.0
    captured_s: float = 0.0
    pass_s: float = 0.0
    look_s: float = 0.0
    check_request_s: float = 0.0
    choice_s: float = 0.0
    token_s: float = 0.0
    begin_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """All constants of one device.

    `matmul` and `attention` are keyed by dtype ("bf16") or dtype and weight format ("bf16-int4").
    `ranges` maps "kind.quantity" to the lowest and highest value that was measured, with kind as
    `Op.kind` and quantity one of m, n, k, flops, bytes (of one Op), sent_bytes: outside of them
    a figure is extrapolated. `assumed_kinds` were not measured. `held_out` maps "kind" or any name
    to the median relative error on points that the fit has not seen. `streams` has the passes over
    memory that were measured apart, by name of the operator and dtype ("activation bf16").
    `own_products`: [n, k] of products that the engine has kernels of its own for on this device, of
    plain weights and of the formats that `ridgeline.formats` calls fused: these norm, gate and add
    on their way where there are few rows, and begin before the kernel before them has ended.
    `own_least`: it cuts others by a rule if n and k are this at least (0: it has none).
    `caveat`: what those who measured say against it, such as that the machine was busy.
    """

    device_name: str
    matmul: Mapping[str, MatmulConstants] = field(hash=False)
    attention: Mapping[str, AttentionConstants] = field(hash=False)
    elementwise: StreamConstants
    sampling: StreamConstants
    messages: MessageConstants
    host: HostConstants = HostConstants()
    origin: Origin = "calibrated"
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    assumed_kinds: tuple[str, ...] = ()
    held_out: Mapping[str, float] = field(default_factory=dict, hash=False)
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    date: str = ""
    streams: Mapping[str, StreamConstants] = field(default_factory=dict, hash=False)
    own_products: tuple[tuple[int, int], ...] = ()
    own_least: int = 0
    caveat: str = ""

    def stream_for(self, name: str, kind: str, dtype: str) -> StreamConstants:
        """The constants of the pass `name` in `dtype`, of its own if it was measured apart."""
        other = self.sampling if kind == "sampling" else self.elementwise
        return self.streams.get(f"{name} {dtype}", other)

    def matmul_for(self, dtype: str, weights: str = "plain") -> MatmulConstants:
        """The constants of products in `dtype` with weights of this format, or of the one that its
        name begins with ("int4-g64": int4)."""
        for name in (weights, weights.partition("-")[0]):
            if weights != "plain" and f"{dtype}-{name}" in self.matmul:
                return self.matmul[f"{dtype}-{name}"]
        found = _lookup(self.matmul, dtype, self.device_name)
        if dtype in NARROW_FLOATS and not self.matmul.keys() & {dtype, STANDS_IN[dtype]}:
            found = _scaled(found, NARROW_SHARE)
        found = replace(found, k_s=found.k_s * weight_line(weights).chain)
        is_unpacked = weights != "plain" and not weights.startswith(dtype)
        return _scaled(found, UNPACKING) if is_unpacked else found

    def attention_for(self, dtype: str) -> AttentionConstants:
        return _lookup(self.attention, dtype, self.device_name)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads; only JSON's own types (a `q` of infinity is null)."""
        record = asdict(self)
        for constants in record["matmul"].values():
            constants["q"] = None if math.isinf(constants["q"]) else constants["q"]
        record["assumed_kinds"] = list(self.assumed_kinds)
        record["ranges"] = {name: list(bounds) for name, bounds in self.ranges.items()}
        record["own_products"] = [list(sizes) for sizes in self.own_products]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str = "calibration") -> Calibration:
        """The inverse of `to_json`. ConfigError names `where` and what is wrong."""
        try:
            return _from_json(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{where} is no calibration record ({type(error).__name__}: {error}); "
                "make one with `ridgeline calibrate`"
            ) from None


Constants = TypeVar("Constants", MatmulConstants, AttentionConstants)


def _check_shares(owner: str, **shares: float) -> None:
    """A share above 1 would beat the data sheet: then the data sheet's figure is too low."""
    for name, share in shares.items():
        if not 0.0 < share <= 1.0:
            raise ConfigError(f"{owner}: {name} is {share:g}; a share must lie in (0, 1]")


def _check_amounts(owner: str, **amounts: float) -> None:
    for name, amount in amounts.items():
        if not 0.0 <= amount < math.inf:
            raise ConfigError(f"{owner}: {name} is {amount:g}; it must be 0 or more")


def _lookup(table: Mapping[str, Constants], dtype: str, device: str) -> Constants:
    for name in (dtype, STANDS_IN.get(dtype, ""), "bf16", "fp32"):
        if name in table:
            return table[name]
    raise ConfigError(f"the calibration of {device} has no constants for {dtype}")


def _scaled(constants: MatmulConstants, share: float) -> MatmulConstants:
    return replace(constants, e_c=constants.e_c * share, q_b=0.0)


def _attention(entry: Mapping[str, Any]) -> AttentionConstants:
    """In older records the name is `check_token`, and in those before them verifying is on the way
    from a decode to a chunk, by `check_way`."""
    known = {name: value for name, value in entry.items() if name not in OLD_NAMES}
    if "check_token" in entry:
        known.setdefault("verify_token", entry["check_token"])
    elif "check_way" in entry:
        known.setdefault("verify_token", VERIFY_TOKEN)
    return AttentionConstants(**known)


def _from_json(record: Mapping[str, Any]) -> Calibration:
    matmul = {
        name: MatmulConstants(**{**entry, "q": math.inf if entry["q"] is None else entry["q"]})
        for name, entry in record["matmul"].items()
    }
    origin = record.get("origin", "calibrated")
    if origin not in ORIGINS:
        raise ValueError(f"unknown origin {origin!r}")
    return Calibration(
        device_name=str(record["device_name"]),
        matmul=matmul,
        attention={n: _attention(entry) for n, entry in record["attention"].items()},
        elementwise=StreamConstants(**record["elementwise"]),
        sampling=StreamConstants(**record["sampling"]),
        messages=MessageConstants(**record["messages"]),
        host=HostConstants(**record.get("host", {})),
        origin=cast(Origin, origin),
        ranges={n: (float(b[0]), float(b[1])) for n, b in record.get("ranges", {}).items()},
        assumed_kinds=tuple(record.get("assumed_kinds", ())),
        held_out={n: float(error) for n, error in record.get("held_out", {}).items()},
        versions={n: str(version) for n, version in record.get("versions", {}).items()},
        date=str(record.get("date", "")),
        streams={n: StreamConstants(**entry) for n, entry in record.get("streams", {}).items()},
        own_products=tuple((int(n), int(k)) for n, k in record.get("own_products", ())),
        own_least=int(record.get("own_least", 0)),
        caveat=str(record.get("caveat", "")),
    )


# ------------------------------------------------------------------------ nobody has calibrated


@dataclass(frozen=True, slots=True)
class _Assumed:
    e_c: float
    e_c_fp8: float
    e_m: float
    prefill_e_c: float
    decode_e_m: float
    t0_s: float


_ASSUMED = {
    "nvidia": _Assumed(0.78, 0.60, 0.80, 0.55, 0.75, 5e-6),
    "amd": _Assumed(0.60, 0.50, 0.75, 0.45, 0.70, 6e-6),
    "apple": _Assumed(0.70, 0.60, 0.68, 0.45, 0.60, 10e-6),
    "tpu": _Assumed(0.70, 0.60, 0.80, 0.50, 0.70, 5e-6),
    "cpu": _Assumed(0.50, 0.40, 0.77, 0.35, 0.60, 5e-6),
}


@lru_cache(maxsize=64)
def default_calibration(device: Device) -> Calibration:
    """Assumed constants for a device that nobody has calibrated; see the top of this file."""
    known = _ASSUMED[device.kind if device.kind != "gpu" else _vendor(device)]
    matmul = {
        dtype: MatmulConstants(
            known.e_c_fp8 if dtype in ("fp8", "fp4") else known.e_c,
            known.e_m,
            known.t0_s,
            q=3.5,
            q_b=1.0 if dtype in ("fp8", "fp4") else 0.0,
        )
        for dtype in DTYPES
    }
    attention = AttentionConstants(
        decode_e_m=known.decode_e_m,
        decode_t0_s=2 * known.t0_s,
        decode_e_c=known.prefill_e_c,
        prefill_e_c=known.prefill_e_c,
        prefill_e_m=known.decode_e_m,
        prefill_t0_s=2 * known.t0_s,
        mixed_decode=1.0 if device.kind == "cpu" else 1.8,
    )
    is_cpu = device.kind == "cpu"
    return Calibration(
        device_name=device.name,
        matmul=matmul,
        attention={"bf16": attention},
        elementwise=StreamConstants(known.e_m, 2e-6),
        sampling=StreamConstants(known.e_m, 30e-6),
        messages=MessageConstants(0.75),
        host=HostConstants(
            per_launch_s=0.0 if is_cpu else 6e-6,
            overlapped=not is_cpu,
            captured_tokens=0 if is_cpu else 512,
        ),
        origin="assumed",
    )


def _vendor(device: Device) -> str:
    vendor = device.vendor.lower()
    return vendor if vendor in _ASSUMED else "nvidia"
