"""Where does a layer find its keys and values? A pool of blocks that any KV group may use.

A block is one slot in each of `layers_per_group` shared stores, whichever group it serves: layer i
of every group uses store i. Block 0 is the null block: it is never read, and takes the writes of
padding tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.architectures.kv_groups import KVGroup, kv_groups
from ridgeline.architectures.spec import AttentionSpec, ModelSpec
from ridgeline.errors import ConfigError
from ridgeline.formats import KV_FORMATS, check_served, kv_line, served
from ridgeline.kvcache.formats import KVFormat, Store
from ridgeline.registry import load


class LayerKV:
    """The keys and values of one layer. `group` is the index of its block table; `views` are K and
    V in place, where the format has them."""

    __slots__ = ("format", "group", "head_dim", "num_kv_heads", "store", "views")

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
        attention = one_attention_shape(spec)
        heads = num_kv_heads or attention.num_kv_heads
        check_served(KV_FORMATS, kv_format, "KV format")
        self.format: KVFormat = load(served(KV_FORMATS), kv_format, "KV format")()
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.stores: tuple[Store, ...] = tuple(
            self.format.allocate(
                num_blocks + 1, block_size, heads, attention.head_dim, dtype, device
            )
            for _ in range(max(len(group.layers) for group in groups))
        )
        by_layer = {
            layer: LayerKV(self.format, self.stores[place], index, heads, attention.head_dim)
            for index, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }
        self.layers: tuple[LayerKV, ...] = tuple(by_layer[i] for i in range(spec.num_layers))

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


def one_attention_shape(spec: ModelSpec) -> AttentionSpec:
    """The attention that all layers share the KV shape of; ConfigError if they differ, because
    blocks of one pool have one size."""
    shapes = {(layer.attention.num_kv_heads, layer.attention.head_dim) for layer in spec.layers}
    if len(shapes) != 1:
        raise ConfigError(f"layers with different KV shapes are not supported: {sorted(shapes)}")
    return spec.layers[0].attention


def bytes_per_block(
    spec: ModelSpec,
    block_size: int,
    dtype_bytes: int,
    *,
    kv_format: str = "auto",
    num_kv_heads: int | None = None,
) -> int:
    """Bytes of one block of the pool, all its stores; `num_kv_heads` is what one rank holds."""
    attention = one_attention_shape(spec)
    per_token = kv_line(kv_format).bytes_per_token(
        num_kv_heads or attention.num_kv_heads, attention.head_dim, dtype_bytes
    )
    return max(len(group.layers) for group in kv_groups(spec)) * block_size * per_token
