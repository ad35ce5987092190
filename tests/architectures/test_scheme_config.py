"""A quantization_config is read as what it says, or refused by the name of the key."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.architectures.quantization_scheme import Scheme
from ridgeline.architectures.scheme_config import (
    checkpoint_tensors,
    matrix_schemes,
    optional_checkpoint_tensors,
    scheme_text,
    tensors_read,
)
from ridgeline.errors import ConfigError
from tests.architectures.configs import config

LAYER = "model.layers.1."
Q, OUT, DOWN = (
    f"{LAYER}{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
)


def packed(**changes: Any) -> dict[str, Any]:
    """Weights of a compressed-tensors group."""
    return {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16,
        "dynamic": False, "actorder": None,
    } | changes  # fmt: skip


def compressed(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{at}": group for at, group in enumerate(groups)},
        "ignore": ["lm_head"],
    } | changes


def linear(**changes: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": packed(**changes)}


def scheme(section: dict[str, Any], family: str = "llama") -> dict[str, Scheme]:
    """Module -> how it is stored."""
    spec = read_spec(config(family, quantization_config=section))
    return {one.name.removesuffix(".weight"): one.scheme for one in matrix_schemes(spec)}


def test_without_one_nothing_is_stored() -> None:
    empty: dict[str, Any] = {}
    for nothing in (empty, None):
        spec = read_spec(config("llama", quantization_config=nothing))
        assert spec == read_spec(config("llama"))
        assert checkpoint_tensors(spec) == expected_tensors(spec)


def test_compressed_tensors_of_all_linear_layers() -> None:
    found = scheme(compressed(linear(symmetric=False)))
    spec = read_spec(config("llama"))
    assert len(found) == 7 * spec.num_layers
    wanted = Scheme("pack-quantized", 4, 16, True, spec.dtype)
    assert set(found.values()) == {wanted}
    assert wanted.text == "pack-quantized, 4 bits, groups of 16, zeros"


def test_an_exact_name_beats_a_pattern_and_a_pattern_the_class() -> None:
    eight, two = linear(num_bits=8), linear(num_bits=2)
    eight["targets"], two["targets"] = ["re:.*mlp[.]down_proj$"], [DOWN]
    found = scheme(compressed(linear(), eight, two, ignore=["lm_head", "re:.*o_proj"]))
    assert found[Q].bits == 4
    assert found[DOWN].bits == 2
    assert found["model.layers.0.mlp.down_proj"].bits == 8
    assert not any(name.endswith("o_proj") for name in found)


def test_the_output_matrix_is_one_if_nobody_ignores_it() -> None:
    found = scheme(compressed(linear(), ignore=[]))
    assert found["lm_head"] == found[Q]
    spec = read_spec(config("llama", quantization_config=compressed(linear(), ignore=[])))
    assert [role for role, _ in spec.schemes] == ["lm_head"]
    assert "lm_head.weight_packed" in checkpoint_tensors(spec)
    assert "lm_head.weight" in tensors_read(spec)


def test_floats_keep_what_a_format_of_ours_can() -> None:
    def kept(**changes: Any) -> tuple[str, str]:
        weights = {"num_bits": 8, "type": "float", **changes}
        section = compressed(linear(**weights), format="float-quantized")
        one = scheme(section)[Q]
        return one.layout, one.keeps

    assert kept(strategy="channel") == ("float-quantized", "e4m3")
    assert kept(strategy="tensor") == ("float-quantized", "e4m3")
    assert kept(strategy="block", block_structure=[128, 128]) == ("float-quantized", "blocks")
    assert kept(strategy="block", block_structure=[64, 128]) == ("float-quantized", "")


def test_gptq_and_its_rules() -> None:
    section: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
    wanted = Scheme("gptq", 4, 16, True, "float16")
    assert set(scheme(section).values()) == {wanted}
    assert scheme(section | {"group_size": -1})[Q].group == 0
    assert scheme(section | {"checkpoint_format": "gptq_v2"})[Q].layout == "gptq_v2"
    assert scheme(section | {"desc_act": True})[Q].act_order
    assert not scheme(section | {"sym": True})[Q].has_zero
    inside = scheme(section | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]})
    assert {name.rpartition(".")[2] for name in inside} == {"q_proj"}
    rules = {r"-:.*o_proj": {}, r"+:.*\.1\.mlp.*": {"bits": 8}}
    found = scheme(section | {"dynamic": rules, "lm_head": True})
    assert OUT not in found
    assert found[DOWN].bits == 8
    assert found["model.layers.0.mlp.down_proj"].bits == 4
    assert found["lm_head"].bits == 4


def test_awq_and_fp8_leave_out_what_they_name() -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["k_proj"]}
    found = scheme(awq)
    assert found[Q] == Scheme("awq", 4, 16, True, "float16")
    assert f"{LAYER}self_attn.k_proj" not in found
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    found = scheme(fp8 | {"modules_to_not_convert": ["model.layers.1"]})
    assert found["model.layers.0.mlp.up_proj"].keeps == "blocks"
    assert Q not in found
    found = scheme({"quant_method": "fp8", "activation_scheme": "static"})
    assert (found[Q].layout, found[Q].keeps, found[Q].is_whole) == ("fp8-whole", "e4m3", True)


def test_experts_are_stored_alike_or_refused() -> None:
    found = scheme(compressed(linear()), "mixtral")
    assert "model.layers.0.block_sparse_moe.experts.1.w2" in found
    assert "model.layers.0.block_sparse_moe.gate" not in found
    other = linear(num_bits=8)
    other["targets"] = ["re:.*experts[.]1[.]w2"]
    with pytest.raises(ConfigError, match="down matrices of layer 0's experts in several ways"):
        scheme(compressed(linear(), other), "mixtral")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c | {"quant_method": "aqlm"}, "quant_method is 'aqlm'; read are"),
        (lambda c: {"quant_method": "bitsandbytes"}, "load_in_4bit is false"),
        (
            lambda c: (
                {"quant_method": "bitsandbytes", "load_in_4bit": True}
                | {"bnb_4bit_quant_storage": "bfloat16"}
            ),
            "bnb_4bit_quant_storage is 'bfloat16'; read is uint8",
        ),
        (lambda c: c | {"quant_method": 3}, "quantization_config.quant_method must be a string"),
        (lambda c: c | {"format": "marlin-24"}, "format is 'marlin-24'; read are pack-quantized"),
        (lambda c: c | {"config_groups": {}}, "config_groups is missing"),
        (lambda c: c | {"config_groups": {"a": {}}}, "config_groups.a is empty"),
        (lambda c: c | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        (lambda c: c | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format is"),
        (lambda c: c | {"quantization_status": "calibration"}, "status is 'calibration'; read are"),
        (lambda c: c | {"ignore": "lm_head"}, "ignore must be a list"),
        (lambda c: c | {"ignore": ["re:("]}, "ignore has a pattern that cannot be read"),
        (lambda c: compressed({"targets": ["Linear"]}), "weights is missing"),
        (lambda c: compressed(linear(num_bits=9)), "weights.num_bits is 9"),
        (lambda c: compressed(linear(num_bits=1)), "type is 'int' with 1 bits"),
        (lambda c: compressed(linear(type="float")), "type is 'float' with 4 bits"),
        (lambda c: compressed(linear(dynamic=True)), "weights.dynamic is True"),
        (lambda c: compressed(linear(strategy="token")), "strategy is 'token'; read are group"),
        (lambda c: compressed(linear(group_size=0)), "weights.group_size is 0"),
        (lambda c: compressed(linear(group_size=24)), "group_size is 24; it does not divide"),
        (lambda c: compressed(linear(actorder="random")), "weights.actorder is 'random'"),
        (lambda c: {"quant_method": "gptq", "bits": 5}, "bits is 5; read are 2, 3, 4, 8"),
        (lambda c: {"quant_method": "gptq", "desc_act": 1}, "desc_act must be true or false"),
        (lambda c: {"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is"),
        (lambda c: {"quant_method": "gptq", "dynamic": {"(": {}}}, "dynamic has a pattern"),
        (lambda c: {"quant_method": "awq", "bits": 8}, "bits is 8; AWQ is read with 4"),
        (lambda c: {"quant_method": "awq", "version": "gemv"}, "version is 'gemv'; read is gemm"),
        (
            lambda c: {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be two positive integers",
        ),
        (lambda c: {"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; read is e4m3"),
        (
            lambda c: {"quant_method": "awq", "modules_to_not_convert": ["("]},
            "modules_to_not_convert has '('",
        ),
        (
            lambda c: {"quant_method": "awq", "modules_to_not_convert": ["x", r"(a)\1"]},
            "it refers to a part of itself",
        ),
    ],
)
def test_the_message_names_the_key(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        scheme(change(compressed(linear())))
    assert str(raised.value).startswith("config.json: quantization_config")
    assert message in str(raised.value)


def test_the_tensors_of_the_checkpoint() -> None:
    section = {"quant_method": "gptq", "bits": 3, "group_size": 16, "desc_act": True, "sym": False}
    spec = read_spec(config("llama", intermediate_size=96, quantization_config=section))
    found = checkpoint_tensors(spec)
    rows, columns = expected_tensors(spec)[f"{DOWN}.weight"]
    assert f"{DOWN}.weight" not in found
    assert found[f"{DOWN}.qweight"] == (columns * 3 // 32, rows)
    assert found[f"{DOWN}.qzeros"] == (columns // 16, rows * 3 // 32)
    assert found[f"{DOWN}.scales"] == (columns // 16, rows)
    assert found[f"{DOWN}.g_idx"] == (columns,)
    assert not optional_checkpoint_tensors(spec)
    assert tensors_read(spec) == found
    plain = section | {"desc_act": False}
    spec = read_spec(config("llama", intermediate_size=96, quantization_config=plain))
    assert f"{DOWN}.g_idx" in optional_checkpoint_tensors(spec)
    assert f"{DOWN}.g_idx" not in tensors_read(spec)
    assert scheme_text(spec) == "gptq, 3 bits, groups of 16, zeros"


def test_random_damage_never_raises_anything_else() -> None:
    """Any value at any key gives a spec or a ConfigError, never another exception."""
    fp8 = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    good: list[dict[str, Any]] = [
        compressed(linear(symmetric=False)),
        compressed({"targets": ["Linear"], "weights": fp8}, format="float-quantized"),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "dynamic": {"-:x": {}}, "sym": True},
        {"quant_method": "awq", "bits": 4, "group_size": 16, "modules_to_not_convert": ["x"]},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["x"]},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "gguf", "types": {"mlp.up_proj": "Q8_0", "mlp.down_proj": ["Q4_0"] * 3}},
    ]
    junk: list[Any] = [None, -1, 0, 3, 2**70, 0.5, "", "x", "re:(", [], [1], ["x"], {}, {"a": 1}]
    junk += [True, [[]], {"a": {}}, ["re:*"]]
    read = 0
    for seed in range(1500):
        rng = random.Random(seed)
        section = copy.deepcopy(rng.choice(good))
        place: Any = section
        while True:
            key = rng.choice(list(place))
            if not isinstance(place[key], dict) or not place[key] or rng.random() < 0.3:
                break
            place = place[key]
        place[key] = rng.choice(junk)
        try:
            spec = read_spec(config("llama", quantization_config=section))
            assert checkpoint_tensors(spec)
            assert tensors_read(spec)
            assert scheme_text(spec) or not matrix_schemes(spec)
            read += 1
        except ConfigError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {section}") from error
    assert 0 < read < 1500


LARGE = config(
    "qwen3_moe",
    num_hidden_layers=94,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
    hidden_size=4096,
    max_position_embeddings=4096,
)


@pytest.mark.parametrize("how", ["names", "pattern", "fp8"])
def test_routers_of_large_models_may_be_named(how: str) -> None:
    """As published checkpoints of 94 layers of 128 experts do."""
    routers = [f"model.layers.{index}.mlp.gate" for index in range(94)]
    left = routers if how == "names" else ["lm_head", "re:.*mlp.gate$"]
    section = compressed(linear(group_size=128), ignore=left)
    if how == "fp8":
        section = {"quant_method": "fp8", "modules_to_not_convert": routers}
    spec = read_spec(LARGE | {"quantization_config": section})
    assert all(layer.scheme_of("gate") for layer in spec.layers)
