"""Every type of number in a GGUF file is read as the public `gguf` package reads it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ridgeline.errors import InternalError
from ridgeline.loader.gguf import read_gguf
from ridgeline.loader.gguf_checkpoint import decode
from ridgeline.loader.gguf_layout import BY_NAME, locate
from tests.conftest import TEST_DEVICE

FILES = Path(__file__).parent / "gguf_files"


def stored(name: str) -> torch.Tensor:
    """The bytes of a matrix in types.gguf, by rows."""
    header = read_gguf(FILES / "types.gguf")
    entry = locate(header)[name]
    data = bytearray(header.path.read_bytes()[entry.start : entry.end])
    return torch.frombuffer(data, dtype=torch.uint8).view(entry.shape[0], -1)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().contiguous().view(torch.int32)


@pytest.mark.parametrize("name", BY_NAME)
def test_numbers_are_the_same_bit_for_bit(name: str) -> None:
    want = load_file(FILES / "types.safetensors")[name]
    got = decode(name, stored(name).to(TEST_DEVICE))
    assert got.shape == want.shape == (2, 256)
    assert torch.equal(bits(got.float()), bits(want))
    assert len(set(want.flatten().tolist())) > 20


@pytest.mark.parametrize("name", [name for name, kind in BY_NAME.items() if kind.block > 1])
def test_blocks_do_not_depend_on_each_other(name: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    noise = torch.Generator().manual_seed(seed)
    raw, size = stored(name), BY_NAME[name].num_bytes
    blocks = raw.view(-1, size)
    order = torch.randperm(len(blocks), generator=noise)
    whole = decode(name, blocks)
    assert torch.equal(bits(decode(name, blocks[order])), bits(whole[order]))
    assert torch.equal(bits(whole.view(2, -1)), bits(decode(name, raw)))
    for at in range(len(blocks)):
        assert torch.equal(bits(decode(name, blocks[at : at + 1])), bits(whole[at : at + 1]))


def test_parts_of_blocks_are_our_own_mistake() -> None:
    with pytest.raises(InternalError, match="whole blocks"):
        decode("Q8_0", torch.zeros(2, 33, dtype=torch.uint8))
