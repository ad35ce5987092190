"""Are the decode steps of several ranks on a CPU one call each, like those of one rank?"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.executor.group import GroupExecutor
from ridgeline.executor.local import LocalExecutor
from ridgeline.kernels.cpu import native
from tests.distributed.models import numbers
from tests.distributed.prepared import fails, prepared
from tests.layers.reference_models import LLAMA3, YARN, tiny_config
from tests.layers.test_agreement import QWEN_WINDOW

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "bfloat16", "max_model_len": 64, "threads": 1, "speculate": "off",
}  # fmt: skip
# Full panels of one rank, shares of some of which end within one.
SIZES = {"vocab_size": 128, "intermediate_size": 144, "moe_intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama biased": tiny_config("llama", **SIZES, attention_bias=True, mlp_bias=True),
    "llama tied": tiny_config("llama", **SIZES, tie_word_embeddings=True, rope_scaling=LLAMA3),
    "3 KV heads": tiny_config("llama", **SIZES, num_attention_heads=6, num_key_value_heads=3),
    "mistral": tiny_config("mistral", **SIZES, sliding_window=5),
    "mixtral": tiny_config("mixtral", **SIZES, num_local_experts=16),
    "phi3": tiny_config("phi3", **SIZES),
    "qwen2": tiny_config("qwen2", **SIZES, **QWEN_WINDOW),
    "qwen2_moe": tiny_config(
        "qwen2_moe", **SIZES, num_experts=15, shared_expert_intermediate_size=96
    ),
    "qwen3": tiny_config("qwen3", **SIZES, attention_bias=True, rope_scaling=YARN),
    "qwen3_moe": tiny_config("qwen3_moe", **SIZES, num_experts=16),
    "seed_oss": tiny_config("seed_oss", **SIZES),
}
FORMATS = ("plain", "int8", "int4", "int4-g32-asym")
WAYS = (
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True),
)
PROMPTS = [list(range(3, 20)), [9, 8, 7], [5]]


@pytest.fixture
def must_record() -> Iterator[None]:
    """On every rank: no step falls back to calls one by one."""
    logger = logging.getLogger("ridgeline.devices.cpu")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addFilter(fails)
    with prepared(must_record=True):
        yield
    logger.removeFilter(fails)
    logger.setLevel(before)


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    found: Any = numbers(read_spec(config))
    save_file(dict(found.tensors), folder / "model.safetensors")


def said(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """All answers, and how many steps were captured ones."""
    with LLM(folder, **OPTIONS | options) as llm:
        executor = llm.engine.executor
        inner = executor.inner if isinstance(executor, GroupExecutor) else executor
        assert isinstance(inner, LocalExecutor)
        found = [llm.generate(PROMPTS, way, progress=False) for way in WAYS]
        answers = [list(one.token_ids) for some in found for one in some]
        return answers, inner.num_captured_steps


@pytest.mark.usefixtures("must_record")
@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_of_several_ranks_falls_back(family: str, tmp_path: Path) -> None:
    """In weight formats by turns."""
    turn = list(FAMILIES).index(family)
    config, weight_format = FAMILIES[family], FORMATS[turn % len(FORMATS)]
    write(tmp_path, config)
    for tp in (1, 2 + turn % 2):
        shared = {"tp": tp, "weight_format": weight_format}
        recorded, num_captured = said(tmp_path, **shared)
        assert num_captured == 16, tp  # all but the prompts'
        if tp > 1:
            assert recorded == said(tmp_path, **shared, enforce_eager=True)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("must_record")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_so_it_is_in_every_format(family: str, weight_format: str, tp: int, tmp_path: Path) -> None:
    write(tmp_path, FAMILIES[family])
    assert said(tmp_path, tp=tp, weight_format=weight_format)[1] == 16
