"""Layers that read the keys and values of an earlier one, against a decoder written apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.counts import kv_bytes_per_token
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.cli.inspect import _attention_text
from ridgeline.cost.memory import block_bytes
from ridgeline.cost.setup import Setup
from ridgeline.errors import ConfigError
from ridgeline.kvcache import bytes_per_block
from tests.cost.random_setups import device
from tests.layers.driving import Driver, greedy, load_decoder
from tests.layers.reference_models import VOCAB, tiny_config

WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
KINDS = ["sliding_attention", "full_attention"] * 3


def cla(factor: int) -> dict[str, Any]:
    return {"use_cla": True, "cla_share_factor": factor}


# Configs, and which layer's keys and values each layer reads.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "in pairs": (
        tiny_config("llama", num_hidden_layers=4, **cla(2)),
        [0, 0, 2, 2],
    ),
    "in threes": (
        tiny_config("qwen2", num_hidden_layers=4, **cla(3)),
        [0, 0, 0, 3],
    ),
    "last layers": (
        tiny_config("qwen3", num_hidden_layers=5, num_kv_shared_layers=3),
        [0, 1, 1, 1, 1],
    ),
    "by window": (
        tiny_config(
            "qwen3", num_hidden_layers=6, layer_types=KINDS, num_kv_shared_layers=2, **WINDOWS
        ),
        [0, 1, 2, 3, 2, 3],
    ),
    "off": (tiny_config("llama", use_cla=False, cla_share_factor=2), [0, 1, 2]),
}


def tensors_of(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(read_spec(config))
    return {
        name: ("norm" in name) + 0.2 * torch.randn(shape, generator=noise)
        for name, shape in shapes.items()
    }


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x_HTD: torch.Tensor, theta: float) -> torch.Tensor:
    half = x_HTD.shape[2] // 2
    speeds = theta ** -(torch.arange(half) / half)
    angles = torch.arange(x_HTD.shape[1])[:, None] * speeds
    first, second = x_HTD[..., :half], x_HTD[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def plain_logits(
    config: dict[str, Any], owners: list[int], w: dict[str, torch.Tensor], ids: list[int]
) -> torch.Tensor:
    """All layers over all tokens at once; keys and values are kept by layer."""
    eps, heads = config["rms_norm_eps"], config["num_attention_heads"]
    kinds = config.get("layer_types")
    x_TE, kept = w["model.embed_tokens.weight"][ids], {}
    ahead = torch.ones(len(ids), len(ids)).triu(1).bool()
    behind = torch.ones(len(ids), len(ids)).tril(-config.get("sliding_window", 0) or -1).bool()
    for index, owner in enumerate(owners):
        stem = f"model.layers.{index}."

        def product(
            x: torch.Tensor, role: str, stem: str = stem, module: str = "self_attn"
        ) -> torch.Tensor:
            name = f"{stem}{module}.{role}_proj."
            return functional.linear(x, w[f"{name}weight"], w.get(f"{name}bias"))

        def headed(y_TX: torch.Tensor, role: str, stem: str = stem) -> torch.Tensor:
            y_HTD = y_TX.view(len(y_TX), -1, config["head_dim"]).transpose(0, 1)
            weight = w.get(f"{stem}self_attn.{role}_norm.weight")
            return y_HTD if weight is None else norm(y_HTD, weight, eps)

        y_TE = norm(x_TE, w[f"{stem}input_layernorm.weight"], eps)
        q = rotated(headed(product(y_TE, "q"), "q"), config["rope_theta"])
        if owner == index:
            k = rotated(headed(product(y_TE, "k"), "k"), config["rope_theta"])
            kept[index] = k, headed(product(y_TE, "v"), "v")
        k, v = (one.repeat_interleave(heads // len(one), 0) for one in kept[owner])
        hidden = ahead if kinds is None or kinds[index] == "full_attention" else ahead | behind
        scores = (q @ k.mT / config["head_dim"] ** 0.5).masked_fill(hidden, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x_TE = x_TE + product(mixed, "o")
        y_TE = norm(x_TE, w[f"{stem}post_attention_layernorm.weight"], eps)
        gate = functional.silu(product(y_TE, "gate", module="mlp"))
        x_TE = x_TE + product(gate * product(y_TE, "up", module="mlp"), "down", module="mlp")
    return norm(x_TE, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def prompt(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(num)]


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens(name: str) -> None:
    """In one pass, in chunks of several requests together, and token by token."""
    config, owners = CASES[name]
    weights = tensors_of(config, 1)
    decoder = load_decoder(config, weights, max_model_len=128)
    driver, texts = Driver(decoder), {"a": prompt(1, 60), "b": prompt(2, 33)}
    found: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    for size in (13, 1, 5, 20, 21):
        done = {key: sum(map(len, rows)) for key, rows in found.items()}
        work = {key: text[done[key] : done[key] + size] for key, text in texts.items()}
        for key, logits in driver.step({k: v for k, v in work.items() if v}).items():
            found[key].append(logits)
    for key, ids in texts.items():
        want = plain_logits(config, owners, weights, ids)
        assert (torch.cat(found[key]) - want).abs().max() <= 1e-4
    answer = greedy(Driver(decoder), {"a": texts["b"]}, 12)["a"]
    for place in range(12):
        logits = plain_logits(config, owners, weights, texts["b"] + answer[:place])
        assert int(logits[-1].argmax()) == answer[place]


@pytest.mark.parametrize("name", CASES)
def test_the_cache_is_smaller_by_exactly_the_readers(name: str) -> None:
    """The pool, the bytes of a token and the memory contract."""
    config, owners = CASES[name]
    spec, own = read_spec(config), len(set(owners))
    whole = read_spec(config | {"num_kv_shared_layers": 0, "cla_share_factor": 1})
    named = [_attention_text(layer.attention) for layer in spec.layers]
    assert sum("keys and values of layer" in line for line in named) == len(owners) - own
    one = 2 * 2 * 16 * 2  # K and V of two heads of 16 numbers, in 16 bits
    assert kv_bytes_per_token(spec, 2) == own * one
    assert kv_bytes_per_token(whole, 2) == len(owners) * one
    assert sum(len(group.layers) for group in kv_groups(spec)) == own
    stores = max(len(group.layers) for group in kv_groups(spec))
    assert bytes_per_block(spec, 16, 2) == stores * 16 * one
    assert block_bytes(Setup(spec, device()), 16) == stores * 16 * one
    assert Driver(load_decoder(config, tensors_of(config, 0), max_model_len=64)).kv.num_bytes == (
        257 * bytes_per_block(spec, 4, 4)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3; it must be from 0 to 2"),
        ({"cla_share_factor": 0}, "cla_share_factor is 0"),
    ],
)
def test_what_cannot_be_shared(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(tiny_config("llama", **changes))


def test_layers_of_different_windows_share_nothing() -> None:
    with pytest.raises(ConfigError, match="cla_share_factor shares layers with different windows"):
        read_spec(tiny_config("qwen3", layer_types=KINDS[:3], **cla(2), **WINDOWS))
    with pytest.raises(ConfigError, match="use_cla and sharing are for plain attention"):
        read_spec(tiny_config("deepseek_v3", **cla(2)))
