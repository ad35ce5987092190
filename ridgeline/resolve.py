"""Asked + hardware + model -> what is done, and why. Nothing is silently adjusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from msgspec import structs

from ridgeline.architectures.counts import weight_bytes
from ridgeline.architectures.kv_groups import KVGroup, kv_groups
from ridgeline.architectures.scheme_config import is_quantized, scheme_text, unpacked_matrices
from ridgeline.architectures.spec import NATIVE, ModelSpec
from ridgeline.architectures.stages import stage_groups, stage_spec
from ridgeline.asked import check_settings
from ridgeline.attention import INVARIANT
from ridgeline.config import DEFAULT_POLICY, Decision, EngineConfig, ResolvedConfig
from ridgeline.cost.captured import (
    MAX_ROWS,
    MAX_VERIFIED_TOKENS,
    RECORDED_KV,
    SHARE,
    can_capture,
    captured_chunk,
    efficient_chunk,
    most_prompt_tokens,
)
from ridgeline.cost.memory import (
    RESERVE_BYTES,
    device_kind,
    graph_items,
    size_text,
    weight_items,
    working_items,
)
from ridgeline.cost.pipeline import ONE_REQUEST, with_cuts
from ridgeline.cost.setup import DTYPE_BYTES, Layout, Precision, Setup
from ridgeline.costing import unknown_device
from ridgeline.devices import Device
from ridgeline.devices.host_memory import kept_for_others
from ridgeline.distributed.collectives import collective_class
from ridgeline.errors import ConfigError, DoesNotFit
from ridgeline.formats import CHECKPOINT, WeightFormatLine, weight_line
from ridgeline.kernels.cpu.native import library
from ridgeline.kernels.rms_norm import MAX_SIZE as MAX_NORM_SIZE
from ridgeline.kvcache import bytes_per_block
from ridgeline.resolve_draft import (
    Drafting,
    ReadSpec,
    decide_drafting,
    num_token_rows,
    why_no_drafts,
)
from ridgeline.scheduler.block_manager import blocks_needed
from ridgeline.speculation.memory import DraftSetting
from ridgeline.step import StepPricer

CPU_CACHE_BYTES = 4 << 30  # what the KV cache takes on a CPU when nothing was asked
WEIGHT_BYTES_PER_THREAD = 16 << 20
CORES = torch.get_num_threads()  # as torch found them, before any model changes the number
MAX_NUM_SEQS = {"cuda": 256, "cpu": 64}
MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}
NO_DRAFTS = Drafting(None, "nothing is decided yet")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One line of the memory contract, in bytes; `measured` once it has been allocated."""

    what: str
    predicted: int
    measured: int | None = None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What one rank may take, in bytes; `bound` says why it is less than the hardware has, if it
    is."""

    total: int
    free: int
    bound: str = ""


def memory_of(device: Device) -> RankMemory:
    return RankMemory(device.memory_total(), device.memory_free(), device.memory_bound())


@dataclass(frozen=True, slots=True)
class _Memory:
    """A device as far as sizes are concerned, in bytes."""

    name: str
    total: int
    free: int
    bound: str = ""  # why it is less than the hardware has, if it is
    num_peers: int = 0  # as Device.num_peers


Resolved = tuple[ResolvedConfig, tuple[MemoryRow, ...]]


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
    read_draft: ReadSpec | None = None,
    least: RankMemory | None = None,
) -> tuple[ResolvedConfig, tuple[MemoryRow, ...]]:
    """The final configuration and the memory it will take, on each rank. `read_draft` reads the
    model that drafts, where `speculate` names one. `least` is the memory of the rank that has
    least, where that is not this device's own.

    Raises ConfigError for a choice that cannot be had and DoesNotFit, with the itemised table and
    changes that have been tried, when weights and one request's cache exceed the memory allowed.
    Nothing is allocated here.
    """
    found = least or memory_of(device)
    memory = _Memory(device.name, found.total, found.free, found.bound, device.num_peers())

    def attempt(asked: EngineConfig, where: _Memory) -> Resolved:
        take = partial(
            _resolve,
            spec=spec,
            device=where,
            model_path=model_path,
            model_name=model_name,
            revision=revision,
            has_weights=has_weights,
            read_draft=read_draft,
        )
        if asked.speculate != "auto":
            return take(asked)
        try:
            return take(asked)
        except DoesNotFit:
            return take(
                structs.replace(asked, speculate="off"), no_drafts="with the draft it does not fit"
            )

    try:
        return attempt(config, memory)
    except DoesNotFit as error:
        ways = ways_out(config, spec, memory, attempt)
        texts, settings = tuple(way.text for way in ways), tuple(way.settings for way in ways)
        raise DoesNotFit(str(error), error.items, texts, settings) from None


def _resolve(
    config: EngineConfig,
    spec: ModelSpec,
    device: _Memory,
    *,
    model_path: str,
    model_name: str,
    revision: str | None,
    has_weights: bool,
    read_draft: ReadSpec | None,
    no_drafts: str | None = None,
) -> Resolved:
    """`resolve` for one configuration; its DoesNotFit names no changes. `no_drafts` says why there
    are none although they might have been decided on."""
    check_settings(config)
    decisions = _Decisions()
    chosen = _choose(config, spec, device, model_path, model_name, has_weights, decisions)
    chosen = _with_drafts(chosen, config, spec, model_path, read_draft, no_drafts, decisions)
    in_flight = _in_flight(config, chosen, decisions)
    block_bytes = _block_bytes(config, spec, chosen)
    fixed, draft_block_bytes = _beside_the_cache(config, spec, chosen)
    num_blocks, max_model_len = _cache_size(
        config,
        spec,
        device,
        chosen.kind,
        (("weights", chosen.weights), *fixed),
        block_bytes + draft_block_bytes,
        chosen.max_num_seqs,
        chosen.max_model_len,
        chosen.max_num_batched_tokens,
        decisions,
    )
    chosen = replace(chosen, max_model_len=max_model_len)
    resolved = ResolvedConfig(
        model_path=model_path,
        model_name=model_name,
        revision=revision,
        device=device.name,
        dtype=chosen.dtype,
        load_format=chosen.load_format,
        seed=config.seed,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        prefix_caching=config.prefix_caching,
        policy=config.policy or DEFAULT_POLICY,
        ttft_slo_ms=config.ttft_slo_ms,
        tpot_slo_ms=config.tpot_slo_ms,
        max_in_flight=in_flight,
        draft_method=chosen.drafting.method,
        draft_argument=chosen.drafting.argument,
        max_draft_tokens=chosen.drafting.max_draft_tokens,
        num_draft_tokens=chosen.drafting.num_draft_tokens,
        max_verified_tokens=chosen.verified,
        max_captured_rows=chosen.captured,
        max_captured_tokens=chosen.captured_tokens,
        warm_up=config.warm_up == "auto" and chosen.has_graphs,
        deterministic=config.deterministic,
        attention_backend=config.attention_backend,
        weight_format=chosen.weight_format,
        kv_cache_dtype=config.kv_cache_dtype,
        threads=_threads(config, chosen.kind, chosen.weights, decisions),
        tp=config.tp,
        ep=config.ep,
        dp=config.dp,
        stages=chosen.stages,
        collective=chosen.collective,
        decisions=tuple(decisions.made),
    )
    others, draft_bytes = _beside_the_cache(config, spec, chosen)
    caches = ("KV cache", block_bytes), ("draft cache", draft_bytes)
    sizes = [(what, (num_blocks + 1) * size) for what, size in caches if size]  # and the null block
    rows = (("weights", chosen.weights), *sizes, *others)
    return resolved, tuple(MemoryRow(*row) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What is decided before the size of the cache; sizes in tokens, rows and bytes.

    `captured` requests are in the largest captured decode step, `captured_tokens` in the largest
    captured step with prompts, and `verified` tokens in the largest step with drafts. `kept` bytes
    of the host's memory are for other processes of ours."""

    kind: str
    dtype: str
    load_format: str
    weight_format: str
    weights: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    captured: int
    captured_tokens: int
    kept: int
    collective: str = ""
    stages: tuple[tuple[int, int], ...] = ()
    drafting: Drafting = NO_DRAFTS
    verified: int = 0

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def has_graphs(self) -> bool:
        return self.captured > 0 and self.kind == "cuda"  # a CPU's recorded steps fit its reserve


