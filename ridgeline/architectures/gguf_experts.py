"""Which config.json would describe a GGUF file of a family with experts, or with latent attention?

What llama.cpp takes for granted of an architecture is not in its files: whether the weights of the
chosen experts sum to one, say. Keys that tell of another model than this family's are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.architectures.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from ridgeline.architectures.family import MAX_EXPERTS

Shapes = Mapping[str, tuple[int, ...]]
COUNT, NEXTN, GATING = "expert_count", "nextn_predict_layers", "expert_gating_func"
SOFTMAX, SIGMOID = 1, 2  # of `GATING`; 0: none is named
WIDTH, SHARED_WIDTH = "expert_feed_forward_length", "expert_shared_feed_forward_length"
NUM_SHARED, GROUPS, SCALE = "expert_shared_count", "expert_group_count", "expert_weights_scale"
SUMS_TO_ONE = "expert_weights_norm"


def has_experts(reader: ConfigReader) -> bool:
    return reader.integer(COUNT, low=0, high=MAX_EXPERTS, default=0) > 0


def num_drafting_layers(reader: ConfigReader) -> int:
    """Of the blocks that a file counts, those that follow the last layer."""
    blocks = reader.integer("block_count", high=MAX_LAYERS)
    return reader.integer(NEXTN, low=0, high=blocks - 1, default=0)


def _chosen(reader: ConfigReader, key: str) -> dict[str, object]:
    total = reader.integer(COUNT, high=MAX_EXPERTS)
    return {key: total, "num_experts_per_tok": reader.integer("expert_used_count", high=total)}


def softmax_experts(
    name: str, reader: ConfigReader, shapes: Shapes, *, has_biases: bool
) -> dict[str, object]:
    """Of all that score experts by a softmax and have no dense layers. Files before May 2024 say no
    widths."""
    reader.refuse(GATING, 0, SOFTMAX)
    reader.refuse(SUMS_TO_ONE, name != "qwen2moe")
    reader.refuse(SCALE, 0.0, 1.0)
    reader.refuse(GROUPS, 0, 1)
    if name in ("qwen2moe", "qwen3moe"):
        found = _chosen(reader, "num_experts") | {
            "moe_intermediate_size": _width(reader, WIDTH, shapes, "ffn_down_exps"),
            "norm_topk_prob": name == "qwen3moe",
        }
        if name == "qwen3moe":
            return found
        shared = _width(reader, SHARED_WIDTH, shapes, "ffn_down_shexp")
        return found | {"shared_expert_intermediate_size": shared, "qkv_bias": has_biases}
    reader.refuse(NUM_SHARED, 0)
    found = _chosen(reader, "num_local_experts")
    if name == "granitemoe" and (shared := reader.integer(SHARED_WIDTH, low=0, default=0)):
        found |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    else:
        reader.refuse(SHARED_WIDTH, 0)
    if reader.has(WIDTH):
        found["intermediate_size"] = reader.integer(WIDTH)
    if name == "llama":
        return found | {"model_type": "mixtral"}
    if name == "gpt-oss":
        window = reader.integer("attention.sliding_window", high=MAX_POSITIONS)
        return found | {"sliding_window": window, "rope_scaling": {"rope_type": "default"}}
    return found


def _width(reader: ConfigReader, key: str, shapes: Shapes, tensor: str) -> int:
    """What the file says, or what the columns of this tensor are."""
    return reader.integer(key, default=(shapes.get(f"blk.0.{tensor}.weight") or (None,))[-1])


def biased_experts(reader: ConfigReader, shapes: Shapes, *, default: int) -> dict[str, object]:
    """Of GLM-4-MoE and DeepSeek: behind dense layers, beside experts that every token passes.
    Files before October 2025 say nothing of groups, and are computed as one group."""
    gating = reader.integer(GATING, low=0, high=SIGMOID, default=0) or default
    first = reader.integer("leading_dense_block_count", low=0, high=MAX_LAYERS, default=0)
    groups = reader.integer(GROUPS, low=0, high=MAX_EXPERTS, default=0) or 1
    method = "greedy" if groups == 1 else "group_limited_greedy"
    if f"blk.{first}.exp_probs_b.bias" in shapes:
        method = "noaux_tc"
    return _chosen(reader, "n_routed_experts") | {
        "first_k_dense_replace": first,
        "moe_intermediate_size": reader.integer(WIDTH),
        "n_shared_experts": reader.integer(NUM_SHARED, low=0, default=0),
        "n_group": groups,
        "topk_group": reader.integer("expert_group_used_count", low=0, default=0) or groups,
        "norm_topk_prob": reader.flag(SUMS_TO_ONE, default=False),
        "routed_scaling_factor": reader.number(SCALE, default=0.0, low=0.0, high=1e3) or 1.0,
        "scoring_func": "softmax" if gating == SOFTMAX else "sigmoid",
        "topk_method": method,
    }


def glm4_moe(reader: ConfigReader, shapes: Shapes) -> dict[str, object]:
    found = biased_experts(reader, shapes, default=SIGMOID)
    if found["scoring_func"] != "sigmoid":
        raise reader.fail(GATING, f"is {SOFTMAX}; experts of this family are scored by sigmoids")
    return found | {"use_qk_norm": "blk.0.attn_q_norm.weight" in shapes}


def deepseek(reader: ConfigReader, shapes: Shapes) -> dict[str, object]:
    """Newer files describe the absorbed form, in which all heads share a key of the latent size,
    and have the sizes of a head under names of their own."""
    head, value = (
        reader.integer(f"attention.{one}{mla}", high=4096)
        for one in ("key_length", "value_length")
        for mla in ["_mla" if reader.has(f"attention.{one}_mla") else ""]
    )
    rotated = reader.integer("rope.dimension_count", high=head - 1)
    rank = "attention.q_lora_rank"
    latent: dict[str, object] = {
        "num_key_value_heads": reader.integer("attention.head_count"),
        "kv_lora_rank": reader.integer("attention.kv_lora_rank"),
        "q_lora_rank": reader.integer(rank) if reader.has(rank) else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": value,
    }
    if not has_experts(reader):
        return latent | {"first_k_dense_replace": MAX_LAYERS}
    found = biased_experts(reader, shapes, default=SOFTMAX)
    is_second = found["scoring_func"] == "softmax" and not found["norm_topk_prob"]
    return latent | found | {"model_type": "deepseek_v2" if is_second else "deepseek_v3"}
