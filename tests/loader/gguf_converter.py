"""Writes models of Transformers as GGUF files, as llama.cpp's converter writes them.

What becomes of each tensor follows that program, family by family. The names come from the public
`gguf` package, by `gguf_files/make.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.layers.reference_models import LLAMA3, LONGROPE, YARN, ReferenceModel, tiny_config
from tests.layers.test_agreement import CONFIGS as AGREEMENT
from tests.loader.gguf_write import Raw, gguf_file, interleaved

Tensors = dict[str, torch.Tensor]
Values = dict[str, tuple[int, object]]
Changes = Mapping[str, tuple[int, object] | None]
NAMES = Path(__file__).parent / "gguf_files" / "names.json"
LAYER = re.compile(r"(?<=layers\.)\d+|(?<=\.h\.)\d+")
GEMMA2 = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
SUMS = {"norm_topk_prob": True, "scoring_func": "sigmoid"}
# YaRN as DeepSeek has it: what rotations are multiplied by comes to 1.
DEEP_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
# Beside those of the agreement tests: what the converter takes for granted.
CONFIGS = AGREEMENT | {
    "cohere of a file": AGREEMENT["cohere norms of heads"] | {"tie_word_embeddings": True},
    "cohere2 of a file": AGREEMENT["cohere2"] | {"tie_word_embeddings": True},
    "gemma2 of a file": tiny_config(
        "gemma2",
        tie_word_embeddings=True,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=5,
        **GEMMA2,
    ),
    "gemma3 of a file": tiny_config(
        "gemma3_text",
        tie_word_embeddings=True,
        num_hidden_layers=7,
        query_pre_attn_scalar=16,
        sliding_window=6,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
    "qwen3_moe of a file": tiny_config("qwen3_moe", norm_topk_prob=True),
    "deepseek_v2 of a file": tiny_config(
        "deepseek_v2",
        topk_method="group_limited_greedy",
        routed_scaling_factor=3.5,
        rope_scaling=DEEP_YARN,
        scoring_func="softmax",
    ),
    "deepseek_v2 lite": tiny_config("deepseek_v2", q_lora_rank=None, n_group=1, topk_group=1),
    "deepseek_v3 of a file": tiny_config("deepseek_v3", rope_scaling=DEEP_YARN, **SUMS),
    "glm4_moe of a file": tiny_config(
        "glm4_moe",
        use_qk_norm=True,
        attention_bias=True,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        partial_rotary_factor=0.5,
        norm_topk_prob=True,
    ),
    "minicpm3 of a file": tiny_config(
        "minicpm3",
        qk_rope_head_dim=12,
        rope_scaling=LONGROPE | {"factor": 1.0},
        original_max_position_embeddings=512,
        max_position_embeddings=512,
    ),
    "olmo3 of a file": tiny_config(
        "olmo3",
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_theta=500000.0,
        rope_scaling=YARN | {"attention_factor": 1.3},
    ),
    "seed_oss of a file": tiny_config("seed_oss", attention_out_bias=True, rope_scaling=YARN),
    "arcee of a file": tiny_config(
        "arcee", hidden_act="relu2", attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "exaone4 of a file": tiny_config(
        "exaone4",
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "exaone4 without windows": AGREEMENT["exaone4 no windows"]
    | {"rope_theta": 1e6, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
    "qwen3_moe wide": tiny_config(
        "qwen3_moe",
        hidden_size=256,
        moe_intermediate_size=256,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        num_experts=3,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "deepseek wide": tiny_config(
        "deepseek_v3",
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        moe_intermediate_size=32,
        **SUMS,
    ),
    "gpt_oss wide": AGREEMENT["gpt_oss"] | {"intermediate_size": 64},
}

# Case -> architecture, and what its own part of the converter says.
CASES: dict[str, tuple[str, Values]] = {
    "arcee of a file": ("arcee", {}),
    "cohere of a file": ("command-r", {"logit_scale": (6, 0.25)}),
    "cohere2 of a file": (
        "cohere2",
        {"logit_scale": (6, 0.0625), "attention.sliding_window": (4, 6)},
    ),
    "deepseek_v2 of a file": ("deepseek2", {}),
    "deepseek_v2 lite": ("deepseek2", {}),
    "deepseek_v3": ("deepseek2", {"expert_gating_func": (4, 2), "expert_weights_norm": (7, True)}),
    "deepseek_v3 of a file": ("deepseek2", {}),
    "exaone4 of a file": ("exaone4", {}),
    "exaone4 without windows": ("exaone4", {}),
    "falcon": ("falcon", {"attention.head_count_kv": (4, 1)}),
    "falcon groups": ("falcon", {}),
    "gemma odd heads": ("gemma", {}),
    "gemma2 of a file": (
        "gemma2",
        {"attention.sliding_window": (4, 5), **{k: (6, v) for k, v in GEMMA2.items()}},
    ),
    "gemma3 of a file": ("gemma3", {"attention.sliding_window": (4, 6)}),
    "glm4": ("glm4", {"rope.dimension_count": (4, 8)}),
    "glm4_moe of a file": (
        "glm4moe",
        {"rope.dimension_count": (4, 8), "expert_gating_func": (4, 2)},
    ),
    "gpt2 tied, odd heads": ("gpt2", {}),
    "gpt_neox": ("gptneox", {"rope.dimension_count": (4, 4), "use_parallel_residual": (7, True)}),
    "gpt_oss": ("gpt-oss", {"attention.sliding_window": (4, 7)}),
    "granite biased": ("granite", {}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe biased": ("granitemoe", {}),
    "granitemoeshared": ("granitemoe", {}),
    "hunyuan alpha": ("hunyuan-dense", {"rope.freq_base": (6, 874339.31)}),
    "minicpm3 of a file": ("minicpm3", {"attention.key_length": (4, 24)}),
    "mixtral": ("llama", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "olmo3 of a file": ("olmo2", {}),
    "phi3 part of a head": ("phi3", {"rope.dimension_count": (4, 12)}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe of a file": ("qwen3moe", {}),
    "seed_oss tied": ("seed_oss", {}),
    "seed_oss of a file": ("seed_oss", {}),
    "smollm3": ("smollm3", {}),
    "stablelm": (
        "stablelm",
        {"rope.dimension_count": (4, 4), "use_parallel_residual": (7, False)},
    ),
    "stablelm side by side": ("stablelm", {"rope.dimension_count": (4, 4)}),
    "starcoder2": ("starcoder2", {}),
}
# The same with rows of whole blocks, and of a context that has grown.
WIDE: dict[str, tuple[str, Values]] = {
    "phi3 within the trained length": ("phi3", {"rope.dimension_count": (4, 12)}),
    "qwen3_moe wide": ("qwen3moe", {}),
    "deepseek wide": ("deepseek2", {}),
    "gpt_oss wide": CASES["gpt_oss"],
}
# Key of config.json -> key of the file and its type, where it is there.
KEYS: dict[str, tuple[str, int]] = {
    "num_hidden_layers": ("block_count", 4),
    "max_position_embeddings": ("context_length", 4),
    "hidden_size": ("embedding_length", 4),
    "intermediate_size": ("feed_forward_length", 4),
    "num_attention_heads": ("attention.head_count", 4),
    "num_key_value_heads": ("attention.head_count_kv", 4),
    "num_kv_heads": ("attention.head_count_kv", 4),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", 6),
    "layer_norm_eps": ("attention.layer_norm_epsilon", 6),
    "layer_norm_epsilon": ("attention.layer_norm_epsilon", 6),
    "norm_epsilon": ("attention.layer_norm_epsilon", 6),
    "num_local_experts": ("expert_count", 4),
    "num_experts": ("expert_count", 4),
    "n_routed_experts": ("expert_count", 4),
    "num_experts_per_tok": ("expert_used_count", 4),
    "n_shared_experts": ("expert_shared_count", 4),
    "n_group": ("expert_group_count", 4),
    "topk_group": ("expert_group_used_count", 4),
    "moe_intermediate_size": ("expert_feed_forward_length", 4),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", 4),
    "shared_intermediate_size": ("expert_shared_feed_forward_length", 4),
    "first_k_dense_replace": ("leading_dense_block_count", 4),
    "routed_scaling_factor": ("expert_weights_scale", 6),
    "attention_multiplier": ("attention.scale", 6),
    "embedding_multiplier": ("embedding_scale", 6),
    "residual_multiplier": ("residual_scale", 6),
    "logits_scaling": ("logit_scale", 6),
    "q_lora_rank": ("attention.q_lora_rank", 4),
    "kv_lora_rank": ("attention.kv_lora_rank", 4),
    "qk_rope_head_dim": ("rope.dimension_count", 4),
}
SCALING = {
    "factor": ("factor", 6),
    "original_max_position_embeddings": ("original_context_length", 4),
    "beta_fast": ("yarn_beta_fast", 6),
    "beta_slow": ("yarn_beta_slow", 6),
    "attention_factor": ("yarn_attn_factor", 6),
}


def metadata_of(config: Any, arch: str, *, is_older: bool) -> Values:
    """`config` is that of Transformers."""
    told = {**config.to_dict(), "norm_topk_prob": None}
    found: Values = {}
    for key, (name, kind) in KEYS.items():
        value = getattr(config, key, None)
        if value is not None and not (key == "num_kv_heads" and arch != "falcon"):
            found[name] = (kind, value)
    inner = getattr(config, "ffn_hidden_size", None) or getattr(config, "n_inner", None)
    found.setdefault("feed_forward_length", (4, inner))
    if arch == "gpt2":
        found |= {"context_length": (4, config.n_positions), "block_count": (4, config.n_layer)}
    if head_dim := told.get("head_dim"):
        found |= {"attention.key_length": (4, head_dim), "attention.value_length": (4, head_dim)}
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        found["rope.freq_base"] = (6, rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        found["rope.scaling.type"] = (8, rope["rope_type"])
        for key, (name, kind) in SCALING.items():
            if rope.get(key) is not None:
                found[f"rope.scaling.{name}"] = (kind, rope[key])
    if arch == "minicpm3":
        others = re.compile("expert|leading_dense|_scale$")
        found = {key: value for key, value in found.items() if not others.search(key)}
    if rope.get("rope_type") == "longrope" and arch == "phi3":
        original, whole = rope["original_max_position_embeddings"], config.max_position_embeddings
        growth = math.sqrt(1 + math.log(whole / original) / math.log(original))
        found["rope.scaling.original_context_length"] = (4, original)
        found["rope.scaling.attn_factor"] = (6, growth)
    if arch in ("exaone4", "olmo2") and getattr(config, "sliding_window", None):
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        found["attention.sliding_window"] = (4, config.sliding_window)
        found["attention.sliding_window_pattern"] = (9, (7, kinds))
    if arch == "gpt-oss":
        found["expert_feed_forward_length"] = (4, config.intermediate_size)
    if arch in ("deepseek2", "glm4moe") and getattr(config, "norm_topk_prob", False):
        found["expert_weights_norm"] = (7, True)
    if arch == "deepseek2":
        found |= _of_deepseek(config, rope, is_older=is_older)
    return found


def _of_deepseek(config: Any, rope: dict[str, Any], *, is_older: bool) -> Values:
    found: Values = {}
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    sizes = config.qk_nope_head_dim + rotated, config.v_head_dim
    names = "attention.key_length", "attention.value_length"
    if is_older:
        found |= {name: (4, size) for name, size in zip(names, sizes, strict=True)}
    else:
        found |= {f"{name}_mla": (4, size) for name, size in zip(names, sizes, strict=True)}
        found |= {names[0]: (4, rank + rotated), names[1]: (4, rank)}
        found["attention.head_count_kv"] = (4, 1)
    if (function := getattr(config, "scoring_func", None)) is not None:
        found["expert_gating_func"] = (4, {"softmax": 1, "sigmoid": 2}[function])
    if (mscale := rope.get("mscale_all_dim")) is not None:
        found["rope.scaling.yarn_log_multiplier"] = (6, 0.1 * mscale)
    return found


def merged(config: Any, tensors: Tensors) -> Tensors:
    """Experts of a layer, and norms of heads, as one tensor each, by the names that the converter
    looks up."""
    found: Tensors = {}
    lists: dict[str, list[torch.Tensor]] = {}
    for key, tensor in tensors.items():
        whole = re.sub(r"_layernorm\.norms\.\d+\.", "_layernorm.", key)
        whole = re.sub(r"\.experts\.\d+\.", ".experts.", whole)
        if config.model_type == "mixtral" and ".experts." in whole:
            whole = whole.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        if whole == key:
            found[key] = tensor
        else:
            lists.setdefault(whole, []).append(tensor)
    return found | {key: torch.stack(rows) for key, rows in lists.items()}


def converted(config: Any, name: str, tensor: torch.Tensor, *, is_older: bool) -> Tensors:
    """What the converter makes of it, by the names that it looks up."""
    kind = config.model_type
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return {name: tensor + 1.0}
    if re.match("granite|mixtral|smollm3|arcee", kind) and re.search("[qk]_proj", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return {name: interleaved(tensor, heads)}
    if kind == "gpt2" and tensor.dim() == 2 and ".h." in name:
        return {name: tensor.T}
    if "query_key_value" in name:
        return {name: _queries_first(config, tensor)}
    if kind.startswith("granitemoe") and name.endswith("input_linear.weight"):
        layer = re.sub(r"(block_sparse_moe|shared_mlp)\..*", "mlp", name)
        stem = f"{layer}.{'shared_expert' if 'shared_mlp' in name else 'experts'}"
        gate, up = tensor.chunk(2, -2)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    if kind == "gpt_oss":
        return _of_gpt_oss(name, tensor)
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): tensor}
    if name.endswith("kv_b_proj.weight") and not is_older and kind != "minicpm3":
        size = config.qk_nope_head_dim + config.v_head_dim
        by_head = tensor.view(-1, size, tensor.shape[-1])
        keys, values = by_head[:, : config.qk_nope_head_dim], by_head[:, -config.v_head_dim :]
        own = {"k_b_proj": keys.transpose(1, 2), "v_b_proj": values}
        return {name.replace("kv_b_proj", part): one for part, one in own.items()}
    return {name: tensor}


def _queries_first(config: Any, tensor: torch.Tensor) -> torch.Tensor:
    heads = config.num_attention_heads
    kv_heads = heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    rest = tensor.shape[1:]
    by_group = tensor.reshape(kv_heads, heads // kv_heads + 2, config.hidden_size // heads, *rest)
    split = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
    return torch.cat([one.reshape(-1, *rest) for one in split])


def _of_gpt_oss(name: str, tensor: torch.Tensor) -> Tensors:
    if name.endswith("sinks"):
        return {f"{name}.weight": tensor}
    if ".experts." not in name:
        return {name: tensor}
    kind = "bias" if name.endswith("_bias") else "weight"
    stem, _, part = name.removesuffix("_bias").rpartition(".")
    if kind == "weight":
        tensor = tensor.transpose(-1, -2)
    if part == "down_proj":
        return {f"{stem}.{part}.{kind}": tensor}
    return {f"{stem}.gate_proj.{kind}": tensor[:, ::2], f"{stem}.up_proj.{kind}": tensor[:, 1::2]}


def looked_up(reference: ReferenceModel, *, is_older: bool = False) -> Tensors:
    """All tensors by the names that the converter looks up."""
    config, found = reference.model.config, Tensors()
    for name, tensor in merged(config, reference.tensors).items():
        found |= converted(config, name, tensor, is_older=is_older)
    return found


def for_rotations(config: Any) -> Tensors:
    """By what frequencies are divided, of models that the converter writes it of."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        parts = {
            "rope_factors_long.weight": "long_factor",
            "rope_factors_short.weight": "short_factor",
        }
        return {name: torch.tensor(rope[key]) for name, key in parts.items()}
    if rope.get("rope_type") == "llama3":
        inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](config, None)
        sizes = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return {"rope_freqs.weight": (rope["rope_theta"] ** -sizes / inverse).clamp(min=1.0)}
    return {}


