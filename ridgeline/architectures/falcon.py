"""What is a Falcon? Attention and feed-forward side by side, with one layer norm or two; all query
heads, or groups of them, share a key and a value, and lie in one tensor with these."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.config_reader import MAX_HEADS, ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import with_biases
from ridgeline.architectures.spec import ModelSpec, TensorLayout

DEFAULTS = Defaults(
    rope_theta=10_000.0, norm_eps=1e-5, norm_key="layer_norm_epsilon", max_positions=2048
)
_STEM = "transformer.h.{layer}."
_QKV = f"{_STEM}self_attention.query_key_value"
NAMES = {
    "embedding": "transformer.word_embeddings.weight",
    "lm_head": "lm_head.weight",
    **with_biases(
        {
            "norm": "transformer.ln_f",
            "input_norm": f"{_STEM}input_layernorm",
            "pre_feed_forward_norm": f"{_STEM}post_attention_layernorm",
            "q": f"{_STEM}self_attention.query",
            "k": f"{_STEM}self_attention.key",
            "v": f"{_STEM}self_attention.value",
            "o": f"{_STEM}self_attention.dense",
            "up": f"{_STEM}mlp.dense_h_to_4h",
            "down": f"{_STEM}mlp.dense_4h_to_h",
        }
    ),
}
TWO_NORMS = with_biases(
    {"input_norm": f"{_STEM}ln_attn", "pre_feed_forward_norm": f"{_STEM}ln_mlp"}
)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    if config.flag("alibi", default=False):
        reason = "is true; positions as a bias of scores are not served, only rotary ones"
        raise config.fail("alibi", f"{reason}: take a Falcon with alibi false")
    is_new = config.flag("new_decoder_architecture", default=False)
    norms = _norms(config, is_new)
    config = _with_usual_keys(config, is_new)
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    bias = config.flag("bias", default=False)
    return model_spec(
        config,
        trunk,
        family="falcon",
        attention=(trunk.attention(qkv_bias=bias, out_bias=bias),) * trunk.num_layers,
        feed_forward=dense(config, bias=bias, gated=False, default="gelu"),
        tensor_names=NAMES | TWO_NORMS if norms == 2 else NAMES,
        norm_kind="layer and bias",
        parallel_norms=norms,
        tied=True,
        tensor_layouts=(
            TensorLayout(f"{_QKV}.weight", ("q", "k", "v"), trunk.num_kv_heads),
            TensorLayout(f"{_QKV}.bias", ("q_bias", "k_bias", "v_bias"), trunk.num_kv_heads),
        ),
    )


def _norms(config: ConfigReader, is_new: bool) -> int:
    """See `LayerSpec.parallel_norms`."""
    if not config.flag("parallel_attn", default=True):
        if is_new:
            raise config.fail("parallel_attn", "is false, which new_decoder_architecture has not")
        return 0
    given = config.integer("num_ln_in_parallel_attn", high=2, default=2 if is_new else 1)
    if given == 2 and not is_new:
        raise config.fail("num_ln_in_parallel_attn", "is 2 without new_decoder_architecture")
    return given


def _with_usual_keys(config: ConfigReader, is_new: bool) -> ConfigReader:
    values = dict(config.values)
    if config.has("n_embed"):
        values["hidden_size"] = values["n_embed"]
    config = replace(config, values=values)
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    shares = not is_new and config.flag("multi_query", default=True)
    kv_heads = 1 if shares else config.integer("num_kv_heads", high=MAX_HEADS, default=heads)
    if not shares and not is_new and kv_heads != heads:
        raise config.fail("num_kv_heads", f"is {kv_heads}; without multi_query it is {heads}")
    usual = {
        "num_key_value_heads": kv_heads,
        "intermediate_size": config.integer(
            "ffn_hidden_size", default=4 * config.integer("hidden_size")
        ),
        "hidden_act": config.text("activation", default="gelu"),
    }
    return replace(config, values=values | usual)
