"""Weights that are copied some rows at a time are those of the file, and its pages do not stay."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.errors import ConfigError, InternalError
from ridgeline.layers.piece import Piece
from ridgeline.loader.checkpoint import Checkpoint, open_checkpoint
from tests.layers.driving import build_decoder
from tests.loader.write import write_safetensors, write_sharded
from tests.tiny_model import tiny_config


def in_chunks(checkpoint: Checkpoint, chunk_bytes: int) -> Checkpoint:
    checkpoint.chunk_bytes = chunk_bytes
    return checkpoint


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("chunk_bytes", [1, 200, 1 << 20])
def test_a_model_is_the_one_that_is_read_piece_by_piece(tmp_path: Path, chunk_bytes: int) -> None:
    spec = read_spec(tiny_config())
    noise = torch.Generator().manual_seed(5)
    shapes = expected_tensors(spec)
    tensors = {name: torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    write_sharded(tmp_path, tensors, 2)
    make = partial(build_decoder, spec, max_model_len=64, device="cpu")
    plain, chunked = make(), make()
    seen: list[int] = []
    plain.load(open_checkpoint(tmp_path), seen.append)
    counted, seen = seen, []
    chunked.load(in_chunks(open_checkpoint(tmp_path), chunk_bytes), seen.append)
    assert seen == counted
    for name, tensor in plain.kept().items():
        assert torch.equal(tensor, chunked.kept()[name])


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_pieces(tmp_path: Path, dim: int | None) -> None:
    stored = torch.arange(60, dtype=torch.float32).view(10, 6)
    source = in_chunks(open_checkpoint(write(tmp_path, {"a": stored})), 24)
    wanted = stored if dim is None else stored.narrow(dim, 2, 3)
    target = torch.empty(wanted.shape, dtype=torch.bfloat16)
    with source.bring([Piece("a", target, dim, 0 if dim is None else 2)]) as sizes:
        assert list(sizes) == [4 * wanted.numel()]
    assert torch.equal(target, wanted.bfloat16())


@pytest.mark.parametrize("piece", [Piece("a", torch.empty(3)), Piece("a", torch.empty(3, 5), 0, 1)])
def test_a_piece_that_does_not_fit_is_refused(tmp_path: Path, piece: Piece) -> None:
    source = open_checkpoint(write(tmp_path, {"a": torch.ones(10, 6)}))
    with source.bring([piece]) as sizes, pytest.raises(InternalError, match="a piece fits"):
        next(sizes)


def test_damage_is_named(tmp_path: Path) -> None:
    stored = torch.ones(10, 6)
    stored[9, 5] = torch.inf
    source = in_chunks(open_checkpoint(write(tmp_path, {"a": stored})), 24)
    found = pytest.raises(ConfigError, match="tensor 'a' holds NaN or infinity")
    with source.bring([Piece("a", torch.empty(10, 6))]) as sizes, found:
        next(sizes)


def test_a_view_is_good_after_its_pages_are_gone(tmp_path: Path) -> None:
    stored = torch.arange(1 << 18, dtype=torch.float32)
    checkpoint = open_checkpoint(write(tmp_path, {"a": stored, "b": torch.empty(0)}))
    checkpoint.release("a")  # nothing is mapped yet
    view = checkpoint.tensor("a")
    before = resident(tmp_path)
    checkpoint.release("a")
    checkpoint.release("b")
    assert resident(tmp_path) < before / 10
    assert torch.equal(view, stored)


def resident(folder: Path) -> int:
    """Kilobytes of this process's memory that are pages of a file in `folder`."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counts = str(folder) in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total
