"""Asked + hardware + model -> what is done, and why. Nothing is silently adjusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import torch

from ridgeline.architectures.counts import weight_bytes
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import DenseSpec, ModelSpec
from ridgeline.config import Decision, EngineConfig, ResolvedConfig
from ridgeline.devices import Device
from ridgeline.errors import ConfigError, DoesNotFit
from ridgeline.formats import KV_FORMATS, WEIGHT_FORMATS
from ridgeline.kvcache import bytes_per_block
from ridgeline.scheduler.block_manager import blocks_needed
from ridgeline.scheduler.policies import POLICIES

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CPU_CACHE_BYTES = 4 << 30  # what the KV cache takes on a CPU when nothing was asked
RESERVE_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20}  # context, libraries, fragmentation
GATHERED_TOKENS = 1 << 16  # of all requests, that attention copies together at once
WEIGHT_BYTES_PER_THREAD = 16 << 20
CORES = torch.get_num_threads()  # as torch found them, before any model changes the number
MAX_NUM_SEQS = {"cuda": 256, "cpu": 64}
MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of the memory contract, in bytes; `measured` once it has been allocated."""

    what: str
    predicted: int
    measured: int | None = None


@dataclass(slots=True)
class _Decisions:
    made: list[Decision] = field(default_factory=list)

    def note(self, name: str, asked: object, got: object, because: str) -> None:
        said = "nothing" if asked is None else str(asked)
        self.made.append(Decision(name, said, str(got), because))


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    device: Device,
    *,
    model_path: str,
    model_name: str,
    revision: str | None,
    has_weights: bool,
) -> tuple[ResolvedConfig, tuple[MemoryRow, ...]]:
    """The final configuration and the memory it will take.

    Raises ConfigError for a choice that cannot be had and DoesNotFit, with the itemised table,
    when weights and one request's cache exceed the memory allowed. Nothing is allocated here.
    """
    _check_numbers(config)
    decisions = _Decisions()
    kind = "cuda" if device.name.startswith("cuda") else "cpu"
    if config.device != device.name:
        decisions.note("device", config.device, device.name, "the fastest device found here")
    dtype = _dtype(config, spec, kind, decisions)
    limit = longest_context(spec)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds what {model_name} was made for "
            f"({limit} tokens); ask for at most {limit}"
        )
    max_model_len = config.max_model_len or spec.max_position_embeddings
    max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS[kind]
    batched = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind]
    weight_format = "plain" if config.weight_format == "auto" else config.weight_format
    weights = weight_bytes(spec, DTYPE_BYTES[dtype], weight_format)
    working = working_bytes(spec, batched, max_num_seqs, max_model_len, DTYPE_BYTES[dtype])
    block_bytes = bytes_per_block(
        spec, config.block_size, DTYPE_BYTES[dtype], kv_format=config.kv_cache_dtype
    )
    fixed = (
        ("weights", weights),
        ("working space", working),
        ("reserve", RESERVE_BYTES[kind]),
    )
    num_blocks, max_model_len = _cache_size(
        config,
        spec,
        device,
        kind,
        fixed,
        block_bytes,
        max_num_seqs,
        max_model_len,
        batched,
        decisions,
    )
    load_format = _load_format(config, has_weights)
    resolved = ResolvedConfig(
        model_path=model_path,
        model_name=model_name,
        revision=revision,
        device=device.name,
        dtype=dtype,
        load_format=load_format,
        seed=config.seed,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        prefix_caching=config.prefix_caching,
        policy=config.policy,
        max_in_flight=config.max_in_flight,
        attention_backend=config.attention_backend,
        weight_format=weight_format,
        kv_cache_dtype=config.kv_cache_dtype,
        threads=_threads(config, kind, weights, decisions),
        decisions=tuple(decisions.made),
    )
    cache = (num_blocks + 1) * block_bytes  # and the null block
    rows = [MemoryRow(what, size) for what, size in fixed]
    return resolved, (rows[0], MemoryRow("KV cache", cache), *rows[1:])


def longest_context(spec: ModelSpec) -> int:
    """Tokens that the model's position encoding was made for, scaling included."""
    longest = spec.max_position_embeddings
    for layer in spec.layers:
        rope = layer.attention.rope
        if rope.kind in ("linear", "dynamic", "yarn"):
            original = rope.original_max_position or spec.max_position_embeddings
            longest = max(longest, int(original * rope.factor))
    return longest


def working_bytes(
    spec: ModelSpec, num_tokens: int, num_rows: int, context: int, dtype_bytes: int
) -> int:
    """Upper estimate of what the plain path holds at once: the activations of a step of
    `num_tokens`, the logits of `num_rows` rows, the keys and values that attention gathers for a
    request of `context` tokens, and the rotary tables."""
    widest = gathered = tables = 0
    for layer in spec.layers:
        attention, ffn = layer.attention, layer.feed_forward
        qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        width = ffn.intermediate_size * (1 if isinstance(ffn, DenseSpec) else ffn.num_active)
        widest = max(widest, 3 * width, 3 * qkv)
        per_token = 2 * attention.num_kv_heads * attention.head_dim * dtype_bytes
        gathered = max(gathered, min(num_rows * context, max(context, GATHERED_TOKENS)) * per_token)
        tables = max(tables, context * attention.head_dim * 2 * 4)
    activations = num_tokens * (widest * dtype_bytes + 4 * spec.hidden_size * (dtype_bytes + 4))
    logits = min(num_rows, num_tokens) * spec.vocab_size * 4 * 4
    return activations + logits + gathered + tables


