"""Families that are described for planning: their numbers are right, and serving refuses them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from ridgeline.architectures import FAMILIES, PLANNED_FAMILIES, expected_tensors, read_spec
from ridgeline.architectures.catalogue import catalogue
from ridgeline.architectures.counts import (
    attention_flops,
    kv_bytes,
    kv_bytes_per_token,
    layer_attention_flops,
    linear_weights,
    num_active_parameters,
    num_parameters,
    small_parameters,
)
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import (
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    check_served,
    missing,
)
from ridgeline.build import build_tokenizer_side
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from tests.architectures.configs import config
from tests.cost.random_setups import DEEPSEEK_V3, GEMMA_3_27B, random_spec

DEEPSEEK = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
}


def deepseek(**changes: Any) -> ModelSpec:
    return read_spec(config("deepseek_v3", **DEEPSEEK | changes))


def gemma(**changes: Any) -> ModelSpec:
    return read_spec(config("gemma3_text", head_dim=16, **changes))


# ------------------------------------------------------------------------ DeepSeek-V3


def test_deepseek_v3_as_published() -> None:
    """671 billion parameters, 37 of them active; 70,272 bytes of cache per token in 16 bit."""
    spec = read_spec(DEEPSEEK_V3)
    assert num_parameters(spec) / 1e9 == pytest.approx(671.0, abs=0.05)
    assert num_active_parameters(spec) / 1e9 == pytest.approx(37, abs=1)
    assert kv_bytes_per_token(spec, 2) == 61 * (512 + 64) * 2 == 70_272
    kinds = [isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers]
    assert kinds == [False] * 3 + [True] * 58
    assert spec.layers[5].feed_forward == ExpertsSpec(
        256,
        8,
        2048,
        shared_size=2048,
        scoring="sigmoid",
        score_bias=True,
        num_groups=8,
        num_active_groups=4,
        group_best=2,
        weight_scale=2.5,
        float32_scores=True,
    )
    rope = spec.layers[0].attention.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 40.0, 4096)


def test_tensors_of_deepseek() -> None:
    names = expected_tensors(deepseek())
    stem = "model.layers.1."
    assert names[f"{stem}self_attn.q_a_proj.weight"] == (24, 64)
    assert names[f"{stem}self_attn.q_b_proj.weight"] == (4 * 20, 24)
    assert names[f"{stem}self_attn.kv_a_proj_with_mqa.weight"] == (24, 64)
    assert names[f"{stem}self_attn.kv_b_proj.weight"] == (4 * 22, 16)
    assert names[f"{stem}self_attn.o_proj.weight"] == (64, 4 * 10)
    assert names[f"{stem}mlp.gate.e_score_correction_bias"] == (4,)
    assert names[f"{stem}mlp.experts.3.down_proj.weight"] == (64, 32)
    assert names[f"{stem}mlp.shared_experts.up_proj.weight"] == (32, 64)
    assert names["model.layers.0.mlp.up_proj.weight"] == (80, 64)
    assert f"{stem}mlp.up_proj.weight" not in names
    straight = expected_tensors(deepseek(q_lora_rank=None))
    assert straight[f"{stem}self_attn.q_proj.weight"] == (80, 64)


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"n_shared_experts": 2}])
def test_tensors_equal_transformers(changes: dict[str, Any]) -> None:
    """Names and shapes of a tiny model, whose experts Transformers keeps stacked."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = config("deepseek_v3", **DEEPSEEK | changes)
    model_type = given.pop("model_type")
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(AutoConfig.for_model(model_type, **given))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = expected_tensors(deepseek(**changes))
    assert sum(map(prod, theirs.values())) == sum(map(prod, ours.values()))
    stacked = [name for name in theirs if ".mlp.experts." in name]
    plain = {name: shape for name, shape in ours.items() if ".mlp.experts." not in name}
    assert plain == {name: shape for name, shape in theirs.items() if name not in stacked}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads must equal num_attention_heads"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"qk_rope_head_dim": 7}, "need an even one"),
    ],
)
def test_broken_deepseek_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepseek(**changes)


def test_latent_attention_takes_the_cheaper_way() -> None:
    """A long prompt expands keys and values, a decode and a short check do not."""
    attention = read_spec(DEEPSEEK_V3).layers[0].attention
    pairs = 4096 * 4097 // 2
    assert layer_attention_flops(attention, 4096, 0) == 2 * 128 * (192 + 128) * pairs
    assert layer_attention_flops(attention, 1, 999) == 2 * 128 * (2 * 512 + 64) * 1000
    four = sum(range(1000, 1004))
    assert layer_attention_flops(attention, 4, 999) == 2 * 128 * (2 * 512 + 64) * four
    expanded = 2 * 128 * 512 * (128 + 128) * 1000
    pairs = 4096 * 1000 + pairs
    assert layer_attention_flops(attention, 4096, 1000) == 2 * 128 * 320 * pairs + expanded