def _choose(
    config: EngineConfig,
    spec: ModelSpec,
    device: _Memory,
    model_path: str,
    model_name: str,
    has_weights: bool,
    decisions: _Decisions,
) -> _Chosen:
    """Formats, limits and captured steps, in this order."""
    kind = "cuda" if device.name.startswith("cuda") else "cpu"
    if config.device != device.name:
        decisions.note("device", config.device, device.name, "the fastest device found here")
    if config.deterministic:
        _check_deterministic(config, spec, kind, decisions)
    if spec.implementation != NATIVE:
        _check_foreign(config, spec)
    dtype = _dtype(config, spec, kind, decisions)
    limit = longest_context(spec)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds what {model_name} was made for "
            f"({limit} tokens); ask for at most {limit}"
        )
    max_num_seqs = config.max_num_seqs or MAX_NUM_SEQS[kind]
    batched = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind]
    load_format = _load_format(config, has_weights)
    weight_format = _weight_format(config, spec, dtype, load_format, decisions)
    line = weight_line(weight_format)
    if kind == "cpu" and line.compute is not None and line.cpu_compute is None:
        because = f"as asked, but a CPU multiplies in {dtype}: smaller, not faster"
        decisions.note("weight_format", config.weight_format, weight_format, because)
    collective = _collective(config, kind, device, decisions)
    stages = _cut(config, spec, device, kind, dtype, weight_format, decisions)
    captured = _captured_rows(config, spec, kind, dtype, line, max_num_seqs, decisions)
    if captured and (why := _why_not_captured(config, collective)[0]):
        decisions.note("captured steps", captured, "none", why)
        captured = 0
    has_graphs = captured > 0 and kind == "cuda"
    return _Chosen(
        kind=kind,
        dtype=dtype,
        load_format=load_format,
        weight_format=weight_format,
        weights=_weights(config, spec, dtype, weight_format, stages),
        max_model_len=config.max_model_len or spec.max_position_embeddings,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        captured=captured,
        captured_tokens=min(most_prompt_tokens(spec), batched) if has_graphs else 0,
        kept=kept_for_others() if kind == "cpu" else 0,
        collective=collective,
        stages=stages,
    )


