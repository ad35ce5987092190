"""What is a DeepSeek-V2, V3 or R1? Latent attention everywhere; after a few dense layers, many
small experts beside some that every token passes, scored by a softmax (V2) or a sigmoid.

Sources: arXiv 2405.04434, section 2.1; arXiv 2412.19437, section 2.1; Transformers `deepseek_v2`
and `deepseek_v3`. The additional layers for drafting (`num_nextn_predict_layers`) are not part of
the model here.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import dense, in_groups, model_spec, routed
from ridgeline.architectures.latent_config import LATENT_NAMES, latent_trunk
from ridgeline.architectures.spec import ExpertsSpec, LatentSpec, ModelSpec

# `topk_method` -> how many experts tell how good a group is; 0: all experts are one group
GROUP_BEST = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}
_MLP = "model.layers.{layer}.mlp."
SIZES = LatentSpec(512, 64, 128, 128, q_lora_rank=1536)
NAMES = {
    **LATENT_NAMES,
    "router": f"{_MLP}gate.weight",
    "score_bias": f"{_MLP}gate.e_score_correction_bias",
    **{
        f"{prefix}_{role}": f"{_MLP}{folder}.{role}_proj.weight"
        for prefix, folder in (("expert", "experts.{expert}"), ("shared", "shared_experts"))
        for role in ("gate", "up", "down")
    },
}


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    config.refuse("moe_layer_freq", 1)
    interleaved = config.flag("rope_interleave", default=True)
    trunk, attention = latent_trunk(config, max_model_len, sizes=SIZES, interleaved=interleaved)
    is_second = config.text("model_type") == "deepseek_v2"
    first = config.integer("first_k_dense_replace", low=0, default=0 if is_second else 3)
    feed_forward = tuple(
        dense(config) if index < first else _experts(config) for index in range(trunk.num_layers)
    )
    return model_spec(
        config,
        trunk,
        family=config.text("model_type"),
        attention=(attention,) * trunk.num_layers,
        feed_forward=feed_forward,
        tensor_names=NAMES,
    )


def _experts(config: ConfigReader) -> ExpertsSpec:
    """V2 scores by a softmax and takes the best, or the best of the groups with the best experts;
    V3 by sigmoids and a bias, where a group is as good as its best two."""
    is_v2 = config.text("model_type") == "deepseek_v2"
    if is_v2:
        config.refuse("norm_topk_prob", False)
    number, active = (64, None) if is_v2 else (256, 8)
    experts = routed(config, ("n_routed_experts",), num_experts=number, num_active=active)
    scoring = config.text("scoring_func", default="softmax" if is_v2 else "sigmoid")
    if scoring not in ("sigmoid", "softmax"):
        raise config.fail("scoring_func", f"is {scoring[:60]!r}; supported are sigmoid, softmax")
    method = config.text("topk_method", default="greedy" if is_v2 else "noaux_tc")
    if method not in GROUP_BEST:
        known = ", ".join(GROUP_BEST)
        raise config.fail("topk_method", f"is {method[:60]!r}; supported are {known}")
    num_shared = config.integer("n_shared_experts", low=0, high=64, default=2 if is_v2 else 1)
    scale = 1.0 if is_v2 else 2.5
    experts = replace(
        experts,
        renormalize=config.flag("norm_topk_prob", default=not is_v2),
        shared_size=experts.intermediate_size * num_shared,
        scoring=scoring,
        score_bias=method == "noaux_tc",
        float32_scores=True,
        weight_scale=config.number("routed_scaling_factor", default=scale, low=1e-3, high=1e3),
    )
    if not GROUP_BEST[method]:
        return experts
    defaults = (1, 1) if is_v2 else (8, 4)
    return in_groups(config, experts, group_best=GROUP_BEST[method], defaults=defaults)
