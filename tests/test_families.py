"""Is every family served whole? From a folder through the engine, in chunks, with shared prefixes,
preemptions and drafts the tokens are those of Transformers; caches and weights may have fewer bits.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import FAMILIES, read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import ExpertsSpec
from ridgeline.attention import choose_backend
from ridgeline.errors import ConfigError
from tests.conftest import TEST_DEVICE
from tests.layers.reference_models import VOCAB, ReferenceModel
from tests.layers.test_agreement import CONFIGS, prompts

# One of `CONFIGS` for each family, the one with most of what sets it apart.
CHOSEN = {
    "arcee": "arcee odd heads",
    "cohere": "cohere norms of heads",
    "cohere2": "cohere2 tied, layer types",
    "deepseek_v2": "deepseek_v2 yarn",
    "deepseek_v3": "deepseek_v3 odd heads",
    "exaone4": "exaone4 odd heads",
    "falcon": "falcon groups",
    "gemma": "gemma odd heads",
    "gemma2": "gemma2 odd heads",
    "gemma3_text": "gemma3 untied",
    "glm": "glm odd heads",
    "glm4": "glm4 odd heads",
    "glm4_moe": "glm4_moe groups",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "granite": "granite biased",
    "granitemoe": "granitemoe tied",
    "granitemoeshared": "granitemoeshared biased",
    "hunyuan_v1_dense": "hunyuan odd heads",
    "minicpm3": "minicpm3 straight queries",
    "mixtral": "mixtral llama3",
    "olmo2": "olmo2 odd heads",
    "olmo3": "olmo3 yarn",
    "phi3": "phi3 part of a head",
    "qwen2_moe": "qwen2_moe mixed",
    "qwen3_moe": "qwen3_moe mixed",
    "seed_oss": "seed_oss odd heads",
    "smollm3": "smollm3 odd heads",
    "stablelm": "stablelm side by side",
    "starcoder2": "starcoder2",
}
# What most other tests serve, and what reads the text part of another's checkpoint or its own as
# DeepSeek-V3 does.
ELSEWHERE = {"llama", "mistral", "qwen2", "qwen3", "gemma3", "kimi_k2"}
NEW_TOKENS = 64
FEW_BLOCKS = 44  # for each group of layers that sees everything: two of four requests at their end
SHARED = prompts(11, (9,))["r0"]
PROMPTS = [SHARED + own for own in prompts(12, (14, 5, 11, 8)).values()]
OPTIONS: dict[str, Any] = {
    "device": TEST_DEVICE,
    "dtype": "float32",
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "warm_up": "off",
}
# KV format and weight format, each at least once.
FORMATS = [("fp8", "int8"), ("int8", "int4"), ("int4", "fp8"), ("auto", "int4")]


@cache
def model(family: str) -> tuple[ReferenceModel, list[list[int]]]:
    """And its greedy tokens."""
    found = ReferenceModel(CONFIGS[CHOSEN[family]], seed=3)
    return found, [found.greedy(prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.fixture(params=CHOSEN)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    reference = model(name)[0]
    (tmp_path / "config.json").write_text(json.dumps(reference.config))
    tensors = {key: tensor.contiguous() for key, tensor in reference.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return name


def tokens(folder: Path, num: int = NEW_TOKENS, **options: Any) -> list[list[int]]:
    """Of all prompts, twice in a row: what the first left in the cache serves the second."""
    greedy = SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True)
    with LLM(str(folder), **OPTIONS | options) as llm:
        for row in llm.memory:
            assert row.measured in (None, row.predicted), row
        first, again = (llm.generate(PROMPTS, greedy, progress=False) for _ in range(2))
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert any(one.metrics.num_cached_tokens for one in again)
    if num == NEW_TOKENS:
        assert any(one.metrics.num_preemptions for one in first)
    return [list(one.token_ids) for one in first]


def test_chunks_prefixes_and_preemptions_change_no_token(family: str, tmp_path: Path) -> None:
    groups = kv_groups(read_spec(model(family)[0].config))
    num_blocks = FEW_BLOCKS * max(1, sum(group.window is None for group in groups))
    assert tokens(tmp_path, num_blocks=num_blocks) == model(family)[1]


@pytest.mark.parametrize("speculate", ["ngram:3", "early:1:2"])
def test_drafts_change_no_token(family: str, tmp_path: Path, speculate: str) -> None:
    spec, device = read_spec(model(family)[0].config), torch.device(TEST_DEVICE)
    if not choose_backend("auto", spec, torch.float32, device).captures_decodes:
        pytest.skip("drafts need captured steps")
    if isinstance(spec.layers[-1].feed_forward, ExpertsSpec) and TEST_DEVICE == "cpu":
        pytest.skip("experts have no captured steps in float32 on a CPU")
    found = tokens(tmp_path, 24, num_blocks=120, speculate=speculate)
    assert found == [answer[:24] for answer in model(family)[1]]


def test_every_cache_and_weights_of_fewer_bits(family: str, tmp_path: Path) -> None:
    """Logits near those of the whole numbers; groups of 32 or more need wider matrices."""
    wanted = model(family)[0].logits(PROMPTS[0])
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    is_latent = "kv_lora_rank" in model(family)[0].config
    for kv_format, weight_format in FORMATS:
        if is_latent and kv_format == "int4":
            continue
        options = {"kv_cache_dtype": kv_format, "weight_format": weight_format}
        with LLM(str(tmp_path), **OPTIONS | options, num_blocks=60) as llm:
            found = llm.logits(PROMPTS[0]).cpu()
            assert len(llm.generate([PROMPTS[0]], short)[0].token_ids) == 4
        apart = float((found - wanted).norm() / wanted.norm())
        assert apart < 0.8, (kv_format, weight_format, apart)
        assert torch.isfinite(found).all()


def test_the_part_of_a_multimodal_checkpoint_that_reads_text(tmp_path: Path) -> None:
    reference, answers = model("gemma3_text")
    config = {"model_type": "gemma3", "text_config": reference.config, "vision_config": {}}
    config["architectures"] = ["Gemma3ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {f"language_model.{k}": t.contiguous() for k, t in reference.tensors.items()}
    images = {"vision_tower.post_layernorm.weight": torch.ones(3)}
    save_file(tensors | images, tmp_path / "model.safetensors")
    assert tokens(tmp_path, 8, num_blocks=120) == [answer[:8] for answer in answers]
    save_file(tensors | {"other.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds tensor 'other\.weight'"):
        tokens(tmp_path, 8, num_blocks=120)


def test_every_family_has_its_line() -> None:
    assert CHOSEN.keys() | ELSEWHERE == FAMILIES.keys()
    assert all(len(prompt) < VOCAB for prompt in PROMPTS)
