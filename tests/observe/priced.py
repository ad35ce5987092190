"""A small model priced on a known device, for tests of what follows from prices."""

from __future__ import annotations

from ridgeline.architectures import read_spec
from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "sliding_window": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def small_setup(device: str = "h100-sxm") -> Setup:
    return Setup(read_spec(CONFIG), find_device(device))


def small_pricer() -> Pricer:
    return Pricer(small_setup())
