"""A model family from outside: a Llama with its own words for sizes and tensors, and a window on
every second layer. Its table line: `FAMILIES["toy"] = "tests.extensions.toy_architecture:read"`."""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)

NAMES = {
    "embedding": "tokens",
    "norm": "last_norm",
    "lm_head": "readout",
    "input_norm": "block{layer}.norm1",
    "pre_feed_forward_norm": "block{layer}.norm2",
    "q": "block{layer}.wq",
    "k": "block{layer}.wk",
    "v": "block{layer}.wv",
    "o": "block{layer}.wo",
    "gate": "block{layer}.w1",
    "up": "block{layer}.w3",
    "down": "block{layer}.w2",
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    heads = config.integer("heads", high=64)
    width = config.integer("width", high=4096)
    if width % heads:
        raise config.fail("width", f"is {width}; it must be a multiple of heads ({heads})")

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(heads, heads, width // heads, RopeSpec(), window=window)
        return LayerSpec(attention, DenseSpec(2 * width, "relu"))

    look_back = config.integer("look_back", high=1 << 20)
    depth = config.integer("depth", high=64)
    return ModelSpec(
        family="toy",
        vocab_size=config.integer("symbols", high=1 << 20),
        hidden_size=width,
        layers=tuple(layer(look_back if index % 2 else None) for index in range(depth)),
        norm_eps=1e-6,
        tie_embeddings=False,
        max_position_embeddings=config.integer("longest", high=1 << 20),
        dtype="float32",
        tensor_names=NAMES,
    )
