"""What does drafting take on the device, beside the model that checks the drafts?

Rows of tokens that stay on the device; of a draft model its weights, its tables, the logits that
its drafts are drawn from, and in each block of the cache room for its keys and values. All in
bytes; `speculation/` allocates it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.architectures.counts import layer_kv_bytes, weight_bytes
from ridgeline.architectures.draft_groups import draft_groups
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.memory_items import MemoryItem
from ridgeline.cost.working_space import working_items

INDEX = 8  # bytes of an int64
TOKEN = 4  # bytes of a token of a row
FLOAT = 4
PADDING_LENGTH = 2  # kernels.history
DRAW_CHUNK = 4096  # speculation.draft_model
PASS_TOKENS = 2  # of a row, in the longest pass of a draft model


@dataclass(frozen=True, slots=True)
class DraftSetting:
    """`num_rows` rows of up to `max_model_len` tokens and `max_draft_tokens` drafts stay on the
    device; of a step at most `max_rows` are drafted for, and with odds at most `max_logit_rows`
    drafts in all. A draft model is served in `weight_format` and has its cache in `kv_format`."""

    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_rows: int
    max_draft_tokens: int
    max_rows: int
    max_logit_rows: int
    dtype_bytes: int
    weight_format: str = "plain"
    kv_format: str = "auto"
    kind: str = "gpu"  # or "cpu"


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """`block_bytes` comes on top of each block of the target's cache, the null block included."""

    items: tuple[MemoryItem, ...]
    block_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Without the cache."""
        return sum(item.bytes for item in self.items)


def looking_up(setting: DraftSetting) -> DraftMemory:
    """Drafts that are found in a row's own tokens, or are nobody's."""
    return DraftMemory((_rows(setting),))


def early_layers(target: ModelSpec, setting: DraftSetting) -> DraftMemory:
    """Drafts of the target's first layers: their cache is the target's."""
    return DraftMemory((_rows(setting), _buffers(target.vocab_size, target, setting, 1)))


def draft_model(target: ModelSpec, draft: ModelSpec, setting: DraftSetting) -> DraftMemory:
    """Drafts of a smaller model. ConfigError if its layers find no block tables."""
    groups = draft_groups(kv_groups(target), draft)
    # Ids of the target that the draft has not are looked up as well.
    held = replace(draft, vocab_size=max(draft.vocab_size, target.vocab_size))
    weights = weight_bytes(held, setting.dtype_bytes, setting.weight_format)
    per_token = layer_kv_bytes(draft.layers[0].attention, setting.dtype_bytes, setting.kv_format)
    stores = max(len(group.layers) for group in groups)
    items = (
        MemoryItem("draft weights", weights, f"a model of {draft.num_layers} layers that drafts"),
        *_working(target, draft, setting),
        _buffers(target.vocab_size, draft, setting, PASS_TOKENS),
        _rows(setting),
    )
    return DraftMemory(items, stores * setting.block_size * per_token)


def draft_head(target: ModelSpec, head: ModelSpec, setting: DraftSetting) -> DraftMemory:
    """A head that reads the target's hidden states; `head` is one of the target's layers and its
    matrices of the vocabulary, which is no less than a head has. ConfigError if its layer finds no
    block tables."""
    draft_groups(kv_groups(target), head)
    per_token = layer_kv_bytes(head.layers[0].attention, setting.dtype_bytes)
    states = target.hidden_size * setting.dtype_bytes
    weights = weight_bytes(head, setting.dtype_bytes) + 3 * target.hidden_size * states
    # Three states of each token of a step, and one of each row.
    kept = (3 * max(setting.max_rows, setting.max_logit_rows) + setting.num_rows) * states
    items = (
        MemoryItem("draft weights", weights, "a head of one layer"),
        MemoryItem("draft states", kept, "hidden states that the head reads"),
        _buffers(target.vocab_size, head, setting, 1),
        _rows(setting),
    )
    return DraftMemory(items, setting.block_size * per_token)


def _working(target: ModelSpec, draft: ModelSpec, setting: DraftSetting) -> Iterator[MemoryItem]:
    """Draft and target compute one after the other, in the same memory."""
    mine, its = (_working_bytes(spec, setting) for spec in (draft, target))
    note = "rotations of the draft"
    yield MemoryItem("draft tables", mine["tables"] - draft.vocab_size * INDEX, note)
    if (more := mine["activations"] - its["activations"]) > 0:
        yield MemoryItem("draft activations", more, "beyond those of the model")


def _working_bytes(spec: ModelSpec, setting: DraftSetting) -> dict[str, int]:
    items = working_items(
        spec,
        num_tokens=setting.max_num_batched_tokens,
        num_rows=setting.max_rows,
        context=setting.max_model_len,
        dtype_bytes=setting.dtype_bytes,
        kind=setting.kind,
    )
    return {item.what: item.bytes for item in items}


def _buffers(
    vocab_size: int, draft: ModelSpec, setting: DraftSetting, pass_tokens: int
) -> MemoryItem:
    """Logits of `vocab_size` ids, and what passes over `draft` read and draw with."""
    rows = setting.max_rows
    kept = max(rows, setting.max_logit_rows)
    drawn = rows * FLOAT * (3 * (vocab_size // DRAW_CHUNK + 1) + 1)
    each = (3 + len(kv_groups(draft))) * INDEX + 4 + FLOAT
    read = rows * (pass_tokens * each + (each if pass_tokens > 1 else 0))
    logits = kept * vocab_size * FLOAT
    return MemoryItem("draft logits", logits + drawn + read, f"of {kept} drafts at once")


def _rows(setting: DraftSetting) -> MemoryItem:
    width = max(setting.max_model_len, PADDING_LENGTH) + setting.max_draft_tokens + 1
    amount = setting.num_rows * (width * TOKEN + 2 * INDEX)
    return MemoryItem("token rows", amount, f"of {setting.num_rows} requests, with their drafts")
