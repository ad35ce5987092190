"""Files as llama.cpp's converter writes them, of every family that it writes and we read, give the
logits and tokens of Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from tests.conftest import TEST_DEVICE
from tests.layers.reference_models import ReferenceModel
from tests.layers.test_agreement import prompts
from tests.loader.gguf_converter import CASES, write

OPTIONS: dict[str, Any] = {
    "device": TEST_DEVICE,
    "dtype": "float32",
    "num_blocks": 160,
    "block_size": 4,
    "warm_up": "off",
}


def agrees(path: Path, reference: ReferenceModel) -> None:
    ids = prompts(7, (24,))["r0"]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(path), **OPTIONS) as llm:
        found = llm.logits(ids).cpu()
        for row in llm.memory:
            assert row.measured in (None, row.predicted), row
        torch.testing.assert_close(found, reference.logits(ids), atol=1e-4, rtol=1e-4)
        [result] = llm.generate([ids], greedy, progress=False)
    assert list(result.token_ids) == reference.greedy(ids, 24)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    agrees(path, write(path, name))


@pytest.mark.parametrize("name", ["deepseek_v2 lite", "deepseek_v3 of a file"])
def test_latent_attention_of_older_files(name: str, tmp_path: Path) -> None:
    """What makes keys and values is one tensor there."""
    path = tmp_path / "model.gguf"
    agrees(path, write(path, name, is_older=True))


def test_what_a_file_says_of_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "starcoder2", keys={"use_parallel_residual": (7, True)})
    with pytest.raises(ConfigError, match="use_parallel_residual is True"):
        LLM(str(path), device="cpu")


def test_positions_that_have_grown(tmp_path: Path) -> None:
    """Phi-3 files of the longer context: divisors for both lengths as tensors, and what scores grow
    by as a key."""
    path = tmp_path / "model.gguf"
    reference = write(path, "phi3 within the trained length")
    for num, served in ((24, 128), (160, 512)):
        ids = prompts(7, (num,))["r0"]
        with LLM(str(path), **OPTIONS, max_model_len=served) as llm:
            found = llm.logits(ids).cpu()
        torch.testing.assert_close(found, reference.logits(ids), atol=1e-4, rtol=1e-4)
    write(path, "phi3 within the trained length", keys={"rope.scaling.attn_factor": (6, 1.5)})
    with pytest.raises(ConfigError, match=r"attn_factor is not the 1\.13\d* of a context of 128"):
        LLM(str(path), device="cpu")
    write(path, "phi3 within the trained length", without=["rope_factors_short.weight"])
    with pytest.raises(ConfigError, match=r"lacks tensor 'rope_factors_short\.weight' beside"):
        LLM(str(path), device="cpu")
