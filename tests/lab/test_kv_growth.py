"""Does the page of the KV cache show the figures that others publish, and what the pool does?"""

from __future__ import annotations

import json

import pytest

from ridgeline.architectures.catalogue import catalogue
from ridgeline.cost.memory import ideal_sequences
from ridgeline.errors import RequestFault
from ridgeline.lab.block_pool import FREE, SHARED
from ridgeline.lab.page import read_inputs
from ridgeline.lab.pages.kv_growth import PAGE, Inputs, answer


def figure(inputs: Inputs, name: str) -> float:
    return next(one.value for one in answer(inputs).figures if one.name == name)


# Teaching texts: 320 KiB a token, 2K = 640 MiB ... 128K = 40 GiB; 819,200 B for 13B; 1.342 GB for
# Llama-2-70B at 4096; 68.6 KiB of the latent vector.
@pytest.mark.parametrize(
    ("model", "bytes_each"),
    [("llama-3-70b", 327_680), ("llama-2-13b", 819_200), ("deepseek-v3", 70_272)],
)
def test_a_token_takes_what_is_published(model: str, bytes_each: int) -> None:
    assert figure(Inputs(model=model, device="b300"), "KV of a token") == bytes_each


@pytest.mark.parametrize(
    ("model", "tokens", "num_bytes"),
    [
        ("llama-3.1-70b", 2048, 640 << 20),
        ("llama-3.1-70b", 8192, 2560 << 20),
        ("llama-2-70b", 4096, 1_342_177_280),
        ("llama-3.1-8b", 4096, 1 << 29),
    ],
)
def test_a_request_takes_what_is_published(model: str, tokens: int, num_bytes: int) -> None:
    inputs = Inputs(model=model, devices=1, device="b300", prompt=tokens, generated=0)
    assert figure(inputs, "KV of one request") == num_bytes


def test_the_batch_ceiling_is_the_published_one() -> None:
    """13 requests of 5 GB beside a model of 14 GB in 80 GB: by itself, and of a model of that size,
    on the page, 9,537 tokens of which are 5 GB. Weights that do not fit leave room for none."""
    assert ideal_sequences(80e9, 14e9, 5e9) == 13
    assert ideal_sequences(10, 12, 1) == 0
    inputs = Inputs(model="llama-2-7b", device="a100-80-sxm", prompt=9537, generated=0)
    assert figure(inputs, "KV of one request") == pytest.approx(5e9, rel=1e-4)
    assert figure(inputs, "The same beside weights alone") == 13


def test_a_pasted_config_is_the_model_of_that_name() -> None:
    pasted = json.dumps(dict(catalogue()["llama-3.1-8b"].config))
    assert answer(Inputs(model="gpt-oss-20b", config=pasted)) == answer(Inputs())


@pytest.mark.parametrize("config", ["{", "[]", '{"model_type": "unheard"}'])
def test_a_config_that_is_none_is_refused_by_name(config: str) -> None:
    with pytest.raises(RequestFault, match="config") as fault:
        answer(Inputs(config=config))
    assert fault.value.param == "config"


@pytest.mark.parametrize(
    "inputs",
    [
        Inputs(),
        Inputs(users=128, prompt=3000, generated=5000),
        Inputs(users=100, prompt=4000, prefix=3990, generated=3000, block_size=64),
        Inputs(model="llama-2-13b", device="a100-40-sxm", users=16, generated=1000),
        Inputs(model="deepseek-v2-lite", kv="fp8"),
    ],
)
def test_the_block_manager_holds_what_the_closed_form_says(inputs: Inputs) -> None:
    drawing = answer(inputs).drawing
    assert drawing.pool is not None
    here = next(point for point in drawing.points if point.generated == inputs.generated)
    assert drawing.running == min(inputs.users, here.fit)
    whole, block = inputs.prompt + inputs.generated, inputs.block_size
    running = drawing.pool.tables[: drawing.running]
    for held in running:  # ceil(tokens / block), counted by hand
        assert held.shared + held.own == -(-whole // block)
        assert 0 <= held.spare < block
        assert held.spare == -whole % block
    shared = inputs.prefix // block
    assert [held.shared for held in running] == [shared] * len(running)
    used = shared + sum(held.own for held in running)
    assert drawing.pool.num_free == drawing.pool.num_blocks - used


def test_blocks_behind_a_window_are_given_back() -> None:
    """Every second layer of Gemma-2 sees 4,096 tokens: half of the blocks beyond are free again."""
    inputs = Inputs(model="gemma-2-9b", users=1, prompt=8192, generated=0)
    drawing = answer(inputs).drawing
    assert drawing.pool is not None
    held = drawing.pool.num_blocks - drawing.pool.num_free
    full, window = 8192 // 16, 4096 // 16
    assert full + window <= held <= full + window + 1


def test_cells_show_all_blocks() -> None:
    pool = answer(Inputs(users=3, prefix=1000)).drawing.pool
    assert pool is not None
    assert set(pool.cells) == {FREE, SHARED, 2, 3, 4}
    assert (len(pool.cells) - 1) * pool.blocks_per_cell < pool.num_blocks
    assert pool.num_blocks <= len(pool.cells) * pool.blocks_per_cell


def test_what_does_not_fit_says_what_would() -> None:
    found = answer(Inputs(model="llama-3.1-405b"))
    assert found.drawing.pool is None
    assert found.drawing.ways
    assert "does not fit" in found.sentence


@pytest.mark.parametrize("changed", [{"users": 0}, {"prompt": 40000}, {"devices": 3}])
def test_what_is_out_of_bounds_is_refused_by_name(changed: dict[str, int]) -> None:
    with pytest.raises(RequestFault) as fault:
        read_inputs(PAGE, changed)
    assert fault.value.param == next(iter(changed))


@pytest.mark.parametrize("preset", [preset.name for preset in PAGE.presets])
def test_presets_are_inputs(preset: str) -> None:
    chosen = next(one for one in PAGE.presets if one.name == preset)
    inputs = read_inputs(PAGE, chosen.inputs)
    assert answer(inputs).sentence  # type: ignore[arg-type]
