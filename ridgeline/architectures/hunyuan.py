"""What is a dense HunYuan? A Llama that norms each head of q and k when it has been rotated."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-5, max_positions=2048)
_STEM = "model.layers.{layer}.self_attn."
NAMES = {
    **LLAMA_NAMES,
    "q_norm": f"{_STEM}query_layernorm.weight",
    "k_norm": f"{_STEM}key_layernorm.weight",
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("use_qk_norm", True)
    config.refuse("use_cla", False)
    config.refuse("mlp_bias", False)
    trunk = read_trunk(_with_stretched_theta(config), DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=False)
    attention = trunk.attention(qkv_bias=bias, out_bias=bias, qk_norm=True)
    # The norm takes away what a rotation multiplies by.
    rope = replace(trunk.rope, attention_factor=1.0)
    attention = replace(attention, rope=rope, norms_rotated=True)
    return model_spec(
        config,
        trunk,
        family="hunyuan_v1_dense",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=NAMES,
    )


def _with_stretched_theta(config: ConfigReader) -> ConfigReader:
    """Dynamic positions with an `alpha` are plain ones of a larger theta."""
    key = "rope_scaling" if config.section("rope_scaling") else "rope_parameters"
    scaling = config.section(key)
    if scaling is None or not scaling.has("alpha"):
        return config
    kind = scaling.text("rope_type" if scaling.has("rope_type") else "type", default="default")
    if kind != "dynamic":
        raise scaling.fail("alpha", f"is for positions of kind dynamic, not {kind[:60]!r}")
    size = config.integer("head_dim", low=4, high=4096)
    outer = config.number("rope_theta", default=DEFAULTS.rope_theta, low=1.0, high=1e15)
    theta = scaling.number("rope_theta", default=outer, low=1.0, high=1e15)
    theta *= scaling.number("alpha", default=None, low=1e-3, high=1e6) ** (size / (size - 2))
    return config.without("rope_scaling", "rope_parameters").with_values(rope_theta=theta)
