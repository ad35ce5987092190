"""Keys and values of 8 bits with scales: near what was written, and about half the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.errors import ConfigError
from ridgeline.evaluation import worlds
from ridgeline.evaluation.agreement import matches
from ridgeline.evaluation.questions import ask
from ridgeline.evaluation.tasks import questions
from ridgeline.formats import KV_FORMATS
from ridgeline.kernels.cpu import native
from ridgeline.kvcache import KVCache, bytes_per_block
from ridgeline.kvcache.int8 import encode
from tests.architectures.configs import config
from tests.tiny_model import make_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = read_spec(config())  # two KV heads of 16
AGREEMENT = 0.99  # of greedy tokens with those of a cache of 16 bits, each after the same tokens


def cache(dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(SPEC, kv_groups(SPEC), 6, 4, dtype, DEVICE, kv_format="int8")


def rows(num: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(num, 2 * 2 * 16, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_gathered_is_off_by_a_250th_of_its_head_at_most(dtype: torch.dtype) -> None:
    layer = cache(dtype).layers[1]
    for seed in range(20):
        spread = 10.0 ** rows(3, seed=100 + seed)
        wide = (rows(3, seed) * spread).to(dtype).repeat(1, 2)[:, 32:96]  # not contiguous
        layer.write(slots(5, 27, 8), wide)
        found = layer.gather(slots(8, 5, 8, 27))
        assert found.shape == (4, 2, 2, 16)
        assert found.dtype == dtype
        wanted = wide[[2, 0, 2, 1]].float().view(4, 2, 2, 16)
        largest = wanted.abs().amax(-1, keepdim=True)
        bound = torch.clamp_min(largest / 250, 1e-5) + wanted.abs() * torch.finfo(dtype).eps
        assert bool(((found.float() - wanted).abs() <= bound).all()), f"seed {seed}"


def test_what_was_read_can_be_written_again() -> None:
    layer = cache().layers[0]
    layer.write(slots(4, 9), rows(2))
    once = layer.gather(slots(4, 9))
    layer.write(slots(11, 12), once.flatten(1))
    torch.testing.assert_close(layer.gather(slots(11, 12)), once, rtol=1e-3, atol=1e-5)


def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_head_alone() -> None:
    layer, wide = cache().layers[0], rows(3)
    wide[0] = 0.0
    wide[1, 3], wide[2, 17] = torch.nan, -torch.inf
    layer.write(slots(4, 5, 6), wide)
    found = layer.gather(slots(4, 5, 6)).view(3, 4, 16)
    assert bool((found[0] == 0).all())
    assert found.isnan().all(-1).tolist() == [[False] * 4, [True] + [False] * 3, [0, 1, 0, 0]]


def test_views_are_the_same_numbers() -> None:
    layer = cache().layers[2]
    layer.write(torch.arange(4, 28, device=DEVICE), rows(24))
    if DEVICE.type == "cuda":
        assert layer.views is None  # no kernel there knows the scales
        return
    assert layer.views is not None
    every = layer.gather(torch.arange(28)).view(7, 4, 2, 2, 16)
    for side, codes, scales in (
        (0, layer.views.k_NSKD, layer.views.k_scales_NSK),
        (1, layer.views.v_NSKD, layer.views.v_scales_NSK),
    ):
        assert scales is not None
        assert torch.equal(codes.float() * scales.float().unsqueeze(-1), every[:, :, side])


def test_copied_blocks_are_equal_in_all_layers() -> None:
    kv = cache()
    for index, layer in enumerate(kv.layers):
        layer.write(torch.arange(4, 28, device=DEVICE), rows(24, seed=index))
    before = [layer.gather(torch.arange(28, device=DEVICE)) for layer in kv.layers]
    kv.copy_blocks(slots(2, 2, 5), slots(1, 6, 3))
    for old, layer in zip(before, kv.layers, strict=True):
        new = layer.gather(torch.arange(28, device=DEVICE)).view(7, 4, -1)
        assert torch.equal(new, old.view(7, 4, -1)[[0, 2, 2, 5, 4, 5, 2]])


def test_bytes_are_as_announced() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        kv, size = cache(dtype), dtype.itemsize
        assert kv.num_bytes == 7 * bytes_per_block(SPEC, 4, size, kv_format="int8")
        per_token = 2 * 2 * (16 + 2)  # two sides of two heads: 16 codes and a scale
        assert kv.format.bytes_per_token(2, 16, size) == per_token
        assert KV_FORMATS["int8"].bytes_per_token(2, 16, size) == per_token


def test_codes_use_all_of_their_range() -> None:
    codes_THD, scales_TH = encode(torch.tensor([[[-3.0, 1.5, 0.0, 3.0]]]))
    assert codes_THD.tolist() == [[[-127, 63, 0, 127]]] or codes_THD.tolist() == [
        [[-127, 64, 0, 127]]
    ]
    assert scales_TH.item() == pytest.approx(3 / 127, rel=1e-3)


def prompt_logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([prompt], asked)[0].prompt_logprobs
    assert found is not None
    return torch.tensor([one.logprob for one in found if one is not None])


@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_served(tmp_path: Path, backend: str) -> None:
    """By the kernels that know codes, and through `gather` by those that do not."""
    folder = str(make_tiny_model(tmp_path, head_dim=16))
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[3, 14, 15, 92, 65], [3, 14, 15, 92, 7, 8, 9] * 8]
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 40, "block_size": 4}
    with (
        LLM(folder, kv_cache_dtype="int8", attention_backend=backend, **options) as small,
        LLM(folder, **options) as plain,
    ):
        assert small.memory[1].predicted == small.memory[1].measured
        assert small.memory[1].predicted * 64 == plain.memory[1].predicted * 18  # of float32
        ours, theirs = (prompt_logprobs(llm, prompts[1]) for llm in (small, plain))
        assert 0 < (ours - theirs).abs().mean() < 0.02
        first = [result.token_ids for result in small.generate(prompts, greedy)]
        again = [result.token_ids for result in small.generate(prompts, greedy)]
    assert first == again  # from cached prefixes the second time
    assert [len(ids) for ids in first] == [20, 20]


@pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
def test_a_backend_that_reads_numbers_in_place_refuses(tmp_path: Path) -> None:
    folder = str(make_tiny_model(tmp_path, head_dim=16))
    with pytest.raises(ConfigError, match="triton does not read KV format int8; use auto"):
        LLM(folder, device="cpu", num_blocks=40, kv_cache_dtype="int8", attention_backend="triton")


@pytest.mark.slow
def test_the_bundled_model_says_the_same() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_blocks": 4000}
    with LLM("demo:chat", **options) as plain:
        asked, _ = questions(plain, list(worlds.TASKS), 12, 0)
        answered = ask(plain, asked, progress=False)
    with LLM("demo:chat", kv_cache_dtype="int8", **options) as small:
        found = [same for row in matches(small, answered, progress=False) for same in row]
    assert len(found) > 3000
    assert sum(found) / len(found) >= AGREEMENT
