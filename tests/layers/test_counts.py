"""What the spec promises is what PyTorch counts: parameters, shapes, operations, and no drift."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.counts import (
    linear_weights,
    num_active_parameters,
    num_parameters,
    step_flops,
    weight_bytes,
)
from ridgeline.architectures.parts import layer_tensors
from ridgeline.architectures.shares import fullest_share, own_share
from ridgeline.architectures.tensor_layouts import checkpoint_shapes
from ridgeline.distributed.placement import Placement
from tests.distributed.alone import Alone
from tests.layers.driving import Driver, build_decoder
from tests.layers.reference_models import ReferenceModel, tiny_config

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "llama biased": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama tied": tiny_config("llama", tie_word_embeddings=True),
    "mistral": tiny_config("mistral", sliding_window=8),
    "mixtral": tiny_config("mixtral"),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3", head_dim=32),
    "cohere": tiny_config("cohere", use_qk_norm=True),
    "cohere2": tiny_config("cohere2"),
    "falcon": tiny_config("falcon", new_decoder_architecture=True, num_kv_heads=4, bias=True),
    "gemma2": tiny_config("gemma2", tie_word_embeddings=True, attn_logit_softcapping=None),
    "gemma3": tiny_config("gemma3_text", sliding_window=8),
    "glm4": tiny_config("glm4"),
    "gpt2": tiny_config("gpt2"),
    "gpt_neox": tiny_config("gpt_neox"),
    "granite": tiny_config("granite", residual_multiplier=0.22),
    "hunyuan": tiny_config("hunyuan_v1_dense"),
    "phi3": tiny_config("phi3"),
    "smollm3": tiny_config("smollm3", num_hidden_layers=4),
    "stablelm": tiny_config("stablelm", use_parallel_residual=True),
    "starcoder2": tiny_config("starcoder2"),
}
# Llama-3.1-8B: 8.03 billion parameters, as its model card says.
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


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_and_parameters_equal_transformers(name: str) -> None:
    spec = read_spec(CONFIGS[name])
    model = ReferenceModel(CONFIGS[name])
    shapes = {key: tuple(tensor.shape) for key, tensor in model.tensors.items()}
    assert checkpoint_shapes(spec) == shapes
    assert num_parameters(spec) == sum(p.numel() for p in model.model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_meta_decoder_has_the_parameters_of_the_spec(name: str) -> None:
    spec = read_spec(CONFIGS[name])
    decoder = build_decoder(spec, max_model_len=64, device="meta")
    targets = {piece.name: tuple(piece.target.shape) for piece in decoder.pieces()}
    assert targets == expected_tensors(spec)
    assert decoder.num_parameters() == num_parameters(spec)
    packed = sum(p.target.numel() for p in decoder.pieces() if is_packed(p.name))
    assert packed == linear_weights(spec)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_rank_holds_the_share_that_the_description_says(name: str, ranks: int) -> None:
    """And the fullest as much as is priced."""
    spec = read_spec(CONFIGS[name])
    said = {n: p for i in range(3) for n, p in layer_tensors(spec, i).items()}
    layers = {n: spec.layers[i] for i in range(3) for n in layer_tensors(spec, i)}
    most = dict.fromkeys(said, 0)
    for rank in range(ranks):
        placement = Placement(rank, ranks, Alone())
        decoder = build_decoder(spec, max_model_len=16, device="meta", placement=placement)
        held = {piece.name: piece for piece in decoder.pieces()}
        for key, part in said.items():
            shape, piece = list(part.shape), held[key]
            if part.split:
                own = own_share(part, layers[key], "plain", rank, ranks)
                shape[part.split == "columns"] = own.length
                assert (piece.dim, piece.start) == (int(part.split == "columns"), own.start)
            assert tuple(piece.target.shape) == tuple(shape)
            most[key] = max(most[key], piece.target.numel())
    for key, part in said.items():
        assert prod(fullest_share(part, layers[key], "plain", ranks)) == most[key]


# In names of matrices of layers.
PACKED = ("_proj", ".w1", ".w2", ".w3", ".c_fc", "attention.", "dense_", ".attn.", ".mlp.")


def is_packed(name: str) -> bool:
    own = name.removesuffix(".weight")
    return name.endswith("weight") and any(part in own for part in PACKED)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("name", CONFIGS)
def test_operations_of_a_decode_equal_the_spec(name: str, backend: str) -> None:
    """One new token after 30: nothing is padded, so every product is counted exactly. On a CPU, as
    the counter knows torch's products, and not kernels of ours."""
    spec = read_spec(CONFIGS[name])
    decoder = build_decoder(spec, max_model_len=64, backend=backend, device="cpu")
    decoder.randomize(0)
    driver = Driver(decoder)
    driver.step({"a": list(range(30))})
    batch = driver.batch({"a": [5]})
    with FlopCounterMode(display=False) as counter:
        decoder.logits(decoder.forward(batch, driver.kv))
    counted = counter.get_total_flops() + sdpa_flops_missed(counter, spec, backend)
    assert counted == step_flops(spec, [(1, 30)], 1)


def sdpa_flops_missed(counter: FlopCounterMode, spec: Any, backend: str) -> int:
    """The counter of PyTorch knows the fused CPU kernel in some versions only."""
    names = [str(op) for ops in counter.get_flop_counts().values() for op in ops]
    if backend == "reference" or any("scaled_dot_product" in name for name in names):
        return 0
    seen = (min(31, layer.attention.window or 31) for layer in spec.layers)
    heads = spec.layers[0].attention
    return sum(4 * heads.num_heads * heads.head_dim * n for n in seen)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_operations_on_the_meta_device_equal_the_spec(name: str) -> None:
    """A prompt of one token, without memory. (Experts need real numbers to choose by.)"""
    spec = read_spec(CONFIGS[name])
    decoder = build_decoder(spec, max_model_len=64, device="meta", backend="reference")
    driver = Driver(decoder, poison=False)
    batch = driver.batch({"a": [5]})
    with FlopCounterMode(display=False) as counter:
        decoder.logits(decoder.forward(batch, driver.kv))
    assert counter.get_total_flops() == step_flops(spec, [(1, 0)], 1)


def test_a_known_model() -> None:
    spec = read_spec(LLAMA_8B)
    assert num_parameters(spec) == 8_030_261_248
    assert num_active_parameters(spec) == 8_030_261_248 - 128256 * 4096
    assert weight_bytes(spec, 2) == 16_060_522_496
    decoder = build_decoder(spec, max_model_len=16, dtype=torch.bfloat16, device="meta")
    assert decoder.num_parameters() == 8_030_261_248