def _block_bytes(config: EngineConfig, spec: ModelSpec, chosen: _Chosen) -> int:
    """Of a block on the fullest rank."""
    size, kv = chosen.dtype_bytes, config.kv_cache_dtype
    return max(
        bytes_per_block(one, config.block_size, size, kv_format=kv, ranks=config.tp, groups=groups)
        for one, groups in _stages(spec, chosen.stages)
    )


def _why_not_captured(config: EngineConfig, collective: str) -> tuple[str, str]:
    """By several ranks, and the way out; empty where they may be."""
    if config.pp > 1:
        return "no captured step can wait for the stage before it", "leave out pp"
    if config.dp > 1:
        why = "no captured step knows how many tokens other groups of ranks have"
        return why, "leave out dp"
    if collective and not collective_class(collective).captures:
        why = f"ranks talk over {collective}, which no captured step can call"
        return why, "use collective shared, of CPUs of one machine, or nccl"
    return "", ""


def _stages(
    spec: ModelSpec, stages: Sequence[tuple[int, int]]
) -> Iterator[tuple[ModelSpec, tuple[KVGroup, ...]]]:
    """Each as a model, with its part of the KV groups; without stages the model itself."""
    groups = kv_groups(spec)
    if not stages:
        yield spec, groups
    for layers in (range(*one) for one in stages):
        yield stage_spec(spec, layers), stage_groups(groups, layers)


def _cut(
    config: EngineConfig,
    spec: ModelSpec,
    device: _Memory,
    kind: str,
    dtype: str,
    weight_format: str,
    decisions: _Decisions,
) -> tuple[tuple[int, int], ...]:
    """Stages of which the slowest is fastest in a usual step, among those that fit; none without a
    pipeline. ConfigError for more ranks than there is something to divide among."""
    Layout(tp=config.tp, ep=config.ep, dp=config.dp).check(spec)
    if config.pp == 1:
        return ()
    if config.pp > spec.num_layers:
        raise ConfigError(f"pp is {config.pp}; the model has only {spec.num_layers} layers")
    free = min(device.free, int(device.total * config.memory_utilization))
    is_cpu = kind == "cpu"
    figures = unknown_device("", is_cpu=is_cpu, threads=config.threads or 1, memory_bytes=free)
    precision = Precision(dtype, weight_format, config.kv_cache_dtype)
    layout = Layout(tp=config.tp, pp=config.pp, ep=config.ep, dp=config.dp)
    least = replace(ONE_REQUEST, max_model_len=config.max_model_len or 1, utilization=1.0)
    layout = with_cuts(Setup(spec, figures, layout, precision), least).layout
    stages = (layout.stage_layers(spec.num_layers, stage) for stage in range(config.pp))
    found = tuple((one.start, one.stop) for one in stages)
    shown = ", ".join(f"{first}-{behind - 1}" for first, behind in found)
    decisions.note("pp", config.pp, config.pp, f"layers {shown}: the slowest stage is fastest so")
    return found


