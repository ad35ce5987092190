"""Where does a layer find its keys and values? A pool of blocks that any KV group may use.

A block is one slot in each of `layers_per_group` shared stores, whichever group it serves: layer i
of every group uses store i. Block 0 is the null block: it is never read, and takes the writes of
padding tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.architectures.counts import layer_kv_bytes
from ridgeline.architectures.kv_groups import KVGroup, kv_groups
from ridgeline.architectures.spec import AttentionSpec, ModelSpec
from ridgeline.errors import ConfigError
from ridgeline.formats import KV_FORMATS, check_served, kv_line, served
from ridgeline.kernels.paged_kv import PagedKV
from ridgeline.kvcache.formats import KVFormat, Store
from ridgeline.registry import load


class LayerKV:
    """The keys and values of one layer. `group` is the index of its block table; `views` are K and
    V in place, where the format has them."""

    __slots__ = ("format", "group", "head_dim", "num_kv_heads", "store", "views")

    views: PagedKV | None

    def __init__(
        self, kv_format: KVFormat, store: Store, group: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self.format = kv_format
        self.store = store
        self.group = group
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.views = kv_format.views(store, num_kv_heads, head_dim)

    def write(self, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        """Put tokens into slots; a row is the K heads, then the V heads."""
        self.format.write(self.store, slots_T, kv_TC)

    def gather(self, slots_n: torch.Tensor) -> torch.Tensor:
        """The tokens of these slots, [n, 2, K, D]: K is [:, 0], V is [:, 1]."""
        return self.format.gather(self.store, slots_n, self.num_kv_heads, self.head_dim)


class LatentKV(LayerKV):
    """The same of a layer with latent attention: one vector of `head_dim` numbers per token, which
    lie in memory as `latent_NSC`, where they can be read in place."""

    __slots__ = ("latent_NSC",)

    def __init__(self, kv_format: KVFormat, store: Store, group: int, width: int) -> None:
        self.format = kv_format
        self.store = store
        self.group = group
        self.num_kv_heads = 1
        self.head_dim = width
        self.views = None
        self.latent_NSC = kv_format.view_latent(store)

    def gather(self, slots_n: torch.Tensor) -> torch.Tensor:
        """The vectors of these slots, [n, C]."""
        return self.format.gather_latent(self.store, slots_n, self.head_dim)


class KVCache:
    """`num_blocks` blocks (and the null block) of `block_size` tokens for all layers of `spec`.

    `num_kv_heads` is what one rank holds, the model's number without tensor parallelism.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: Sequence[KVGroup],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kv_format: str = "auto",
        num_kv_heads: int | None = None,
    ) -> None:
        check_served(KV_FORMATS, kv_format, "KV format")
        attention = _attention_shape(spec, kv_format)
        heads = num_kv_heads or attention.num_kv_heads
        self.format: KVFormat = load(served(KV_FORMATS), kv_format, "KV format")()
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        room, latent, size = (num_blocks + 1, block_size), attention.latent, attention.head_dim
        self.stores: tuple[Store, ...] = tuple(
            self.format.allocate(*room, heads, size, dtype, device)
            if latent is None
            else self.format.allocate_latent(*room, latent.cached_width, dtype, device)
            for _ in range(max(len(group.layers) for group in groups))
        )
        by_layer = {
            layer: LayerKV(self.format, self.stores[place], index, heads, size)
            if latent is None
            else LatentKV(self.format, self.stores[place], index, latent.cached_width)
            for index, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }
        owners = (own.attention.cache_layer for own in spec.layers)
        self.layers: tuple[LayerKV, ...] = tuple(
            by_layer[index if owner is None else owner] for index, owner in enumerate(owners)
        )

    @property
    def num_bytes(self) -> int:
        """All that the pool takes, the null block included."""
        return sum(t.numel() * t.element_size() for store in self.stores for t in store)

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks, all layers of the pool; ids are int64 on the pool's device, and no
        block is both a source and a target of one call."""
        for store in self.stores:
            for tensor in store:
                # Numbers of one byte are copied as bytes: not all kinds of them can be indexed.
                blocks = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
                blocks.index_copy_(0, targets, blocks.index_select(0, sources))


def _attention_shape(spec: ModelSpec, kv_format: str) -> AttentionSpec:
    """The attention that all layers share the KV shape of. ConfigError if they differ, because
    blocks of one pool have one size, or if the format does not keep such vectors."""
    every = [layer.attention for layer in spec.layers]
    shapes = {
        (one.num_kv_heads, one.head_dim) if one.latent is None else (1, one.latent.cached_width)
        for one in every
    }
    if len(shapes) != 1 or len({one.latent is None for one in every}) != 1:
        raise ConfigError(f"layers with different KV shapes are not supported: {sorted(shapes)}")
    if every[0].latent is not None and not kv_line(kv_format).takes_latent:
        able = ", ".join(name for name, line in KV_FORMATS.items() if line.takes_latent)
        raise ConfigError(
            f"kv_cache_dtype {kv_format} does not keep the vectors of latent attention; choose one"
            f" of {able}"
        )
    return every[0]


def bytes_per_block(
    spec: ModelSpec,
    block_size: int,
    dtype_bytes: int,
    *,
    kv_format: str = "auto",
    ranks: int = 1,
    groups: Sequence[KVGroup] | None = None,
) -> int:
    """Bytes of one block of the pool, all its stores, on the fullest of so many ranks. `groups`:
    of a stage, those of the model."""
    per_token = layer_kv_bytes(_attention_shape(spec, kv_format), dtype_bytes, kv_format, ranks)
    num_stores = max(len(group.layers) for group in groups or kv_groups(spec))
    return num_stores * block_size * per_token
