"""What do families with latent attention read from a config.json in the same way?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_HEADS, MAX_POSITIONS, MAX_VOCAB, ConfigReader
from ridgeline.architectures.family import Trunk, read_num_layers
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.rope_config import check_context, read_rope, yarn_growth
from ridgeline.architectures.spec import AttentionSpec, LatentSpec

_ATTENTION = "model.layers.{layer}.self_attn."
LATENT_NAMES: Mapping[str, str] = {
    **LLAMA_NAMES,
    "q_a": f"{_ATTENTION}q_a_proj.weight",
    "q_a_norm": f"{_ATTENTION}q_a_layernorm.weight",
    "q_b": f"{_ATTENTION}q_b_proj.weight",
    "kv_a": f"{_ATTENTION}kv_a_proj_with_mqa.weight",
    "kv_a_norm": f"{_ATTENTION}kv_a_layernorm.weight",
    "kv_b": f"{_ATTENTION}kv_b_proj.weight",
}


def _rank(config: ConfigReader, default: int | None) -> int | None:
    """An explicit null means that queries are made of the states themselves."""
    if "q_lora_rank" in config.values and not config.has("q_lora_rank"):
        return None
    return config.integer("q_lora_rank", default=default)


def latent_trunk(
    config: ConfigReader,
    max_model_len: int | None,
    *,
    sizes: LatentSpec,
    interleaved: bool,
    max_positions: int = 4096,
    norm_eps: float = 1e-6,
) -> tuple[Trunk, AttentionSpec]:
    """The sizes of the model, and the attention of its layers; `sizes` are defaults."""
    for key in ("attention_bias", "mlp_bias"):
        config.refuse(key, False)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    if config.integer("num_key_value_heads", high=MAX_HEADS, default=heads) != heads:
        raise config.fail("num_key_value_heads", f"must equal num_attention_heads ({heads})")
    positions = config.integer("max_position_embeddings", high=MAX_POSITIONS, default=max_positions)

    def size(key: str) -> int:
        return config.integer(key, high=4096, default=getattr(sizes, key))

    latent = LatentSpec(
        kv_lora_rank=config.integer("kv_lora_rank", default=sizes.kv_lora_rank),
        qk_rope_head_dim=size("qk_rope_head_dim"),
        qk_nope_head_dim=size("qk_nope_head_dim"),
        v_head_dim=size("v_head_dim"),
        q_lora_rank=_rank(config, sizes.q_lora_rank),
    )
    head_dim, rotated = latent.qk_head_dim, latent.qk_rope_head_dim
    rope = read_rope(config, head_dim=rotated, default_theta=10_000.0, max_positions=positions)
    rope, scale = replace(rope, interleaved=interleaved), None
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale = head_dim**-0.5 * yarn_growth(rope.factor, rope.mscale_all_dim) ** 2
    check_context(rope, positions, max_model_len)
    trunk = Trunk(
        vocab_size=config.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=config.integer("hidden_size"),
        num_layers=read_num_layers(config),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_positions=positions,
        rope=rope,
        norm_eps=config.number("rms_norm_eps", default=norm_eps, low=0.0, high=1.0),
    )
    return trunk, AttentionSpec(heads, heads, head_dim, rope, scale=scale, latent=latent)
