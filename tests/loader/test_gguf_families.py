"""Files as llama.cpp's converter writes them of families with layer norms or fused
tensors give the logits of Transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM
from ridgeline.errors import ConfigError
from tests.conftest import TEST_DEVICE
from tests.layers.reference_models import ReferenceModel, tiny_config
from tests.layers.test_agreement import CONFIGS, prompts
from tests.loader.gguf_write import gguf_file, interleaved

Tensors = dict[str, torch.Tensor]
SHARED = {
    r"(model\.embed_tokens|transformer\.wte|gpt_neox\.embed_in|transformer\.word_embeddings)": (
        "token_embd"
    ),
    r"transformer\.wpe": "position_embd",
    r"(model\.norm|transformer\.ln_f|gpt_neox\.final_layer_norm)": "output_norm",
    r"lm_head": "output",
}
# What the converter takes for granted, since its models have it.
CONFIGS = CONFIGS | {
    "gemma2 of a file": tiny_config(
        "gemma2",
        tie_word_embeddings=True,
        head_dim=24,
        query_pre_attn_scalar=24,
        sliding_window=5,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
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
}
LAYER = r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.+)"
PARTS = {
    r"input_layernorm|ln_1|ln_mlp": "attn_norm",
    r"ln_attn": "attn_norm_2",
    r"post_attention_layernorm|ln_2": "ffn_norm",
    r"self_attn\.([qkv])_proj": r"attn_\1",
    r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"self_attn\.o_proj|attn\.c_proj|(self_)?attention\.dense": "attn_output",
    r"self_attn\.qkv_proj|attn\.c_attn|(self_)?attention\.query_key_value": "attn_qkv",
    r"mlp\.gate_proj": "ffn_gate",
    r"mlp\.(up_proj|c_fc|dense_h_to_4h|gate_up_proj)": "ffn_up",
    r"mlp\.(down_proj|c_proj|dense_4h_to_h)": "ffn_down",
}
MORE: dict[str, tuple[str, str, dict[str, tuple[int, object]]]] = {
    "cohere norms of heads": ("command-r", "layer", {"logit_scale": (6, 0.25)}),
    "cohere2": (
        "cohere2",
        "layer",
        {"logit_scale": (6, 0.0625), "attention.sliding_window": (4, 6)},
    ),
    "falcon": ("falcon", "layer", {}),
    "falcon groups": ("falcon", "layer", {}),
    "gemma odd heads": ("gemma", "rms", {}),
    "gemma2 of a file": (
        "gemma2",
        "rms",
        {
            "attention.sliding_window": (4, 5),
            "attn_logit_softcapping": (6, 3.0),
            "final_logit_softcapping": (6, 5.0),
        },
    ),
    "gemma3 of a file": (
        "gemma3",
        "rms",
        {
            "attention.sliding_window": (4, 6),
            "rope.freq_base": (6, 500000.0),
            "rope.scaling.type": (8, "linear"),
            "rope.scaling.factor": (6, 4.0),
        },
    ),
    "glm4": ("glm4", "rms", {"rope.dimension_count": (4, 8)}),
    "granite biased": (
        "granite",
        "rms",
        {
            "attention.scale": (6, 0.11),
            "embedding_scale": (6, 12.0),
            "residual_scale": (6, 0.22),
            "logit_scale": (6, 8.0),
        },
    ),
    "hunyuan alpha": ("hunyuan-dense", "rms", {"rope.freq_base": (6, 874339.31)}),
    "olmo2": ("olmo2", "rms", {}),
    "smollm3": ("smollm3", "rms", {}),
    "gpt2 tied, odd heads": ("gpt2", "layer", {}),
    "gpt_neox": (
        "gptneox",
        "layer",
        {"rope.dimension_count": (4, 4), "use_parallel_residual": (7, True)},
    ),
    "phi3 part of a head": ("phi3", "rms", {"rope.dimension_count": (4, 12)}),
    "stablelm": (
        "stablelm",
        "layer",
        {"rope.dimension_count": (4, 4), "use_parallel_residual": (7, False)},
    ),
    "stablelm side by side": ("stablelm", "layer", {"rope.dimension_count": (4, 4)}),
    "starcoder2": ("starcoder2", "layer", {}),
}


# Norms behind a branch, by the name that a Llama has for the one before its feed-forward.
BEHIND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN_PARTS = {
    **dict.fromkeys(("gemma2", "gemma3", "olmo2"), BEHIND),
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "hunyuan-dense": {
        r"self_attn\.query_layernorm": "attn_q_norm",
        r"self_attn\.key_layernorm": "attn_k_norm",
    },
}


def gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    for pattern, stored in SHARED.items():
        if re.fullmatch(pattern, stem):
            return f"{stored}.{kind}"
    found = re.fullmatch(LAYER, stem)
    assert found is not None, name
    for pattern, stored in (*OWN_PARTS.get(arch, {}).items(), *PARTS.items()):
        if part := re.fullmatch(pattern, found[2]):
            return f"blk.{found[1]}.{part.expand(stored)}.{kind}"
    raise AssertionError(name)


def converted(name: str, model: Any, tensor: torch.Tensor) -> torch.Tensor:
    """What the converter makes of it."""
    config = model.config
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1.0
    if config.model_type in ("granite", "smollm3") and re.search("[qk]_proj", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return interleaved(tensor, heads)
    if config.model_type == "gpt2" and tensor.dim() == 2 and ".h." in name:
        return tensor.T.contiguous()
    if "query_key_value" not in name:
        return tensor
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    kv_heads = heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    by_group = tensor.reshape(kv_heads, heads // kv_heads + 2, size, *tensor.shape[1:])
    split = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
    return torch.cat([one.reshape(-1, *tensor.shape[1:]) for one in split])


def stacked(tensors: Tensors) -> Tensors:
    """Norms of single heads as rows of one tensor."""
    found: Tensors = {}
    heads: dict[str, list[torch.Tensor]] = {}
    for key, tensor in tensors.items():
        whole = re.sub(r"_layernorm\.norms\.\d+\.", "_norm.", key)
        if whole == key:
            found[key] = tensor
        else:
            heads.setdefault(whole, []).append(tensor)
    return found | {key: torch.stack(rows) for key, rows in heads.items()}


def written(path: Path, name: str, **changes: tuple[int, object]) -> ReferenceModel:
    reference = ReferenceModel(CONFIGS[name], seed=5)
    arch, norm, more = MORE[name]
    config = reference.model.config
    inner = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None)
    kind = "layer_norm_rms_epsilon" if norm == "rms" else "layer_norm_epsilon"
    own: dict[str, tuple[int, object]] = {
        "block_count": (4, config.num_hidden_layers),
        "context_length": (4, config.max_position_embeddings),
        "embedding_length": (4, config.hidden_size),
        "feed_forward_length": (4, inner or CONFIGS[name]["n_inner"]),
        "attention.head_count": (4, config.num_attention_heads),
        f"attention.{kind}": (6, 1e-5),
        **more,
        **changes,
    }
    if "multi_query" in config.to_dict():
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
        own["attention.head_count_kv"] = (4, kv_heads)
    elif kv_heads := getattr(config, "num_key_value_heads", None):
        own["attention.head_count_kv"] = (4, kv_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        own.setdefault("rope.freq_base", (6, rope["rope_theta"]))
    if head_dim := getattr(config, "head_dim", None):
        own["attention.key_length"] = own["attention.value_length"] = (4, head_dim)
    metadata = {"general.architecture": (8, arch)} | {f"{arch}.{k}": v for k, v in own.items()}
    tensors = {
        gguf_name(key, arch): converted(key, reference.model, tensor).contiguous()
        for key, tensor in stacked(reference.tensors).items()
    }
    path.write_bytes(gguf_file(metadata, tensors))
    return reference


@pytest.mark.parametrize("name", MORE)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    reference = written(path, name)
    ids = prompts(7, (24,))["r0"]
    options: dict[str, Any] = {"device": TEST_DEVICE, "dtype": "float32", "num_blocks": 80}
    with LLM(str(path), block_size=4, warm_up="off", **options) as llm:
        found = llm.logits(ids).cpu()
        for row in llm.memory:
            assert row.measured in (None, row.predicted), row
    torch.testing.assert_close(found, reference.logits(ids), atol=1e-4, rtol=1e-4)


def test_what_a_file_says_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "starcoder2", use_parallel_residual=(7, True))
    with pytest.raises(ConfigError, match="use_parallel_residual is True"):
        LLM(str(path), device="cpu")
