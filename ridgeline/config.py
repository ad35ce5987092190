"""What may a user ask for? (`resolve.py` turns it into what is done.)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real

from ridgeline.errors import ConfigError

DEFAULT_POLICY = "fcfs"

# A field, the least and the most that it may be; a least without a point: whole numbers only.
Range = tuple[str, float, float]

_COUNTS = (
    "max_model_len",
    "num_blocks",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_mixed_tokens",
    "threads",
    "block_size",
)

# What a field may be, by its annotation.
_KINDS: dict[str, tuple[type, str]] = {
    "str": (str, "a text"),
    "bool": (bool, "True or False"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What was asked for. "auto" and None mean: decide, and say so at start.

    `model` is a folder or a hub id `user/name[@revision]`. Sizes are in tokens, requests or bytes
    as their names say. `kv_cache_memory_bytes` beats `memory_utilization`, which is the share of
    the device's total memory that weights, cache and working space together may take.
    `max_num_mixed_tokens` is how many tokens a step computes in which prompts join answers that go
    on (more where many prompts wait); None on a GPU: about as few as are read at nine tenths of the
    full rate.
    `max_in_flight` 1 plans a step after the last one's result, 2 while it runs. `ttft_slo_ms` and
    `tpot_slo_ms` are what policy slo promises: milliseconds to the first token, and per later one.
    `enforce_eager` launches the kernels of a decode step one by one, where a GPU would replay them
    as one captured graph. `deterministic` (on a GPU): a request's tokens do not depend on what else
    is served beside it, for some speed. `speculate` says who drafts the tokens that a step then
    checks, as METHOD[:ARGUMENT][:K] (`formats.DRAFT_METHODS`), or off; what is answered follows the
    same law with any. With K each step checks so many drafts of each request where there is room,
    without it as many as pay, which may be none; auto: the draft that is known for the model, else
    off. `warm_up` auto, on a GPU: capture the steps that can be foreseen before the first request,
    for 30 s at most. `pack_cache` (on a CPU): weights as the kernels want them are kept on disk for
    the next start, unless it is "off"; "clear" removes those of all models first. `calibration` is
    a file of measured constants for the prices of steps; `event_log` is a file that everything that
    happens in the engine is appended to (token ids, never text).
    """

    model: str
    tokenizer: str | None = None
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    load_format: str = "auto"  # auto, safetensors, random
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.9
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    prefix_caching: bool = True
    policy: str | None = None  # None: fair in a server with several keys, else fcfs
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    max_in_flight: int = 2
    enforce_eager: bool = False
    warm_up: str = "auto"  # auto, off
    deterministic: bool = False
    speculate: str = "auto"  # auto, off, ngram[:K], suffix[:K], early:N[:K], draft:MODEL[:K]
    attention_backend: str = "auto"
    weight_format: str = "auto"
    kv_cache_dtype: str = "auto"
    pack_cache: str = "auto"  # auto, off, clear
    threads: int | None = None
    calibration: str | None = None
    event_log: str | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the start-up report: what was asked, what was done and why."""

    field: str
    asked: str
    got: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What is done. Every field has its final value; `decisions` says why."""

    model_path: str
    model_name: str
    revision: str | None
    device: str
    dtype: str
    load_format: str
    seed: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    policy: str
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    max_in_flight: int
    max_num_mixed_tokens: int | None = None  # None: prompts may fill a step that also decodes
    warm_up: bool = False
    max_captured_rows: int = 0  # requests of the largest captured decode step; 0: none is captured
    max_captured_tokens: int = 0  # of the largest captured step with prompts
    deterministic: bool = False
    draft_method: str | None = None  # None: nothing is drafted
    draft_argument: str = ""  # MODEL, N or RATE of the method
    max_draft_tokens: int = 0  # of one request in one step
    num_draft_tokens: int | None = None  # always so many where there is room; None: as many as pay
    max_verified_tokens: int = 0  # of a step with drafts: of each request one token and its drafts
    attention_backend: str
    weight_format: str
    kv_cache_dtype: str
    threads: int
    decisions: tuple[Decision, ...] = ()


def without_drafts(resolved: ResolvedConfig) -> ResolvedConfig:
    """The same for an engine in which nothing is drafted."""
    return replace(
        resolved,
        draft_method=None,
        draft_argument="",
        max_draft_tokens=0,
        num_draft_tokens=None,
        max_verified_tokens=0,
    )


def check_ranges(config: object, ranges: Iterable[Range]) -> None:
    """ConfigError names the first of these fields of `config` that is not in its range, or that is
    no number at all."""
    for name, least, most in ranges:
        value = getattr(config, name)
        is_whole = isinstance(least, int)
        is_right_kind = isinstance(value, Integral if is_whole else Real)
        if not is_right_kind:
            kind = "a whole number" if is_whole else "a number"
            raise ConfigError(f"{name} is {value!r}; it must be {kind}")
        if not least <= value <= most:  # nan is in no range
            low, high = (n if isinstance(n, int) else f"{n:g}" for n in (least, most))
            wanted = f"at least {low}" if most == math.inf else f"from {low} to {high}"
            raise ConfigError(f"{name} is {value}; it must be {wanted}")


def make_config(options: Mapping[str, object]) -> EngineConfig:
    """ConfigError for an option that there is not, with the nearest one."""
    known = [field.name for field in fields(EngineConfig)]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise ConfigError(f"there is no option {name}{hint}")
    return EngineConfig(**options)  # type: ignore[arg-type]


def _check_types(config: EngineConfig) -> None:
    for field in fields(config):
        name, _, optional = str(field.type).partition(" | ")
        value, (kind, words) = getattr(config, field.name), _KINDS[name]
        if optional and value is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{field.name} is {value!r}; it must be {words}")


def check_device(name: str) -> None:
    """ConfigError for what can name no device on any machine."""
    kind, separator, index = name.partition(":")
    if name not in ("auto", "cpu") and (kind != "cuda" or (separator and not index.isdecimal())):
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")


def check_numbers(config: EngineConfig) -> None:
    """What can be said of the numbers without a model or a device; ConfigError names the first that
    is wrong."""
    _check_types(config)
    given = (name for name in _COUNTS if getattr(config, name) is not None)
    check_ranges(config, ((name, 1, math.inf) for name in given))
    if not 0 < config.memory_utilization <= 1:
        raise ConfigError(
            f"memory_utilization is {config.memory_utilization}; it must be in (0, 1]"
        )
    if config.max_in_flight not in (1, 2):
        raise ConfigError(f"max_in_flight is {config.max_in_flight}; it must be 1 or 2")
    if config.num_blocks is not None and config.kv_cache_memory_bytes is not None:
        raise ConfigError("give num_blocks or kv_cache_memory_bytes, not both")
    if config.warm_up not in ("auto", "off"):
        raise ConfigError(f"unknown warm_up {config.warm_up!r}; choose auto or off")
