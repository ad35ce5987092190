"""Models, devices and step shapes to price: known ones and random ones."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from ridgeline.architectures import read_spec
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import (
    AttentionSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormPlaces,
    RopeSpec,
)
from ridgeline.cost.constants import Calibration, default_calibration
from ridgeline.cost.hardware import Device, catalogue
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.errors import ConfigError
from ridgeline.formats import KV_FORMATS, WEIGHT_FORMATS
from ridgeline.step import StepShape

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LLAMA_2_7B = LLAMA_8B | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
LLAMA_2_13B = LLAMA_2_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
LLAMA_405B = LLAMA_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
QWEN_2_5_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


NORMS: tuple[NormPlaces, ...] = ("around", "after")


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return read_spec(config | changes)


def device(name: str = "h100-sxm") -> Device:
    return catalogue()[name]


def random_spec(rng: random.Random, *, latent: bool | None = None) -> ModelSpec:
    """Any mixture of windows, shared caches, latent attention, experts and dense layers."""
    width = 64 * rng.randint(1, 8)
    is_latent = rng.random() < 0.25 if latent is None else latent
    attention = _latent(rng) if is_latent else _heads(rng)
    window = rng.choice([None, rng.randint(1, 300)])
    layers: list[LayerSpec] = []
    for index in range(rng.randint(1, 6)):
        own = attention
        if not is_latent and rng.random() < 0.5:
            own = replace(own, window=window)
        if not is_latent and index and rng.random() < 0.2:
            own = replace(own, cache_layer=0, window=layers[0].attention.window)
        inner = _experts(rng) if rng.random() < 0.4 else DenseSpec(64 * rng.randint(1, 10))
        norms = rng.choice(NORMS) if rng.random() < 0.3 else "before"
        layers.append(LayerSpec(own, inner, norms=norms))
    return ModelSpec(
        family="random",
        vocab_size=rng.randint(50, 5000),
        hidden_size=width,
        layers=tuple(layers),
        norm_eps=1e-5,
        tie_embeddings=rng.random() < 0.5,
        max_position_embeddings=4096,
        dtype="bfloat16",
        tensor_names=NAMES,
    )


NAMES = {
    **LLAMA_NAMES,
    "post_attention_norm": "a{layer}",
    "post_feed_forward_norm": "f{layer}",
    "router": "r{layer}",
    "router_bias": "rb{layer}",
    "sinks": "sinks{layer}",
    "score_bias": "b{layer}",
    "shared_score": "ss{layer}",
    **{role: f"{role}{{layer}}" for role in ("q_a", "q_b", "kv_a", "kv_b", "q_a_norm")},
    "kv_a_norm": "kv_a_norm{layer}",
    **{
        f"expert_{role}{kind}": f"e{role}{kind}{{layer}}.{{expert}}"
        for role in ("gate", "up", "down")
        for kind in ("", "_bias")
    },
    **{f"shared_{role}": f"s{role}{{layer}}" for role in ("gate", "up", "down")},
}


def _heads(rng: random.Random) -> AttentionSpec:
    kv_heads = rng.choice([1, 2, 4, 8])
    heads = 8 * rng.randint(1, 2)
    return AttentionSpec(
        heads,
        kv_heads,
        8 * rng.randint(1, 8),
        RopeSpec(),
        qkv_bias=rng.random() < 0.3,
        out_bias=rng.random() < 0.3,
        qk_norm=rng.random() < 0.3,
        sinks=rng.random() < 0.3,
    )


def _latent(rng: random.Random) -> AttentionSpec:
    plain, rotated = 16 * rng.randint(1, 4), 16
    rank = rng.choice([None, 32 * rng.randint(1, 4)])
    latent = LatentSpec(64, rotated, plain, 16 * rng.randint(1, 4), rank)
    return AttentionSpec(8, 8, plain + rotated, RopeSpec(), latent=latent)


def _experts(rng: random.Random) -> ExpertsSpec:
    total = rng.choice([4, 8, 16])
    shared = rng.choice([0, 64])
    return ExpertsSpec(
        total,
        rng.randint(1, total),
        64 * rng.randint(1, 4),
        shared_size=shared,
        score_bias=rng.random() < 0.5,
        shared_gate=shared > 0 and rng.random() < 0.5,
        router_bias=rng.random() < 0.3,
        bias=rng.random() < 0.3,
    )


def random_precision(rng: random.Random) -> Precision:
    return Precision(
        rng.choice(["bfloat16", "float16", "float32"]),
        rng.choice(list(WEIGHT_FORMATS)),
        rng.choice(list(KV_FORMATS)),
    )


def random_layout(rng: random.Random, spec: ModelSpec) -> Layout:
    """One that this model can be spread over."""
    while True:
        tp = rng.choice([1, 2, 4, 8])
        layout = Layout(tp, rng.choice([1, 2]), rng.choice([1, tp]))
        try:
            layout.check(spec)
        except ConfigError:
            continue
        return layout


def random_calibration(rng: random.Random, on: Device) -> Calibration:
    """Constants that use every term of every formula."""
    base = default_calibration(on)

    def share() -> float:
        return rng.uniform(0.3, 1.0)

    matmul = {
        name: replace(
            c,
            e_c=share(),
            e_m=share(),
            q=rng.choice([1.0, 2.5, float("inf")]),
            k0=rng.uniform(0, 200),
            q_b=rng.uniform(0, 3),
        )
        for name, c in base.matmul.items()
    }
    attention = replace(
        base.attention["bf16"],
        decode_e_c=share(),
        decode_e_m=share(),
        prefill_e_c=share(),
        prefill_e_m=share(),
        skew=rng.uniform(0, 0.5),
        mixed_prefill=rng.uniform(0.9, 1.2),
        mixed_decode=rng.uniform(0.9, 2.2),
        mixed_overlap_s=rng.uniform(0, 2e-5),
    )
    host = replace(
        base.host,
        c0_s=rng.uniform(0, 1e-3),
        c1_s=rng.uniform(0, 2e-5),
        per_launch_s=rng.choice([0.0, rng.uniform(0, 1e-5)]),
        overlapped=rng.random() < 0.5,
        captured_tokens=rng.choice([0, 16, 512]),
        captured_prompt_tokens=rng.choice([0, 600, 2048]),
    )
    return replace(
        base, matmul=matmul, attention={"bf16": attention}, host=host, origin="calibrated"
    )


def random_setup(rng: random.Random, *, latent: bool | None = None) -> Setup:
    spec = random_spec(rng, latent=latent)
    on = rng.choice([d for d in catalogue().values() if d.kind == "gpu"])
    calibration = random_calibration(rng, on) if rng.random() < 0.7 else None
    return Setup(spec, on, random_layout(rng, spec), random_precision(rng), calibration)


def random_shape(rng: random.Random, most: int = 12) -> StepShape:
    return tuple(
        (rng.choice([1, 1, 1, rng.randint(2, 200)]), rng.randint(0, 700))
        for _ in range(rng.randint(1, most))
    )
