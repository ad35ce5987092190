"""How does a step run: captured or not, by which kernels, over weights that are still in the cache?

A step leaves in the last cache what it read last. If all that the next one reads is still there,
kernels wait less for their first bytes. From half of the cache on parts are driven out, and of what
is a quarter larger nothing is left when it is read again. On an H200 (50 MiB) steps of a model of
24 MB take 150 us with one request (1 MB of keys and values) and 179 us with 32 (26 MB); where
nothing is left, as many kernels of these sizes take some 200 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

from ridgeline.architectures.counts import layer_kv_bytes
from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.captured import captured_size
from ridgeline.cost.constants import HostConstants
from ridgeline.cost.ops import layer_products, step_ops
from ridgeline.cost.setup import ONE_DEVICE, Layout, Precision, Setup
from ridgeline.cost.step_features import StepFeatures, attention_kinds

OWN_TOKENS = 16  # of a step, that kernels made for the products of a model norm and gate too
OWN_ROWS = 128  # that they take at all; of more, some products are the library's
UNTUNED_ROWS = 64  # that kernels take which were not tuned for the sizes
STAYS, GONE = 0.5, 1.25  # of the last cache
LEVELS = 8  # of warmth, so that prices can be kept

Sizes = tuple[int, int]  # n and k of a product


class Own(Enum):
    """Which operators of a step are parts of products, by kernels made for these."""

    # No tuples: Python 3.11.2, which Debian 12 has, loses an empty one.
    NONE = frozenset[str]()
    ROWS = frozenset({"activation"})
    FEW = frozenset({"norm", "activation"})


@dataclass(frozen=True, slots=True, eq=False)
class ExecutionMode:
    """Told apart by identity, as prices are kept by it. `captured`: all kernels of a step are
    launched at once; `own`: products by kernels of our own; `warm`: so much of what is read is
    still in the last cache, 0 to 1."""

    captured: bool = False
    own: Own = Own.NONE
    warm: float = 0.0

    def product_t0(self, host: HostConstants) -> float:
        """Share of a product's t0."""
        if self.own is Own.ROWS and host.own_rows_t0 is not None:
            return host.own_rows_t0
        return self.pass_t0(host)

    def pass_t0(self, host: HostConstants) -> float:
        """The same of a pass over memory."""
        if not self.captured:
            return 1.0
        return host.own_t0 if self.own is Own.FEW else host.captured_t0

    def wait(self, host: HostConstants) -> float:
        """Share of a t0 that is left where a kernel reads what may still be in the cache."""
        return 1.0 - self.warm * (1.0 - host.warm_t0)


SINGLE = ExecutionMode()  # an operator by itself, or of a step that launches each


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a step of a model reads on each device: all weights once, and of each kind of attention
    so many bytes for a key."""

    weight_bytes: float
    key_bytes: tuple[int, ...]

    @classmethod
    def of(cls, spec: ModelSpec, precision: Precision, layout: Layout = ONE_DEVICE) -> Footprint:
        ops = step_ops(spec, ((1, 1),), layout, precision)
        kinds = attention_kinds(spec).items()
        return cls(
            sum(op.count * op.weight_bytes for op in ops),
            tuple(
                count * layer_kv_bytes(kind, precision.dtype_bytes, precision.kv, layout.tp)
                for kind, count in kinds
            ),
        )

    def warm(self, features: StepFeatures, cache_bytes: int) -> float:
        """How much of it is still in such a cache; `features` of all kinds of attention."""
        if self.weight_bytes >= GONE * cache_bytes:
            return 0.0
        read = self.weight_bytes
        for size, sums in zip(self.key_bytes, features.attention, strict=True):
            read += size * (sums.decode_keys + sums.prefill_keys)
        return still_there(read, cache_bytes)


def still_there(read_bytes: float, cache_bytes: int) -> float:
    """How much of what is read again and again is in such a cache, in steps of 1 / LEVELS."""
    if read_bytes >= GONE * cache_bytes:
        return 0.0
    share = (GONE - read_bytes / cache_bytes) / (GONE - STAYS)
    return round(LEVELS * min(1.0, share)) / LEVELS


def is_captured(host: HostConstants, features: StepFeatures) -> bool:
    """Small enough for a graph: a step of decodes and checks of a few drafts, or a short one with
    prompts."""
    most = host.captured_prompt_tokens if features.has_prompts else host.captured_tokens
    return features.num_tokens <= most


def sent_tokens(host: HostConstants, mode: ExecutionMode, features: StepFeatures) -> int:
    """Tokens that all but attention is computed for: with prompts, in a captured step, those of the
    size that it was captured in."""
    if not mode.captured or not features.has_prompts:
        return features.num_tokens
    return captured_size(features.num_tokens, host.captured_prompt_tokens)


def own_of(features: StepFeatures, most_tokens: int) -> Own:
    """What kernels of our own do of a captured step, if they take so many tokens at most. Whether
    these are of prompts makes no difference to them."""
    if features.num_tokens > most_tokens:
        return Own.NONE
    return Own.FEW if features.num_tokens <= OWN_TOKENS else Own.ROWS


def most_own_tokens(setup: Setup) -> int:
    """Of a step all of whose layers' products are done by kernels of the engine's own; 0: none."""
    constants, precision = setup.constants, setup.precision
    products = layer_products(setup.spec, setup.layout, precision)
    return most_tokens_of(products, precision, constants.own_products, constants.own_least)


def most_tokens_of(
    products: AbstractSet[Sizes], precision: Precision, tuned: Sequence[Sizes], least: int
) -> int:
    """The same for products [n, k]; `tuned` and `least` as in `Calibration`. What holds for plain
    weights of 16 bits holds for the formats whose kernels fuse as much."""
    has_some = bool(tuned or least)
    if not (has_some and precision.weight_line.is_fused and precision.dtype_bytes == 2):
        return 0
    others = products - set(tuned)
    if not others:
        return OWN_ROWS
    return UNTUNED_ROWS if least and min(map(min, others)) >= least else 0


class ExecutionModes:
    """How the steps of one setup run."""

    def __init__(self, setup: Setup) -> None:
        self._host, self._cache_bytes = setup.constants.host, setup.device.l2_bytes
        self._most_own = most_own_tokens(setup)
        self._footprint = Footprint.of(setup.spec, setup.precision, setup.layout)
        self._is_cold = self._footprint.weight_bytes >= GONE * self._cache_bytes
        self._cold: dict[int, ExecutionMode] = {}  # by tokens of steps without prompts
        self._known: dict[tuple[str, float], ExecutionMode] = {}

    def of(self, features: StepFeatures) -> ExecutionMode:
        """`features` of all kinds of attention. The same object for equal ones."""
        if not self._is_cold or features.num_chunks:
            return self._of(features)
        num_tokens = features.num_decodes
        found = self._cold.get(num_tokens)
        if found is None:
            found = self._cold[num_tokens] = self._of(features)
        return found

    def _of(self, features: StepFeatures) -> ExecutionMode:
        if not is_captured(self._host, features):
            return SINGLE
        own = own_of(features, self._most_own)
        warm = self._footprint.warm(features, self._cache_bytes)
        found = self._known.get((own.name, warm))
        if found is None:
            found = self._known[own.name, warm] = ExecutionMode(True, own, warm)
        return found
