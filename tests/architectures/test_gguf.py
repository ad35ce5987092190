"""The metadata of a GGUF file make the ModelSpec that the model's config.json makes."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.gguf import (
    LLAMA3_HIGH,
    LLAMA3_LOW,
    ROPE_FACTORS,
    config_of,
    decimal,
    readable_families,
    sources,
)
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "float16",
}


def single(value: float) -> float:
    """As a file has it."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def metadata(name: str, **more: object) -> dict[str, object]:
    own = {
        "block_count": 2,
        "context_length": 131072,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": single(1e-6),
        "rope.freq_base": 500000.0,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return {"general.architecture": name} | {f"{name}.{key}": v for key, v in own.items()}


SHAPES = {"token_embd.weight": (100, 64), "output.weight": (100, 64)}


def spec_of(name: str, *, factors: list[float] | None = None, **more: object) -> ModelSpec:
    told, given = metadata(name, **more), {} if factors is None else {ROPE_FACTORS: factors}
    found = config_of(told, SHAPES, dtype="float16", rope_factors=given, source="m.gguf")
    return read_spec(found)


def llama3(head_dim: int, theta: float, factor: float, length: int) -> list[float]:
    """By the formula of Transformers' rope_type llama3, wavelength by wavelength."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * 3.141592653589793 * theta ** (i / head_dim)
        if wavelength < length / LLAMA3_HIGH:
            found.append(1.0)
        elif wavelength > length / LLAMA3_LOW:
            found.append(factor)
        else:
            smooth = (length / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
            found.append(single(1 / ((1 - smooth) / factor + smooth)))
    return found


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_spec_is_that_of_the_config(name: str) -> None:
    assert spec_of(name) == read_spec(SIZES | {"model_type": name})
    tied = config_of(
        metadata(name),
        {"token_embd.weight": (100, 64)},
        dtype="float16",
        rope_factors={},
        source="m.gguf",
    )
    assert read_spec(tied).tie_embeddings


@pytest.mark.parametrize(
    ("more", "factors", "scaling"),
    [
        ({"rope__scaling__type": "none"}, None, None),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.5}, None, ("linear", 2.5)),
        ({"rope__scale_linear": single(1.6)}, None, ("linear", 1.6)),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32768,
            },
            None,
            YARN,
        ),
        ({}, llama3(16, 500000.0, 8.0, 8192), LLAMA3),
        ({}, [1.0] * 8, None),
    ],
)
def test_scaled_positions(more: dict[str, Any], factors: list[float] | None, scaling: Any) -> None:
    if isinstance(scaling, tuple):
        scaling = {"rope_type": scaling[0], "factor": scaling[1]}
    want = read_spec(SIZES | {"model_type": "llama", "rope_scaling": scaling})
    assert spec_of("llama", factors=factors, **more) == want


def test_other_divisors_are_refused() -> None:
    right = llama3(16, 500000.0, 8.0, 8192)
    for wrong in (right[:-1], [*right[:-1], 7.9], [0.5, *right[1:]], [float("nan")] * 8):
        with pytest.raises(ConfigError, match=r"m\.gguf: rope_freqs\.weight is not the scaling"):
            spec_of("llama", factors=wrong)
    with pytest.raises(ConfigError, match=r"rope\.scaling\.type is 'linear' beside"):
        spec_of("llama", factors=right, rope__scaling__type="linear")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_every_tensor_has_a_name_in_the_file(name: str) -> None:
    spec = read_spec(SIZES | {"model_type": name})
    found = sources(spec)
    assert {"llama", "qwen2", "qwen3", "command-r", "gptneox"} <= set(readable_families())
    assert found.keys() == expected_tensors(spec).keys()
    assert len({source.name for source in found.values()}) == len(found)
    assert found["model.layers.1.mlp.down_proj.weight"].name == "blk.1.ffn_down.weight"
    turned = {found[f"model.layers.0.self_attn.{x}_proj.weight"].heads for x in "qkvo"}
    assert turned == ({4, 2, 0} if name == "llama" else {0})


def test_biases_are_seen_by_their_tensors() -> None:
    shapes = SHAPES | {"blk.0.attn_q.bias": (64,)}
    config = config_of(metadata("llama"), shapes, dtype="float16", rope_factors={}, source="m.gguf")
    spec = read_spec(config)
    assert spec.layers[0].attention.qkv_bias
    assert sources(spec)["model.layers.1.self_attn.k_proj.bias"].heads == 2


def test_ends_are_all_that_the_file_names() -> None:
    keys = {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 2}
    told = metadata("llama") | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    spec = read_spec(config_of(told, SHAPES, dtype="float16", rope_factors={}, source="m.gguf"))
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2, 7))


@pytest.mark.parametrize("value", [1e-5, 1e-6, 0.1, 10000.0, 1e6, 500000.0, 1.0, 1 / 3])
def test_numbers_are_what_somebody_typed(value: float) -> None:
    found = decimal(single(value))
    assert single(found) == single(value)
    assert len(repr(found)) <= len(repr(single(value)))
    assert found == value or value == 1 / 3


def test_numbers_beyond_float32_stay() -> None:
    assert decimal(1e300) == 1e300
