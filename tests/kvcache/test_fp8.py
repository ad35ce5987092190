"""e4m3 keys and values: near what was written, half the bytes, and never NaN for large numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.kernels.qk_norm_rope_write import qk_norm_rope_write
from ridgeline.kernels.quantize_rows import E4M3
from ridgeline.kvcache import KVCache, bytes_per_block
from ridgeline.kvcache.fp8 import Fp8KV
from tests.architectures.configs import config
from tests.tiny_model import make_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = read_spec(config())  # two KV heads of 16


def cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(SPEC, kv_groups(SPEC), 6, 4, dtype, DEVICE, kv_format="fp8")


def rows(num: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(num, 2 * 2 * 16, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_gathered_is_off_by_a_sixteenth_at_most(dtype: torch.dtype) -> None:
    layer = cache(dtype).layers[1]
    wide = (rows(3) * 10.0 ** rows(3, seed=1)).to(dtype).repeat(1, 2)[:, 32:96]  # not contiguous
    layer.write(slots(5, 27, 8), wide)
    found = layer.gather(slots(8, 5, 8, 27))
    assert found.shape == (4, 2, 2, 16)
    assert found.dtype == dtype
    wanted = wide[[2, 0, 2, 1]].float().clamp(-448, 448)
    apart = (found.flatten(1).float() - wanted).abs()
    assert bool((apart <= torch.clamp_min(wanted.abs() / 16, 2.0**-10)).all())


def test_large_numbers_become_the_largest_and_nan_stays() -> None:
    layer, wide = cache().layers[0], rows(1)
    wide[0, :5] = torch.tensor([447.0, 465.0, -1e9, torch.inf, torch.nan])
    layer.write(slots(4), wide)
    found = layer.gather(slots(4)).flatten()
    assert found[:4].tolist() == [448.0, 448.0, -448.0, 448.0]
    assert bool(found[4].isnan())


def test_views_are_the_same_numbers() -> None:
    layer = cache().layers[2]
    layer.write(torch.arange(4, 28, device=DEVICE), rows(24))
    assert layer.views is not None
    assert layer.views.k_NSKD.dtype == layer.views.v_NSKD.dtype == E4M3
    every = layer.gather(torch.arange(28, device=DEVICE)).view(7, 4, 2, 2, 16)
    assert torch.equal(layer.views.k_NSKD.float(), every[:, :, 0])
    assert torch.equal(layer.views.v_NSKD.float(), every[:, :, 1])


def test_copied_blocks_are_equal_in_all_layers() -> None:
    kv = cache()
    for index, layer in enumerate(kv.layers):
        layer.write(torch.arange(4, 28, device=DEVICE), rows(24, seed=index))
    before = [layer.gather(torch.arange(28, device=DEVICE)) for layer in kv.layers]
    kv.copy_blocks(slots(2, 2, 5), slots(1, 6, 3))
    for old, layer in zip(before, kv.layers, strict=True):
        new = layer.gather(torch.arange(28, device=DEVICE)).view(7, 4, -1)
        wanted = old.view(7, 4, -1)[[0, 2, 2, 5, 4, 5, 2]]
        assert torch.equal(new, wanted)


def test_bytes_are_as_announced() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        kv, size = cache(dtype), dtype.itemsize
        assert kv.num_bytes == 7 * bytes_per_block(SPEC, 4, size, kv_format="fp8")
        assert kv.format.bytes_per_token(2, 16, size) == 2 * 2 * 16
        assert kv.num_bytes * size == KVCache(SPEC, kv_groups(SPEC), 6, 4, dtype, DEVICE).num_bytes


def prompt_logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([prompt], asked)[0].prompt_logprobs
    assert found is not None
    return torch.tensor([one.logprob for one in found if one is not None])


def test_served(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path, head_dim=16))
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[3, 14, 15, 92, 65], [3, 14, 15, 92, 7, 8, 9] * 8]
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 40, "block_size": 4}
    with LLM(folder, kv_cache_dtype="fp8", **options) as small, LLM(folder, **options) as plain:
        assert small.memory[1].predicted == small.memory[1].measured
        assert small.memory[1].predicted * 4 == plain.memory[1].predicted
        ours, theirs = (prompt_logprobs(llm, prompts[1]) for llm in (small, plain))
        assert 0 < (ours - theirs).abs().mean() < 0.1
        first = [result.token_ids for result in small.generate(prompts, greedy)]
        again = [result.token_ids for result in small.generate(prompts, greedy)]
    assert first == again  # from cached prefixes the second time
    assert [len(ids) for ids in first] == [20, 20]


def test_the_fused_write_does_not_make_nan_of_large_numbers() -> None:
    kind, heads, size = Fp8KV(), 1, 16
    store = kind.allocate(2, 16, heads, size, torch.float32, DEVICE)
    views = kind.views(store, heads, size)
    qkv = torch.full((2, 3 * size), 1000.0, device=DEVICE)
    qkv[1] *= -1
    turn = torch.stack((torch.ones(1, size), torch.zeros(1, size)), 1).to(DEVICE)
    place = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    qk_norm_rope_write(qkv, turn, place, torch.tensor([17, 20], device=DEVICE), views)
    for written in (views.k_NSKD, views.v_NSKD):
        assert bool((written[1, 1].float() == 448).all())
        assert bool((written[1, 4].float() == -448).all())
