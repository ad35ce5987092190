"""Writes whole GGUF models, right ones and wrong ones: metadata, tensor infos, and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.loader.gguf import GGUFTensor
from tests.loader.write import gguf, raw_bytes

Metadata = Mapping[str, tuple[int, object]]
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


def metadata_of(config: Mapping[str, Any], **changes: tuple[int, object] | None) -> Metadata:
    """What says the same as this config of a Llama; `changes` (with _ for .) of None leave out."""
    own: dict[str, tuple[int, object]] = {
        "block_count": (4, config["num_hidden_layers"]),
        "context_length": (4, config["max_position_embeddings"]),
        "embedding_length": (4, config["hidden_size"]),
        "feed_forward_length": (4, config["intermediate_size"]),
        "attention.head_count": (4, config["num_attention_heads"]),
        "attention.head_count_kv": (4, config["num_key_value_heads"]),
        "attention.key_length": (4, config["head_dim"]),
        "attention.layer_norm_rms_epsilon": (6, config["rms_norm_eps"]),
        "rope.freq_base": (6, config["rope_theta"]),
    }
    whole: dict[str, tuple[int, object] | None] = {
        "general.architecture": (8, "llama"),
        **{f"llama.{key}": value for key, value in own.items()},
        "tokenizer.ggml.bos_token_id": (4, config["bos_token_id"]),
        "tokenizer.ggml.eos_token_id": (4, config["eos_token_id"]),
        **changes,
    }
    return {key: value for key, value in whole.items() if value is not None}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{number}.{PARTS[part]}.{kind}"


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row: the two numbers that are rotated together become neighbours."""
    half = len(tensor) // heads // 2
    rows = [
        tensor[head * 2 * half + part * half + pair]
        for head in range(heads)
        for pair in range(half)
        for part in (0, 1)
    ]
    return torch.stack(rows)


def llama_tensors(
    tensors: Mapping[str, torch.Tensor], heads: int, kv_heads: int
) -> dict[str, torch.Tensor]:
    """The tensors of a Llama checkpoint as a GGUF file has them."""
    turned = {"q_proj": heads, "k_proj": kv_heads}
    found = {}
    for name, tensor in tensors.items():
        number = turned.get(name.split(".")[-2], 0)
        found[gguf_name(name)] = interleaved(tensor, number) if number else tensor
    return found


@dataclass(frozen=True, slots=True)
class Raw:
    """Blocks of a type, by its number in a file."""

    shape: tuple[int, ...]
    kind: int
    data: bytes


def gguf_file(metadata: Metadata, tensors: Mapping[str, torch.Tensor | Raw]) -> bytes:
    """A file with these tensors in their own dtype."""
    infos, data = [], bytearray()
    for name, tensor in tensors.items():
        one = tensor
        if not isinstance(one, Raw):
            one = Raw(tuple(one.shape), TYPES[one.dtype], raw_bytes(one))
        infos.append(GGUFTensor(name, one.shape, one.kind, len(data)))
        data += one.data
        data += bytes(-len(data) % 32)
    head = gguf(metadata, tuple(infos))
    return head + bytes(-len(head) % 32) + data
