"""What is an EXAONE 4? Norms behind attention and feed-forward, and of each head of queries and
keys; where some layers look back on a window, the others do not rotate."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import Defaults, dense, layer_types, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, RopeSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-5, max_positions=2048, num_kv_heads=32)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config = config.with_defaults(sliding_window=4096, sliding_window_pattern=4)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    full = sliding = trunk.attention(qk_norm=True)
    every = 1
    if config.has("sliding_window"):
        full = replace(full, rope=RopeSpec(kind="none"))
        sliding = replace(sliding, window=config.integer("sliding_window", high=MAX_POSITIONS))
        if not config.has("layer_types"):
            every = config.integer("sliding_window_pattern", high=MAX_LAYERS)
    kinds = layer_types(config, trunk.num_layers, full_every=every)
    if sliding.window is None and "sliding_attention" in kinds:
        raise config.fail("layer_types", "has sliding_attention but sliding_window is null")
    return model_spec(
        config,
        trunk,
        family="exaone4",
        attention=tuple(sliding if kind == "sliding_attention" else full for kind in kinds),
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
        norms="after",
    )
