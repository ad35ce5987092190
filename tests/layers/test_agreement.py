"""Our decoder over a paged cache gives the logits and tokens of Transformers, family by family."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.layers import experts
from tests.layers.driving import Driver, greedy, load_decoder
from tests.layers.reference_models import (
    GONE,
    LLAMA3,
    LONGROPE,
    VOCAB,
    YARN,
    ReferenceModel,
    newer_keys,
    tiny_config,
)
from tests.thinning import slow

TOLERANCE = 1e-4
ODD_HEADS = {
    "hidden_size": 72,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 22,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
GEMMA = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.3, "beta_fast": 8, "beta_slow": 2}

YARN_TUNING = {
    "beta_fast": 16,
    "beta_slow": 2,
    "mscale": 1.5,
    "mscale_all_dim": 0.5,
    "truncate": False,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.015625,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
PLAIN = {"rope_type": "default"}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "llama biased": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama tied": tiny_config("llama", tie_word_embeddings=True),
    "llama one head each": tiny_config("llama", num_key_value_heads=None, head_dim=None),
    "llama one kv head": tiny_config("llama", num_key_value_heads=1),
    "llama wide heads": tiny_config("llama", head_dim=32),
    "llama gelu": tiny_config("llama", hidden_act="gelu_pytorch_tanh"),
    "llama linear": tiny_config("llama", rope_scaling={"type": "linear", "factor": 2.5}),
    "llama dynamic": tiny_config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
    "llama llama3": tiny_config("llama", rope_scaling=LLAMA3),
    "llama yarn": tiny_config("llama", rope_scaling=YARN),
    "llama yarn tuned": tiny_config(
        "llama",
        rope_scaling=YARN
        | {
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
    ),
    "llama yarn factor": tiny_config("llama", rope_scaling=YARN | {"attention_factor": 1.25}),
    "mistral": tiny_config("mistral"),
    "mistral window": tiny_config("mistral", sliding_window=5),
    "mistral yarn": tiny_config("mistral", rope_scaling=YARN),
    "mixtral": tiny_config("mixtral"),
    "mixtral window": tiny_config("mixtral", sliding_window=6),
    "mixtral one expert": tiny_config("mixtral", num_experts_per_tok=1),
    "mixtral llama3": tiny_config("mixtral", rope_scaling=LLAMA3),
    "qwen2": tiny_config("qwen2"),
    "qwen2 tied": tiny_config("qwen2", tie_word_embeddings=True),
    "qwen2 window": tiny_config("qwen2", **QWEN_WINDOW),
    "qwen2 yarn": tiny_config("qwen2", rope_scaling=YARN),
    "qwen3": tiny_config("qwen3"),
    "qwen3 biased": tiny_config("qwen3", attention_bias=True),
    "qwen3 window": tiny_config("qwen3", **QWEN_WINDOW),
    "qwen3 layer types": tiny_config(
        "qwen3",
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "glm4_moe": tiny_config("glm4_moe", use_qk_norm=True, attention_bias=True),
    "glm4_moe groups": tiny_config(
        "glm4_moe",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        n_shared_experts=2,
        first_k_dense_replace=2,
    ),
    "glm4_moe no sum": tiny_config(
        "glm4_moe", norm_topk_prob=False, partial_rotary_factor=0.25, num_attention_heads=6
    ),
    "gpt_oss": tiny_config("gpt_oss", rope_scaling=YARN | {"truncate": False}),
    "gpt_oss plain": tiny_config(
        "gpt_oss", rope_scaling=PLAIN, num_attention_heads=6, attention_bias=False
    ),
    "gpt_oss full": tiny_config(
        "gpt_oss", rope_scaling=YARN, layer_types=["full_attention"] * 3 + ["sliding_attention"]
    ),
    "granitemoe": tiny_config("granitemoe", **GRANITE),
    "granitemoe tied": tiny_config(
        "granitemoe", **GRANITE, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "granitemoe biased": tiny_config(
        "granitemoe", attention_bias=True, logits_scaling=8.0, num_attention_heads=6
    ),
    "granitemoeshared": tiny_config("granitemoeshared", **GRANITE),
    "granitemoeshared tied": tiny_config(
        "granitemoeshared", **MULTIPLIERS, tie_word_embeddings=True, shared_intermediate_size=80
    ),
    "granitemoeshared biased": tiny_config(
        "granitemoeshared", attention_bias=True, num_experts_per_tok=1, **MULTIPLIERS | ODD_HEADS
    ),
    "granitemoeshared with none": tiny_config(
        "granitemoeshared", **MULTIPLIERS, shared_intermediate_size=0
    ),
    "qwen2_moe": tiny_config("qwen2_moe"),
    "qwen2_moe mixed": tiny_config(
        "qwen2_moe", norm_topk_prob=True, mlp_only_layers=[1], qkv_bias=False, num_attention_heads=6
    ),
    "qwen2_moe window": tiny_config("qwen2_moe", **QWEN_WINDOW | {"max_window_layers": 2}),
    "qwen3_moe": tiny_config("qwen3_moe"),
    "qwen3_moe mixed": tiny_config(
        "qwen3_moe",
        norm_topk_prob=True,
        num_hidden_layers=4,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        attention_bias=True,
    ),
    "qwen3_moe window": tiny_config(
        "qwen3_moe", use_sliding_window=True, sliding_window=7, tie_word_embeddings=True
    ),
    "qwen3 dynamic": tiny_config("qwen3", rope_scaling={"type": "dynamic", "factor": 3.0}),
    "deepseek_v3": tiny_config("deepseek_v3"),
    "deepseek_v3 straight queries": tiny_config(
        "deepseek_v3", q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False
    ),
    "deepseek_v3 without experts": tiny_config("deepseek_v3", first_k_dense_replace=3),
    "deepseek_v3 yarn": tiny_config("deepseek_v3", rope_scaling=YARN | MSCALE, v_head_dim=14),
    "deepseek_v3 not interleaved": tiny_config("deepseek_v3", rope_interleave=False),
    "deepseek_v3 odd heads": tiny_config(
        "deepseek_v3", num_attention_heads=3, num_key_value_heads=3, qk_nope_head_dim=7
    ),
    "deepseek_v2": tiny_config("deepseek_v2", topk_method="group_limited_greedy"),
    "deepseek_v2 straight queries": tiny_config("deepseek_v2", q_lora_rank=None, kv_lora_rank=10),
    "deepseek_v2 yarn": tiny_config("deepseek_v2", rope_scaling=YARN | MSCALE | {"mscale": 0.7}),
    "cohere": tiny_config("cohere", tie_word_embeddings=True),
    "cohere norms of heads": tiny_config(
        "cohere", use_qk_norm=True, attention_bias=True, logit_scale=0.25
    ),
    "cohere odd heads": tiny_config(
        "cohere", num_attention_heads=3, num_key_value_heads=1, hidden_size=60, logit_scale=1.5
    ),
    "cohere2": tiny_config("cohere2", num_hidden_layers=4, sliding_window=6),
    "cohere2 tied, layer types": tiny_config(
        "cohere2",
        tie_word_embeddings=True,
        sliding_window=9,
        attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "cohere2 odd heads": tiny_config(
        "cohere2", num_attention_heads=6, hidden_size=72, num_key_value_heads=3, rope_theta=500.0
    ),
    "falcon": tiny_config("falcon"),
    "falcon groups": tiny_config(
        "falcon", new_decoder_architecture=True, num_kv_heads=2, bias=True, ffn_hidden_size=72
    ),
    "falcon one norm, tied": tiny_config(
        "falcon",
        new_decoder_architecture=True,
        num_kv_heads=3,
        num_attention_heads=6,
        hidden_size=72,
        num_ln_in_parallel_attn=1,
        tie_word_embeddings=True,
    ),
    "falcon all heads, one after the other": tiny_config(
        "falcon", multi_query=False, parallel_attn=False
    ),
    "gpt2": tiny_config("gpt2"),
    "gpt2 tied, odd heads": tiny_config(
        "gpt2", tie_word_embeddings=True, n_head=3, n_embd=60, n_inner=72
    ),
    "gpt2 scores by layer": tiny_config(
        "gpt2", scale_attn_by_inverse_layer_idx=True, activation_function="relu", n_head=2
    ),
    "gpt_neox": tiny_config("gpt_neox", rotary_pct=0.25),
    "gpt_neox one after the other": tiny_config(
        "gpt_neox", use_parallel_residual=False, rotary_pct=1.0, attention_bias=False
    ),
    "gpt_neox odd heads, tied": tiny_config(
        "gpt_neox",
        num_attention_heads=3,
        hidden_size=60,
        rotary_pct=0.5,
        tie_word_embeddings=True,
        hidden_act="gelu_new",
    ),
    "stablelm": tiny_config("stablelm"),
    "stablelm side by side": tiny_config(
        "stablelm",
        use_parallel_residual=True,
        use_qkv_bias=True,
        tie_word_embeddings=True,
        qk_layernorm=True,
    ),
    "stablelm whole heads": tiny_config(
        "stablelm", partial_rotary_factor=1.0, num_attention_heads=6, hidden_size=72
    ),
    "phi3": tiny_config("phi3"),
    "phi3 tied window": tiny_config(
        "phi3", tie_word_embeddings=True, sliding_window=6, num_attention_heads=2, hidden_size=36
    ),
    "phi3 part of a head": tiny_config("phi3", partial_rotary_factor=0.75, num_key_value_heads=1),
    "phi3 within the trained length": tiny_config(
        "phi3",
        partial_rotary_factor=0.75,
        rope_scaling=LONGROPE,
        original_max_position_embeddings=128,
        max_position_embeddings=512,
    ),
    "minicpm3": tiny_config("minicpm3", scale_emb=3, dim_model_base=16),
    "minicpm3 straight queries": tiny_config(
        "minicpm3", q_lora_rank=None, num_attention_heads=2, num_key_value_heads=2, scale_depth=0.9
    ),
    "minicpm3 tied longrope": tiny_config(
        "minicpm3",
        tie_word_embeddings=True,
        qk_rope_head_dim=12,
        rope_scaling=LONGROPE | {"factor": 4.0},
        original_max_position_embeddings=128,
        max_position_embeddings=512,
    ),
    "deepseek_v2 scaled": tiny_config(
        "deepseek_v2", routed_scaling_factor=3.5, n_shared_experts=1, first_k_dense_replace=0
    ),
    "starcoder2": tiny_config("starcoder2"),
    "starcoder2 tied window": tiny_config(
        "starcoder2", tie_word_embeddings=True, sliding_window=6, num_attention_heads=6, head_dim=12
    ),
    "starcoder2 no biases": tiny_config("starcoder2", use_bias=False, num_key_value_heads=1),
    "olmo2": tiny_config("olmo2", num_key_value_heads=4),
    "olmo2 biased": tiny_config("olmo2", attention_bias=True, tie_word_embeddings=True),
    "olmo2 odd heads": tiny_config("olmo2", **ODD_HEADS | {"head_dim": 24}, rope_scaling=YARN),
    "gemma": tiny_config("gemma", **GEMMA),
    "gemma untied": tiny_config(
        "gemma", attention_bias=True, hidden_act="gelu_pytorch_tanh", head_dim=32
    ),
    "gemma odd heads": tiny_config("gemma", **GEMMA | ODD_HEADS | {"num_key_value_heads": 3}),
    "gemma2": tiny_config("gemma2", **GEMMA, sliding_window=5),
    "gemma2 uncapped": tiny_config(
        "gemma2", **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma2 odd heads": tiny_config(
        "gemma2",
        **GEMMA | ODD_HEADS,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=11,
        sliding_window=5,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
    ),
    "gemma3": tiny_config("gemma3_text", **GEMMA, sliding_window=6, sliding_window_pattern=2),
    "gemma3 linear": tiny_config(
        "gemma3_text",
        **GEMMA | ODD_HEADS,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attention_bias=True,
    ),
    "gemma3 untied": tiny_config(
        "gemma3_text",
        query_pre_attn_scalar=24,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        final_logit_softcapping=4.0,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
        },
        rope_theta=GONE,
        hidden_activation="silu",
    ),
    "olmo3": tiny_config("olmo3", sliding_window=6, num_hidden_layers=4),
    "olmo3 yarn": tiny_config(
        "olmo3",
        **ODD_HEADS | {"head_dim": 24},
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_theta=500000.0,
        rope_scaling=YARN,
    ),
    "olmo3 biased": tiny_config(
        "olmo3", sliding_window=5, attention_bias=True, tie_word_embeddings=True
    ),
    "granite": tiny_config("granite", **MULTIPLIERS),
    "granite biased": tiny_config(
        "granite", **MULTIPLIERS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "granite odd heads": tiny_config(
        "granite",
        **ODD_HEADS | {"head_dim": 24},
        attention_multiplier=0.3,
        residual_multiplier=1.7,
        logits_scaling=3.0,
    ),
    "arcee": tiny_config("arcee", hidden_act="relu2"),
    "arcee biased": tiny_config(
        "arcee", hidden_act=GONE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "arcee odd heads": tiny_config(
        "arcee",
        **ODD_HEADS,
        hidden_act="relu2",
        mlp_bias=True,
        rope_scaling=YARN,
    ),
    "exaone4": tiny_config("exaone4", sliding_window=6, num_hidden_layers=4),
    "exaone4 no windows": tiny_config(
        "exaone4",
        sliding_window=None,
        layer_types=["full_attention"] * 3,
        tie_word_embeddings=True,
        rope_scaling=LLAMA3,
    ),
    "exaone4 odd heads": tiny_config(
        "exaone4",
        **ODD_HEADS,
        sliding_window=7,
        sliding_window_pattern="LLG",
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_scaling=YARN,
    ),
    "seed_oss": tiny_config("seed_oss"),
    "seed_oss tied": tiny_config(
        "seed_oss", attention_bias=False, mlp_bias=True, tie_word_embeddings=True, head_dim=None
    ),
    "seed_oss odd heads": tiny_config(
        "seed_oss", **ODD_HEADS, attention_out_bias=True, rope_scaling=YARN
    ),
    "smollm3": tiny_config("smollm3", num_hidden_layers=4, tie_word_embeddings=True),
    "smollm3 window": tiny_config(
        "smollm3", no_rope_layers=[1, 0, 0], use_sliding_window=True, sliding_window=6
    ),
    "smollm3 odd heads": tiny_config(
        "smollm3",
        **ODD_HEADS | {"head_dim": 24},
        no_rope_layer_interval=2,
        attention_bias=True,
        mlp_bias=True,
        rope_scaling=YARN,
    ),
    "glm4": tiny_config("glm4", head_dim=16),
    "glm4 quarter": tiny_config(
        "glm4", partial_rotary_factor=0.25, attention_bias=False, tie_word_embeddings=True
    ),
    "glm4 odd heads": tiny_config("glm4", **ODD_HEADS | {"head_dim": 20}, rope_scaling=YARN),
    "glm": tiny_config("glm"),
    "glm odd heads": tiny_config("glm", **ODD_HEADS | {"head_dim": 20}),
    "glm whole": tiny_config("glm", partial_rotary_factor=1.0, attention_bias=False),
    "hunyuan": tiny_config("hunyuan_v1_dense"),
    "hunyuan alpha": tiny_config(
        "hunyuan_v1_dense",
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "hunyuan odd heads": tiny_config(
        "hunyuan_v1_dense", **ODD_HEADS, attention_bias=True, rope_scaling=YARN
    ),
}
CONFIGS |= {
    f"{name} (newer keys)": newer_keys(CONFIGS[name])
    for name in ("llama", "llama linear", "llama llama3", "llama yarn", "mixtral", "qwen3 dynamic")
}
NAMES = list(CONFIGS)


@cache
def reference(name: str) -> ReferenceModel:
    return ReferenceModel(CONFIGS[name], seed=NAMES.index(name))


def prompts(seed: int, lengths: tuple[int, ...]) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"r{i}": [rng.randrange(3, VOCAB) for _ in range(n)] for i, n in enumerate(lengths)}


def drive(name: str, *, backend: str = "auto", max_model_len: int = 128) -> Driver:
    model = reference(name)
    decoder = load_decoder(
        model.config, model.tensors, max_model_len=max_model_len, backend=backend
    )
    return Driver(decoder, seed=NAMES.index(name))


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    assert got.isfinite().all()
    return float((got - want).abs().max())


IN_ONE_PASS = [
    (name, backend)
    for name in NAMES
    for backend in (["auto"] if "kv_lora_rank" in CONFIGS[name] else ["sdpa", "reference"])
]


@pytest.mark.parametrize(("name", "backend"), IN_ONE_PASS)
def test_logits_in_one_pass(name: str, backend: str) -> None:
    layers = read_spec(CONFIGS[name]).layers
    if backend == "sdpa" and any(layer.attention.scores_cap for layer in layers):
        pytest.skip("torch's kernels have no soft caps")
    work = prompts(1, (90, 1, 17))
    got = drive(name, backend=backend).step(work)
    errors = {key: worst(got[key], reference(name).logits(ids)) for key, ids in work.items()}
    print(f"{name} {backend}: {max(errors.values()):.2e}")
    assert max(errors.values()) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_chunks_and_single_tokens(name: str) -> None:
    """Three requests at different places share every batch; the cache holds what they share not."""
    texts = prompts(2, (60, 40, 50))
    driver, rng = drive(name), random.Random(NAMES.index(name))
    rows: dict[str, list[torch.Tensor]] = {key: [] for key in texts}
    done = dict.fromkeys(texts, 0)
    while open_ := [key for key in texts if done[key] < len(texts[key])]:
        work = {}
        for key in rng.sample(open_, rng.randint(1, len(open_))):
            size = rng.choice((1, 1, 2, 5, 13, 24))
            work[key] = texts[key][done[key] : done[key] + size]
            done[key] += len(work[key])
        for key, logits in driver.step(work).items():
            rows[key].append(logits)
    for key, ids in texts.items():
        assert worst(torch.cat(rows[key]), reference(name).logits(ids)) <= TOLERANCE


@pytest.mark.parametrize("num", [12, *slow(64)])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens(name: str, num: int) -> None:
    texts = prompts(3, (11, 29, 3))
    answers = greedy(drive(name), texts, num)
    for key, ids in texts.items():
        assert answers[key] == reference(name).greedy(ids, num), key


@pytest.mark.parametrize("name", ["llama dynamic", "qwen3 dynamic"])
def test_dynamic_positions_past_the_trained_length(name: str) -> None:
    """Served to 200 tokens, every pass turns as Transformers does in one pass of 200."""
    ids = prompts(4, (200,))["r0"]
    driver = drive(name, max_model_len=200)
    got = torch.cat([driver.step({"a": ids[i : i + 64]})["a"] for i in range(0, 200, 64)])
    assert worst(got, reference(name).logits(ids)) <= TOLERANCE


STACKED = {
    "mixtral": 0,
    "mixtral one expert": 0,
    "mixtral window": 0,
    "qwen2_moe": 2,
    "glm4_moe": 1,
}


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "STACKED_ON", {"cpu", "cuda"})
    driver = drive(name)
    for layer in driver.decoder.layers:
        if isinstance(layer.feed_forward, experts.Experts):
            assert not layer.feed_forward.asks_host
            assert layer.feed_forward.slices == STACKED[name]
    ids = prompts(6, (70,))["r0"]
    got = torch.cat([driver.step({"a": ids[i : i + 14]})["a"] for i in range(0, 70, 14)])
    assert worst(got, reference(name).logits(ids)) <= TOLERANCE


def test_dynamic_positions_below_the_trained_length_are_plain() -> None:
    ids = prompts(4, (40,))["r0"]
    got = drive("llama dynamic", max_model_len=40).step({"a": ids})["a"]
    assert worst(got, reference("llama dynamic").logits(ids)) <= TOLERANCE


def test_window_drops_what_it_has_passed() -> None:
    """The driver frees passed blocks and gives them to others, so a leak would show."""
    driver = drive("mistral window")
    ids = prompts(5, (100,))["r0"]
    rows = [driver.step({"a": ids[i : i + 10]})["a"] for i in range(0, 100, 10)]
    assert sum(block > 0 for block in driver.tables["a"][0]) <= 5
    assert worst(torch.cat(rows), reference("mistral window").logits(ids)) <= TOLERANCE


def test_longrope_past_the_trained_length() -> None:
    """Served to 200 tokens, every pass turns by the long factors, as Transformers does in one pass
    of more than the trained length."""
    name = "phi3 within the trained length"
    ids = prompts(4, (200,))["r0"]
    driver = drive(name, max_model_len=200)
    got = torch.cat([driver.step({"a": ids[i : i + 64]})["a"] for i in range(0, 200, 64)])
    assert worst(got, reference(name).logits(ids)) <= TOLERANCE
