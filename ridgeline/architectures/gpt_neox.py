"""What is a GPT-NeoX? Attention and feed-forward side by side, with a layer norm each; of a head a
quarter rotates, and each head has its q, k and v in one tensor of the checkpoint."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import with_biases
from ridgeline.architectures.rope_config import SHARE
from ridgeline.architectures.spec import ModelSpec, TensorLayout

DEFAULTS = Defaults(
    rope_theta=10_000.0,
    norm_eps=1e-5,
    norm_key="layer_norm_eps",
    max_positions=2048,
    rotated_share=0.25,
)
OTHER_KEYS = {"rotary_emb_base": "rope_theta", "rotary_pct": SHARE}
_STEM = "gpt_neox.layers.{layer}."
_QKV = f"{_STEM}attention.query_key_value"
NAMES = {
    "embedding": "gpt_neox.embed_in.weight",
    "lm_head": "lm_head.weight",
    **with_biases(
        {
            "norm": "gpt_neox.final_layer_norm",
            "input_norm": f"{_STEM}input_layernorm",
            "pre_feed_forward_norm": f"{_STEM}post_attention_layernorm",
            "q": f"{_STEM}attention.query",
            "k": f"{_STEM}attention.key",
            "v": f"{_STEM}attention.value",
            "o": f"{_STEM}attention.dense",
            "up": f"{_STEM}mlp.dense_h_to_4h",
            "down": f"{_STEM}mlp.dense_4h_to_h",
        }
    ),
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    given = {ours: config.values[own] for own, ours in OTHER_KEYS.items() if config.has(own)}
    config = replace(config, values={**given, **config.values, "num_key_value_heads": None})
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=True)
    heads = trunk.num_heads
    return model_spec(
        config,
        trunk,
        family="gpt_neox",
        attention=(trunk.attention(qkv_bias=bias, out_bias=bias),) * trunk.num_layers,
        feed_forward=dense(config, bias=True, gated=False, default="gelu"),
        tensor_names=NAMES,
        norm_kind="layer and bias",
        parallel_norms=2 if config.flag("use_parallel_residual", default=True) else 0,
        tensor_layouts=(
            TensorLayout(f"{_QKV}.weight", ("q", "k", "v"), heads),
            TensorLayout(f"{_QKV}.bias", ("q_bias", "k_bias", "v_bias"), heads),
        ),
        written=(("embed_out.", "lm_head."),),
    )
