"""The memory contract adds up, and every change that it names would really fit."""

from __future__ import annotations

import random

import pytest

from ridgeline.architectures.counts import (
    kv_bytes,
    kv_bytes_per_token,
    layer_scale_bytes,
    linear_weights,
    weight_bytes,
)
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.cost.hardware import catalogue
from ridgeline.cost.memory import (
    Limits,
    MemoryPlan,
    block_bytes,
    fit_suggestions,
    memory_plan,
    plan_or_none,
    size_text,
    weight_items,
)
from ridgeline.cost.setup import Layout, Precision, Setup
from ridgeline.errors import DoesNotFit
from ridgeline.formats import weight_line
from tests.cost.random_setups import (
    DEEPSEEK_V3,
    GEMMA_3_27B,
    LLAMA_2_7B,
    LLAMA_2_13B,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    QWEN_2_5_7B,
    device,
    random_precision,
    random_setup,
    random_spec,
    spec_of,
)
from tests.thinning import slow

LIMITS = Limits(8192, 64, 8192)


def planned(setup: Setup, limits: Limits = LIMITS) -> MemoryPlan:
    return memory_plan(
        setup,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=limits.block_size,
        utilization=limits.utilization,
        min_sequences=limits.min_sequences,
    )


# ------------------------------------------------------------------------ known figures


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA_2_7B, 524_288),
        (LLAMA_2_13B, 819_200),
        (LLAMA_8B, 131_072),
        (LLAMA_70B, 327_680),
        (LLAMA_70B | {"num_key_value_heads": 64}, 2_621_440),
        (LLAMA_405B, 516_096),
        (QWEN_2_5_7B, 57_344),
        (DEEPSEEK_V3, 70_272),
    ],
)
def test_cache_of_a_token_in_16_bit(config: dict[str, object], expected: int) -> None:
    assert kv_bytes_per_token(spec_of(config), 2) == expected


def test_windows_of_gemma_3_27b() -> None:
    """10 of 62 layers see everything: 1.11 GB at 8k, 11.2 GB at 128k, instead of 4.16 and 66.6."""
    spec = spec_of(GEMMA_3_27B)
    assert sum(layer.attention.window is None for layer in spec.layers) == 10
    for tokens, windowed, whole in ((8192, 1.11, 4.16), (131072, 11.2, 66.6)):
        assert kv_bytes(spec, tokens, 2) / 1e9 == pytest.approx(windowed, rel=0.01)
        assert kv_bytes_per_token(spec, 2) * tokens / 1e9 == pytest.approx(whole, rel=0.01)


def test_a_latent_cache_does_not_shrink_with_ranks() -> None:
    spec = spec_of(DEEPSEEK_V3)
    assert kv_bytes_per_token(spec, 2, ranks=8) == 70_272
    assert kv_bytes_per_token(spec, 2, "fp8") == 70_272 // 2
    grouped = spec_of(LLAMA_70B)
    assert [kv_bytes_per_token(grouped, 2, ranks=r) for r in (1, 8, 16)] == [
        327_680,
        40_960,
        40_960,
    ]


# ------------------------------------------------------------------------ weights


@pytest.mark.parametrize("seed", range(60))
def test_the_lines_of_weights_sum_to_the_weights(seed: int) -> None:
    rng = random.Random(seed)
    spec, precision = random_spec(rng), random_precision(rng)
    items = weight_items(spec, Layout(), precision)
    assert sum(item.bytes for item in items) == weight_bytes(
        spec, precision.dtype_bytes, precision.weights
    )


def test_known_weights() -> None:
    items = {i.what: i.bytes for i in weight_items(spec_of(LLAMA_70B), Layout(), Precision())}
    assert sum(items.values()) / 1e9 == pytest.approx(141.1, abs=0.05)
    assert items["embedding"] == items["LM head"] == 128256 * 8192 * 2
    four_bit = weight_items(spec_of(LLAMA_70B), Layout(), Precision(weights="int4"))
    by_name = {item.what: item.bytes for item in four_bit}
    assert by_name["scales"] == pytest.approx(by_name["feed-forward"] * 0.03125 / 0.82, rel=0.03)
    assert by_name["embedding"] == by_name["LM head"] == items["embedding"] // 2  # int8
    eight_bit = weight_items(spec_of(LLAMA_70B), Layout(), Precision(weights="fp8"))
    by_name = {item.what: item.bytes for item in eight_bit}
    assert by_name["embedding"] == items["embedding"] // 2  # int8
    deepseek = weight_items(spec_of(DEEPSEEK_V3), Layout(), Precision())
    assert sum(i.bytes for i in deepseek) / 2e9 == pytest.approx(671, abs=0.5)  # billions
    experts = next(item for item in deepseek if item.what == "experts")
    assert experts.bytes == 2 * 58 * 256 * 3 * 7168 * 2048


