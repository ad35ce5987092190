"""The operators of a step add up to what the model's description says, whatever the model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ridgeline.architectures.counts import layer_kv_bytes, linear_weights, num_visible, step_flops
from ridgeline.architectures.spec import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec
from ridgeline.cost.ops import COLLECTIVES, KINDS, Op, experts_hit, step_ops
from ridgeline.cost.setup import Layout, Precision
from ridgeline.step import StepShape
from tests.cost.random_setups import (
    DEEPSEEK_V3,
    LLAMA_8B,
    LLAMA_70B,
    QWEN_2_5_7B,
    random_layout,
    random_precision,
    random_shape,
    random_spec,
    spec_of,
)

DECODE: StepShape = ((1, 999),)


def total(ops: tuple[Op, ...], what: str) -> float:
    values: list[float] = [op.count * getattr(op, what) for op in ops]
    return sum(values)


def named(ops: tuple[Op, ...], name: str) -> Op:
    (found,) = [op for op in ops if op.name == name]
    return found


@pytest.mark.parametrize("seed", range(150))
def test_operations_equal_the_counts_of_the_description(seed: int) -> None:
    rng = random.Random(seed)
    spec, shape = random_spec(rng), random_shape(rng)
    rows = rng.randint(0, 20)
    ops = step_ops(spec, shape, precision=random_precision(rng), num_logits=rows)
    assert total(ops, "flops") == step_flops(spec, shape, rows)
    assert {op.kind for op in ops} <= set(KINDS)


@pytest.mark.parametrize("seed", range(60))
def test_one_device_sends_nothing(seed: int) -> None:
    rng = random.Random(seed)
    ops = step_ops(random_spec(rng), random_shape(rng))
    assert total(ops, "sent_bytes") == 0
    assert not any(op.kind in COLLECTIVES for op in ops)


@pytest.mark.parametrize("seed", range(60))
def test_bytes_of_one_decode_are_weights_cache_and_activations(seed: int) -> None:
    rng = random.Random(seed)
    spec, precision = random_spec(rng), random_precision(rng)
    context = rng.randint(0, 500)
    ops = step_ops(spec, ((1, context),), precision=precision)
    size = precision.dtype_bytes
    packed = linear_weights(spec) - idle_weights(spec)
    head = spec.vocab_size * spec.hidden_size * precision.vocabulary.weight_bits
    weights = (packed * precision.weight_bits + head) / 8 + unpacked(spec) * size
    assert total(ops, "weight_bytes") == pytest.approx(weights, rel=1e-12)
    read = sum(op.count * op.kv_bytes for op in ops if op.kind == "decode_attention")
    assert read == sum(
        num_visible(a, context + 1) * layer_kv_bytes(a, size, precision.kv)
        for a in (layer.attention for layer in spec.layers)
    )
    written = total(ops, "kv_bytes") - read
    assert written == sum(
        layer_kv_bytes(a, size, precision.kv)
        for a in (layer.attention for layer in spec.layers)
        if a.cache_layer is None
    )
    activations = total(ops, "bytes") - total(ops, "weight_bytes") - total(ops, "kv_bytes")
    assert activations > 0


def idle_weights(spec: ModelSpec) -> int:
    """Of experts that one token does not choose."""
    return sum(
        (e.num_experts - e.num_active) * 3 * spec.hidden_size * e.intermediate_size
        for e in experts(spec)
    )


def unpacked(spec: ModelSpec) -> int:
    """Weights that no format packs: routers, and what makes keys and values of latent vectors."""
    routers = sum((e.num_experts + e.shared_gate) * spec.hidden_size for e in experts(spec))
    return routers + sum(
        a.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank
        for a in (layer.attention for layer in spec.layers)
        if (latent := a.latent) is not None
    )


def experts(spec: ModelSpec) -> list[ExpertsSpec]:
    every = [layer.feed_forward for layer in spec.layers]
    return [inner for inner in every if isinstance(inner, ExpertsSpec)]


def test_activations_are_a_small_part_of_a_large_models_decode() -> None:
    ops = step_ops(spec_of(LLAMA_8B), DECODE)
    weights = 16_060_522_496 - 128256 * 4096 * 2 - 65 * 4096 * 2  # embedding and norms aside
    assert total(ops, "weight_bytes") == weights
    rest = total(ops, "bytes") - weights - 1000 * 131072
    assert 0 < rest < 0.001 * weights


@pytest.mark.parametrize("seed", range(40))
def test_all_heads_as_kv_heads_is_multi_head_attention(seed: int) -> None:
    """Grouped attention with a group for each head has the bytes and operations of plain one, and
    with fewer groups only the keys, values and their matrices shrink."""
    rng = random.Random(seed)
    spec = random_spec(rng, latent=False)
    shape = random_shape(rng)
    heads = spec.layers[0].attention.num_heads
    full, half = with_kv_heads(spec, heads), with_kv_heads(spec, heads // 2)
    many, few = step_ops(full, shape), step_ops(half, shape)
    for a, b in zip(many, few, strict=True):
        assert (a.name, a.count) == (b.name, b.count)
        if a.kind.endswith("_attention"):
            assert a.kv_bytes == 2 * b.kv_bytes
            assert a.flops == b.flops
        elif a.name not in ("qkv", "rope_and_cache"):
            assert a == b
    attention = full.layers[0].attention
    head_bytes = 2 * 2 * attention.head_dim
    assert layer_kv_bytes(attention, 2) == heads * head_bytes


def with_kv_heads(spec: ModelSpec, number: int) -> ModelSpec:
    def changed(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, num_kv_heads=number))

    return replace(spec, layers=tuple(map(changed, spec.layers)))


@pytest.mark.parametrize("seed", range(60))
def test_ranks_share_the_work(seed: int) -> None:
    """All ranks together do at least the work of one device; what is not split is done again."""
    rng = random.Random(seed)
    spec, shape = random_spec(rng), random_shape(rng)
    layout = random_layout(rng, spec)
    alone, shared = step_ops(spec, shape), step_ops(spec, shape, layout)
    for what in ("flops", "weight_bytes", "kv_bytes"):
        one, each = total(alone, what), total(shared, what)
        assert one / layout.tp <= each * (1 + 1e-9)
        assert each <= one * (1 + 1e-9)


def test_shapes_of_the_products_of_a_rank() -> None:
    ops = step_ops(spec_of(LLAMA_70B), ((1, 10),) * 3, Layout(tp=8))
    shapes = {op.name: (op.m, op.n, op.k) for op in ops if op.kind == "matmul"}
    assert shapes == {
        "qkv": (3, (64 // 8 + 2 * 1) * 128, 8192),
        "attention_out": (3, 8192, 1024),
        "gate_up": (3, 2 * 28672 // 8, 8192),
        "down": (3, 8192, 28672 // 8),
        "lm_head": (3, 128256 // 8, 8192),
    }


def test_messages_of_tensor_parallel_ranks() -> None:
    spec = spec_of(LLAMA_70B)
    ops = step_ops(spec, ((1, 10),) * 4, Layout(tp=8))
    reduce = named(ops, "all_reduce")
    assert reduce.count == 2 * 80 + 1  # and the embedding
    assert reduce.sent_bytes == 2 * 7 / 8 * 4 * 8192 * 2
    gather = named(ops, "gather_logits")
    assert gather.sent_bytes == 7 / 8 * 4 * 128256 * 4
    assert reduce.ranks == gather.ranks == 8


def test_messages_of_pipeline_stages_and_expert_ranks() -> None:
    spec = spec_of(DEEPSEEK_V3)
    ops = step_ops(spec, ((1, 10),) * 16, Layout(tp=8, pp=2, ep=8))
    passed = named(ops, "point_to_point")
    assert (passed.count, passed.sent_bytes) == (1, 16 * 7168 * 2)
    assert named(ops, "all_reduce").count == 2 * 61 + 1  # every rank has all tokens


def test_the_fullest_rank_is_priced() -> None:
    """Of 14 query heads with 2 KV heads in all a third of 3 ranks has the 7 of one, of 231 groups
    half of them and one more, of 100 experts 34."""
    sizes = {"intermediate_size": 29_568, "num_attention_heads": 14, "num_key_value_heads": 2}
    sizes |= {"hidden_size": 14 * 128}
    spec = spec_of(QWEN_2_5_7B | sizes)
    ops = step_ops(spec, DECODE, Layout(3), Precision(weights="int4"))
    whole = step_ops(spec, DECODE, Layout(1), Precision(weights="int4"))
    assert named(ops, "decode_attention").flops == named(whole, "decode_attention").flops / 2
    assert named(ops, "qkv").n == (7 + 1 + 1) * 128
    halves = step_ops(spec, DECODE, Layout(2), Precision(weights="int4"))
    assert named(halves, "down").k == 116 * 128
    many = spec_of(DEEPSEEK_V3 | {"n_routed_experts": 100, "n_group": 1, "topk_group": 1})
    three, one = (step_ops(many, DECODE, Layout(ep, ep=ep)) for ep in (3, 1))
    experts = [named(found, "experts_down").weight_bytes for found in (three, one)]
    assert experts[0] == pytest.approx(0.34 * experts[1])


def test_kv_heads_are_repeated_where_ranks_outnumber_them() -> None:
    spec = spec_of(LLAMA_70B)
    by_ranks = {tp: named(step_ops(spec, DECODE, Layout(tp)), "decode_attention") for tp in (8, 16)}
    assert by_ranks[8].kv_bytes == by_ranks[16].kv_bytes == 1000 * 2 * 128 * 2
    assert by_ranks[8].flops == 2 * by_ranks[16].flops


def test_a_latent_cache_is_held_by_every_rank() -> None:
    spec = spec_of(DEEPSEEK_V3)
    for tp in (1, 8):
        op = named(step_ops(spec, DECODE, Layout(tp)), "decode_attention")
        assert op.kv_bytes == 1000 * (512 + 64) * 2
        assert op.flops == 2 * 1000 * (128 // tp) * (2 * 512 + 64)


def test_experts_that_have_work() -> None:
    """128 experts, 8 of them active: 8, 29, 82, 126, 128 for 1, 4, 16, 64, 256 tokens."""
    hit = [round(experts_hit(128, 8, tokens)) for tokens in (1, 4, 16, 64, 256)]
    assert hit == [8, 29, 82, 126, 128]


def test_decode_attention_has_the_same_intensity_for_any_batch() -> None:
    """2 operations per byte and query head of a group: 1 with 16-bit keys for plain heads, 8 for
    groups of eight."""
    for config, expected in ((LLAMA_70B, 8.0), (LLAMA_70B | {"num_key_value_heads": 64}, 1.0)):
        for batch in (1, 50):
            op = named(step_ops(spec_of(config), ((1, 4095),) * batch), "decode_attention")
            assert op.flops / op.kv_bytes == expected
    latent = named(step_ops(spec_of(DEEPSEEK_V3), DECODE), "decode_attention")
    assert latent.flops / latent.kv_bytes == pytest.approx(242, abs=0.5)


def test_decodes_and_chunks_are_separate_operators() -> None:
    spec = spec_of(LLAMA_8B)
    ops = step_ops(spec, ((1, 100), (64, 200), (1, 50), (32, 0)))
    decode, prefill = named(ops, "decode_attention"), named(ops, "prefill_attention")
    assert decode.mixed
    assert prefill.mixed
    assert (decode.m, decode.n, decode.k) == (2, 101, 152)
    assert (prefill.m, prefill.n, prefill.k) == (96, 2, 264 + 32)
    assert not named(step_ops(spec, DECODE), "decode_attention").mixed


def test_a_window_bounds_what_is_read() -> None:
    spec = spec_of(LLAMA_8B)
    windowed = replace(
        spec,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, window=128)) for layer in spec.layers
        ),
    )
    assert named(step_ops(windowed, ((1, 5000),)), "decode_attention").k == 128
    assert named(step_ops(windowed, ((10, 5000),)), "prefill_attention").k == 137
    assert named(step_ops(windowed, ((1, 50),)), "decode_attention").k == 51


def test_no_tokens_no_operators() -> None:
    assert step_ops(spec_of(LLAMA_8B), ()) == ()


def test_a_step_without_logits_has_no_output_matrix() -> None:
    names = {op.name for op in step_ops(spec_of(LLAMA_8B), ((512, 0),), num_logits=0)}
    assert names.isdisjoint({"lm_head", "sampling", "final_norm"})


def test_weight_formats_shrink_what_is_read() -> None:
    spec = spec_of(LLAMA_8B)
    read = {
        name: named(step_ops(spec, DECODE, precision=Precision.named(name)), "gate_up").weight_bytes
        for name in ("bf16", "fp8", "int8", "int4")
    }
    assert read["fp8"] == read["bf16"] / 2
    assert read["int8"] == read["bf16"] / 2
    assert read["int4"] == read["bf16"] * 4.125 / 16
    for name in ("fp8", "int8", "int4"):  # embedding and output matrix beside them have 8 bits
        ops = {op.name: op for op in step_ops(spec, DECODE, precision=Precision.named(name))}
        assert ops["lm_head"].weight_bytes == 128256 * 4096
        assert ops["lm_head"].weights == "int8"
        assert ops["embedding"].read_bytes == ops["embedding"].m * 4096


@pytest.mark.parametrize(("name", "on_gpu"), [("int8", "int8"), ("int4", "bf16")])
def test_a_cpu_multiplies_integers(name: str, on_gpu: str) -> None:
    """Its kernels round the inputs, as those of GPUs do beside weights of 8 bits; beside 4 bits
    there the weights become the serving dtype."""
    ops = {o.name: o for o in step_ops(spec_of(LLAMA_8B), DECODE, precision=Precision.named(name))}
    for what, wanted in (("gate_up", on_gpu), ("lm_head", "int8")):
        assert (ops[what].dtype_on("cpu"), ops[what].dtype_on("gpu")) == ("int8", wanted)
    assert ops["norm"].dtype_on("cpu") == ops["decode_attention"].dtype_on("cpu") == "bf16"
    plain = {o.name: o for o in step_ops(spec_of(LLAMA_8B), DECODE)}
    assert plain["gate_up"].dtype_on("cpu") == "bf16"


def test_attention_specs_that_cost_the_same_are_one_operator() -> None:
    spec = spec_of(LLAMA_8B)
    assert named(step_ops(spec, DECODE), "decode_attention").count == 32
    attention: AttentionSpec = spec.layers[0].attention
    other = replace(spec.layers[0], attention=replace(attention, scale=0.1))
    mixed = replace(spec, layers=(other, *spec.layers[1:]))
    assert named(step_ops(mixed, DECODE), "decode_attention").count == 32
