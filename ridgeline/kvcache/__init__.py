"""Where do the keys and values of computed tokens live?"""

from __future__ import annotations

from ridgeline.kvcache.cache import KVCache, LayerKV, bytes_per_block
from ridgeline.kvcache.formats import KVFormat, Store

__all__ = ["KVCache", "KVFormat", "LayerKV", "Store", "bytes_per_block"]
