"""Small config.json contents to change one key of."""

from __future__ import annotations

from typing import Any

LATENT = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"), LATENT),
    "glm4_moe": {"moe_intermediate_size": 32},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"moe_intermediate_size": 32},
}


def config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    base = base | OF_FAMILY.get(model_type, {}) | changes
    if model_type == "gemma3":
        return {"model_type": model_type, "text_config": base}
    return base
