"""Are the bytes of a decode step those of its matrices and its cache?"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.spec import ExpertsSpec
from ridgeline.benchmark.traffic import decode_bytes, experts_used, layer_weights_read
from tests.tiny_model import tiny_config

MOE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def matrices(config: dict[str, Any]) -> int:
    """All two-dimensional tensors of the layers, counted one by one."""
    shapes = expected_tensors(read_spec(config))
    return sum(
        prod(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and "embed" not in name and "lm_head" not in name
    )


def test_a_dense_model_reads_all_its_matrices() -> None:
    config = tiny_config()
    assert layer_weights_read(read_spec(config), 1) == layer_weights_read(read_spec(config), 64)
    assert layer_weights_read(read_spec(config), 1) == matrices(config)


def test_an_llama_8b_step() -> None:
    """Llama-3.1-8B, batch 32 at 8192 tokens: 7.50 billion weights and 131,072 bytes a token."""
    config = tiny_config(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    spec = read_spec(config)
    assert layer_weights_read(spec, 1) + 128256 * 4096 == 7_504_658_432
    assert decode_bytes(spec, "bfloat16", 32, 8192) == 2 * 7_504_658_432 + 32 * 8192 * 131072


def test_experts_that_nobody_chose_are_not_read() -> None:
    ffn = ExpertsSpec(num_experts=8, num_active=2, intermediate_size=64)
    assert experts_used(ffn, 1) == pytest.approx(2.0)
    assert experts_used(ffn, 2) == pytest.approx(3.5)
    assert experts_used(ffn, 1000) == pytest.approx(8.0)
    config = tiny_config(**MOE)
    spec = read_spec(config)
    routers = 2 * 8 * 32
    assert layer_weights_read(spec, 1000) == pytest.approx(matrices(config) - routers)
    assert layer_weights_read(spec, 1) == pytest.approx(
        matrices(config) - routers - 2 * 6 * 3 * 32 * 64
    )
