"""Every format, served: as many bytes as announced, and answers near those of plain weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, build
from ridgeline.formats import WEIGHT_FORMATS, served
from ridgeline.kernels.cpu import native
from ridgeline.loader.packs import Packs
from tests.tiny_model import make_tiny_model

NAMES = [name for name in served(WEIGHT_FORMATS) if WEIGHT_FORMATS[name].bits is not None]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "vocab_size": 272,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks": 20, "pack_cache": "off"}
IDS = list(range(5, 60))


FAR = {"int4-all": 0.8}  # its vocabulary is coarser as well


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_as_announced_and_answers_are_near(name: str, tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path, **SIZES))
    with LLM(folder, dtype="float32", **OPTIONS) as plain:
        wanted, whole = plain.logits(IDS), plain.memory[0].predicted
    for dtype in ("float32", "bfloat16"):
        with LLM(folder, weight_format=name, dtype=dtype, **OPTIONS) as small:
            weights = small.memory[0]
            assert weights.predicted == weights.measured
            assert weights.predicted < whole
            near = (small.logits(IDS).float() - wanted).norm() / wanted.norm()
            assert 0 < near < (0.25 if WEIGHT_FORMATS[name].bits == 8 else FAR.get(name, 0.7))


@pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
@pytest.mark.parametrize("name", ["int4-g32-asym", "int8-outliers"])
def test_a_second_start_finds_zero_points_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = Packs(tmp_path / "packs", worth_bytes=0)
    monkeypatch.setattr(build, "open_packs", lambda way: packs)
    folder = str(make_tiny_model(tmp_path / "model", **SIZES))
    logits = []
    for begin in ("B/s", "packed at an earlier start"):
        options = OPTIONS | {"dtype": "bfloat16", "weight_format": name, "pack_cache": "auto"}
        with LLM(folder, **options) as model:
            [phase] = [phase for phase in model.built.startup if phase.name == "weights"]
            assert begin in phase.detail
            logits.append(model.logits(IDS))
    assert torch.equal(*logits)