def _weights(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    weight_format: str,
    stages: Sequence[tuple[int, int]],
) -> int:
    """Bytes on the fullest rank."""
    layout = Layout(tp=config.tp, ep=config.ep, dp=config.dp)
    if layout.expert_devices == 1:
        every = _stages(spec, stages)
        return max(weight_bytes(one, DTYPE_BYTES[dtype], weight_format) for one, _ in every)
    precision = Precision(dtype, weight_format)
    items = (weight_items(one, layout, precision) for one, _ in _stages(spec, stages))
    return max(sum(item.bytes for item in of_stage) for of_stage in items)


def _check_moves(config: EngineConfig) -> None:
    """Raises ConfigError where no expert can change ranks."""
    if config.ep == 1:
        raise ConfigError(
            "expert_placement is load, and with ep 1 every rank has a share of each expert; use ep"
            " 2 or more, or expert_placement fixed"
        )
    if config.pp > 1:
        raise ConfigError(
            f"expert_placement load and pp {config.pp} are not served together yet: rank 0 counts"
            " the tokens of its own stage alone; use expert_placement fixed or pp 1"
        )


def _collective(config: EngineConfig, kind: str, device: _Memory, decisions: _Decisions) -> str:
    """How ranks talk; empty for one rank."""
    if config.expert_placement == "load":
        _check_moves(config)
    if config.num_ranks == 1:
        return ""
    is_here = config.launcher_line.is_here
    if config.tp > 1:
        where = "on this machine" if is_here else f"by launcher {config.launcher}"
        decisions.note("tp", config.tp, config.tp, f"each layer is shared by ranks {where}")
    if config.ep > 1:
        decisions.note("ep", config.ep, config.ep, "each expert is whole in one group of ranks")
    if config.expert_placement == "load":
        because = "experts change ranks where the price of their bytes is less than the gain"
        decisions.note("expert_placement", "load", "load", because)
    if config.dp > 1:
        because = "each group of ranks attends for requests of its own, and all share the experts"
        decisions.note("dp", config.dp, config.dp, because)
    if config.launcher == "auto":
        decisions.note("launcher", "auto", "local", "nothing says that ranks are elsewhere")
    if config.collective != "auto":
        if kind not in collective_class(config.collective).devices:
            raise ConfigError(f"collective {config.collective} is not for device {kind}; use auto")
        return config.collective
    if kind == "cpu" and is_here and library() is not None:
        decisions.note("collective", "auto", "shared", "all ranks have this machine's memory")
        return "shared"
    if kind == "cuda" and is_here and device.num_peers >= config.num_ranks - 1:
        because = "each GPU can write to the others' memory; what is long goes by NCCL"
        decisions.note("collective", "auto", "peer", because)
        return "peer"
    name, way = ("nccl", "from GPU to GPU") if kind == "cuda" else ("gloo", "over sockets")
    decisions.note("collective", "auto", name, f"ranks talk {way}")
    return name


def _with_drafts(
    chosen: _Chosen,
    config: EngineConfig,
    spec: ModelSpec,
    model_path: str,
    read_draft: ReadSpec | None,
    no_drafts: str | None,
    decisions: _Decisions,
) -> _Chosen:
    """Who drafts, which may depend on the steps that are captured."""
    kind, captured = chosen.kind, chosen.captured
    ranks = _why_not_captured(config, chosen.collective)
    decided = decide_drafting(
        config,
        spec,
        model_path,
        why_not=why_no_drafts(config, spec, kind, chosen.dtype, captured, ranks),
        read_draft=read_draft,
    )
    drafting = replace(decided, kind=kind)
    if no_drafts is not None or config.speculate != "off":
        asked = config.speculate if no_drafts is None else "auto"
        decisions.note("speculate", asked, drafting.text, no_drafts or drafting.because)
    verified = 0
    if drafting.asked is not None:
        verified = max(captured, MAX_VERIFIED_TOKENS[device_kind(kind)])
    return replace(chosen, drafting=drafting, verified=verified)


