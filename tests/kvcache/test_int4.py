"""Keys and values of 4 bits: what turning does, and which heads kernels read in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu import native
from ridgeline.kernels.paged_kv import decode_4, encode_4, hadamard
from ridgeline.kvcache.formats import Int4KV, reads_in_place
from tests.kvcache.test_coded import DEVICE, cache
from tests.tiny_model import make_tiny_model


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [2, 16, 64, 96, 128, 80])
def test_turning_keeps_products_and_is_its_own_inverse(size: int) -> None:
    q, k = noise(5, size), noise(5, size, seed=1)
    torch.testing.assert_close(hadamard(hadamard(k)), k, rtol=0, atol=1e-5)
    there = hadamard(q) @ hadamard(k).T
    torch.testing.assert_close(there, q @ k.T, rtol=1e-4, atol=1e-4)
    ones = torch.zeros(size)
    ones[0] = 1
    run = size & -size  # the largest power of two that divides it
    spread = torch.cat((torch.ones(run), torch.zeros(size - run)))
    assert torch.equal(hadamard(ones), spread * run**-0.5)


def test_turning_spreads_a_large_place() -> None:
    """Keys with a few places far above the others, as models have them: turned first, the products
    of 4 bits are nearer by far."""
    keys, queries = noise(200, 1, 128), noise(50, 128, seed=1)
    keys[..., [7, 71]] += 40.0
    exact = queries @ keys[:, 0].T

    def error(found: torch.Tensor, asked: torch.Tensor) -> float:
        scores = asked @ found[:, 0].T
        return float((scores - exact).norm() / exact.norm())

    plain = error(decode_4(*encode_4(keys)), queries)
    turned = error(decode_4(*encode_4(hadamard(keys))), hadamard(queries))
    assert turned < plain / 2


def test_codes_use_all_of_their_range() -> None:
    pairs, scales, lows = encode_4(torch.tensor([[[-1.0, 0.0, 0.52, 2.0]]]))
    assert (pairs & 15).tolist() == [[[0, 5]]]
    assert (pairs >> 4).tolist() == [[[8, 15]]]
    assert scales.item() == pytest.approx(0.2, rel=1e-3)
    assert lows.item() == -1.0


def test_heads_that_are_read_in_place() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [size for size in range(1, 300) if reads_in_place(cpu, size)] == [16, 32, 64, 128, 256]
    assert [size for size in range(1, 300) if reads_in_place(cuda, size)] == [32, 64, 128]
    store = Int4KV().allocate(2, 4, 2, 48, torch.float32, DEVICE)
    assert Int4KV().views(store, 2, 48) is None
    with pytest.raises(ConfigError, match="int4 needs an even head size, not 9"):
        Int4KV().allocate(2, 4, 2, 9, torch.float32, DEVICE)


@pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
def test_other_heads_are_gathered(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path, head_dim=24))
    options = {"device": "cpu", "num_blocks": 40, "block_size": 4, "kv_cache_dtype": "int4"}
    with LLM(folder, **options) as llm:  # type: ignore[arg-type]
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        assert len(llm.generate([[3, 14, 15]], greedy)[0].token_ids) == 4
    with pytest.raises(ConfigError, match="native does not read heads of 24 in KV format int4"):
        LLM(folder, attention_backend="native", **options)  # type: ignore[arg-type]


def test_a_quarter_of_the_bytes() -> None:
    wide = cache("auto", torch.bfloat16).num_bytes
    assert cache("int4", torch.bfloat16).num_bytes == wide * 20 // 64  # heads of 32: 16 and 4
