"""A checkpoint with MXFP4 experts is served as Transformers unpacks it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.layers.cut_source import unpack_mxfp4
from tests.layers.reference_models import YARN, ReferenceModel, tiny_config

PROMPTS = [[3, 14, 15, 92, 65], [3, 14, 15, 92, 6, 5, 35], [50]]
CONFIG = tiny_config("gpt_oss", rope_scaling=YARN, intermediate_size=96, torch_dtype=None)
PACKED = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}


@cache
def packed() -> tuple[ReferenceModel, dict[str, torch.Tensor]]:
    """A model with the numbers of random blocks, and its checkpoint."""
    model, noise = ReferenceModel(CONFIG, seed=3), torch.Generator().manual_seed(7)
    tensors = model.tensors
    for name, weight in model.model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            shape = experts, rows, columns // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=noise, dtype=torch.uint8)
            scales = torch.randint(122, 126, shape, generator=noise, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    return model, tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(PACKED))
    contiguous = {key: tensor.clone().contiguous() for key, tensor in packed()[1].items()}
    save_file(contiguous, str(tmp_path / "model.safetensors"))
    return tmp_path


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", num_blocks=60, block_size=4, max_model_len=64, **options)


def test_tokens_from_packed_experts(folder: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    results = opened(folder, dtype="float32").generate(PROMPTS, greedy)
    wanted = [packed()[0].greedy(prompt, 32) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == wanted


def test_without_a_word_of_the_dtype_it_is_bfloat16_with_sinks_of_32_bits(folder: Path) -> None:
    llm = opened(folder)
    assert llm.resolved.dtype == "bfloat16"
    for row in llm.memory:
        assert row.measured in (None, row.predicted), row


def test_rounded_further(folder: Path) -> None:
    llm = opened(folder, dtype="float32", weight_format="int8", kv_cache_dtype="fp8")
    wanted = packed()[0].logits(PROMPTS[1])
    apart = (llm.logits(PROMPTS[1]) - wanted).norm() / wanted.norm()
    assert float(apart) < 0.8


def test_every_number() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    scales = torch.tensor([[[0, 1, 100, 126, 127, 128, 200, 254]] * 2], dtype=torch.uint8)
    want = convert_moe_packed_tensors(every, scales, dtype=torch.bfloat16)[0].T
    assert torch.equal(unpack_mxfp4(every[0], scales[0]), want)


def test_quantized_experts_have_a_matrix_each() -> None:
    """Those of other packings, unless they were left as they are."""
    for left, is_stacked in (([], False), (["re:.*experts"], True)):
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": left}
        spec = read_spec(CONFIG | {"quantization_config": said | {"config_groups": groups}})
        assert any(one.experts for one in spec.tensor_layouts) is is_stacked
        assert (spec.layers[0].scheme_of("gate") is None) is is_stacked
        assert spec.layers[0].scheme_of("q") is not None
