"""Do the variants of attention keep and read what papers and hand arithmetic say?"""

from __future__ import annotations

import pytest

from ridgeline.errors import RequestFault
from ridgeline.lab.page import read_inputs
from ridgeline.lab.pages.attention_variants import PAGE, Inputs, Variant, answer


def variants(inputs: Inputs) -> dict[str, Variant]:
    return {one.name: one for one in answer(inputs).drawing.variants}


def test_groups_and_one_head_shrink_the_cache_as_taught() -> None:
    """64 heads: 8 times less with 8 groups, 64 times with one KV head (teaching texts)."""
    found = variants(Inputs())
    assert found["MHA"].bytes_per_token == 8 * found["GQA"].bytes_per_token
    assert found["MHA"].bytes_per_token == 64 * found["MQA"].bytes_per_token
    assert found["GQA"].bytes_per_token == 327_680
    quiz = variants(Inputs(model="llama-2-7b", kv_heads=4, context=4096))  # 32 heads, 4 groups
    assert quiz["MHA"].bytes_per_token == 8 * quiz["GQA"].bytes_per_token


def test_llama_2_70b_at_4096_tokens() -> None:
    found = variants(Inputs(model="llama-2-70b", context=4096))
    assert found["GQA"].keeps == pytest.approx(1.342e9, rel=1e-3)
    assert found["MHA"].keeps == pytest.approx(10.74e9, rel=1e-3)


def test_a_latent_cache_is_that_of_deepseek_v3() -> None:
    """(512 + 64) numbers x 61 layers x 2 B; its heads do 2 x 128 x (2 x 512 + 64) operations for
    each 1,152 B (arXiv 2405.04434)."""
    found = variants(Inputs(model="deepseek-v3"))["MLA"]
    assert found.bytes_per_token == 576 * 61 * 2 == 70_272
    assert found.flops_per_byte == pytest.approx(2 * 128 * 1088 / 1152)


def test_operations_for_a_byte_are_query_heads_per_kv_head() -> None:
    """With numbers of 2 bytes, whatever the batch and the context."""
    for inputs in (Inputs(batch=1), Inputs(batch=64, context=2048)):
        found = variants(inputs)
        assert [found[name].flops_per_byte for name in ("MHA", "GQA", "MQA")] == [1, 8, 64]


def test_layers_that_share_keep_less_and_read_as_much() -> None:
    found = variants(Inputs(shared_by=4))
    assert found["GQA, shared"].bytes_per_token == found["GQA"].bytes_per_token // 4
    assert found["GQA, shared"].reads == found["GQA"].reads
    assert found["GQA, shared"].weights < found["GQA"].weights  # no k and v matrices


def test_windows_bound_what_is_kept_and_read() -> None:
    inputs = Inputs(context=32768, window=4096, full_every=5, batch=3)
    found = variants(inputs)
    share = (1 + 4 * 4096 / 32768) / 5
    assert found["GQA, windows"].keeps == pytest.approx(found["GQA"].keeps * share)
    assert found["GQA, windows"].reads == pytest.approx(found["GQA"].reads * share)
    assert found["GQA"].reads == 3 * found["GQA"].keeps
    assert found["GQA, windows"].layers[:5] == ["window"] * 4 + ["full"]


def test_weights_are_those_of_the_model() -> None:
    """70.55 B parameters less the embedding, of which a step reads a row; 2 bytes each."""
    weights = variants(Inputs())["GQA"].weights
    assert weights == pytest.approx(2 * (70.55e9 - 128_256 * 8192), rel=1e-3)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(RequestFault, match="kv_heads is 7; 64 query heads") as fault:
        answer(Inputs(kv_heads=7))
    assert fault.value.param == "kv_heads"


@pytest.mark.parametrize("preset", [preset.name for preset in PAGE.presets])
def test_presets_are_inputs(preset: str) -> None:
    chosen = next(one for one in PAGE.presets if one.name == preset)
    assert answer(read_inputs(PAGE, chosen.inputs)).sentence  # type: ignore[arg-type]
