"""A config.json in either generation of keys becomes the spec that its model needs."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.architectures import (
    FAMILIES,
    expected_tensors,
    is_ignored,
    leftover_tensors,
    optional_tensors,
    read_spec,
)
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import DenseSpec, ExpertsSpec, ModelSpec, RopeSpec
from ridgeline.errors import ConfigError
from tests.architectures.configs import config


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


def rope(**changes: Any) -> RopeSpec:
    return read_spec(config(**changes)).layers[0].attention.rope


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: str) -> None:
    own = {"head_dim": 16, "tie_word_embeddings": False}
    falcon = {"new_decoder_architecture": True, "num_kv_heads": 2}
    spec = read_spec(config(family, bos_token_id=1, eos_token_id=[2, 3], **own, **falcon))
    attention = spec.layers[0].attention
    has_all = family in ("gpt2", "gpt_neox") or attention.latent is not None
    kv_heads = 4 if has_all else 2
    assert spec.family == family.removesuffix("_text")
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers) == (97, 64, 3)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, kv_heads, 16)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 3))
    assert (spec.norm_eps, spec.dtype, spec.tie_embeddings) == (1e-5, "float32", False)


def test_what_tells_the_families_apart() -> None:
    first = {family: read_spec(config(family, head_dim=16)).layers[0] for family in FAMILIES}
    biased = {f for f, layer in first.items() if layer.attention.qkv_bias}
    normed = {f for f, layer in first.items() if layer.attention.qk_norm}
    expert = {f for f, layer in first.items() if isinstance(layer.feed_forward, ExpertsSpec)}
    llamas = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"}
    assert biased & llamas == {"qwen2"}
    assert normed & llamas == {"qwen3", "qwen3_moe"}
    assert expert & llamas == {"mixtral", "qwen3_moe"}
    assert first["mixtral"].attention.rope.theta == 1_000_000.0
    assert first["mistral"].attention.window == 4096  # what Transformers assumes when it is absent


def test_head_dim_is_derived_or_given() -> None:
    assert read_spec(config()).layers[0].attention.head_dim == 16
    assert read_spec(config(head_dim=24)).layers[0].attention.head_dim == 24
    assert read_spec(config("qwen3")).layers[0].attention.head_dim == 128


def test_missing_and_null_kv_heads() -> None:
    gone = config()
    del gone["num_key_value_heads"]
    assert read_spec(gone).layers[0].attention.num_kv_heads == 4
    assert read_spec(config(num_key_value_heads=None)).layers[0].attention.num_kv_heads == 4


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_dtype_in_both_generations(key: str, value: str) -> None:
    assert read_spec(config(**{key: value})).dtype == "bfloat16"


def test_rope_in_both_generations() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    older = rope(rope_theta=5e5, rope_scaling=scaling | {"rope_type": "llama3"})
    oldest = rope(rope_theta=5e5, rope_scaling=scaling | {"type": "llama3"})
    newer = rope(rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 5e5})
    assert older == oldest == newer
    assert older == RopeSpec(5e5, "llama3", None, 8.0, 64, 1.0, 4.0)


def test_rope_kinds() -> None:
    assert rope() == RopeSpec(10000.0)
    assert rope(rope_theta=1e6, rope_scaling=None) == RopeSpec(1e6)
    assert rope(rope_parameters={"rope_theta": 7.0, "rope_type": "default"}) == RopeSpec(7.0)
    linear = rope(rope_scaling={"type": "linear", "factor": 2})
    assert (linear.kind, linear.factor, linear.original_max_position) == ("linear", 2.0, 128)
    dynamic = rope(rope_scaling={"rope_type": "dynamic", "factor": 3.0})
    assert (dynamic.kind, dynamic.factor, dynamic.original_max_position) == ("dynamic", 3.0, 128)
    yarn = rope(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 32})
    assert (yarn.kind, yarn.factor, yarn.original_max_position) == ("yarn", 4.0, 32)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (32.0, 1.0, True)
    outside = rope(
        rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 32},
        original_max_position_embeddings=64,
    )
    assert outside.original_max_position == 64


def test_windows_of_mistral() -> None:
    assert windows(read_spec(config("mistral", sliding_window=8))) == [8, 8, 8]
    assert windows(read_spec(config("mistral", sliding_window=None))) == [None] * 3
    same = read_spec(config("mistral", sliding_window=8, layer_types=["sliding_attention"] * 3))
    assert windows(same) == [8, 8, 8]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(family: str) -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows(read_spec(config(family, sliding_window=8, max_window_layers=0))) == [None] * 3
    assert windows(read_spec(config(family, **on, max_window_layers=2))) == [None, None, 8]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    mixed = read_spec(config(family, **on, layer_types=kinds))
    assert windows(mixed) == [8, None, None]
    assert [(g.window, g.layers) for g in kv_groups(mixed)] == [
        (None, (1,)),
        (None, (2,)),
        (8, (0,)),
    ]


def test_experts_of_mixtral() -> None:
    spec = read_spec(config("mixtral", num_local_experts=6, num_experts_per_tok=3))
    assert spec.layers[0].feed_forward == ExpertsSpec(6, 3, 80)
    names = expected_tensors(spec)
    assert names["model.layers.2.block_sparse_moe.experts.5.w2.weight"] == (64, 80)
    assert names["model.layers.0.block_sparse_moe.gate.weight"] == (6, 64)


def test_biases_and_activations() -> None:
    spec = read_spec(config(attention_bias=True, mlp_bias=True, hidden_act="gelu_new"))
    assert spec.layers[0].attention.qkv_bias
    assert spec.layers[0].attention.out_bias
    assert spec.layers[0].feed_forward == DenseSpec(80, "gelu_tanh", True)
    names = expected_tensors(spec)
    assert names["model.layers.1.self_attn.k_proj.bias"] == (32,)
    assert names["model.layers.1.mlp.down_proj.bias"] == (64,)


def test_tied_output_is_optional() -> None:
    tied, untied = (read_spec(config(tie_word_embeddings=t)) for t in (True, False))
    assert "lm_head.weight" not in expected_tensors(tied)
    assert optional_tensors(tied) == {"lm_head.weight": (97, 64)}
    assert expected_tensors(untied)["lm_head.weight"] == (97, 64)
    assert optional_tensors(untied) == {}


def test_leftovers_that_change_nothing() -> None:
    assert is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_ignored("model.layers.0.self_attn.q_proj.bias")
    spec = read_spec(config(tie_word_embeddings=True))
    extra = ["lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "a.rotary_emb.inv_freq"]
    found = leftover_tensors(spec, [*expected_tensors(spec), *extra])
    assert found == ("model.layers.0.self_attn.q_proj.bias",)


def test_how_long_a_context_may_be_served() -> None:
    assert read_spec(config(), max_model_len=128).max_position_embeddings == 128
    stretched = config(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert read_spec(stretched, max_model_len=512).max_position_embeddings == 128
    with pytest.raises(ConfigError, match="max_model_len is 513; this model serves 1 to 512"):
        read_spec(stretched, max_model_len=513)
    with pytest.raises(ConfigError, match="max_model_len is 129; this model serves 1 to 128"):
        read_spec(config(), max_model_len=129)