def _beside_the_cache(
    config: EngineConfig, spec: ModelSpec, chosen: _Chosen
) -> tuple[list[tuple[str, int]], int]:
    """What takes memory beside weights and cache, in bytes, and what each block of the cache takes
    for the model that drafts."""
    kind = device_kind(chosen.kind)
    working = working_items(
        spec,
        num_tokens=chosen.max_num_batched_tokens,
        num_rows=chosen.max_num_seqs,
        dtype_bytes=chosen.dtype_bytes,
        kind=kind,
        context=chosen.max_model_len,
        ranks=config.tp,
        expert_ranks=config.tp * config.dp // config.ep,
    )
    most = max(chosen.captured, chosen.verified) * chosen.has_graphs
    graphs = graph_items(spec, most, chosen.captured_tokens, chosen.dtype_bytes)
    setting = DraftSetting(
        max_model_len=chosen.max_model_len,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        block_size=config.block_size,
        num_rows=num_token_rows(chosen.captured),
        max_draft_tokens=chosen.drafting.max_draft_tokens,
        max_rows=chosen.captured,
        max_logit_rows=chosen.verified,
        dtype_bytes=chosen.dtype_bytes,
        kind=kind,
    )
    draft = chosen.drafting.memory(spec, setting)
    items = [(item.what, item.bytes) for item in (*working, *graphs, *draft.items)]
    if chosen.kept:
        items.append(("HTTP process", chosen.kept))
    return [*items, ("reserve", RESERVE_BYTES[kind])], draft.block_bytes


def longest_context(spec: ModelSpec) -> int:
    """Tokens that the model's position encoding was made for, scaling included."""
    longest = spec.max_position_embeddings
    for layer in spec.layers:
        rope = layer.attention.rope
        if rope.kind in ("linear", "dynamic", "yarn"):
            original = rope.original_max_position or spec.max_position_embeddings
            longest = max(longest, int(original * rope.factor))
    return longest


def with_mixed_tokens(
    resolved: ResolvedConfig, asked: int | None, pricer: StepPricer
) -> ResolvedConfig:
    """The same once steps have a price: how long a step is in which prompts join decodes. On a CPU
    nobody knows what a short step costs beside its arithmetic, so there only what was asked."""
    promises = resolved.tpot_slo_ms is not None
    if asked is not None or resolved.device == "cpu" or promises:
        return replace(resolved, max_num_mixed_tokens=asked)
    least = efficient_chunk(pricer, resolved.max_num_batched_tokens)
    num = captured_chunk(least, resolved.max_captured_tokens)
    because = f"from {least} on prompts are read at {SHARE:.0%} of the full rate"
    if num != least:
        because += f", and steps of {num} are captured"
    decision = Decision("max_num_mixed_tokens", "nothing", str(num), because)
    return replace(resolved, max_num_mixed_tokens=num, decisions=(*resolved.decisions, decision))


def _check_deterministic(
    config: EngineConfig, spec: ModelSpec, kind: str, decisions: _Decisions
) -> None:
    """What can be known before anything is built; the rest is the attention backend's to say."""
    way_out = "leave out deterministic, or"
    if kind != "cuda":
        raise ConfigError(f"deterministic needs a CUDA device, not {kind}; {way_out} serve on one")
    if config.num_ranks > 1:
        raise ConfigError(
            f"deterministic needs all of the model on one rank; {way_out} tp, pp and dp"
        )
    if config.attention_backend not in ("auto", INVARIANT):
        raise ConfigError(
            f"deterministic needs attention_backend {INVARIANT}, not {config.attention_backend};"
            f" {way_out} use auto"
        )
    if spec.hidden_size > MAX_NORM_SIZE:
        raise ConfigError(
            f"deterministic serves hidden sizes up to {MAX_NORM_SIZE}, not {spec.hidden_size};"
            f" {way_out} serve another model"
        )
    because = (
        "the same bits in any batch: no products by the library or by the number of rows, no keys"
        " dealt out to several programs, no kernels of their own for decodes and long prompts, and"
        " filters and log-probabilities row by row"
    )
    decisions.note("deterministic", True, "one kernel for any number of tokens", because)


