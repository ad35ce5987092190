"""A small random model folder with a byte-level tokenizer and a chat template, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ridgeline.architectures import expected_tensors, read_spec

SPECIALS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ ('<|assistant|>' if m.role == 'assistant' else '<|user|>') + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A Llama config small enough for thousands of steps a second."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 261,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    } | changes


def write_tokenizer(folder: Path, *, chat_template: bool = True) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    if chat_template:
        config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    tokenizer: bool = True,
    chat_template: bool = True,
    weights: bool = True,
    **changes: Any,
) -> Path:
    """Write a model of `tiny_config(**changes)` to `folder`; weights have std 0.2, so that ties
    between tokens are rare."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        write_tokenizer(folder, chat_template=chat_template)
    if weights:
        noise = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in expected_tensors(read_spec(config)).items():
            values = 0.2 * torch.randn(shape, generator=noise)
            tensors[name] = 1.0 + values if "norm" in name else values
        save_file(tensors, str(folder / "model.safetensors"))
    return folder
