"""Families without a file of ours answer as Transformers does, through its own modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ridgeline import LLM, SamplingParams, build
from ridgeline.errors import ConfigError

SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Layer norms and a squared ReLU; learned positions, layers inside of a further module; experts;
# a window in some layers; a family of ours, through the other implementation.
SERVED: Mapping[str, Mapping[str, Any]] = {
    "nemotron": {},
    "opt": {"ffn_dim": 96},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "cwm": {"sliding_window": 20},
    "llama": {"head_dim": 10},
}
LENGTHS = (3, 17, 40, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@cache
def reference(model_type: str, folder: Path) -> tuple[Any, Path]:
    config = AutoConfig.for_model(model_type, **{**SIZES, **SERVED[model_type]})
    config._attn_implementation = "eager"
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise), alpha=0.15)
    model.save_pretrained(folder / model_type)
    return model, folder / model_type


def serve(path: Path, **options: Any) -> LLM:
    asked = {"device": "cpu", "dtype": "float32", "progress": None, "max_num_batched_tokens": 16}
    return LLM(str(path), **(asked | options))


def prompts() -> list[list[int]]:
    """The last one begins as the third does, for as long as a few blocks."""
    noise = torch.Generator().manual_seed(2)
    found = [torch.randint(3, 97, (n,), generator=noise).tolist() for n in LENGTHS]
    return [*found, [*found[2][:32], 5, 6]]


def greedy(model: Any, prompt: list[int], num: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, min_new_tokens=num,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("model_type", SERVED)
def test_tokens_and_logits_equal_transformers(model_type: str, folder: Path) -> None:
    """In chunks of 16 tokens, side by side, with a prefix from the cache and preempted."""
    model, path = reference(model_type, folder)
    option = "transformers" if model_type == "llama" else "auto"
    num_blocks = 24 if "sliding_window" in SERVED[model_type] else 14
    llm = serve(path, implementation=option, num_blocks=num_blocks)
    asked = prompts()
    results = llm.generate(asked, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert sum(result.metrics.num_preemptions for result in results) > 0
    for prompt, result in zip(asked, results, strict=True):
        assert list(result.token_ids) == greedy(model, prompt, 64)
    (_, again) = (
        llm.generate(asked[2:3], SamplingParams(temperature=0, max_tokens=2))[0] for _ in range(2)
    )
    assert again.metrics.num_cached_tokens >= 32
    with torch.inference_mode():
        want = model(torch.tensor(asked[2:3])).logits[0]
    assert (llm.logits(asked[2]) - want).abs().max() < 1e-4
    parameters = sum(weight.numel() for weight in model.parameters())
    held = next(row for row in llm.memory if row.what == "weights")
    assert held.predicted == held.measured == 4 * parameters


def test_native_and_transformers_agree_in_a_smaller_cache(folder: Path) -> None:
    _, path = reference("llama", folder)
    answers = [
        serve(path, implementation=name, kv_cache_dtype="int8").generate(
            prompts(), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )
        for name in ("native", "transformers")
    ]
    ours, theirs = ([list(one.token_ids) for one in found] for found in answers)
    assert ours == theirs


# A bias by distance; layers without attention; positions that follow the longest of a step.
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "not each of its layers attends once"),
    "mamba": ({}, "not each of its layers attends once"),
    "nemotron": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "depend on the longest request of a step",
    ),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "its attention needs s_aux"),
    "no_such_type": ({}, "Transformers does not read a model_type 'no_such_type'"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_no_plain_decoder_is_refused_before_it_loads(
    model_type: str, tmp_path: Path
) -> None:
    changes, reason = REFUSED[model_type]
    config = {**SIZES, **changes, "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason):
        serve(tmp_path, implementation="transformers", load_format="random")


def test_modules_that_see_other_requests_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a norm that takes the mean over the tokens of a step."""
    from transformers.models.nemotron import modeling_nemotron

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x - 0.5 * x.mean(1, keepdim=True)

    _, path = reference("nemotron", folder)
    monkeypatch.setattr(modeling_nemotron.NemotronLayerNorm1P, "forward", forward)
    with pytest.raises(ConfigError, match="in chunks, beside others, its logits differ"):
        serve(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight_format": "int4"}, "weight_format int4 needs native layers"),
        ({"speculate": "ngram"}, "drafts need captured steps"),
        ({"implementation": "native"}, "model_type is 'nemotron'"),
    ],
)
def test_options_that_need_native_layers_say_so(
    options: dict[str, Any], reason: str, folder: Path
) -> None:
    _, path = reference("nemotron", folder)
    with pytest.raises(ConfigError, match=reason):
        serve(path, **options)


def test_a_tensor_too_few_or_too_many_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, path = reference("nemotron", folder)
    tensors = load_file(path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    for changed, reason in (
        ({k: v for k, v in tensors.items() if k != name}, f"1 missing tensors, such as {name}"),
        ({**tensors, "model.extra": torch.zeros(3)}, "1 unexpected tensors, such as model.extra"),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=reason):
            serve(tmp_path)


def test_without_the_package_the_error_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = reference("nemotron", folder)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ridgeline\[transformers\]'"):
        serve(path)
