"""What is a gpt-oss? Every other layer looks back on a window, and every head has a sink; experts
with biases, a clamped gate and a router with a bias."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import LAYER_TYPES, Defaults, model_spec, read_trunk, routed
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec, TensorLayout

DEFAULTS = Defaults(
    rope_theta=150_000.0, norm_eps=1e-5, max_positions=131_072, num_kv_heads=8, head_dim=64
)
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_STEM = "model.layers.{layer}."
NAMES = {
    **LLAMA_NAMES,
    "sinks": f"{_STEM}self_attn.sinks",
    "router": f"{_STEM}mlp.router.weight",
    "router_bias": f"{_STEM}mlp.router.bias",
    **{
        f"{role}{suffix}": f"{_STEM}mlp.experts.{{expert}}.{role}_proj.{kind}"
        for role in ("gate", "up", "down")
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    },
}


def layouts(size: int, *, mxfp4: bool) -> tuple[TensorLayout, ...]:
    """Rows of gate and up take turns."""
    stem = f"{_STEM}mlp.experts."
    both, down = f"{stem}gate_up_proj", f"{stem}down_proj"
    as_numbers = {"transposed": not mxfp4, "mxfp4": mxfp4, "experts": True}
    return (
        TensorLayout(both, ("gate", "up"), size, **as_numbers),
        TensorLayout(f"{both}_bias", ("gate_bias", "up_bias"), size, experts=True),
        TensorLayout(down, ("down",), **as_numbers),
        TensorLayout(f"{down}_bias", ("down_bias",), experts=True),
    )


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("hidden_act", "silu")
    config.refuse("swiglu_limit", 7.0)
    config.refuse("swiglu_alpha", 1.702)
    if not config.has("rope_scaling") and not config.has("rope_parameters"):
        config = replace(config, values={**config.values, "rope_scaling": YARN})
    packing = config.section("quantization_config")
    is_packed = packing is not None and packing.text("quant_method") == "mxfp4"
    if is_packed and not config.has("dtype") and not config.has("torch_dtype"):
        config = replace(config, values={**config.values, "torch_dtype": "bfloat16"})
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("attention_bias", default=True)
    window = config.integer("sliding_window", high=MAX_POSITIONS, default=128)
    full = replace(trunk.attention(qkv_bias=bias, out_bias=bias), sinks=True)
    attention = tuple(
        replace(full, window=window) if kind == LAYER_TYPES[1] else full
        for kind in _layer_types(config, trunk.num_layers)
    )
    experts = replace(
        routed(
            config, ("num_local_experts",), size="intermediate_size", num_experts=128, num_active=4
        ),
        activation="clamped",
        bias=True,
        router_bias=True,
    )
    return model_spec(
        config,
        trunk,
        family="gpt_oss",
        attention=attention,
        feed_forward=experts,
        tensor_names=NAMES,
        tensor_layouts=layouts(experts.intermediate_size, mxfp4=is_packed),
    )


def _layer_types(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    kinds = config.texts("layer_types", length=num_layers)
    for kind in kinds or ():
        if kind not in LAYER_TYPES:
            raise config.fail("layer_types", f"has {kind[:60]!r}; supported are {LAYER_TYPES}")
    return kinds or tuple(LAYER_TYPES[(index + 1) % 2] for index in range(num_layers))
