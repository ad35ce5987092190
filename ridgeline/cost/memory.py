"""What does a model take on each device, line by line, and how many KV blocks are left?

Everything is in bytes of the fullest device: under tensor parallelism it holds its share of every
matrix and all of what cannot be split (norms, routers, a latent cache), under pipeline parallelism
the layers of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ridgeline.architectures.counts import kv_bytes_per_token, layer_kv_bytes
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import DenseSpec, ExpertsSpec, ModelSpec
from ridgeline.cost.fit_suggestions import Change, Limits
from ridgeline.cost.fit_suggestions import fit_suggestions as find_ways
from ridgeline.cost.memory_items import WEIGHTS, MemoryItem, size_text, weight_items
from ridgeline.cost.setup import LOGIT_BYTES, Setup
from ridgeline.cost.working_space import working_items
from ridgeline.errors import ConfigError, DoesNotFit
from ridgeline.scheduler.block_manager import blocks_needed

__all__ = [
    "Change",
    "Limits",
    "MemoryItem",
    "MemoryPlan",
    "fit_suggestions",
    "graph_items",
    "memory_plan",
    "plan_or_none",
    "size_text",
    "weight_items",
    "working_items",
]

RESERVE_BYTES = {"gpu": 1 << 30, "cpu": 128 << 20}  # context, libraries, fragmentation
GRAPH_BYTES = 128 << 20  # what a driver keeps of captured steps
# Of sampling inside captured steps (kernels.sample_rows): logits that are worked on at once, tokens
# of a chunk of a row and what is kept for it, candidates of a row; and (sampling.controls) tokens
# with a bias or a ban.
SAMPLED_AT_ONCE = 1 << 23
SAMPLED_CHUNK = 4096
SAMPLED_CHUNK_BYTES = 208
SAMPLED_LISTED = 1 << 14
SAMPLED_ENTRIES = 1 << 14
SAMPLED_ENTRY_BYTES = 20
SAMPLED_ROW_BYTES = 44  # of a row that is worked on
SAMPLED_PARAMETER_BYTES = 68  # of any row
COMMUNICATOR_BYTES = 360 << 20  # buffers of the collective library
KV_CACHE = "KV cache"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one device. `kv_bytes_per_token` is one token in all its layers, `capacity_bytes` what may
    be taken; `max_sequences` requests of full length fit at once, on all groups of devices."""

    items: tuple[MemoryItem, ...]
    kv_bytes_per_token: int
    block_bytes: int
    num_blocks: int
    total_bytes: int
    capacity_bytes: int
    max_sequences: int

    def item(self, what: str) -> MemoryItem:
        """The line of this name."""
        for item in self.items:
            if item.what == what:
                return item
        raise ConfigError(f"no line {what!r} in the memory plan")

    @property
    def weight_bytes(self) -> int:
        return sum(item.bytes for item in self.items if item.what in WEIGHTS)


def memory_plan(
    setup: Setup,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int = 16,
    utilization: float = 0.9,
    min_sequences: int = 1,
) -> MemoryPlan:
    """The memory of one device, and as many KV blocks as fit and can be used.

    DoesNotFit names the largest item and the three cheapest changes, each of which would fit, when
    not even `min_sequences` requests of `max_model_len` tokens have room.
    """
    limits = Limits(
        max_model_len, max_num_seqs, max_num_batched_tokens, block_size, utilization, min_sequences
    )
    plan = plan_or_none(setup, limits)
    if plan is None:
        raise _shortage(setup, limits)
    return plan


