"""What is a DeepSeek-V2, V3 or R1? Latent attention everywhere; after a few dense layers, many
small experts beside some that every token passes, scored by a softmax (V2) or a sigmoid.

Sources: arXiv 2405.04434, section 2.1; arXiv 2412.19437, section 2.1; Transformers `deepseek_v2`
and `deepseek_v3`. The additional layers for drafting (`num_nextn_predict_layers`) are not part of
the model here.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_HEADS, MAX_POSITIONS, MAX_VOCAB, ConfigReader
from ridgeline.architectures.family import (
    Trunk,
    dense,
    in_groups,
    model_spec,
    read_num_layers,
    routed,
)
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.rope_config import check_context, read_rope, yarn_growth
from ridgeline.architectures.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    ModelSpec,
)

# `topk_method` -> how many experts tell how good a group is; 0: all experts are one group
GROUP_BEST = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}
UNSERVED = "a comparison of experts beside latent attention with another decoder"
_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
NAMES = {
    **LLAMA_NAMES,
    "q_a": f"{_ATTENTION}q_a_proj.weight",
    "q_a_norm": f"{_ATTENTION}q_a_layernorm.weight",
    "q_b": f"{_ATTENTION}q_b_proj.weight",
    "kv_a": f"{_ATTENTION}kv_a_proj_with_mqa.weight",
    "kv_a_norm": f"{_ATTENTION}kv_a_layernorm.weight",
    "kv_b": f"{_ATTENTION}kv_b_proj.weight",
    "router": f"{_MLP}gate.weight",
    "score_bias": f"{_MLP}gate.e_score_correction_bias",
    **{
        f"{prefix}_{role}": f"{_MLP}{folder}.{role}_proj.weight"
        for prefix, folder in (("expert", "experts.{expert}"), ("shared", "shared_experts"))
        for role in ("gate", "up", "down")
    },
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    for key in ("attention_bias", "mlp_bias"):
        config.refuse(key, False)
    config.refuse("moe_layer_freq", 1)
    trunk = _trunk(config, max_model_len)
    is_second = config.text("model_type") == "deepseek_v2"
    first = config.integer("first_k_dense_replace", low=0, default=0 if is_second else 3)
    feed_forward = tuple(
        dense(config) if index < first else _experts(config) for index in range(trunk.num_layers)
    )
    spec = model_spec(
        config,
        trunk,
        family=config.text("model_type"),
        attention=(_attention(config, trunk),) * trunk.num_layers,
        feed_forward=feed_forward,
        tensor_names=NAMES,
    )
    return replace(spec, unserved=UNSERVED)


def _trunk(config: ConfigReader, max_model_len: int | None) -> Trunk:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    if config.integer("num_key_value_heads", high=MAX_HEADS, default=heads) != heads:
        raise config.fail("num_key_value_heads", f"must equal num_attention_heads ({heads})")
    positions = config.integer("max_position_embeddings", high=MAX_POSITIONS, default=4096)
    rotated = config.integer("qk_rope_head_dim", high=4096, default=64)
    rope = read_rope(config, head_dim=rotated, default_theta=10_000.0, max_positions=positions)
    rope = replace(rope, interleaved=config.flag("rope_interleave", default=True))
    check_context(rope, positions, max_model_len)
    return Trunk(
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=config.integer("hidden_size"),
        num_layers=read_num_layers(config),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=rotated + config.integer("qk_nope_head_dim", high=4096, default=128),
        max_positions=positions,
        rope=rope,
        norm_eps=config.number("rms_norm_eps", default=1e-6, low=0.0, high=1.0),
    )


def _attention(config: ConfigReader, trunk: Trunk) -> AttentionSpec:
    rotated = config.integer("qk_rope_head_dim", high=4096, default=64)
    latent = LatentSpec(
        kv_lora_rank=config.integer("kv_lora_rank", default=512),
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=trunk.head_dim - rotated,
        v_head_dim=config.integer("v_head_dim", high=4096, default=128),
        q_lora_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
    )
    rope, scale = trunk.rope, None
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale = trunk.head_dim**-0.5 * yarn_growth(rope.factor, rope.mscale_all_dim) ** 2
    heads = trunk.num_heads
    return AttentionSpec(heads, heads, trunk.head_dim, rope, scale=scale, latent=latent)


def _experts(config: ConfigReader) -> ExpertsSpec:
    """V2 scores by a softmax and takes the best, or the best of the groups with the best experts;
    V3 by sigmoids and a bias, where a group is as good as its best two."""
    experts = routed(config, ("n_routed_experts",), num_experts=256, num_active=8)
    scoring = config.text("scoring_func", default="sigmoid")
    if scoring not in ("sigmoid", "softmax"):
        raise config.fail("scoring_func", f"is {scoring[:60]!r}; supported are sigmoid, softmax")
    method = config.text("topk_method", default="noaux_tc")
    if method not in GROUP_BEST:
        known = ", ".join(GROUP_BEST)
        raise config.fail("topk_method", f"is {method[:60]!r}; supported are {known}")
    is_v2 = config.text("model_type") == "deepseek_v2"
    num_shared = config.integer("n_shared_experts", low=0, high=64, default=1)
    scale = 1.0 if is_v2 else 2.5
    experts = replace(
        experts,
        renormalize=config.flag("norm_topk_prob", default=not is_v2),
        shared_size=experts.intermediate_size * num_shared,
        scoring=scoring,
        score_bias=method == "noaux_tc",
        weight_scale=config.number("routed_scaling_factor", default=scale, low=1e-3, high=1e3),
    )
    if not GROUP_BEST[method]:
        return experts
    defaults = (1, 1) if is_v2 else (8, 4)
    return in_groups(config, experts, group_best=GROUP_BEST[method], defaults=defaults)
