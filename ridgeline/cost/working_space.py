"""How much does the largest step hold at once, beside weights and KV cache?

What is counted is what a step allocates that is not captured: the numbers that are alive together
at the worst moment of the worst step that the limits allow. Forward pass, prompt log-probabilities
and sampling come one after the other and use the same memory, so the largest decides.
`bench/memory.py` holds this against what is allocated.

Letters: T tokens of a step, E hidden, C queries, keys and values, Q queries, N numbers that are
rotated, F feed-forward, V vocabulary, each per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ridgeline.architectures.counts import layer_kv_bytes
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.parts import branches
from ridgeline.architectures.shares import KERNEL_STEP, fitting, fullest, fullest_queries
from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
)
from ridgeline.cost.memory_items import MemoryItem
from ridgeline.request import MAX_LOGPROBS

# Of attention on a GPU (ridgeline.attention.paged): head sizes of our own kernels, and tokens of a
# prompt from which torch's is used.
PAGED_HEAD_DIMS = frozenset((16, 32, 64, 128, 256))
LONG_PIECE = 1024
# Of attention elsewhere (ridgeline.attention.sdpa): tokens of several requests that one call copies
# together, new tokens up to which requests are answered together, and query rows of a masked call.
GATHERED_TOKENS = {"cpu": 1 << 11, "gpu": 1 << 16}
FEW_TOKENS = 8
QUERY_TILE = 256
EXPANDED_BYTES = 64 << 20  # keys and values of latent attention, at a time
# Of sampling: logits that are worked on at once (ridgeline.sampling.batch), what that takes for
# each of them, and float32 logits of a prompt that exist at once (executor.prompt_logprobs).
NUMBERS_AT_ONCE = {"cpu": 1 << 18, "gpu": 1 << 23}
SAMPLING_BYTES = {"cpu": 36, "gpu": 48}
LOGPROBS_BYTES = {"cpu": 13, "gpu": 13}
PROMPT_LOGITS_BYTES = 64 << 20
# The matrix library's scratch that torch takes from its own allocator: 32 MiB on Hopper, less on
# others (getChosenWorkspaceSize in ATen/cuda/CublasHandlePool.cpp).
LIBRARY_BYTES = {"cpu": 0, "gpu": 32 << 20}

INDEX = 8  # bytes of an int64
FLOAT = 4  # bytes of a float32


def working_items(
    spec: ModelSpec,
    *,
    num_tokens: int,
    num_rows: int,
    context: int,
    dtype_bytes: int,
    ranks: int = 1,
    expert_ranks: int | None = None,
    kind: str = "gpu",
) -> tuple[MemoryItem, ...]:
    """What steps of at most `num_tokens` tokens for at most `num_rows` requests of at most
    `context` tokens need, on the fullest of `ranks` devices; `expert_ranks` divide each expert
    (None: all of them). `kind` is "cpu" or "gpu"."""
    of_expert = expert_ranks or ranks
    space = _Space(spec, num_tokens, num_rows, context, dtype_bytes, ranks, of_expert, kind)
    forward, after = space.forward, space.after
    items = (
        MemoryItem("activations", forward, f"a step of {space.tokens} tokens, at its widest"),
        MemoryItem(
            "sampling",
            max(0, after - forward),
            f"logits of {space.rows} rows with every filter on, beyond the activations' memory",
        ),
        MemoryItem("penalty counts", space.counts, f"{space.count_rows} requests with penalties"),
        MemoryItem("tables", space.tables, f"rotations of {context} positions, noise of tokens"),
        MemoryItem("library", LIBRARY_BYTES[kind], "scratch space of matrix products"),
    )
    return tuple(item for item in items if item.bytes)


@dataclass(frozen=True)
class _Space:
    """Sizes in bytes. `tokens` and `rows` are what a step can have of what it may have."""

    spec: ModelSpec
    most_tokens: int
    most_rows: int
    context: int
    size: int  # bytes of a number of the serving dtype
    ranks: int
    expert_ranks: int
    kind: str

    @property
    def is_paged(self) -> bool:
        """Our own attention reads the cache in place, and rotates as it writes to it."""
        dims = {layer.attention.head_dim for layer in self.spec.layers}
        return self.kind == "gpu" and dims <= PAGED_HEAD_DIMS

    @property
    def tokens(self) -> int:
        return min(self.most_tokens, self.most_rows * self.context)

    @property
    def rows(self) -> int:
        return min(self.most_rows, self.tokens)

    @property
    def casts(self) -> bool:
        """A CPU turns 16-bit numbers into float32 in memory, a GPU in its registers."""
        return self.kind == "cpu" and self.size < FLOAT

    # -------------------------------------------------------------------- between the steps

    @property
    def tables(self) -> int:
        """Cosines and sines of each kind of rotation, and a number per token id for the noise."""
        return self.context * self._rotary_bytes + self.spec.vocab_size * INDEX

    @property
    def count_rows(self) -> int:
        """Requests that penalties keep counts of; there is room for 4, then for twice as many."""
        rows = 4
        while rows < self.most_rows:
            rows *= 2
        return rows

    @property
    def counts(self) -> int:
        """An int32 and a flag for each token id."""
        return self.count_rows * self.spec.vocab_size * 5

    @cached_property
    def _rotary_bytes(self) -> int:
        """Of a position, in all tables."""
        return sum(2 * width * FLOAT for _, width in self._rotations)

    @property
    def _rotations(self) -> set[tuple[object, int]]:
        kinds: set[tuple[object, int]] = set()
        for layer in self.spec.layers:
            attention = layer.attention
            kinds.add((attention.rope, attention.rotated_dim))
        return kinds

    # -------------------------------------------------------------------- the forward pass

    @property
    def forward(self) -> int:
        """Of a full step, or of one whose requests all have a few new tokens each."""
        few = min(self.tokens, FEW_TOKENS * self.rows)
        if self.is_paged:
            inputs = self.tokens * INDEX * (4 + len(self._windows))
            return inputs + self._widest(self.tokens, 1)
        inputs = self.tokens * (INDEX * (3 + len(self._windows)) + self._rotary_bytes)
        many = max(self._short_plan(self.rows), self._long_plan)
        each = min(FEW_TOKENS, self.tokens // self.rows)
        full = many + self._widest(self.tokens, 1)
        return inputs + max(full, self._short_plan(few) + self._widest(few, each))

    @cached_property
    def _windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in kv_groups(self.spec))

    def _visible(self, window: int | None, num_new: int) -> int:
        return self.context if window is None else min(self.context, window + num_new - 1)

    def _short_plan(self, num_new: int) -> int:
        """Where the keys of requests lie that have few new tokens, `num_new` in all, and which of
        them each new token must not see."""
        seen = sum(self._visible(window, FEW_TOKENS) for window in self._windows)
        return seen * (self.rows * INDEX + num_new * (1 + self.size))

    @property
    def _long_plan(self) -> int:
        """The same for requests with more; masks are shared, and a GPU knows the usual one."""
        rows = min(self.rows, max(1, self.tokens // (FEW_TOKENS + 1)))
        seen = sum(self._visible(window, self.tokens) for window in self._windows)
        masked = (w for w in self._windows if w is not None or self.kind == "cpu")
        masks = sum(self._visible(window, QUERY_TILE) for window in masked) * QUERY_TILE
        return rows * seen * INDEX + masks * (1 + self.size)

    def _widest(self, tokens: int, each: int) -> int:
        """What the layers hold at most, when requests that are answered together have `each` new
        tokens. The sum so far and its norm are what waits outside of a product."""
        return max(
            max(
                self._attention(layer, tokens, each) + self._beside(layer, tokens),
                self._feed_forward(layer, tokens) + self._beside(layer, tokens),
                self._normed(layer, tokens),
            )
            for layer in dict.fromkeys(self.spec.layers)
        )

    def _normed(self, layer: LayerSpec, tokens: int) -> int:
        """Where a branch has a norm behind it: the sum so far, what the branch gives and what that
        was made of, and its norm."""
        if branches(layer)[0].norm_out is None:
            return 0
        inner, attention = layer.feed_forward, layer.attention
        queries = attention.num_heads * attention.head_dim
        product = max(-(-queries // self.ranks), self._inner(inner))
        return tokens * (3 * self.spec.hidden_size + product) * self.size

    def _beside(self, layer: LayerSpec, tokens: int) -> int:
        """What a parallel layer keeps beside its branches: the states that both read."""
        return layer.parallel_norms * tokens * self.spec.hidden_size * self.size

    def _attention(self, layer: LayerSpec, tokens: int, each: int) -> int:
        attention = layer.attention
        if attention.latent is not None:
            return self._latent_attention(attention, attention.latent, tokens)
        own = fullest_queries(attention.num_heads, attention.num_kv_heads, self.ranks)
        queries = own * attention.head_dim
        keys = -(-attention.num_kv_heads // self.ranks) * attention.head_dim
        held = self.spec.hidden_size + queries + 2 * keys
        if self.is_paged:
            return self._paged_attention(tokens, queries, keys)
        rotated = (queries + keys) * (self.size + FLOAT + (2 * FLOAT if self.casts else 0))
        per_key = layer_kv_bytes(attention, self.size, "auto", self.ranks)
        longest = self._visible(attention.window, min(tokens, self.context))
        together = min(self.rows * longest, max(longest, GATHERED_TOKENS[self.kind]))
        at_once = max(1, together // longest) * each
        share = attention.num_heads // attention.num_kv_heads
        masks = together * each * share * self.size if each > 1 else 0
        short = together * per_key + masks + 2 * at_once * queries * self.size
        whole = min(tokens, self.context)
        long = longest * per_key + whole * queries * self.size
        if self.kind == "cpu":  # only what starts a request is answered in one piece
            pieces = min(whole, QUERY_TILE) * queries * self.size
            long = max(longest * per_key + pieces, whole * (per_key + queries * self.size))
        return max(
            tokens * (held * self.size + rotated),
            tokens * (held + queries) * self.size + max(short, long),
            tokens * (held + queries + self.spec.hidden_size) * self.size,
        )

    def _latent_attention(self, attention: AttentionSpec, latent: LatentSpec, tokens: int) -> int:
        """Queries, what is cached, and of one request keys and values of some heads."""
        heads, width = -(-attention.num_heads // self.ranks), latent.qk_head_dim
        down = latent.cached_width + (latent.q_lora_rank or 0)
        held = self.spec.hidden_size + 2 * down + heads * (width + latent.v_head_dim)
        rotated = heads * latent.qk_rope_head_dim * (self.size + 2 * FLOAT)
        head = latent.qk_nope_head_dim + latent.v_head_dim + latent.qk_rope_head_dim
        of_head = self.context * head * self.size
        together = min(heads, max(1, EXPANDED_BYTES // max(1, of_head)))
        # Values may be filled up to the width of keys, and results with them.
        expanded = together * (self.context * (head + 2 * width) + tokens * width) * self.size
        absorbed = FEW_TOKENS * self.rows * heads * 2 * latent.cached_width * self.size
        gathered = self.context * latent.cached_width * self.size
        return tokens * (held * self.size + rotated) + gathered + max(expanded, absorbed)

    def _paged_attention(self, tokens: int, queries: int, keys: int) -> int:
        """A long prompt goes through torch's kernel, on a copy of its keys, values and queries."""
        whole, hidden = min(tokens, self.context), self.spec.hidden_size
        copied = whole * 2 * (keys + queries) if whole >= LONG_PIECE else 0
        return self.size * max(
            tokens * (hidden + 3 * queries + 2 * keys) + copied,
            tokens * (2 * hidden + 2 * queries + 2 * keys),
        )

    def _feed_forward(self, layer: LayerSpec, tokens: int) -> int:
        """Gate and up, and the activation of the gate. All tokens may want the same expert; on a
        GPU each has its states in and behind all of its experts at once."""
        inner, hidden = layer.feed_forward, self.spec.hidden_size
        product = 3 * self._inner(inner) * self.size
        if isinstance(inner, DenseSpec):
            return tokens * (2 * hidden * self.size + product)
        weighted = hidden * (FLOAT + self.size)
        routed = inner.num_active * 3 * INDEX + inner.num_experts * FLOAT
        if self.kind == "gpu":
            pairs = inner.num_active * (self._inner(inner) + hidden)
            return tokens * ((3 * hidden + pairs) * self.size + routed)
        return tokens * (3 * hidden * self.size + routed + max(product, weighted))

    def _inner(self, inner: DenseSpec | ExpertsSpec) -> int:
        """Numbers between gate and down on the fullest rank; an expert may be whole on it."""
        ranks = self.ranks if isinstance(inner, DenseSpec) else self.expert_ranks
        size = inner.intermediate_size
        return fullest(size, ranks, fitting(size, ranks, KERNEL_STEP))

    # -------------------------------------------------------------------- after it

    @property
    def after(self) -> int:
        """Growing the counts comes before the forward pass, but not with it."""
        width = self.spec.hidden_size * self.size
        states = self.rows * width
        told = self.tokens * (width + (MAX_LOGPROBS + 1) * (FLOAT + INDEX))
        grown = 3 * self.count_rows // 2 * self.spec.vocab_size if self.count_rows > 4 else 0
        prompt = max(1, PROMPT_LOGITS_BYTES // (FLOAT * self.spec.vocab_size))
        return max(
            grown,
            told + self._logits(min(self.tokens, self.context, prompt), 0, LOGPROBS_BYTES),
            told + states + self._logits(self.rows, FLOAT, SAMPLING_BYTES),
        )

    def _logits(self, rows: int, copied: int, at_once: Mapping[str, int]) -> int:
        """Float32 logits of `rows`, made of the normed states; then `copied` bytes more for each,
        and `at_once` for those worked on."""
        numbers = rows * self.spec.vocab_size
        step = min(rows, max(1, NUMBERS_AT_ONCE[self.kind] // self.spec.vocab_size))
        normed = rows * self.spec.hidden_size * self.size
        used = numbers * copied + step * self.spec.vocab_size * at_once[self.kind]
        return numbers * FLOAT + max(normed, used)
