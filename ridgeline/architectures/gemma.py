"""What is a Gemma? A Llama with wide heads, whose norms add one to their weight, whose embedding is
scaled and tied, and whose feed-forward gates by GELU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, Trunk, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import AttentionSpec, ModelSpec, NormPlaces

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-6, max_positions=8192, num_kv_heads=16, head_dim=256
)
ACTIVATION = "gelu_pytorch_tanh"


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    # The first files say "gelu" where their makers meant its tanh formula.
    given = config.values.get("hidden_act")
    meant = {"hidden_activation": ACTIVATION if given in (None, "gelu") else given}
    config = config.with_values(**meant)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias)
    return gemma_spec(config, trunk, "gemma", (attention,) * trunk.num_layers, LLAMA_NAMES)


def gemma_spec(
    config: ConfigReader,
    trunk: Trunk,
    family: str,
    attention: tuple[AttentionSpec, ...],
    tensor_names: Mapping[str, str],
    norms: NormPlaces = "before",
) -> ModelSpec:
    """What all generations have in common."""
    config = config.with_defaults(tie_word_embeddings=True, hidden_activation=ACTIVATION)
    spec = model_spec(
        config,
        trunk,
        family=family,
        attention=attention,
        feed_forward=dense(config, key="hidden_activation"),
        tensor_names=tensor_names,
        norms=norms,
    )
    return replace(spec, norm_offset=1.0, embedding_scale=trunk.hidden_size**0.5)