def _check_numbers(config: EngineConfig) -> None:
    for name, low in (
        ("max_model_len", 1),
        ("num_blocks", 1),
        ("kv_cache_memory_bytes", 1),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("threads", 1),
        ("block_size", 1),
    ):
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} is {value}; it must be at least {low}")
    if not 0 < config.memory_utilization <= 1:
        raise ConfigError(
            f"memory_utilization is {config.memory_utilization}; it must be in (0, 1]"
        )
    if config.max_in_flight not in (1, 2):
        raise ConfigError(f"max_in_flight is {config.max_in_flight}; it must be 1 or 2")
    if config.num_blocks is not None and config.kv_cache_memory_bytes is not None:
        raise ConfigError("give num_blocks or kv_cache_memory_bytes, not both")
    for name, choices in (
        ("weight_format", ("auto", *WEIGHT_FORMATS)),
        ("kv_cache_dtype", tuple(KV_FORMATS)),
        ("policy", tuple(POLICIES)),
    ):
        if getattr(config, name) not in choices:
            known = ", ".join(sorted(choices))
            raise ConfigError(f"unknown {name} {getattr(config, name)!r}; choose one of {known}")


def _load_format(config: EngineConfig, has_weights: bool) -> str:
    if config.load_format not in ("auto", "safetensors", "random"):
        raise ConfigError(
            f"unknown load_format {config.load_format!r}; choose one of auto, safetensors, random"
        )
    if config.load_format == "random":
        return "random"
    if not has_weights:
        raise ConfigError(
            f"{config.model}: no *.safetensors file; weights are read from safetensors only "
            "(for a benchmark without weights use load_format random)"
        )
    return "safetensors"


def _dtype(config: EngineConfig, spec: ModelSpec, kind: str, decisions: _Decisions) -> str:
    if config.dtype in DTYPE_BYTES:
        return config.dtype
    if config.dtype != "auto":
        raise ConfigError(
            f"unknown dtype {config.dtype!r}; choose one of auto, {', '.join(DTYPE_BYTES)}"
        )
    if kind == "cpu" and spec.dtype == "float16":
        decisions.note("dtype", "auto", "float32", "float16 arithmetic is slow on a CPU")
        return "float32"
    decisions.note("dtype", "auto", spec.dtype, "the checkpoint's own")
    return spec.dtype


def _threads(config: EngineConfig, kind: str, weights: int, decisions: _Decisions) -> int:
    """Small models lose more by waiting for a second thread than it computes for them."""
    if config.threads is not None:
        return config.threads
    threads = min(CORES, max(1, weights // WEIGHT_BYTES_PER_THREAD)) if kind == "cpu" else CORES
    if threads < CORES:
        decisions.note("threads", None, threads, f"{weights / 1e6:.1f} MB of weights")
    return threads


def _cache_size(
    config: EngineConfig,
    spec: ModelSpec,
    device: Device,
    kind: str,
    fixed: tuple[tuple[str, int], ...],
    block_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    batched: int,
    decisions: _Decisions,
) -> tuple[int, int]:
    """Blocks of the KV cache, and the longest request that fits in them."""
    windows = tuple(group.window for group in kv_groups(spec))

    def blocks_for(num_tokens: int) -> int:
        return blocks_needed(num_tokens, config.block_size, windows, batched)

    total, free = device.memory_total(), device.memory_free()
    allowed = min(int(total * config.memory_utilization), free)
    used = sum(size for _, size in fixed)
    wanted = max_num_seqs * blocks_for(max_model_len)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes - 1
    else:
        room = allowed - used
        if kind == "cpu":
            room = min(room, CPU_CACHE_BYTES)
        num_blocks = min(room // block_bytes - 1, wanted)
        why = "every request at full length" if num_blocks == wanted else "the memory left"
        decisions.note("num_blocks", None, num_blocks, f"{config.block_size} tokens each, {why}")
    needed = used + (max(num_blocks, 1) + 1) * block_bytes
    items = (fixed[0], ("KV cache", max(num_blocks, 0) * block_bytes), *fixed[1:])
    if num_blocks < 1 or needed > free:
        raise DoesNotFit(_shortage(items, allowed, free), items, _ways_out(config))
    if blocks_for(max_model_len) <= num_blocks:
        return num_blocks, max_model_len
    fits = _longest(num_blocks, max_model_len, blocks_for)
    if config.max_model_len is not None or fits < 1:
        raise DoesNotFit(
            f"a request of {max_model_len} tokens needs {blocks_for(max_model_len)} blocks and the "
            f"KV cache holds {num_blocks} ({fits} tokens); lower max_model_len or give the cache "
            "more memory",
            items,
            (f"max_model_len {fits}", "a larger memory_utilization", "a 16-bit dtype"),
        )
    because = f"the KV cache holds {num_blocks} blocks, not {blocks_for(max_model_len)}"
    decisions.note("max_model_len", None, fits, because)
    return num_blocks, fits


def _longest(num_blocks: int, max_model_len: int, blocks_for: object) -> int:
    low, high = 0, max_model_len
    while low < high:
        middle = ceil((low + high) / 2)
        if callable(blocks_for) and blocks_for(middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _shortage(items: tuple[tuple[str, int], ...], allowed: int, free: int) -> str:
    lines = ", ".join(f"{what} {size / 1e9:.2f} GB" for what, size in items)
    return (
        f"does not fit: {lines}; allowed {allowed / 1e9:.2f} GB, free {free / 1e9:.2f} GB. "
        "The largest item is " + max(items, key=lambda item: item[1])[0]
    )


def _ways_out(config: EngineConfig) -> tuple[str, ...]:
    ways = ["a smaller max_num_batched_tokens", "a smaller model", "a device with more memory"]
    if config.dtype in ("auto", "float32"):
        ways.insert(0, "dtype bfloat16")
    return tuple(ways[:3])