def _check_foreign(config: EngineConfig, spec: ModelSpec) -> None:
    """What layers that another library computes cannot have."""
    for name, usual in (
        ("weight_format", "plain"),
        ("deterministic", False),
        ("tp", 1),
        ("pp", 1),
        ("dp", 1),
    ):
        if getattr(config, name) not in ("auto", usual):
            raise ConfigError(
                f"{name} {getattr(config, name)} needs native layers, and a {spec.family} runs "
                f"with implementation {spec.implementation}; leave {name} out"
            )


def _in_flight(config: EngineConfig, chosen: _Chosen, decisions: _Decisions) -> int:
    """A CPU computes a step when it takes it: another in flight would only make the host plan
    with more drafts accepted than were. Each stage of a pipeline has a step, and the first finds
    one waiting."""
    if chosen.stages:
        because = f"each of {config.pp} stages has a step, and another waits"
        decisions.note("max_in_flight", config.max_in_flight, config.pp + 1, because)
        return config.pp + 1
    if chosen.kind != "cpu" or chosen.drafting.asked is None or config.max_in_flight == 1:
        return config.max_in_flight
    because = "a CPU computes each step as it takes it, and drafts are best planned knowing it"
    decisions.note("max_in_flight", config.max_in_flight, 1, because)
    return 1


def _load_format(config: EngineConfig, has_weights: bool) -> str:
    if config.load_format == "random":
        return "random"
    if not has_weights:
        raise ConfigError(
            f"{config.model}: no *.safetensors file; weights are read from safetensors only "
            "(for a benchmark without weights use load_format random)"
        )
    return "safetensors"


def _weight_format(
    config: EngineConfig, spec: ModelSpec, dtype: str, load_format: str, decisions: _Decisions
) -> str:
    """A quantized checkpoint is kept as it is, unless something else was asked for."""
    asked, has_files = config.weight_format, load_format != "random"
    in_layers, others = is_quantized(spec) and has_files, unpacked_matrices(spec)
    if asked == CHECKPOINT and not in_layers:
        raise ConfigError(
            "weight_format checkpoint: no quantized matrices of layers are read here; leave it out,"
            " or choose plain, or a format to round the weights to"
        )
    if has_files and others:
        because = f"{_some(one.name for one in others)} ({others[0].scheme.text}) unpacked"
        decisions.note("unpacked weights", asked, dtype, because)
    if not in_layers:
        if is_quantized(spec):
            because = "random numbers have nothing of the checkpoint's quantization"
            decisions.note("weight_format", asked, "plain" if asked == "auto" else asked, because)
        return "plain" if asked == "auto" else asked
    if asked in ("auto", CHECKPOINT):
        decisions.note("weight_format", asked, CHECKPOINT, _kept(spec))
        return CHECKPOINT
    because = f"{scheme_text(spec)}: unpacked to {dtype} first"
    decisions.note("weight_format", asked, asked, because)
    return asked


