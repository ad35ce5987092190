"""Matrices of a GGUF file that are kept packed are the same numbers as the unpacked ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.architectures.quantization_scheme import tensors_of
from ridgeline.architectures.scheme_config import matrix_schemes
from ridgeline.architectures.scheme_methods import GGUF_BLOCKS, GGUF_KINDS
from ridgeline.errors import ConfigError
from ridgeline.formats import CHECKPOINT
from ridgeline.kernels.quantized_matrix import QuantizedMatrix
from ridgeline.layers.piece import Piece
from ridgeline.loader import open_checkpoint, read_config
from ridgeline.loader.gguf import read_gguf
from ridgeline.loader.gguf_checkpoint import GGUFCheckpoint
from ridgeline.loader.gguf_layout import locate
from ridgeline.quantization.readers import read_matrix
from tests.conftest import TEST_DEVICE
from tests.portable import only_portable

FILES = Path(__file__).parent / "gguf_files"
MODELS = ("llama", "llama3", "qwen2", "qwen3")
TOLD: dict[str, dict[str, list[int]]] = json.loads((FILES / "models.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_the_numbers_in_the_order_of_rows(name: str) -> None:
    """q and k of llama too, whose rows the file has in another order."""
    path = FILES / f"{name}.gguf"
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    scheme = matrix_schemes(read_spec(read_config(path)))
    assert {one.scheme.layout for one in scheme} <= GGUF_KINDS.keys()
    for matrix in scheme:
        key = matrix.name.removesuffix("weight") + GGUF_BLOCKS
        whole = checkpoint.tensor(matrix.name)
        rows, width = checkpoint.shape(key)
        for dim, start, length in ((0, 0, rows), (0, rows // 2, rows - rows // 2)):
            target = torch.empty(length, width, dtype=torch.uint8)
            checkpoint.fill(Piece(key, target, dim, start))
            read = read_matrix(matrix.scheme, {GGUF_BLOCKS: target}, length, matrix.columns)
            assert torch.equal(read.dequantize(), whole[start : start + length]), matrix.name
        per_block = width // (matrix.columns // 32)
        half = matrix.columns // 64
        if half:
            target = torch.empty(rows, half * per_block, dtype=torch.uint8)
            checkpoint.fill(Piece(key, target, 1, (matrix.columns // 32 - half) * per_block))
            read = read_matrix(matrix.scheme, {GGUF_BLOCKS: target}, rows, half * 32)
            assert torch.equal(read.dequantize(), whole[:, -half * 32 :]), matrix.name


def test_all_of_the_matrices_that_can_be_are_kept() -> None:
    path = FILES / "llama.gguf"
    config = read_config(path)
    section: Any = config["quantization_config"]
    assert section["quant_method"] == "gguf"
    kept = {one.name for one in matrix_schemes(read_spec(config))}
    checkpoint = open_checkpoint(path)
    layers = [name for name in checkpoint.names() if ".layers." in name]
    assert kept == {name for name in layers if checkpoint.dtype(name) in GGUF_KINDS}
    assert kept


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_portable(monkeypatch)
    llm = LLM(str(FILES / f"{name}.gguf"), dtype="float32", device=TEST_DEVICE, num_blocks=64)
    assert llm.resolved.weight_format == CHECKPOINT
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    [result] = llm.generate([TOLD[name]["prompt"]], greedy, progress=False)
    assert list(result.token_ids) == TOLD[name]["greedy"]
    [weights] = [row for row in llm.memory if row.what == "weights"]
    assert weights.measured == weights.predicted


def test_a_damaged_scale_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray((FILES / "llama.gguf").read_bytes())
    path.write_bytes(data)
    matrix = matrix_schemes(read_spec(read_config(path)))[0]
    checkpoint = open_checkpoint(path)
    start = checkpoint.entry(matrix.name).start
    checkpoint.close()
    data[start : start + 2] = b"\x00\x7e"  # a float16 that is no number
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"blk\.0\..* holds NaN or infinity"):
        LLM(str(path), device=TEST_DEVICE, num_blocks=64)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_every_kind_that_is_kept(kind: str) -> None:
    """The numbers that the `gguf` package reads, of random blocks."""
    entry = locate(read_gguf(FILES / "types.gguf"))[kind]
    data = (FILES / "types.gguf").read_bytes()[entry.start : entry.end]
    rows, columns = entry.shape
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1)
    scheme = GGUF_KINDS[kind]
    assert tuple(raw.shape) == tensors_of(scheme)[0].shape(rows, columns)
    found = read_matrix(scheme, {GGUF_BLOCKS: raw}, rows, columns)
    assert isinstance(found, QuantizedMatrix)
    assert found.bits == scheme.kept_bits
    assert found.nbytes - found.codes.nbytes == scheme.beside_bytes(rows, columns)
    assert torch.equal(found.dequantize(), load_file(FILES / "types.safetensors")[kind])


@pytest.mark.parametrize(("kind", "step"), [("Q8_0", 32), ("Q6_K", 256)])
def test_blocks_are_cut_between_them_alone(kind: str, step: int) -> None:
    width = tensors_of(GGUF_KINDS[kind])[0].dims[1]
    assert [at for at in range(0, 1024, 16) if width.divides(at)] == list(range(0, 1024, step))