# ------------------------------------------------------------------------ Gemma 3


def test_gemma_3_27b_as_published() -> None:
    """27 billion parameters without the image part; KV figures of its window pattern."""
    spec = read_spec(GEMMA_3_27B)
    assert num_parameters(spec) / 1e9 == pytest.approx(27.0, abs=0.05)
    windows = [layer.attention.window for layer in spec.layers]
    assert windows.count(None) == 10
    assert windows[:6] == [1024] * 5 + [None]
    assert kv_bytes(spec, 8192, 2) == 8192 * (10 * 8192 + 52 * 1024)
    full, local = spec.layers[5].attention.rope, spec.layers[0].attention.rope
    assert (full.theta, full.kind, full.factor) == (1e6, "linear", 8.0)
    assert (local.theta, local.kind) == (1e4, "default")
    assert (spec.tie_embeddings, spec.vocab_size) == (True, 262_208)
    assert spec.eos_token_ids == (1, 106)
    assert spec.dtype == "bfloat16"


def test_gemma_rope_in_both_generations() -> None:
    newer = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    older = {"factor": 8.0, "rope_type": "linear"}
    a = gemma(rope_parameters=newer, sliding_window=8)
    b = gemma(rope_scaling=older, sliding_window=8)
    assert a.layers == b.layers


def test_gemma_tensors_equal_transformers() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = config("gemma3_text", head_dim=16, tie_word_embeddings=True)
    model_type = given.pop("model_type")
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(AutoConfig.for_model(model_type, **given))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert expected_tensors(gemma()) == theirs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "tanh"}, "hidden_activation is 'tanh'"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"rope_local_base_freq": "x"}, "rope_local_base_freq must be a number"),
    ],
)
def test_broken_gemma_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gemma(**changes)


def test_multimodal_configs_need_their_text_part() -> None:
    with pytest.raises(ConfigError, match="text_config is missing"):
        read_spec({"model_type": "gemma3"})


# ------------------------------------------------------------------------ any description


@pytest.mark.parametrize("seed", range(80))
def test_counts_equal_the_tensors(seed: int) -> None:
    """Packed weights, small parameters and the two vocabulary matrices are all there is."""
    spec = random_spec(random.Random(seed))
    small = sum(small_parameters(spec, layer) for layer in spec.layers) + spec.hidden_size
    matrices = (1 if spec.tie_embeddings else 2) * spec.vocab_size * spec.hidden_size
    assert linear_weights(spec) + small + matrices == num_parameters(spec)


def shared(spec: ModelSpec) -> ModelSpec:
    """Every odd layer reads the cache of the one before it."""

    def own(index: int, layer: LayerSpec) -> LayerSpec:
        owner = index - 1 if index % 2 else None
        return replace(layer, attention=replace(layer.attention, cache_layer=owner))

    return replace(spec, layers=tuple(own(i, layer) for i, layer in enumerate(spec.layers)))


def test_sharing_caches_divides_them() -> None:
    plain = read_spec(config(num_hidden_layers=4))
    spec = shared(plain)
    assert kv_bytes_per_token(spec, 2) == kv_bytes_per_token(plain, 2) // 2
    assert attention_flops(spec, 1, 50) == attention_flops(plain, 1, 50)
    assert "model.layers.1.self_attn.k_proj.weight" not in expected_tensors(spec)
    assert [group.layers for group in kv_groups(spec)] == [(0, 2)]


# ------------------------------------------------------------------------ refused by the build


def test_what_is_missing_is_said() -> None:
    spec = replace(read_spec(config()), unserved="norms that add one")
    with pytest.raises(ConfigError, match="cannot be served by this version: it needs norms that"):
        check_served(spec)


def test_served_families_miss_nothing() -> None:
    for family in FAMILIES:
        assert missing(read_spec(config(family))) == ()


@pytest.mark.parametrize("family", sorted(PLANNED_FAMILIES))
def test_the_build_refuses_them_before_anything_is_loaded(family: str, tmp_path: Path) -> None:
    given = next(e.config for e in catalogue().values() if e.config["model_type"] == family)
    (tmp_path / "config.json").write_text(json.dumps(given))
    asked = EngineConfig(
        model=str(tmp_path), device="cpu", load_format="random", implementation="native"
    )
    with pytest.raises(ConfigError, match=r"can be planned for, cannot be served by this version"):
        build_tokenizer_side(asked)


def test_a_latent_spec_says_its_sizes() -> None:
    latent = LatentSpec(512, 64, 128, 128)
    assert (latent.cached_width, latent.qk_head_dim) == (576, 192)


def test_the_first_gemmas_mean_the_tanh_formula_by_gelu() -> None:
    spec = read_spec(config("gemma", hidden_act="gelu"))
    assert spec.layers[0].feed_forward.activation == "gelu_tanh"
