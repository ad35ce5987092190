"""What is a GPT-2? Learned positions, layer norms, and products whose matrices lie transposed in
the checkpoint, q, k and v side by side."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import with_biases
from ridgeline.architectures.spec import ModelSpec, RopeSpec, TensorLayout

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-5, norm_key="layer_norm_epsilon", max_positions=1024
)
OTHER_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
_STEM = "transformer.h.{layer}."
NAMES = {
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "lm_head": "lm_head.weight",
    **with_biases(
        {
            "norm": "transformer.ln_f",
            "input_norm": f"{_STEM}ln_1",
            "pre_feed_forward_norm": f"{_STEM}ln_2",
            "q": f"{_STEM}attn.query",
            "k": f"{_STEM}attn.key",
            "v": f"{_STEM}attn.value",
            "o": f"{_STEM}attn.c_proj",
            "up": f"{_STEM}mlp.c_fc",
            "down": f"{_STEM}mlp.c_proj",
        }
    ),
}
LAYOUTS = (
    TensorLayout(f"{_STEM}attn.c_attn.weight", ("q", "k", "v"), transposed=True),
    TensorLayout(f"{_STEM}attn.c_attn.bias", ("q_bias", "k_bias", "v_bias")),
    *(TensorLayout(NAMES[role], (role,), transposed=True) for role in ("o", "up", "down")),
)
# As the first files were written.
WRITTEN = tuple((f"{own}.", f"transformer.{own}.") for own in ("h", "wte", "wpe", "ln_f"))


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("scale_attn_weights", True)
    given = {ours: config.values[own] for own, ours in OTHER_KEYS.items() if config.has(own)}
    config = replace(config, values={**config.values, **given, "num_key_value_heads": None})
    inner = config.integer("intermediate_size", default=4 * config.integer("hidden_size"))
    config = replace(config, values={**config.values, "intermediate_size": inner})
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    trunk = replace(trunk, rope=RopeSpec(kind="none"))
    every = trunk.attention(qkv_bias=True, out_bias=True)
    falls = config.flag("scale_attn_by_inverse_layer_idx", default=False)
    scales = [trunk.head_dim**-0.5 / (index + 1) for index in range(trunk.num_layers)]
    spec = model_spec(
        config,
        trunk,
        family="gpt2",
        attention=tuple(replace(every, scale=one) if falls else every for one in scales),
        feed_forward=dense(config, bias=True, gated=False, default="gelu_new"),
        tensor_names=NAMES,
        norm_kind="layer and bias",
        tied=True,
        tensor_layouts=LAYOUTS,
        written=WRITTEN,
    )
    return replace(spec, learned_positions=trunk.max_positions)
