"""Does a model that was packed at an earlier start say the same as one that is packed now?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams, build
from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu import native
from ridgeline.loader.packs import Packs
from tests.tiny_model import make_tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [5, 96, 23, 42]
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "vocab_size": 272,
}

needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packs:
    """Small models are kept too."""
    found = Packs(tmp_path / "packs", worth_bytes=0)
    monkeypatch.setattr(build, "open_packs", lambda way: None if way == "off" else found)
    return found


def weights_detail(model: LLM) -> str:
    [phase] = [phase for phase in model.built.startup if phase.name == "weights"]
    return phase.detail


@needs_library
@pytest.mark.parametrize("weight_format", ["plain", "int8", "int4"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"family": "qwen2"}])
def test_the_second_start_is_as_the_first(
    tmp_path: Path, packs: Packs, weight_format: str, changes: dict[str, Any]
) -> None:
    if changes.get("family") == "qwen2":  # has biases
        changes = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    folder = make_tiny_model(tmp_path / "model", **SIZES, **changes)
    start = partial(
        LLM,
        str(folder),
        device="cpu",
        dtype="bfloat16",
        weight_format=weight_format,
        max_model_len=64,
        num_blocks=32,
    )
    with start() as first:
        assert "B/s" in weights_detail(first)
        assert any(p.name == "keeping packed weights" for p in first.built.startup)
        answer = first.generate([PROMPT], GREEDY)[0].token_ids
        logits = first.logits(PROMPT)
    assert len(list(packs.folder.iterdir())) == 1
    with start() as second:
        assert "packed at an earlier start" in weights_detail(second)
        assert second.generate([PROMPT], GREEDY)[0].token_ids == answer
        assert torch.equal(second.logits(PROMPT), logits)
        [weights] = [row for row in second.memory if row.what == "weights"]
        assert weights.measured == weights.predicted
    with start(pack_cache="off") as third:
        assert "B/s" in weights_detail(third)
        assert torch.equal(third.logits(PROMPT), logits)
    make_tiny_model(folder, seed=1, **SIZES, **changes)
    with start() as other:
        assert "B/s" in weights_detail(other)
        assert not torch.equal(other.logits(PROMPT), logits)
    assert len(list(packs.folder.iterdir())) == 2


def test_what_is_not_packed_is_not_kept(tmp_path: Path, packs: Packs) -> None:
    folder = make_tiny_model(tmp_path / "model", **SIZES)
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_blocks": 32}
    other: dict[str, Any] = {"dtype": "bfloat16", "load_format": "random"}
    for changes in ({"dtype": "float32"}, other):
        with LLM(str(folder), **options, **changes):
            assert not packs.folder.exists()


def test_another_word_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="unknown pack_cache 'yes'; choose one of"):
        LLM(str(folder), pack_cache="yes")


@needs_library
@pytest.mark.parametrize("name", ["ct-int4-zeros", "gptq-4-order", "gptq-3"])
def test_a_quantized_checkpoint_comes_back_too(name: str, packs: Packs) -> None:
    folder = Path(__file__).parent / "loader/stored_files" / name
    start = partial(LLM, str(folder), device="cpu", dtype="bfloat16", num_blocks=32)
    with start() as first:
        logits = first.logits(PROMPT)
    with start() as second:
        assert "packed at an earlier start" in weights_detail(second)
        assert torch.equal(second.logits(PROMPT), logits)
        [weights] = [row for row in second.memory if row.what == "weights"]
        assert weights.measured == weights.predicted
    with start(weight_format="plain") as other:
        assert "B/s" in weights_detail(other)