def plan_or_none(setup: Setup, limits: Limits) -> MemoryPlan | None:
    """The plan, None when not even `min_sequences` requests of full length fit."""
    fixed = fixed_items(setup, limits)
    block = block_bytes(setup, limits.block_size)
    capacity = int(setup.device.memory_bytes * limits.utilization)
    per_sequence = blocks_per_sequence(setup.spec, limits)
    fits = free_blocks(setup, limits, fixed)
    groups = setup.layout.dp  # each has its part of the requests, and blocks of its own
    if fits < per_sequence * -(-limits.least_sequences // groups):
        return None
    num_blocks = min(fits, limits.max_num_seqs * per_sequence)
    cache = MemoryItem(
        KV_CACHE,
        (num_blocks + 1) * block,
        f"{num_blocks} blocks of {limits.block_size} tokens, {block:,} B each",
    )
    items = (*fixed, cache)
    return MemoryPlan(
        items,
        stage_kv_bytes_per_token(setup),
        block,
        num_blocks,
        sum(item.bytes for item in items),
        capacity,
        num_blocks // per_sequence * groups,
    )


def free_blocks(setup: Setup, limits: Limits, fixed: Iterable[MemoryItem]) -> int:
    """KV blocks that have room beside the `fixed` items, not counting the null block; below 0 where
    not even those have."""
    capacity = int(setup.device.memory_bytes * limits.utilization)
    room = capacity - sum(item.bytes for item in fixed)
    return room // block_bytes(setup, limits.block_size) - 1


def ideal_sequences(memory_bytes: float, weight_bytes: float, sequence_bytes: float) -> int:
    """Requests whose keys and values fit beside the weights, if nothing else took memory."""
    return max(0, int((memory_bytes - weight_bytes) // sequence_bytes))


def device_kind(name: str) -> str:
    """ "cpu", or "gpu" for everything else: its memory is taken and used alike."""
    return "cpu" if name == "cpu" else "gpu"


def blocks_per_sequence(spec: ModelSpec, limits: Limits) -> int:
    """KV blocks, of all groups, that one request of full length holds at most."""
    windows = tuple(group.window for group in kv_groups(spec))
    chunk = limits.max_num_batched_tokens
    return blocks_needed(limits.max_model_len, limits.block_size, windows, chunk)


# ------------------------------------------------------------------------ what does not grow


def fixed_items(setup: Setup, limits: Limits) -> tuple[MemoryItem, ...]:
    """All but the KV cache."""
    return (
        *weight_items(setup.spec, setup.layout, setup.precision),
        *working_items(
            setup.spec,
            num_tokens=limits.max_num_batched_tokens,
            num_rows=limits.max_num_seqs,
            context=limits.max_model_len,
            dtype_bytes=setup.precision.dtype_bytes,
            ranks=setup.layout.tp,
            expert_ranks=setup.layout.expert_devices // setup.layout.ep,
            kind=device_kind(setup.device.kind),
        ),
        *_library_items(setup),
    )


def _library_items(setup: Setup) -> Iterator[MemoryItem]:
    is_gpu = setup.device.kind == "gpu"  # recorded steps of a CPU fit in its reserve
    rows = setup.constants.host.captured_tokens if is_gpu else 0
    yield from graph_items(setup.spec, rows, rows, setup.precision.dtype_bytes)
    if setup.layout.devices > 1:
        yield MemoryItem("communicator", COMMUNICATOR_BYTES, "buffers of the collective library")
    reserve = RESERVE_BYTES[device_kind(setup.device.kind)]
    yield MemoryItem("reserve", reserve, "context, libraries, fragmentation")


def graph_items(
    spec: ModelSpec, num_rows: int, num_tokens: int, dtype_bytes: float
) -> tuple[MemoryItem, ...]:
    """What captured steps keep, decodes of up to `num_rows` requests and others of up to
    `num_tokens` tokens: logits and hidden states, the graphs, what lies between their kernels,
    and the scratch of their sampling."""
    if not num_rows:
        return ()
    inner = max(_inner_numbers(layer.feed_forward, spec.hidden_size) for layer in spec.layers)
    logits = num_rows * spec.vocab_size * LOGIT_BYTES
    states = int(num_tokens * (6 * spec.hidden_size + inner) * dtype_bytes)
    kept = GRAPH_BYTES + logits + states + sampling_bytes(spec.vocab_size, num_rows)
    return (MemoryItem("graphs", kept, "captured steps"),)


def _inner_numbers(inner: DenseSpec | ExpertsSpec, hidden: int) -> int:
    """Of a token between the products of a feed-forward: gate, up and the gated, or of each of its
    experts the gated and what comes out."""
    if isinstance(inner, DenseSpec):
        return 3 * inner.intermediate_size
    shared = 3 * inner.shared_size
    return shared + inner.num_active * (inner.intermediate_size + hidden)


def sampling_bytes(vocab_size: int, num_rows: int) -> int:
    """What captured steps of up to `num_rows` rows take to sample them, the counts of penalties
    (a line of their own) left out."""
    at_once = max(1, min(num_rows, SAMPLED_AT_ONCE // vocab_size))
    chunks = -(-vocab_size // SAMPLED_CHUNK)
    numbers = 4 * (vocab_size + min(SAMPLED_LISTED, vocab_size))
    return (
        at_once * (numbers + chunks * SAMPLED_CHUNK_BYTES + SAMPLED_ROW_BYTES)
        + SAMPLED_ENTRIES * SAMPLED_ENTRY_BYTES
        + num_rows * SAMPLED_PARAMETER_BYTES
    )


# ------------------------------------------------------------------------ the cache


def block_bytes(setup: Setup, block_size: int) -> int:
    """Bytes of one block on the fullest device: a slot in each of the layers of a KV group.

    Groups share one pool of equal blocks, so the largest decides.
    """
    precision, layout = setup.precision, setup.layout
    sizes = []
    for group in kv_groups(setup.spec):
        per_token = max(
            layer_kv_bytes(
                setup.spec.layers[i].attention, precision.dtype_bytes, precision.kv, layout.tp
            )
            for i in group.layers
        )
        stages = (layout.stage_layers(setup.spec.num_layers, n) for n in range(layout.pp))
        most = max(sum(i in layers for i in group.layers) for layers in stages)
        sizes.append(most * block_size * per_token)
    return max(sizes)


def stage_kv_bytes_per_token(setup: Setup) -> int:
    """Bytes of one token's keys and values in the layers of the fullest stage."""
    spec, precision, layout = setup.spec, setup.precision, setup.layout
    if layout.pp == 1:
        return kv_bytes_per_token(spec, precision.dtype_bytes, precision.kv, layout.tp)
    stages = (
        replace(
            spec,
            layers=tuple(spec.layers[i] for i in layout.stage_layers(spec.num_layers, stage)),
        )
        for stage in range(layout.pp)
    )
    return max(
        kv_bytes_per_token(part, precision.dtype_bytes, precision.kv, layout.tp) for part in stages
    )


def fit_suggestions(setup: Setup, limits: Limits, count: int = 3) -> tuple[Change, ...]:
    """The cheapest changes that fit, cheapest first."""
    return find_ways(setup, limits, lambda *changed: plan_or_none(*changed) is not None, count)


def needed_items(setup: Setup, limits: Limits) -> tuple[MemoryItem, ...]:
    """What the model and the least number of requests of full length take, fit or not."""
    sequences = -(-limits.least_sequences // setup.layout.dp)
    cache = blocks_per_sequence(setup.spec, limits) * sequences + 1
    request = MemoryItem(
        KV_CACHE,
        cache * block_bytes(setup, limits.block_size),
        f"{sequences} x {limits.max_model_len} tokens",
    )
    return (*fixed_items(setup, limits), request)


def _shortage(setup: Setup, limits: Limits) -> DoesNotFit:
    """The error with everything that one needs to decide."""
    items = needed_items(setup, limits)
    needed = sum(item.bytes for item in items)
    capacity = int(setup.device.memory_bytes * limits.utilization)
    largest = max(items, key=lambda item: item.bytes)
    ways = fit_suggestions(setup, limits)
    return DoesNotFit(
        f"does not fit: {size_text(needed)} needed on each device, {size_text(capacity)} may be "
        f"taken of {setup.device.label}; the largest item is {largest.what} with {largest.text}",
        tuple((item.what, item.bytes) for item in items),
        tuple(way.text for way in ways),
    )
