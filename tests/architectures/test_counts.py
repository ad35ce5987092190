"""The arithmetic of sizes and operations, checked by counting one by one."""

from __future__ import annotations

import random

import pytest

from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import (
    attention_flops,
    kv_bytes,
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
    step_flops,
    weight_bytes,
)
from ridgeline.errors import ConfigError
from tests.architectures.configs import config


def test_attention_counts_every_visible_pair_once() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        window, new, before = rng.randint(1, 12), rng.randint(1, 20), rng.randint(0, 20)
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        spec = read_spec(
            config("qwen2", use_sliding_window=True, sliding_window=window, layer_types=kinds)
        )
        full = sum(before + i + 1 for i in range(new))
        seen = sum(min(window, before + i + 1) for i in range(new))
        assert attention_flops(spec, new, before) == 4 * 4 * 16 * (2 * full + seen), f"seed {seed}"


def test_a_step_is_the_sum_of_its_tokens() -> None:
    spec = read_spec(config("mixtral"))
    one_by_one = sum(step_flops(spec, [(1, seen)], 1) for seen in range(5, 10))
    assert step_flops(spec, [(5, 5)], 5) == one_by_one
    assert step_flops(spec, [(5, 5), (1, 9)], 6) == one_by_one + step_flops(spec, [(1, 9)], 1)


def test_cache_bytes() -> None:
    spec = read_spec(config())
    assert kv_bytes_per_token(spec, 2) == 2 * 3 * 2 * 16 * 2
    assert kv_bytes(spec, 100, 2) == 100 * kv_bytes_per_token(spec, 2)
    windowed = read_spec(config("mistral", sliding_window=10))
    assert kv_bytes(windowed, 100, 4) == 10 * kv_bytes_per_token(windowed, 4)
    with pytest.raises(ConfigError, match="unknown KV format 'fp3'; choose one of auto"):
        kv_bytes(spec, 1, 2, "fp3")


def test_weight_bytes_and_active_parameters() -> None:
    spec = read_spec(config("mixtral", num_local_experts=4, num_experts_per_tok=1))
    assert weight_bytes(spec, 2) == 2 * num_parameters(spec)
    idle = 3 * 3 * (3 * 64 * 80) + 97 * 64
    assert num_active_parameters(spec) == num_parameters(spec) - idle
    with pytest.raises(ConfigError, match="unknown weight format 'q9'; choose one of plain"):
        weight_bytes(spec, 2, "q9")
