"""Are the models that are known by name as large as the real ones?"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.architectures import PLANNED_FAMILIES, read_spec
from ridgeline.architectures.catalogue import DATA, Entry, catalogue, find_entry, suggestions
from ridgeline.architectures.counts import (
    kv_bytes,
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
)
from ridgeline.architectures.shapes import SHAPES
from ridgeline.architectures.spec import ModelSpec, missing

# As the weights on the hub count them (total of their index files).
PUBLISHED = {
    "aya-expanse-8b": 8_028_033_024,
    "command-a": 111_057_580_032,
    "deepseek-v2-lite": 15_706_484_224,
    "falcon3-7b": 7_455_550_464,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "glm-4-9b": 9_400_279_040,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "granite-3.3-8b": 8_170_864_640,
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-4": 14_659_507_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "seed-oss-36b": 36_151_104_512,
    "smollm3-3b": 3_075_098_624,
}
# In billions, as their papers and cards round them: all, and of one token (with the embedding).
ROUNDED = {
    "deepseek-v3": (671, 37),
    "gemma-3-27b": (27.0, None),
    "glm-4.5": (353, 32),  # without the layer for drafting
    "glm-4.5-air": (107, 12),
    "kimi-k2": (1026, 32),
    "llama-4-maverick": (401, 17),
    "llama-4-scout": (108, 17),
    "minimax-m2": (229, 10),
}
# Numbers that a description has no place for: the final norm's bias and that of the output matrix.
LEFT_OUT = {"phi-3.5-moe": 4096 + 32_064}
SAME_CLASS = {"kimi_k2": "deepseek_v3", "gemma3": "gemma3_text"}


def spec_of(name: str) -> ModelSpec:
    entry = find_entry(name)
    assert entry is not None
    return read_spec(entry.config)


def first_of_each_family() -> Iterator[str]:
    seen: set[object] = set()
    for name, entry in catalogue().items():
        if entry.config["model_type"] not in seen:
            seen.add(entry.config["model_type"])
            yield name


FIRST = tuple(first_of_each_family())
REST = tuple(
    pytest.param(name, marks=pytest.mark.slow) for name in catalogue() if name not in FIRST
)


def test_the_data_are_in_the_wheel() -> None:
    """By the patterns of pyproject.toml."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)["tool"]["setuptools"]["package-data"]
    assert DATA.name in data["ridgeline.architectures"]


def test_names_and_sources() -> None:
    entries = list(catalogue().values())
    assert len(entries) >= 100
    assert len({entry.hub_id for entry in entries}) == len(entries)
    for entry in entries:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]+", entry.name)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.hub_id)
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[012])", entry.date)
        assert entry.source == f"config.json of {entry.hub_id}, {entry.date}"


def test_every_planned_family_has_an_entry() -> None:
    """So that its sizes are held against Transformers below."""
    used = {entry.config["model_type"] for entry in catalogue().values()}
    assert PLANNED_FAMILIES.keys() - used == set()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    assert num_parameters(spec_of(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_totals(name: str) -> None:
    spec, (total, active) = spec_of(name), ROUNDED[name]
    assert num_parameters(spec) / 1e9 == pytest.approx(total, abs=0.5)
    if active is not None:
        looked_up = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
        used = num_active_parameters(spec) + looked_up
        assert used / 1e9 == pytest.approx(active, rel=0.15)


def test_known_cache_sizes() -> None:
    assert kv_bytes_per_token(spec_of("deepseek-v3"), 2) == 70_272
    assert kv_bytes_per_token(spec_of("llama-3-70b"), 2) == 327_680
    assert kv_bytes_per_token(spec_of("llama-2-13b"), 2) == 819_200
    assert kv_bytes(spec_of("llama-3.1-8b"), 128 << 10, 2) == 16 << 30
    assert kv_bytes(spec_of("llama-2-70b"), 4096, 2) / 1e9 == pytest.approx(1.342, abs=0.001)
    # Half of the layers look back on 128 tokens.
    assert kv_bytes(spec_of("gpt-oss-20b"), 8192, 2) == 12 * 2048 * (8192 + 128)


def theirs(entry: Entry) -> tuple[Any, int]:
    """The config of Transformers' class, and its numbers; nothing is allocated."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    given: dict[str, Any] = dict(entry.config)
    given = dict(given.get("text_config", given))
    given.pop("torch_dtype", None)
    model_type = str(given.pop("model_type"))
    model_type = SAME_CLASS.get(model_type, model_type)
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers does not know {model_type}")
    with torch.device("meta"):
        make: Any = AutoModelForCausalLM.from_config
        config = AutoConfig.for_model(model_type, **given)
        model = make(config)
    learned = [buffer for name, buffer in model.named_buffers() if "correction_bias" in name]
    return config, sum(one.numel() for one in (*model.parameters(), *learned))


@pytest.mark.parametrize("name", [*FIRST, *REST])
@pytest.mark.filterwarnings("ignore")
def test_parameters_and_windows_equal_transformers(name: str) -> None:
    spec = spec_of(name)
    config, total = theirs(catalogue()[name])
    assert total - num_parameters(spec) == LEFT_OUT.get(name, 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        windows = [layer.attention.window is not None for layer in spec.layers]
        assert windows == [kind != "full_attention" for kind in kinds]


def test_shapes_are_never_served() -> None:
    for entry in catalogue().values():
        spec = read_spec(entry.config)
        is_planned = entry.config["model_type"] in PLANNED_FAMILIES
        assert bool(missing(spec)) is is_planned, entry.name
        assert not (spec.family in SHAPES and not spec.unserved)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("llama-3.1-8", "llama-3.1-8b"),
        ("Qwen3-32", "qwen3-32b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-V3@main", "deepseek-v3"),
        ("mixtral8x7b", "mixtral-8x7b"),
    ],
)
def test_suggestions(typed: str, nearest: str) -> None:
    assert suggestions(typed)[0] == nearest
    assert len(suggestions(typed)) <= 3


def test_what_is_like_nothing_gets_no_suggestion() -> None:
    assert suggestions("gpt2") == suggestions("user/name") == suggestions("xyzzy") == []
    assert find_entry("Llama-3.1-8B") is find_entry("llama-3.1-8b") is not None
    assert find_entry("meta-llama/Llama-3.1-8B") is None
