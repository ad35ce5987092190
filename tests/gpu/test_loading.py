"""On a GPU weights that come through pinned buffers are those that are copied one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.loader.checkpoint import open_checkpoint
from ridgeline.loader.parallel import ParallelSource
from tests.loader.test_parallel import decoders, random_tensors, same, write
from tests.tiny_model import tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda", 0)
WIDE = tiny_config(hidden_size=512, intermediate_size=1536, vocab_size=5000, head_dim=128)


@pytest.mark.parametrize("chunk_bytes", [1001, 64 << 10, 16 << 20])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_format", ["plain", "fp8"])
def test_parameters_are_equal_bit_for_bit(
    tmp_path: Path, chunk_bytes: int, stored: torch.dtype, weight_format: str
) -> None:
    config: dict[str, Any] = tiny_config() if chunk_bytes < 4096 else WIDE
    folder = write(tmp_path / "model", random_tensors(config, stored))
    options: dict[str, Any] = {"dtype": torch.bfloat16, "weight_format": weight_format}
    plain, fast = decoders(config, device="cuda", **options)
    plain.load(open_checkpoint(folder))
    fast.load(ParallelSource(open_checkpoint(folder), CUDA, chunk_bytes=chunk_bytes))
    assert same(plain, fast)


@pytest.mark.parametrize("weight_format", ["plain", "fp8"])
def test_damage_is_found_and_named(tmp_path: Path, weight_format: str) -> None:
    tensors = random_tensors(WIDE, torch.bfloat16)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][-1, -1] = float("nan")
    folder = write(tmp_path / "model", tensors)
    decoder = decoders(WIDE, device="cuda", dtype=torch.bfloat16, weight_format=weight_format)[0]
    with pytest.raises(ConfigError, match=f"tensor '{name}' holds NaN"):
        decoder.load(ParallelSource(open_checkpoint(folder), CUDA))
