"""What of a step's shape decides its price? A few sums, whichever requests they come from.

Matrix products see only how many tokens there are; attention sees how many keys its queries read;
the output matrix sees how many rows need logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from operator import mul

import msgspec

from ridgeline.architectures.counts import flops_per_key, layer_attention_flops
from ridgeline.architectures.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec
from ridgeline.step import StepShape

LONGEST_VERIFICATION = (
    17  # new tokens of a request that is no chunk of a prompt: one and its drafts
)
MOST_TOGETHER = 8  # new tokens of a request that the kernels of decodes take in one launch
_NO_ROPE = RopeSpec()


class AttentionFeatures(msgspec.Struct, frozen=True, gc=False):
    """Sums over the requests of a step, for one layer of one attention kind.

    `decode_keys` and `longest_decode`: keys that the decoding requests read, and the most that one
    of them reads. `prefill_flops` and `prefill_keys`: of the requests with more than one new
    token, whole model (not yet split over devices); a chunk reads each key that it sees once.
    """

    decode_keys: int = 0
    longest_decode: int = 0
    prefill_flops: int = 0
    prefill_keys: int = 0


class StepFeatures(msgspec.Struct, frozen=True, gc=False):
    """`attention` has one entry per kind, in the order of `attention_kinds`. A request with one
    new token decodes, one with more is a chunk of a prompt or a check of drafts; the longest of
    these has `longest_chunk` new tokens. `begins`: one of them has no tokens before. `groups`: of
    a wave, those of each group of devices; the other fields are those of the slowest."""

    num_requests: int
    num_decodes: int
    num_prefill_tokens: int
    longest_chunk: int
    attention: tuple[AttentionFeatures, ...]
    begins: bool = False
    groups: tuple[StepFeatures, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens

    @property
    def num_chunks(self) -> int:
        return self.num_requests - self.num_decodes

    @property
    def is_verification(self) -> bool:
        """Requests have so few new tokens that these are drafts, and no prompt."""
        return 0 < self.longest_chunk <= LONGEST_VERIFICATION and not self.begins

    @property
    def has_prompts(self) -> bool:
        return self.num_chunks > 0 and not self.is_verification

    @property
    def num_verified(self) -> int:
        """Requests whose drafts are checked."""
        return self.num_chunks if self.is_verification else 0

    @property
    def is_mixed(self) -> bool:
        return 0 < self.num_decodes < self.num_requests and not self.is_verification

    @property
    def num_wave_tokens(self) -> int:
        """Of all groups."""
        return sum([group.num_tokens for group in self.groups]) or self.num_tokens

    @property
    def num_wave_requests(self) -> int:
        return sum([group.num_requests for group in self.groups]) or self.num_requests

    def own_logits(self, num_logits: int | None) -> int:
        """This group's part of so many rows of logits of a wave (None: one of every request)."""
        if num_logits is None:
            return self.num_requests
        return -(-num_logits * self.num_requests // max(1, self.num_wave_requests))


Counts = tuple[Mapping[LayerSpec, int], Mapping[AttentionSpec, int]]
MAX_COUNTED = 64
# The latest models that were counted: told apart by identity, as hashing one takes longer.
_counted: dict[int, tuple[ModelSpec, Counts]] = {}


def distinct_layers(spec: ModelSpec) -> Mapping[LayerSpec, int]:
    """Layers that cost the same, and how many there are of each."""
    return _counts(spec)[0]


def attention_kinds(spec: ModelSpec) -> Mapping[AttentionSpec, int]:
    """Kinds of attention that cost the same, and how many layers have each."""
    return _counts(spec)[1]


def _counts(spec: ModelSpec) -> Counts:
    known = _counted.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    layers = _distinct_layers(spec)
    kinds: dict[AttentionSpec, int] = {}
    for layer, count in layers.items():
        kind = attention_kind(layer.attention)
        kinds[kind] = kinds.get(kind, 0) + count
    if len(_counted) >= MAX_COUNTED:
        _counted.clear()
    _counted[id(spec)] = (spec, (layers, kinds))
    return layers, kinds


def _distinct_layers(spec: ModelSpec) -> dict[LayerSpec, int]:
    """Most layers are one object, which is hashed once."""
    counts: dict[LayerSpec, int] = {}
    one_of = {id(layer): layer for layer in spec.layers}
    for key, count in Counter(map(id, spec.layers)).items():
        counts[one_of[key]] = counts.get(one_of[key], 0) + count
    return counts


def attention_kind(attention: AttentionSpec) -> AttentionSpec:
    """`attention` without what its keys' cost does not depend on."""
    return replace(
        attention,
        rope=_NO_ROPE,
        qkv_bias=False,
        out_bias=False,
        qk_norm=False,
        scale=None,
        cache_layer=None,
    )


def step_features(kinds: Sequence[AttentionSpec], shape: StepShape) -> StepFeatures:
    """The sums of a step of (new tokens, context before them) per request."""
    new, before = zip(*shape, strict=True) if shape else ((), ())
    num_decodes = new.count(1)
    if num_decodes == len(shape):
        return decode_features(kinds, before)
    contexts: Sequence[int] = ()
    if num_decodes or 0 in new:
        contexts = [context for num, context in shape if num == 1]
        chunks = [one for one in shape if one[0] > 1]
        new, before = zip(*chunks, strict=True) if chunks else ((), ())
    return StepFeatures(
        num_decodes + len(new),
        num_decodes,
        sum(new),
        max(new, default=0),
        tuple([_attention_features(kind, contexts, new, before) for kind in kinds]),
        0 in before,
    )


def dealt(shape: StepShape, num_groups: int) -> tuple[StepShape, ...]:
    """The parts of a wave where nobody says which group has which request: as even as pools of
    blocks make them, by new tokens, then requests, then contexts."""
    groups: list[list[tuple[int, int]]] = [[] for _ in range(num_groups)]
    loads = [(0, 0, 0, number) for number in range(num_groups)]
    for new, context in sorted(shape, reverse=True):
        num_tokens, num_requests, num_before, number = heappop(loads)
        groups[number].append((new, context))
        heappush(loads, (num_tokens + new, num_requests + 1, num_before + context, number))
    return tuple(map(tuple, groups))


def repeated(features: StepFeatures, num_times: int) -> StepFeatures:
    """Those of a step with each request so many times."""
    attention = tuple(
        AttentionFeatures(
            one.decode_keys * num_times,
            one.longest_decode,
            one.prefill_flops * num_times,
            one.prefill_keys * num_times,
        )
        for one in features.attention
    )
    return StepFeatures(
        features.num_requests * num_times,
        features.num_decodes * num_times,
        features.num_prefill_tokens * num_times,
        features.longest_chunk,
        attention,
        features.begins,
    )


def decode_features(kinds: Sequence[AttentionSpec], contexts: Sequence[int]) -> StepFeatures:
    """Those of a step with one new token after each of these contexts, and nothing else."""
    num = len(contexts)
    attention = tuple([_attention_features(kind, contexts, (), ()) for kind in kinds])
    return StepFeatures(num, num, 0, 0, attention)


def _attention_features(
    kind: AttentionSpec, contexts: Sequence[int], new: Sequence[int], before: Sequence[int]
) -> AttentionFeatures:
    """Of decodes after `contexts`, and of chunks of `new` tokens each."""
    window = kind.window
    longest = max(contexts) + 1 if contexts else 0
    if window is None or longest <= window:
        keys = sum(contexts) + len(contexts)
    else:
        most = window - 1
        keys = sum([c if c < most else most for c in contexts]) + len(contexts)
        longest = window
    if not new:
        return AttentionFeatures(keys, longest)
    if window is None and kind.latent is None:  # the same in one go: checks have many rows
        pairs = sum(map(mul, new, before)) + (sum(map(mul, new, new)) + sum(new)) // 2
        return AttentionFeatures(keys, longest, flops_per_key(kind) * pairs, sum(new) + sum(before))
    return AttentionFeatures(
        keys,
        longest,
        sum([layer_attention_flops(kind, *one) for one in zip(new, before, strict=True)]),
        sum([chunk_keys(window, *one) for one in zip(new, before, strict=True)]),
    )


def chunk_keys(window: int | None, new: int, before: int) -> int:
    """Different keys that `new` queries after `before` tokens see."""
    return new + (before if window is None else min(before, window - 1))
