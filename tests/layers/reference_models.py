"""Tiny Transformers models of every family with weights large enough to tell mistakes apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_GONE = object()
GONE: Any = _GONE
VOCAB = 97
WEIGHT_STD = 0.2

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 12.0],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
# Keys that a family has under other names, or with other values.
OWN_KEYS: Mapping[str, Mapping[str, Any]] = {
    "cohere": {"head_dim": _GONE, "layer_norm_eps": 1e-5, "pad_token_id": None},
    "cohere2": {"head_dim": _GONE, "layer_norm_eps": 1e-5, "pad_token_id": None},
    "falcon": {"head_dim": _GONE, "num_key_value_heads": _GONE, "intermediate_size": _GONE},
    "gpt2": {
        "head_dim": _GONE,
        "hidden_size": _GONE,
        "num_attention_heads": _GONE,
        "num_hidden_layers": _GONE,
        "num_key_value_heads": _GONE,
        "max_position_embeddings": _GONE,
        "intermediate_size": _GONE,
        "hidden_act": _GONE,
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
    },
    "gpt_neox": {
        "head_dim": _GONE,
        "num_key_value_heads": _GONE,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "rotary_emb_base": 5000.0,
        "rope_theta": _GONE,
    },
    "stablelm": {"head_dim": _GONE, "layer_norm_eps": 1e-5},
    "phi3": {"head_dim": _GONE, "pad_token_id": None},
    "starcoder2": {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
}


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json of the older generation of keys; None removes a key."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if model_type == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        config |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        config |= {"shared_expert_intermediate_size": 48} if model_type == "qwen2_moe" else {}
    if model_type.startswith("granitemoe"):
        config |= {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40}
    if model_type == "granitemoeshared":
        config["shared_intermediate_size"] = 48
    if model_type == "glm4_moe":
        config |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    if model_type == "gpt_oss":
        config |= {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 7}
        config |= {"intermediate_size": 48, "num_hidden_layers": 4}
    if model_type == "mistral":
        config["sliding_window"] = None
    if model_type.startswith(("deepseek", "minicpm")):
        config |= LATENT | {"num_key_value_heads": config["num_attention_heads"], "head_dim": _GONE}
    config |= OWN_KEYS.get(model_type, {})
    config |= changes
    return {key: value for key, value in config.items() if value is not _GONE}


def newer_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config as Transformers 5 writes it: `rope_parameters` and `dtype`."""
    newer = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config.get("rope_theta", 10000.0),
    } | dict(config.get("rope_scaling") or {})
    newer["dtype"] = newer.pop("torch_dtype")
    return newer


@dataclass
class ReferenceModel:
    """A Transformers model, its config.json and its checkpoint tensors."""

    config: dict[str, Any]
    seed: int = 0
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        given = deepcopy(self.config)  # some classes write into it
        model_type = given.pop("model_type")
        config = AutoConfig.for_model(model_type, **given)
        config._attn_implementation = "eager"
        make: Any = AutoModelForCausalLM.from_config
        self.model = make(config, dtype=torch.float32).eval()
        noise = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            learned = [one for one in self.model.named_buffers() if "correction_bias" in one[0]]
            for name, weight in (*self.model.named_parameters(), *learned):
                around = 1.0 if "norm" in name and "gemma" not in model_type else 0.0
                weight.copy_(around + WEIGHT_STD * torch.randn(weight.shape, generator=noise))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Named as in a checkpoint on disk."""
        state = {k: v.detach() for k, v in self.model.state_dict().items()}
        if self.config.get("tie_word_embeddings"):
            state.pop("lm_head.weight", None)
        model_type = self.config["model_type"]
        if model_type.startswith("granitemoe"):
            return {_granite_name(name): tensor for name, tensor in state.items()}
        return dict(_each_expert(state, model_type)) if model_type in EXPERT_NAMES else state

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] in one pass without a cache."""
        with torch.inference_mode():
            out: torch.Tensor = self.model(torch.tensor([list(token_ids)])).logits[0]
        return out

    def greedy(self, prompt: Sequence[int], num: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer


def _granite_name(name: str) -> str:
    """That of the files: Transformers 5 has its own."""
    for ours, stored in (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"),
        ("router.weight", "router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe.{ours}", f"block_sparse_moe.{stored}")
    return name


# model type -> its name of a layer's part with experts, and of the matrices of one
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_moe"),
        ("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
}


def _each_expert(
    state: Mapping[str, torch.Tensor], model_type: str
) -> list[tuple[str, torch.Tensor]]:
    """Transformers 5 keeps experts stacked in memory; files have one matrix per expert."""
    part, *roles = EXPERT_NAMES[model_type]
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in state.items():
        if ".shared_experts." in name:
            found.append((name, tensor))
            continue
        stem, _, stacked = name.replace(".mlp.", f".{part}.").rpartition("experts.")
        if stacked == "gate_up_proj":
            halves = dict(zip(roles[:2], tensor.chunk(2, 1), strict=True))
        elif stacked == "down_proj":
            halves = {roles[-1]: tensor}
        else:
            found.append((name.replace(".mlp.", f".{part}."), tensor))
            continue
        for role, matrices in halves.items():
            found += [
                (f"{stem}experts.{expert}.{role}.weight", matrix)
                for expert, matrix in enumerate(matrices)
            ]
    return found
