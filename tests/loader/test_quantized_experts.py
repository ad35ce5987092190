"""Checkpoints of families with experts, quantized in the layouts of other tools, are the models of
their numbers: read as numbers, and kept as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline import LLM
from ridgeline.architectures import read_spec
from ridgeline.architectures.parts import ROUTER, layer_tensors
from ridgeline.architectures.tensor_layouts import checkpoint_layer, unstacked
from ridgeline.formats import CHECKPOINT
from ridgeline.layers.cut_source import of_parameters
from ridgeline.layers.piece import TensorSource
from tests.compression.test_stream import CONFIGS, EXPERTS, stacked
from tests.conftest import TEST_DEVICE
from tests.layers.reference_models import ReferenceModel
from tests.portable import only_portable
from tests.quantization.stored_cases import Case, awq, gptq, make_case, pack_quantized

PROMPT = [1, 17, 60, 33, 5, 88]
Tensors = dict[str, torch.Tensor]


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", "re:.*mlp[.]gate$", "re:.*block_sparse_moe[.]gate$"],
        "config_groups": {"group_0": group},
    }


SECTIONS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
    "ct-int4": compressed(
        "pack-quantized",
        num_bits=4,
        type="int",
        strategy="group",
        group_size=16,
        symmetric=False,
    ),
    "ct-fp8": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def stored(layout: str, shape: tuple[int, ...], seed: int) -> tuple[Tensors, torch.Tensor]:
    """A random matrix as such a tool stores it, and its numbers."""
    rows, columns = shape
    noise = torch.Generator().manual_seed(seed)
    if "fp8" in layout:
        codes = torch.randn(shape, generator=noise).mul_(100.0).to(torch.float8_e4m3fn)
        if layout == "fp8":
            scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=noise) * 0.004
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide
        scale = torch.rand(rows, 1, generator=noise) * 0.004
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    is_gptq = layout == "gptq"
    made = make_case(4, outputs=rows, inputs=columns, seed=seed, symmetric=is_gptq)
    case = Case(4, made.codes, made.scale * 0.05, made.zero, made.group_of)
    if is_gptq:
        return gptq(case, version=1), case.weight
    return awq(case) if layout == "awq" else pack_quantized(case, symmetric=False), case.weight


class Given(TensorSource):
    """These tensors."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        return self._tensors[name].narrow(dim, start, length)


def written(folder: Path, name: str, layout: str) -> ReferenceModel:
    """The model of the numbers."""
    reference = ReferenceModel(CONFIGS[name])
    spec = read_spec(CONFIGS[name])
    source: TensorSource = Given(reference.tensors)
    of_experts = tuple(one for one in spec.tensor_layouts if one.experts)
    if of_experts:
        source = of_parameters(source, replace(spec, tensor_layouts=of_experts))
    tensors = {key: source.tensor(key).clone().contiguous() for key in source.names()}
    numbers = dict(tensors)
    for index in range(spec.num_layers):
        parts = layer_tensors(spec, index)
        for seed, (key, held) in enumerate(checkpoint_layer(unstacked(spec), index).items()):
            if parts[held[0][0]].product in ("", ROUTER):
                continue
            found, numbers[key] = stored(layout, tuple(tensors.pop(key).shape), seed + 1000 * index)
            tensors |= {key.removesuffix("weight") + own: one for own, one in found.items()}
    folder.mkdir()
    config = CONFIGS[name] | {"quantization_config": SECTIONS[layout]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    reference.model.load_state_dict(stacked(numbers))
    return reference


@pytest.mark.every_value
@pytest.mark.parametrize("layout", SECTIONS)
@pytest.mark.parametrize("name", EXPERTS)
def test_it_is_the_model_of_its_numbers(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_portable(monkeypatch)
    want = written(tmp_path / "model", name, layout).logits(PROMPT)
    options: dict[str, Any] = {"dtype": "float32", "device": TEST_DEVICE, "num_blocks": 32}
    for form in ("plain", CHECKPOINT):
        with LLM(str(tmp_path / "model"), weight_format=form, warm_up="off", **options) as llm:
            torch.testing.assert_close(llm.logits(PROMPT).cpu(), want, atol=1e-4, rtol=1e-4)
            [weights] = [row for row in llm.memory if row.what == "weights"]
            assert weights.measured == weights.predicted
