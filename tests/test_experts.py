"""Families with experts answer from a checkpoint on disk as Transformers does, with too few blocks
and with prefixes that others have computed."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ridgeline import LLM, ConfigError, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.layers.cut_source import unpack_mxfp4
from tests.layers.reference_models import VOCAB, YARN, ReferenceModel, tiny_config
from tests.tiny_model import write_tokenizer

PACKED = {"quantization_config": {"quant_method": "mxfp4"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": tiny_config("qwen2_moe", mlp_only_layers=[0]),
    "qwen3_moe": tiny_config("qwen3_moe", norm_topk_prob=True, decoder_sparse_step=2),
    "glm4_moe": tiny_config("glm4_moe", use_qk_norm=True, n_group=4, topk_group=2),
    "gpt_oss": tiny_config("gpt_oss", rope_scaling=YARN | {"truncate": False}),
    "gpt_oss mxfp4": tiny_config(
        "gpt_oss", rope_scaling=YARN, intermediate_size=96, torch_dtype=None
    ),
    "granitemoe": tiny_config("granitemoe", embedding_multiplier=3.0, residual_multiplier=0.3),
}


def packed(model: ReferenceModel) -> dict[str, torch.Tensor]:
    """The checkpoint with random MXFP4 experts, whose numbers the model gets."""
    noise, tensors = torch.Generator().manual_seed(7), model.tensors
    for name, weight in model.model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            shape = experts, rows, columns // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=noise, dtype=torch.uint8)
            scales = torch.randint(122, 126, shape, generator=noise, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    return tensors


@cache
def reference(name: str) -> tuple[ReferenceModel, dict[str, torch.Tensor]]:
    model = ReferenceModel(CONFIGS[name], seed=3)
    return model, packed(model) if "mxfp4" in name else model.tensors


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    model, tensors = reference(name)
    config = model.config | (PACKED if "mxfp4" in name else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    contiguous = {key: tensor.clone().contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, str(tmp_path / "model.safetensors"))
    write_tokenizer(tmp_path)
    return tmp_path


def opened(folder: Path, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "dtype": "float32"}
    return LLM(str(folder), device="cpu", **sizes | options)


def test_prefixes_and_preemption(name: str, folder: Path) -> None:
    rng = random.Random(5)
    prefix = [rng.randrange(3, VOCAB) for _ in range(21)]
    prompts = [[*prefix[: rng.choice((9, 21))], rng.randrange(3, VOCAB)] for _ in range(5)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    llm = opened(folder, num_blocks=34, max_num_batched_tokens=16)
    results = llm.generate(prompts, greedy)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == reference(name)[0].greedy(prompt, 24)
    assert any(result.metrics.num_preemptions for result in results)
    (again,) = llm.generate(prompts[:1], greedy)
    assert again.token_ids == results[0].token_ids
    assert again.metrics.num_cached_tokens > 0


@pytest.mark.parametrize(
    "formats", [{"weight_format": "int4", "kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}]
)
def test_formats(formats: dict[str, str], name: str, folder: Path) -> None:
    llm = opened(folder, num_blocks=40, **formats)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (result,) = llm.generate([[3, 14, 15]], greedy)
    ids = [3, 14, 15, *result.token_ids]
    assert llm.logits(ids).isfinite().all()
    if "weight_format" not in formats:  # keys of 8 bits move little
        assert torch.allclose(llm.logits(ids), reference(name)[0].logits(ids), atol=0.5)


def test_every_number_of_mxfp4() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    scales = torch.tensor([[[0, 1, 100, 126, 127, 128, 200, 254]] * 2], dtype=torch.uint8)
    want = convert_moe_packed_tensors(every, scales, dtype=torch.bfloat16)[0].T
    assert torch.equal(unpack_mxfp4(every[0], scales[0]), want)


def test_other_packings_of_stacked_experts_are_refused() -> None:
    config = CONFIGS["gpt_oss"] | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ConfigError, match="one tensor for all experts of a layer"):
        read_spec(config)