def _some(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def _kept(spec: ModelSpec) -> str:
    """What is kept of a quantized checkpoint, and what it says besides."""
    kinds = {scheme: None for layer in spec.layers for _, scheme in layer.schemes if scheme.keeps}
    said = [f"{scheme_text(spec)}: codes and scales as the checkpoint has them"]
    inputs = dict.fromkeys(one.inputs for one in kinds if one.inputs)
    if inputs:
        says = "; ".join(inputs)
        said.append(f"inputs are rounded as our kernels do it, not as it says ({says})")
    return ", ".join(said)


def _dtype(config: EngineConfig, spec: ModelSpec, kind: str, decisions: _Decisions) -> str:
    if config.dtype != "auto":
        return config.dtype
    if kind == "cpu" and spec.dtype == "float16":
        decisions.note("dtype", "auto", "float32", "float16 arithmetic is slow on a CPU")
        return "float32"
    decisions.note("dtype", "auto", spec.dtype, "the checkpoint's own")
    return spec.dtype


def _threads(config: EngineConfig, kind: str, weights: int, decisions: _Decisions) -> int:
    """Small models lose more by waiting for a second thread than it computes for them."""
    if config.threads is not None:
        return config.threads
    cores = max(1, CORES // config.num_ranks) if config.launcher != "join" else CORES
    threads = min(cores, max(1, weights // WEIGHT_BYTES_PER_THREAD)) if kind == "cpu" else cores
    if threads < CORES:
        decisions.note("threads", None, threads, f"{weights / 1e6:.1f} MB of weights")
    return threads


def _captured_rows(
    config: EngineConfig,
    spec: ModelSpec,
    kind: str,
    dtype: str,
    weights: WeightFormatLine,
    max_num_seqs: int,
    decisions: _Decisions,
) -> int:
    """Requests of the largest decode step that is captured."""
    if config.attention_backend not in ("auto", "native" if kind == "cpu" else "triton"):
        return 0
    if kind == "cpu" and not _records(config, dtype):
        return 0
    if not can_capture(spec, kind, weights, dtype, deterministic=config.deterministic):
        return 0
    if config.enforce_eager:
        decisions.note("captured steps", "none", "none", "enforce_eager was asked for")
        return 0
    return min(max_num_seqs, MAX_ROWS[device_kind(kind)])


def _records(config: EngineConfig, dtype: str) -> bool:
    """All of a decode step on a CPU is done by native kernels, so that it can be recorded. In
    float32 torch does a part of it: worth it only for drafts that were asked for."""
    has_kernels = config.kv_cache_dtype in RECORDED_KV and library() is not None
    draft_tokens = config.speculate not in ("auto", "off")
    return has_kernels and (dtype == "bfloat16" or (dtype == "float32" and draft_tokens))


def _cache_size(
    config: EngineConfig,
    spec: ModelSpec,
    device: _Memory,
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

    free = device.free
    allowed = min(int(device.total * config.memory_utilization), free)
    used = sum(size for _, size in fixed)
    wanted = max_num_seqs * blocks_for(max_model_len)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes - 1
    else:
        room = allowed - used
        if kind == "cpu":
            room = min(room, CPU_CACHE_BYTES // config.num_ranks)
        num_blocks = min(room // block_bytes - 1, wanted)
        why = "every request at full length" if num_blocks == wanted else "the memory left"
        if num_blocks < wanted and device.bound and room == allowed - used:
            why += f"; {device.bound}"
        decisions.note("num_blocks", None, num_blocks, f"{config.block_size} tokens each, {why}")
    needed = used + (max(num_blocks, 1) + 1) * block_bytes
    items = (fixed[0], ("KV cache", max(num_blocks, 0) * block_bytes), *fixed[1:])
    if num_blocks < 1 or needed > free:
        raise DoesNotFit(_shortage(items, allowed, device), items)
    if blocks_for(max_model_len) <= num_blocks:
        return num_blocks, max_model_len
    fits = _longest(num_blocks, max_model_len, blocks_for)
    if config.max_model_len is not None or fits < 1:
        raise DoesNotFit(
            f"a request of {max_model_len} tokens needs {blocks_for(max_model_len)} blocks and the "
            f"KV cache holds {num_blocks} ({fits} tokens); lower max_model_len or give the cache "
            "more memory",
            items,
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


def _shortage(items: tuple[tuple[str, int], ...], allowed: int, device: _Memory) -> str:
    lines = ", ".join(f"{what} {size_text(size)}" for what, size in items)
    return (
        f"does not fit: {lines}; allowed {size_text(allowed)}, free {size_text(device.free)}"
        + (f" ({device.bound}). " if device.bound else ". ")
        + "The largest item is "
        + max(items, key=lambda item: item[1])[0]
    )


# ------------------------------------------------------------------------ ways out

SHORTEST_CONTEXT = 1024  # a shorter limit than this is no way out
FEWEST_TOKENS = 256  # nor is a smaller step
NUM_WAYS = 3
GB = 10**9
Attempt = Callable[[EngineConfig, _Memory], Resolved]


@dataclass(frozen=True, slots=True)
class WayOut:
    """In words, and as fields of EngineConfig where it is a matter of settings."""

    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)


Works = Callable[[dict[str, Any]], bool]


def ways_out(
    config: EngineConfig, spec: ModelSpec, memory: _Memory, attempt: Attempt
) -> tuple[WayOut, ...]:
    """The cheapest changes that make it fit, each of them tried, cheapest first."""
    wanted = config.max_model_len or spec.max_position_embeddings

    def works_on(where: _Memory, change: dict[str, Any]) -> bool:
        asked = structs.replace(config, **change)
        lowest: int = min(SHORTEST_CONTEXT, change.get("max_model_len", wanted))
        try:
            return attempt(asked, where)[0].max_model_len >= lowest
        except DoesNotFit:
            return False

    kind = "cuda" if memory.name.startswith("cuda") else "cpu"
    works = partial(works_on, memory)
    series = (*_fewer(config, kind), _shorter(wanted, works), [_least(config, kind, wanted)])
    found = (next((one for one in changes if works(one)), None) for changes in series)
    ways = [
        WayOut(", ".join(f"{k} {v}" for k, v in change.items()), change)
        for change in found
        if change
    ]
    if len(ways) < NUM_WAYS:
        others = _elsewhere(config, spec, memory, lambda where: works_on(where, {}))
        ways += (WayOut(text) for text in others)
    return tuple(ways[:NUM_WAYS])


def _least(config: EngineConfig, kind: str, wanted: int) -> dict[str, Any]:
    """All three limits as low as they are of use, and none above what was asked for."""
    tokens = config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind]
    return {
        "max_num_batched_tokens": min(tokens, FEWEST_TOKENS),
        "max_num_seqs": min(config.max_num_seqs or MAX_NUM_SEQS[kind], 8),
        "max_model_len": min(wanted, 2 * SHORTEST_CONTEXT),
    } | _without_graphs(config, kind)


def _without_graphs(config: EngineConfig, kind: str) -> dict[str, Any]:
    off = {"speculate": "off"} if config.speculate not in ("auto", "off") else {}
    return off | ({"enforce_eager": True} if kind == "cuda" else {})


def _fewer(config: EngineConfig, kind: str) -> Iterator[list[dict[str, Any]]]:
    """Changes of one setting each, the least first."""
    if config.dtype in ("auto", "float32"):
        yield [{"dtype": "bfloat16"}]
    if config.memory_utilization < 0.95:
        yield [{"memory_utilization": 0.95}]
    if config.speculate not in ("auto", "off"):
        yield [{"speculate": "off"}]
    elif kind == "cuda" and not config.enforce_eager:
        yield [{"enforce_eager": True}]
    for name, value, lowest in (
        ("num_blocks", config.num_blocks, 1),
        ("kv_cache_memory_bytes", config.kv_cache_memory_bytes, 1),
        (
            "max_num_batched_tokens",
            config.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS[kind],
            FEWEST_TOKENS,
        ),
        ("max_num_seqs", config.max_num_seqs or MAX_NUM_SEQS[kind], 1),
    ):
        yield [{name: half} for half in _halves(value or 0, lowest)]
    if kind == "cpu" and config.num_blocks is None and config.kv_cache_memory_bytes is None:
        yield [{"kv_cache_memory_bytes": CPU_CACHE_BYTES << power} for power in range(1, 8)]


def _halves(value: int, lowest: int) -> Iterator[int]:
    while value // 2 >= lowest:
        value //= 2
        yield value


def _shorter(wanted: int, works: Works) -> list[dict[str, Any]]:
    """The longest request that fits, if it is long enough to be of use."""
    low, high = min(SHORTEST_CONTEXT, wanted), wanted
    if not works({"max_model_len": low}):
        return []
    while low < high:
        middle = (low + high + 1) // 2
        if works({"max_model_len": middle}):
            low = middle
        else:
            high = middle - 1
    return [{"max_model_len": low}]


def _elsewhere(
    config: EngineConfig, spec: ModelSpec, memory: _Memory, works: Callable[[_Memory], bool]
) -> Iterator[str]:
    """When no setting helps enough: the smallest device that would do, and what else there is."""
    low, high = memory.total // GB, 1 << 14
    if not works(_Memory(memory.name, high * GB, high * GB)):
        return
    while low + 1 < high:
        middle = (low + high) // 2
        if works(_Memory(memory.name, middle * GB, middle * GB)):
            high = middle
        else:
            low = middle
    yield f"a device with {high} GB of memory, all of it free"
    lacking = int((high * GB - min(memory.total, memory.free)) * config.memory_utilization)
    size = DTYPE_BYTES.get(config.dtype) or DTYPE_BYTES[spec.dtype]
    fewer = weight_bytes(spec, size) - lacking
    if fewer > 0:
        yield f"a model of {fewer / size / 1e9:.1f} billion parameters or fewer"
    yield f"what `ridgeline plan {config.model} --all` finds: other formats, more devices"