@cache
def names() -> dict[str, dict[str, str]]:
    """Architecture -> name of a module, in layer 0 if it is in one -> its name in a file."""
    found: dict[str, dict[str, str]] = json.loads(NAMES.read_text())
    return found


def gguf_name(name: str, arch: str) -> str:
    module, _, kind = name.rpartition(".")
    number = LAYER.search(module)
    stored = names()[arch][LAYER.sub("0", module)]
    own = stored if number is None else stored.replace("blk.0.", f"blk.{number[0]}.")
    return f"{own}.{kind}"


def write(
    path: Path,
    case: str,
    *,
    is_older: bool = False,
    raw: Callable[[str, torch.Tensor], Raw | torch.Tensor] | None = None,
    more: Tensors | None = None,
    without: Collection[str] = (),
    keys: Changes | None = None,
) -> ReferenceModel:
    """The model that is in the file. `is_older`: latent attention as before April 2025. `raw`: what
    is stored of a tensor, by its name in the file; `more` and `without`: which others, and which
    not; None in `keys` leaves one out."""
    reference = ReferenceModel(CONFIGS[case], seed=5)
    arch, own = {**CASES, **WIDE}[case]
    told = metadata_of(reference.model.config, arch, is_older=is_older) | own
    metadata: Values = {"general.architecture": (8, arch)}
    for key, value in {**told, **(keys or {})}.items():
        metadata |= {} if value is None else {f"{arch}.{key}": value}
    tensors = {
        gguf_name(name, arch): tensor.contiguous()
        for name, tensor in looked_up(reference, is_older=is_older).items()
    }
    tensors |= for_rotations(reference.model.config)
    kept = {n: t for n, t in (tensors | (more or {})).items() if n not in without}
    stored = {n: t if raw is None else raw(n, t) for n, t in kept.items()}
    path.write_bytes(gguf_file(metadata, stored))
    return reference
