"""Every matrix stored in another way, the output matrix too: the model that it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline import LLM
from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.cost.memory_items import weight_items
from ridgeline.cost.ops import step_ops
from ridgeline.cost.setup import Layout, Precision
from ridgeline.formats import CHECKPOINT
from ridgeline.loader import read_config
from tests.conftest import TEST_DEVICE
from tests.portable import only_portable
from tests.quantization.stored_cases import make_case, pack_quantized
from tests.tiny_model import tiny_config

GROUP = 16
# Module -> bits, and whether there are no zeros; v is not quantized.
HOW = {
    "q_proj": (4, True),
    "k_proj": (8, False),
    "o_proj": (3, True),
    "gate_proj": (4, False),
    "up_proj": (8, True),
    "down_proj": (2, False),
    "lm_head": (4, True),
}
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": TEST_DEVICE, "num_blocks": 32}
PROMPT = [1, 17, 60, 33, 5, 88]


def groups() -> dict[str, Any]:
    return {
        module: {
            "targets": [module if module == "lm_head" else f"re:.*[.]{module}$"],
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
        for module, (bits, symmetric) in HOW.items()
    }


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """As it is stored, and as numbers in float32."""
    config = tiny_config()
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups(),
        "ignore": [],
    }
    scheme: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    noise = torch.Generator().manual_seed(9)
    for seed, (name, shape) in enumerate(expected_tensors(read_spec(config)).items()):
        module = name.split(".")[-2]
        values = 0.2 * torch.randn(shape, generator=noise)
        plain[name] = scheme[name] = 1.0 + values if "norm" in name else values
        if module not in HOW:
            continue
        bits, symmetric = HOW[module]
        case = make_case(
            bits,
            outputs=shape[0],
            inputs=shape[1],
            group=GROUP,
            symmetric=symmetric,
            dtype=torch.float32,
            seed=seed,
        )
        case.scale.mul_(0.5 / (1 << bits))
        plain[name] = case.weight
        del scheme[name]
        tensors = pack_quantized(case, symmetric=symmetric)
        scheme |= {f"{name.removesuffix('weight')}{k}": t for k, t in tensors.items()}
    folders = tmp_path / "stored", tmp_path / "plain"
    for folder, tensors, more in zip(
        folders, (scheme, plain), ({"quantization_config": section}, {}), strict=True
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")
    return folders


def test_it_is_the_model_of_its_numbers(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_portable(monkeypatch)
    served, wanted = LLM(str(models[0]), **OPTIONS), LLM(str(models[1]), **OPTIONS)
    torch.testing.assert_close(served.logits(PROMPT), wanted.logits(PROMPT), atol=1e-4, rtol=1e-4)
    unpacked = LLM(str(models[0]), weight_format="plain", **OPTIONS)
    assert torch.equal(unpacked.logits(PROMPT), wanted.logits(PROMPT))
    said = {one.field: one.because for one in served.resolved.decisions}
    assert "lm_head.weight (pack-quantized, 4 bits" in said["unpacked weights"]
    assert "2 x pack-quantized, 2 bits, groups of 16, zeros" in said["weight_format"]


def test_its_bytes_are_counted_one_by_one(models: tuple[Path, Path]) -> None:
    """By the contract, by what is allocated, and by the cost model, which also reads them once."""
    served = LLM(str(models[0]), **OPTIONS)
    [weights] = [row for row in served.memory if row.what == "weights"]
    assert weights.measured == weights.predicted
    spec = read_spec(read_config(models[0]))
    precision = Precision("float32", CHECKPOINT)
    assert sum(item.bytes for item in weight_items(spec, Layout(), precision)) == weights.predicted
    kept = 0.0
    for module, (bits, symmetric) in HOW.items():
        if module == "lm_head":
            continue
        name = next(n for n in expected_tensors(spec) if n.endswith(f"{module}.weight"))
        rows, columns = expected_tensors(spec)[name]
        width = 4 if bits <= 4 else 8
        kept += rows * columns * width / 8 + rows * columns // GROUP * (4 if symmetric else 5)
    rows, columns = 16, 32  # of v
    kept += rows * columns * 4
    read = sum(
        op.count * op.weight_bytes
        for op in step_ops(spec, ((1, 0),), precision=precision)
        if op.kind == "matmul" and op.name != "lm_head"
    )
    assert read == pytest.approx(spec.num_layers * kept)
