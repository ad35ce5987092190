"""Well-known models that teaching texts calculate with, as specs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.hardware import Device, find_device
from tests.cost import random_setups as models
from tests.cost.random_setups import spec_of


def llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, **changes: Any
) -> ModelSpec:
    """A Llama of this shape; head size hidden / heads, 16 bit."""
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return spec_of(models.LLAMA_2_7B | shape, **changes)


LONG: dict[str, Any] = {"vocab_size": 128_256, "max_position_embeddings": 131_072}
LLAMA_2_7B = spec_of(models.LLAMA_2_7B)
LLAMA_2_13B = spec_of(models.LLAMA_2_13B)
LLAMA_2_70B = llama(80, 8192, 28_672, 64, 8)
LLAMA_3_1B = llama(16, 2048, 8192, 32, 8, **LONG, tie_word_embeddings=True)
LLAMA_3_8B = spec_of(models.LLAMA_8B)
LLAMA_3_70B = spec_of(models.LLAMA_70B)
GPT_3 = llama(96, 12_288, 49_152, 96, 96, max_position_embeddings=131_072)
DEEPSEEK_V3 = spec_of(models.DEEPSEEK_V3)


def with_kv_heads(spec: ModelSpec, kv_heads: int) -> ModelSpec:
    """The same model with another number of KV heads in every layer."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, num_kv_heads=kv_heads))
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def sharing_caches(spec: ModelSpec, share: int) -> ModelSpec:
    """The same model, where `share` layers in a row read the cache of the first of them."""
    layers = tuple(
        replace(
            layer,
            attention=replace(
                layer.attention, cache_layer=index - index % share if index % share else None
            ),
        )
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def round_a100() -> Device:
    """An A100 with a bandwidth that is easy to divide by: 2 TB/s."""
    return replace(find_device("a100-80-sxm"), bandwidth=2e12)
