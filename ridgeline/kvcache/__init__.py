"""Where do the keys and values of computed tokens live?"""

from __future__ import annotations

from ridgeline.kvcache.cache import KVCache, LatentKV, LayerKV, bytes_per_block
from ridgeline.kvcache.formats import KVFormat, Store

__all__ = ["KVCache", "KVFormat", "LatentKV", "LayerKV", "Store", "bytes_per_block"]
