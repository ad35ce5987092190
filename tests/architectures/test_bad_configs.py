"""What we cannot serve is refused at once, and the message names the key."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from ridgeline.architectures import FAMILIES, read_spec
from ridgeline.errors import ConfigError
from tests.architectures.configs import config

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
SLIDING = ["sliding_attention"] * 3

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be from 1"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("llama", {"num_hidden_layers": -3}, "num_hidden_layers is -3"),
    ("llama", {"num_hidden_layers": 3.0}, "num_hidden_layers must be an integer, not 3.0"),
    ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers must be an integer, not '3'"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers must be an integer, not True"),
    ("llama", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ("llama", {"hidden_size": 10**12}, "hidden_size is 1000000000000"),
    ("llama", {"hidden_size": 66}, "hidden_size is 66; it must be a multiple of num_attention"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
    ("llama", {"num_key_value_heads": 8}, "num_key_value_heads is 8; it must divide"),
    ("llama", {"head_dim": 7}, "head_dim is 7; rotary positions need an even one"),
    ("llama", {"head_dim": -8}, "head_dim is -8"),
    ("llama", {"vocab_size": 1 << 40}, "vocab_size is"),
    ("llama", {"intermediate_size": None}, "intermediate_size is missing"),
    ("llama", {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1"),
    ("llama", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; supported are silu"),
    ("llama", {"hidden_act": 3}, "hidden_act must be a string"),
    ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    ("llama", {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; supported are float32"),
    ("llama", {"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
    ("llama", {"eos_token_id": 97}, "eos_token_id has 97, outside 0 .. 96"),
    ("llama", {"eos_token_id": ["</s>"]}, "eos_token_id must be token ids"),
    ("llama", {"bos_token_id": -1}, "bos_token_id has -1"),
    ("llama", {"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'; read"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama", {"sliding_window": 4}, "sliding_window is 4, which this model family does not"),
    ("llama", {"layer_types": SLIDING}, "layer_types must be full_attention everywhere"),
    ("llama", {"rope_theta": 0.0}, "rope_theta is 0"),
    ("llama", {"rope_theta": "big"}, "rope_theta must be a number"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling must be an object"),
    ("llama", {"rope_scaling": {"type": "longrope"}}, "short_factor must be a list of 8 numbers"),
    ("phi3", {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1; it makes 1 of"),
    ("cohere", {"logit_scale": 0}, "logit_scale is 0"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
    ("cohere2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("falcon", {"alibi": True}, "alibi is true; positions as a bias of scores are not served"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2 without new_decoder"),
    ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2; without multi_query"),
    ("phi3", {"attention_bias": True}, "attention_bias is True"),
    ("llama", {"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type is 'su'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "x"}}, "rope_scaling.factor must be"),
    ("llama", {"rope_scaling": LLAMA3}, "rope_scaling.high_freq_factor is 4; it must be above 4"),
    ("llama", {"rope_scaling": YARN | {"beta_fast": 0.5}}, "rope_scaling.beta_fast is 0.5, below"),
    ("llama", {"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate must be true or"),
    ("llama", {"rope_scaling": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    (
        "llama",
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
        "head_dim is 2; dynamic",
    ),
    (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        "rope_parameters.full_attention differs by layer type",
    ),
    ("mistral", {"attention_bias": True}, "attention_bias is True"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types must be sliding_attention"),
    ("qwen2", {"layer_types": SLIDING}, "layer_types has sliding_attention but use_sliding"),
    ("exaone4", {"layer_types": SLIDING, "sliding_window": None}, "layer_types has sliding_att"),
    ("exaone4", {"sliding_window_pattern": "LLG"}, "sliding_window_pattern must be an integer"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries; it must have 3"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types has 'linear_attention'"),
    ("qwen3", {"layer_types": [1, 2, 3]}, "layer_types must be a list of strings"),
    ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window must be true or false"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be from 1 to 8"),
]


@pytest.mark.parametrize(("family", "change", "message"), BAD)
def test_the_message_names_the_key(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_spec(config(family, **change))
    assert str(raised.value).startswith("config.json: ")
    assert message in str(raised.value)


def test_unknown_model_types_are_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'t5'; supported families are .*minicpm3, mistral, mixtral"
    ):
        read_spec(config("t5"))
    with pytest.raises(ConfigError, match="model_type is missing"):
        read_spec({})
    with pytest.raises(ConfigError, match="model_type must be a string"):
        read_spec({"model_type": ["llama"]})


def test_random_damage_never_raises_anything_else() -> None:
    """Any value at any key gives a spec or a ConfigError, never another exception."""
    junk: list[Any] = [None, -1, 0, 1, 2**70, 0.5, math.inf, "", "x", [], [1], {}, {"a": 1}, True]
    keys = [*config(), "head_dim", "rope_scaling", "rope_parameters", "layer_types", "dtype"]
    keys += ["sliding_window", "use_sliding_window", "eos_token_id", "num_local_experts"]
    scaling_keys = ["rope_type", "factor", "original_max_position_embeddings", "beta_fast"]
    for seed in range(3000):
        rng = random.Random(seed)
        broken = config(rng.choice(list(FAMILIES)))
        for key in rng.sample(keys, rng.randint(1, 3)):
            broken[key] = rng.choice(junk)
        if rng.random() < 0.5:
            kind = rng.choice(["linear", "dynamic", "llama3", "yarn"])
            broken["rope_scaling"] = {"rope_type": kind, rng.choice(scaling_keys): rng.choice(junk)}
        try:
            read_spec(broken)
        except ConfigError:
            continue
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r} for {json.dumps(broken, default=str)}")
