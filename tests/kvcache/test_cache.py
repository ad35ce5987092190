"""The pool: what is written is found again, blocks are copied whole, sizes are as announced."""

from __future__ import annotations

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import ModelSpec
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache, bytes_per_block
from tests.architectures.configs import config

CPU = torch.device("cpu")


def mixed_spec() -> ModelSpec:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return read_spec(config("qwen2", use_sliding_window=True, sliding_window=4, layer_types=kinds))


def cache(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(spec, kv_groups(spec), 6, 4, dtype, CPU)


def rows(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, 2 * 2 * 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_gathered(dtype: torch.dtype) -> None:
    layer = cache(read_spec(config()), dtype).layers[1]
    wide = rows(3).to(dtype).repeat(1, 2)[:, 32:96]  # not contiguous
    layer.write(torch.tensor([5, 27, 8]), wide)
    found = layer.gather(torch.tensor([8, 5, 8, 27]))
    assert found.shape == (4, 2, 2, 16)
    assert torch.equal(found.flatten(1), wide[[2, 0, 2, 1]])


def test_layers_of_one_group_do_not_share_and_groups_do() -> None:
    """A block serves one group at a time, so layers of different groups may share a store."""
    spec = mixed_spec()
    kv = cache(spec)
    assert [layer.group for layer in kv.layers] == [1, 0, 2]
    assert len(kv.stores) == 1
    three = cache(read_spec(config()))
    assert len(three.stores) == 3
    three.layers[0].write(torch.tensor([4]), rows(1))
    assert three.layers[1].gather(torch.tensor([4])).abs().max() == 0


def test_copied_blocks_are_equal_in_all_layers() -> None:
    kv = cache(read_spec(config()))
    for index, layer in enumerate(kv.layers):
        layer.write(torch.arange(4, 28), rows(24, seed=index))
    before = [layer.gather(torch.arange(28)).clone() for layer in kv.layers]
    kv.copy_blocks(torch.tensor([2, 2, 5]), torch.tensor([1, 6, 3]))
    for old, layer in zip(before, kv.layers, strict=True):
        new = layer.gather(torch.arange(28))
        for source, target in ((2, 1), (2, 6), (5, 3), (2, 2), (4, 4), (5, 5), (0, 0)):
            wanted = old[source * 4 : source * 4 + 4]
            assert torch.equal(new[target * 4 : target * 4 + 4], wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_as_announced(dtype: str) -> None:
    for spec in (read_spec(config()), mixed_spec()):
        kv = cache(spec, getattr(torch, dtype))
        size = 4 if dtype == "float32" else 2
        assert kv.num_bytes == 7 * bytes_per_block(spec, 4, size)
        one = kv.format.bytes_per_token(2, 16, size)
        assert bytes_per_block(spec, 4, size) == len(kv.stores) * 4 * one


def test_unknown_format_is_a_config_error() -> None:
    spec = read_spec(config())
    with pytest.raises(ConfigError, match="unknown KV format 'fp3'; choose one of auto"):
        KVCache(spec, kv_groups(spec), 1, 4, torch.float32, CPU, kv_format="fp3")
