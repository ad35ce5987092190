"""How does a Qwen3-MoE checkpoint of bfloat16 become a GGUF file? For a Python that has gguf.

    python bench/cpu/peer_llama_experts.py --model DIR --to FILE.gguf

Norms and routers become float32, as llama.cpp's converter has them; all else stays as it is. There
is no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


class Checkpoint:
    """The bfloat16 tensors of one file, as their bits."""

    def __init__(self, file: Path) -> None:
        self._bytes = np.memmap(file, dtype=np.uint8, mode="r")
        size = int(self._bytes[:8].view(np.uint64)[0])
        self._entries = json.loads(bytes(self._bytes[8 : 8 + size]))
        self._begin = 8 + size

    def bits(self, name: str) -> np.ndarray[Any, Any]:
        entry = self._entries[f"{name}.weight"]
        begin, end = (self._begin + at for at in entry["data_offsets"])
        return self._bytes[begin:end].view(np.uint16).reshape(entry["shape"])


def write(model: Path, to: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    checkpoint = Checkpoint(model / "model.safetensors")
    writer = gguf.GGUFWriter(to, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)

    def add(name: str, bits: np.ndarray[Any, Any]) -> None:
        if bits.ndim == 1 or "gate_inp" in name:
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(f"{name}.weight", wide)
            return
        kind = gguf.GGMLQuantizationType.BF16
        raw = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)

    for theirs, ours in OUTSIDE.items():
        add(ours, checkpoint.bits(theirs))
    for layer in range(config["num_hidden_layers"]):
        inside = f"model.layers.{layer}"
        for theirs, ours in NAMES.items():
            add(f"blk.{layer}.{ours}", checkpoint.bits(f"{inside}.{theirs}"))
        for role in ("gate", "up", "down"):
            each = [
                checkpoint.bits(f"{inside}.mlp.experts.{expert}.{role}_proj")
                for expert in range(config["num_experts"])
            ]
            add(f"blk.{layer}.ffn_{role}_exps", np.stack(each))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    write(args.model, args.to)


if __name__ == "__main__":
    main()