@pytest.mark.parametrize(("vocab_size", "rows"), [(128256, 128256), (128257, 128272)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_vocabulary_of_eight_bits(vocab_size: int, rows: int, is_tied: bool) -> None:
    """Numbers, a scale for each row, and rows of zeros up to a multiple of 16."""
    spec = spec_of(LLAMA_8B, tie_word_embeddings=is_tied, vocab_size=vocab_size)
    matrices = 1 if is_tied else 2
    for name in ("int8", "int4"):
        items = {i.what: i.bytes for i in weight_items(spec, Layout(), Precision(weights=name))}
        assert items["embedding"] == rows * 4096
        assert items.get("LM head", 0) == (matrices - 1) * rows * 4096
        line = weight_line(name)
        scales = sum(layer_scale_bytes(4096, layer, name) for layer in spec.layers)
        if line.group:  # 4096 and 14336 are full groups
            assert scales == linear_weights(spec) // line.group * line.scale_bytes
        scales += matrices * rows * 4
        assert items["scales"] == scales
        assert sum(items.values()) == weight_bytes(spec, 2, name)
    halves = {i.what: i.bytes for i in weight_items(spec, Layout(2), Precision(weights="int8"))}
    assert halves["embedding"] == -(-vocab_size // 32) * 16 * 4096


def test_ranks_and_stages_divide_the_weights() -> None:
    spec = spec_of(LLAMA_70B)
    whole = weight_bytes(spec, 2)
    for tp in (2, 4, 8):
        share = sum(item.bytes for item in weight_items(spec, Layout(tp), Precision()))
        assert share == pytest.approx(whole / tp, rel=1e-3)
    stages = sum(item.bytes for item in weight_items(spec, Layout(pp=4), Precision()))
    assert whole / 4 < stages < whole / 4 + 128256 * 8192 * 2  # the fullest has an embedding


def test_what_is_held_more_than_once() -> None:
    spec = spec_of(LLAMA_70B)
    items = {item.what: item.bytes for item in weight_items(spec, Layout(tp=16), Precision())}
    q_and_o, k_and_v = 2 * 8192 * 8192 // 16, 2 * 8192 * 128  # one KV head on two ranks each
    assert items["attention"] == 80 * (q_and_o + k_and_v) * 2
    tied = spec_of(LLAMA_8B, tie_word_embeddings=True)
    last = {item.what: item.bytes for item in weight_items(tied, Layout(pp=3), Precision())}
    assert "embedding" in last  # the last stage of 11 layers needs it for its logits
    assert last["feed-forward"] == 11 * 3 * 4096 * 14336 * 2


@pytest.mark.parametrize(("layers", "stages"), [(80, 4), (61, 8), (3, 2), (5, 5)])
def test_stages_have_every_layer_once(layers: int, stages: int) -> None:
    parts = [Layout(pp=stages).stage_layers(layers, stage) for stage in range(stages)]
    assert [i for part in parts for i in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ------------------------------------------------------------------------ the plan


def test_a_plan_adds_up() -> None:
    setup = Setup(spec_of(LLAMA_8B), device("h100-sxm"))
    plan = planned(setup)
    assert plan.total_bytes == sum(item.bytes for item in plan.items) <= plan.capacity_bytes
    assert plan.capacity_bytes == int(80e9 * 0.9)
    assert plan.block_bytes == 16 * 131_072 == block_bytes(setup, 16)
    assert plan.item("KV cache").bytes == (plan.num_blocks + 1) * plan.block_bytes
    assert plan.weight_bytes == weight_bytes(setup.spec, 2)
    assert plan.max_sequences == plan.num_blocks // 512
    one_more = plan.total_bytes + plan.block_bytes
    assert one_more > plan.capacity_bytes or plan.num_blocks == 64 * 512


def test_no_more_blocks_than_can_be_used() -> None:
    plan = planned(Setup(spec_of(LLAMA_8B), device("h200-sxm")), Limits(1024, 4, 2048))
    assert plan.num_blocks == 4 * 64
    assert plan.max_sequences == 4


def test_spread_models_need_room_to_talk() -> None:
    setup = Setup(spec_of(LLAMA_70B), device("h100-sxm"), Layout(tp=4))
    names = [item.what for item in planned(setup).items]
    assert "communicator" in names
    assert "communicator" not in [
        item.what for item in planned(Setup(spec_of(LLAMA_8B), device())).items
    ]


def test_stages_share_the_cache_too() -> None:
    spec = spec_of(LLAMA_8B)
    assert block_bytes(Setup(spec, device(), Layout(pp=4)), 16) == 16 * 131_072 // 4
    assert block_bytes(Setup(spec, device(), Layout(tp=8)), 16) == 16 * 131_072 // 8
    assert block_bytes(Setup(spec, device(), Layout(tp=16, pp=2)), 16) == 16 * 131_072 // 16
    gemma = spec_of(GEMMA_3_27B)
    assert len(kv_groups(gemma)) == 31
    assert block_bytes(Setup(gemma, device()), 16) == 16 * 2 * 8192


def test_both_units_are_shown() -> None:
    assert size_text(80e9) == "80.00 GB (74.51 GiB)"


# ------------------------------------------------------------------------ what does not fit


def test_the_error_names_the_item_and_three_changes() -> None:
    with pytest.raises(DoesNotFit, match=r"largest item is feed-forward with 112\.74 GB") as caught:
        planned(Setup(spec_of(LLAMA_70B), device("h100-sxm")))
    assert dict(caught.value.items)["feed-forward"] == 80 * 3 * 8192 * 28672 * 2
    assert len(caught.value.changes) == 3


@pytest.mark.parametrize(
    ("config", "name", "limits", "first"),
    [
        # A little too much: settings come first, then formats, then devices.
        (LLAMA_8B, "rtx-4090", Limits(24576, 64, 8192), "memory_utilization 0.95"),
        (LLAMA_8B, "rtx-4090", Limits(131072, 64, 2048), "max_model_len"),
        (LLAMA_8B, "l4", Limits(8192, 16, 65536), "max_num_batched_tokens"),
        (LLAMA_2_13B, "rtx-4090", Limits(4096, 16, 2048), "fp8 weights"),
        (LLAMA_70B, "h100-sxm", LIMITS, "int4 weights"),
        (LLAMA_70B, "h100-sxm", Limits(131072, 64, 8192), "int4 weights and max_model_len"),
        (LLAMA_405B, "h100-sxm", LIMITS, "16 devices"),
        (DEEPSEEK_V3, "h200-sxm", LIMITS, "16 devices"),
    ],
)
def test_every_change_fits(
    config: dict[str, object], name: str, limits: Limits, first: str
) -> None:
    setup = Setup(spec_of(config), device(name))
    assert plan_or_none(setup, limits) is None
    changes = fit_suggestions(setup, limits)
    assert len(changes) == 3
    assert len({change.text for change in changes}) == 3
    assert changes[0].text.startswith(first), [change.text for change in changes]
    for change in changes:
        plan = planned(change.setup, change.limits)
        assert plan.total_bytes <= plan.capacity_bytes
        assert plan.max_sequences >= 1


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 25))])
def test_changes_fit_whatever_is_asked(seed: int) -> None:
    rng = random.Random(seed)
    config = rng.choice([LLAMA_8B, LLAMA_70B, QWEN_2_5_7B, GEMMA_3_27B, DEEPSEEK_V3, LLAMA_405B])
    one = rng.choice([d for d in catalogue().values() if d.kind == "gpu"])
    sequences = rng.choice([1, 1, 8])
    limits = Limits(
        rng.choice([4096, 32768, 131072]),
        64,
        rng.choice([512, 8192]),
        min_sequences=sequences,
    )
    setup = Setup(spec_of(config), one)
    if plan_or_none(setup, limits) is not None:
        assert planned(setup, limits).max_sequences >= sequences
        return
    with pytest.raises(DoesNotFit) as caught:
        planned(setup, limits)
    changes = fit_suggestions(setup, limits)
    assert caught.value.changes == tuple(change.text for change in changes)
    assert changes
    for change in changes:
        wanted = min(sequences, change.limits.max_num_seqs)
        assert planned(change.setup, change.limits).max_sequences >= wanted


@pytest.mark.parametrize("seed", range(40))
def test_less_is_never_more(seed: int) -> None:
    """Smaller limits leave at least as many blocks."""
    rng = random.Random(seed)
    setup = random_setup(rng)
    limits = Limits(rng.randint(64, 4000), rng.randint(1, 64), rng.randint(64, 4096))
    plan = plan_or_none(setup, limits)
    fewer = Limits(limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens // 2)
    other = plan_or_none(setup, fewer)
    assert plan is not None
    assert other is not None
    fixed = plan.total_bytes - plan.item("KV cache").bytes
    assert fixed >= other.total_bytes - other.item("KV cache").bytes
