"""Makes the GGUF files in this folder, and what they must be read as. Run it from the root:

    python -m tests.loader.gguf_files.make

It needs the packages `gguf` (numbers, names, the writer) and `transformers` (the logits), of which
the tests need neither. `types.gguf` has one matrix of every type that is read, and
`types.safetensors` its numbers by the `gguf` package. The others are tiny random models: the
weights of a Transformers model, in the order of llama.cpp's converter, each rounded to another
type; `models.safetensors` has the last logits of Transformers for the numbers that came of it.
`names.json` has the names of what `gguf_converter.py` writes.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.layers.reference_models import ReferenceModel
from tests.loader.gguf_converter import CASES, CONFIGS, LAYER, NAMES, looked_up
from tests.tiny_model import SPECIALS, TEMPLATE

gguf: Any = import_module("gguf")
HERE = Path(__file__).parent
TYPES = gguf.GGMLQuantizationType
SEED = 20
# Where a block of random bytes has its float16 numbers.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
ROUNDED = ("Q8_0", "Q5_1", "Q4_0", "F16", "Q5_0", "BF16", "Q4_1", "Q8_0", "F32")
NUM_LOGITS, NUM_TOKENS = 4, 16
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_types(noise: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(HERE / "types.gguf", "llama")
    values: dict[str, torch.Tensor] = {}
    for name in ("F32", "F16", "BF16"):
        numbers = noise.standard_normal((2, 256)).astype(np.float32)
        add(writer, name, gguf.quantize(numbers, TYPES[name]), TYPES[name], values)
    for name in PACKED:
        block, size = gguf.GGML_QUANT_SIZES[TYPES[name]]
        raw = noise.integers(0, 256, (2, 256 // block, size), dtype=np.uint8)
        for at in HALVES.get(name, (0,)):
            halves = noise.standard_normal(raw.shape[:2]).astype(np.float16)
            raw[:, :, at : at + 2] = halves.view(np.uint8).reshape(*raw.shape[:2], 2)
        if name == "MXFP4":
            raw[:, :, 0] = noise.integers(100, 154, raw.shape[:2])  # a power of two
        add(writer, name, raw.reshape(2, -1), TYPES[name], values)
    finish(writer)
    save_file(values, HERE / "types.safetensors")


def add(
    writer: Any,
    name: str,
    raw: np.ndarray[Any, Any],
    kind: Any,
    values: dict[str, torch.Tensor],
) -> None:
    writer.add_tensor(name, raw, raw_dtype=kind)
    values[name] = torch.from_numpy(gguf.dequantize(raw, kind).copy())


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter orders the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def uninterleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def make_model(name: str, config: Any) -> tuple[dict[str, Any], torch.Tensor]:
    torch.manual_seed(SEED)
    made: Any = AutoModelForCausalLM
    model = made.from_config(config, dtype=torch.float32).eval()
    writer = gguf.GGUFWriter(HERE / f"{name}.gguf", config.model_type)
    add_metadata(writer, config)
    turns = config.model_type == "llama"
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for number, (key, parameter) in enumerate(parameters.items()):
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.2)
            heads = 0
            if turns and ("q_proj" in key or "k_proj" in key):
                q = "q_proj" in key
                heads = config.num_attention_heads if q else config.num_key_value_heads
            weight = parameter.numpy()
            weight = interleaved(weight, heads) if heads else weight
            kind = TYPES[ROUNDED[number % len(ROUNDED)] if weight.ndim > 1 else "F32"]
            raw = gguf.quantize(np.ascontiguousarray(weight), kind)
            writer.add_tensor(stored_name(key), raw, raw_dtype=kind)
            got = gguf.dequantize(raw, kind)
            got = uninterleaved(got, heads) if heads else got
            parameter.copy_(torch.from_numpy(got.copy()))
        if getattr(config, "rope_parameters", {}).get("rope_type") == "llama3":
            writer.add_tensor("rope_freqs.weight", divisors(config))
        finish(writer)
        prompt = [1, *torch.randint(5, config.vocab_size, (11,)).tolist()]
        logits = model(torch.tensor([prompt])).logits[0, -NUM_LOGITS:]
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return {"prompt": prompt, "greedy": ids[len(prompt) :]}, logits.contiguous()


def stored_name(key: str) -> str:
    part, _, kind = key.rpartition(".")
    if part.startswith("model.layers."):
        number, _, part = part.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{PARTS[part]}.{kind}"
    return f"{PARTS[part]}.{kind}"


def divisors(config: Any) -> np.ndarray[Any, Any]:
    """What Transformers divides the frequencies by."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    places = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / config.rope_parameters["rope_theta"] ** places
    found: np.ndarray[Any, Any] = (plain / scaled).numpy()
    return found


def add_metadata(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def vocabulary() -> list[str]:
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]


def make_names() -> None:
    found: dict[str, dict[str, str]] = {}
    arches = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for case, (name, _) in CASES.items():
        known = gguf.get_tensor_name_map(arches[name], 1)
        model = ReferenceModel(CONFIGS[case])
        for key in {**looked_up(model), **looked_up(model, is_older=True)}:
            module = LAYER.sub("0", key.rpartition(".")[0])
            found.setdefault(name, {})[module] = known.get_name(module)
    NAMES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main() -> None:
    make_names()
    make_types(np.random.default_rng(SEED))
    sizes = SIZES | {"vocab_size": len(vocabulary())}
    tied = sizes | {"num_hidden_layers": 1, "tie_word_embeddings": True}
    models = {
        "llama": LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=False),
        "llama3": LlamaConfig(**tied, rope_parameters=LLAMA3),
        "qwen2": Qwen2Config(**tied, rope_parameters={"rope_theta": 1e6}),
        "qwen3": Qwen3Config(**tied, rope_parameters={"rope_theta": 1e6}),
    }
    told, logits = {}, {}
    for name, config in models.items():
        told[name], logits[name] = make_model(name, config)
    (HERE / "models.json").write_text(json.dumps(told, indent=1) + "\n")
    save_file(logits, HERE / "models.safetensors")


if __name__ == "__main__":
    main()
