"""Bits by layer: measured, within the target, written so that each layer is read with its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.compression.adviser import CANDIDATES, advise
from ridgeline.compression.checkpoints import write_plain
from ridgeline.compression.stream import Job, quantize_model
from ridgeline.errors import ConfigError
from tests.compression.test_stream import all_tensors, method, texts, written


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A model whose middle layer adds almost nothing."""
    model = written(tmp_path / "model", "llama")
    tensors = all_weights(model)
    for name, tensor in tensors.items():
        if ".layers.1." in name and ("o_proj" in name or "down_proj" in name):
            tensor.mul_(1e-3)
    save_file(tensors, model / "model.safetensors")
    return Job(model, tmp_path / "out", method("rtn", model), texts())


def all_weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def test_bits_go_where_they_matter_and_the_target_is_kept(job: Job) -> None:
    asked: list[int] = []
    advice = advise(job, 4.0, asked.append)
    assert tuple(asked) == CANDIDATES
    assert advice.num_bytes <= advice.budget_bytes
    assert advice.bits[1] == min(advice.bits) < 4
    assert max(advice.bits) > 4
    assert not job.out.exists()
    assert [path.name for path in job.out.parent.iterdir()] == ["model"]
    for bits, more in pairwise(CANDIDATES):
        assert advice.kl[more][0] < advice.kl[bits][0]
    mixed = quantize_model(replace(job, bits=advice.bits))
    flat = quantize_model(replace(job, out=job.out.with_name("flat")))
    assert mixed.num_bytes <= flat.num_bytes
    assert mixed.quality.kl < 0.8 * flat.quality.kl
    assert [one.bits for one in mixed.layers] == list(advice.bits)


def test_each_layer_is_read_with_its_own_bits(job: Job, tmp_path: Path) -> None:
    bits = (3, 8, 4)
    quantize_model(replace(job, bits=bits))
    config = json.loads((job.out / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"].values()
    assert sorted(group["weights"]["num_bits"] for group in groups) == [3, 4, 8]
    (pattern,) = config["quantization_config"]["config_groups"]["group_0"]["targets"]
    for name in ("mlp.up_proj", "self_attn.q_proj"):
        assert re.match(pattern.removeprefix("re:"), f"model.layers.0.{name}")
    for name in ("layers.1.mlp.up_proj", "layers.0.input_layernorm", "layers.0.mlp"):
        assert not re.match(pattern.removeprefix("re:"), f"model.{name}")
    write_plain(job.out, tmp_path / "plain")
    got, packed = all_tensors(tmp_path / "plain"), all_tensors(job.out)
    for layer, width in enumerate(bits):
        stem = f"model.layers.{layer}.mlp.up_proj."
        assert packed[stem + "weight_packed"].shape == (80, 64 * width // 32)
        levels = max(len(row.unique()) for row in got[stem + "weight"].view(-1, 16))
        assert levels <= 1 << width
        error = got[stem + "weight"] - all_weights(job.model)[stem + "weight"]
        step = 3 / ((1 << (width - 1)) - 1)
        assert float(error.abs().max()) < step


def test_an_interrupted_mixed_run_goes_on(job: Job) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, of: int) -> None:
        if done == 2:
            raise Stopped

    mixed = replace(job, bits=(3, 8, 4))
    with pytest.raises(Stopped):
        quantize_model(mixed, stop)
    with pytest.raises(ConfigError, match="other settings"):
        quantize_model(replace(job, bits=(3, 8, 3)))
    report = quantize_model(mixed)
    assert [one.resumed for one in report.layers] == [True, True, False]
    whole = quantize_model(replace(mixed, out=job.out.with_name("whole")))
    assert report.quality == whole.quality


@pytest.mark.parametrize("bits", [1.9, 8.1])
def test_a_target_out_of_range_is_refused(job: Job, bits: float) -> None:
    with pytest.raises(ConfigError, match="lies between 2 and 8"):
        advise(job, bits)
