"""Rotation tables are those of Transformers for every kind of scaling, at real sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ridgeline.architectures import read_spec
from ridgeline.layers.rope import Rotation, inverse_frequencies

CPU = torch.device("cpu")


def random_scaling(kind: str, rng: random.Random) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": rng.choice([1.0, 1.5, 4.0, 32.0])}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rng.choice([4, 64, 4096, 32768])
    if kind == "llama3":
        scaling |= {"low_freq_factor": rng.choice([1.0, 2.0]), "high_freq_factor": 4.0}
    if kind == "yarn":
        optional: dict[str, list[Any]] = {
            "beta_fast": [32, 8.0],
            "beta_slow": [1, 2.0],
            "truncate": [True, False],
            "attention_factor": [1.3],
        }
        scaling |= {k: rng.choice(v) for k, v in optional.items() if rng.random() < 0.5}
        if rng.random() < 0.5:
            scaling |= {"mscale": rng.choice([0.7, 1.0]), "mscale_all_dim": 1.2}
    return scaling


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_frequencies(kind: str) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        head_dim = rng.choice([8, 64, 128])
        sizes: dict[str, Any] = {
            "vocab_size": 97,
            "hidden_size": 2 * head_dim,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "max_position_embeddings": rng.choice([128, 32768, 131072]),
            "rope_theta": rng.choice([10000.0, 500000.0, 1e6]),
            "rope_scaling": random_scaling(kind, rng),
        }
        length = 2 * sizes["max_position_embeddings"] if kind == "dynamic" else 16
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](
            AutoConfig.for_model("llama", **sizes), CPU, seq_len=length
        )
        spec = read_spec({"model_type": "llama", **sizes}).layers[0].attention.rope
        found, found_factor = inverse_frequencies(spec, head_dim, length)
        assert torch.allclose(found, wanted, rtol=1e-6, atol=0), f"seed {seed}"
        assert found_factor == pytest.approx(factor), f"seed {seed}"


def test_table_rows() -> None:
    spec = read_spec(
        {
            "model_type": "llama",
            "vocab_size": 5,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "rope_theta": 100.0,
        }
    )
    cos, sin = Rotation(spec.layers[0].attention.rope, 8, 32, CPU).at(torch.tensor([0, 31, 7]))
    angles = torch.tensor([0.0, 31.0, 7.0])[:, None] / 100 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(cos[:, 0], angles.cos().repeat(1, 2))
    torch.testing.assert_close(sin[:, 0], torch.cat((-angles.sin(), angles.sin()), 1))
    with pytest.raises(IndexError):
        Rotation(spec.layers[0].attention.rope, 8, 32, CPU).at(torch.tensor([32]))
