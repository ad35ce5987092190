"""What holds of every format of fewer bits: near what was written, small, copied and served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.evaluation.agreement import matches
from ridgeline.evaluation.answers import ask, questions
from ridgeline.evaluation.problems import TASKS
from ridgeline.formats import KV_FORMATS
from ridgeline.kernels.paged_kv import read_tokens
from ridgeline.kernels.qk_norm_rope_write import qk_norm_rope_write, qk_norm_rope_write_reference
from ridgeline.kvcache import KVCache, LayerKV, bytes_per_block
from tests.architectures.configs import config
from tests.tiny_model import make_tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SIZE = 2, 32
SPEC = read_spec(config(head_dim=SIZE))
FORMATS = ("fp8", "int8", "int4")
BYTES_OF_HEAD = {"fp8": SIZE, "int8": SIZE + 2, "int4": SIZE // 2 + 4}


def cache(name: str, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(SPEC, kv_groups(SPEC), 6, 4, dtype, DEVICE, kv_format=name)


def rows(num: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(num, 2 * HEADS * SIZE, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE)


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=DEVICE)


def of_fp8(wanted: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(wanted.abs() / 16, 2.0**-10)


def of_int8(wanted: torch.Tensor) -> torch.Tensor:
    return torch.clamp_min(wanted.abs().amax(-1, keepdim=True) / 250, 1e-5)


def of_int4(wanted: torch.Tensor) -> torch.Tensor:
    """Values of their own range; keys are turned, in all places of a head at once."""
    keys, values = wanted.unbind(1)
    span = values.amax(-1, keepdim=True) - values.amin(-1, keepdim=True)
    norm = keys.norm(dim=-1, keepdim=True)
    of_keys = (norm * 2 / 29 * SIZE**0.5).expand(keys.shape)
    bound = torch.stack((of_keys, span / 29 + values.abs() / 500), 1)
    return torch.clamp_min(bound, 1e-5)


BOUNDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8": of_fp8,
    "int8": of_int8,
    "int4": of_int4,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_gathered_is_near_what_was_written(name: str, dtype: torch.dtype) -> None:
    layer = cache(name, dtype).layers[1]
    for seed in range(10):
        spread = (10.0 ** rows(3, seed=100 + seed)).clamp(1e-3, 100)
        wide = (rows(3, seed) * spread).to(dtype).repeat(1, 2)
        wide = wide[:, SIZE : SIZE + 2 * HEADS * SIZE]  # not contiguous
        layer.write(slots(5, 27, 8), wide)
        found = layer.gather(slots(8, 5, 8, 27))
        assert found.shape == (4, 2, HEADS, SIZE)
        assert found.dtype == dtype
        wanted = wide[[2, 0, 2, 1]].float().view(4, 2, HEADS, SIZE)
        if name == "fp8":
            wanted = wanted.clamp(-448, 448)
        bound = BOUNDS[name](wanted) + wanted.abs() * torch.finfo(dtype).eps
        assert bool(((found.float() - wanted).abs() <= bound).all()), f"seed {seed}"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_head_alone(name: str) -> None:
    layer, wide = cache(name).layers[0], rows(3)
    wide[0] = 0.0
    wide[1, 3], wide[2, SIZE + 1] = torch.nan, -torch.inf
    layer.write(slots(4, 5, 6), wide)
    found = layer.gather(slots(4, 5, 6)).view(3, 4, SIZE)
    assert bool((found[0] == 0).all())
    assert found.isnan().all(-1).tolist() == [[False] * 4, [True] + [False] * 3, [0, 1, 0, 0]]


def read_in_place(layer: LayerKV, slots_n: torch.Tensor) -> torch.Tensor:
    assert layer.views is not None
    return torch.stack(read_tokens(layer.views, (slots_n // 4, slots_n % 4)), 1)


@pytest.mark.parametrize("name", FORMATS)
def test_views_are_the_same_numbers(name: str) -> None:
    layer = cache(name).layers[2]
    layer.write(torch.arange(4, 28, device=DEVICE), rows(24))
    every = torch.arange(28, device=DEVICE)
    torch.testing.assert_close(read_in_place(layer, every), layer.gather(every))


@pytest.mark.parametrize("name", FORMATS)
def test_the_fused_write_is_the_other(name: str) -> None:
    """Kept out of the way: rotation by nothing, no norms."""
    qkv = torch.cat((rows(3)[:, :SIZE], rows(3, seed=1) * 3), 1)
    turn = torch.stack((torch.ones(1, SIZE), torch.zeros(1, SIZE)), 1).to(DEVICE)
    origin = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    places = slots(9, -1, 22)
    for write in (qk_norm_rope_write, qk_norm_rope_write_reference):
        kv = cache(name)
        fused, plain = kv.layers[0], kv.layers[1]
        assert fused.views is not None
        write(qkv, turn, origin, places, fused.views)
        plain.write(places[::2], qkv[::2, SIZE:].contiguous())
        every = torch.arange(28, device=DEVICE)
        torch.testing.assert_close(fused.gather(every), plain.gather(every), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_copied_blocks_are_equal_in_all_layers(name: str) -> None:
    kv = cache(name)
    for index, layer in enumerate(kv.layers):
        layer.write(torch.arange(4, 28, device=DEVICE), rows(24, seed=index))
    before = [layer.gather(torch.arange(28, device=DEVICE)) for layer in kv.layers]
    kv.copy_blocks(slots(2, 2, 5), slots(1, 6, 3))
    for old, layer in zip(before, kv.layers, strict=True):
        new = layer.gather(torch.arange(28, device=DEVICE)).view(7, 4, -1)
        assert torch.equal(new, old.view(7, 4, -1)[[0, 2, 2, 5, 4, 5, 2]])


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_as_announced(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        kv, size = cache(name, dtype), dtype.itemsize
        assert kv.num_bytes == 7 * bytes_per_block(SPEC, 4, size, kv_format=name)
        per_token = 2 * HEADS * BYTES_OF_HEAD[name]
        assert kv.format.bytes_per_token(HEADS, SIZE, size) == per_token
        assert KV_FORMATS[name].bytes_per_token(HEADS, SIZE, size) == per_token


def prompt_logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = llm.generate([prompt], asked)[0].prompt_logprobs
    assert found is not None
    return torch.tensor([one.logprob for one in found if one is not None])


@pytest.mark.parametrize("name", FORMATS)
def test_served(tmp_path: Path, name: str) -> None:
    """By the kernels that know codes, and the same through `gather` by those that do not."""
    folder = str(make_tiny_model(tmp_path, head_dim=SIZE))
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[3, 14, 15, 92, 65], [3, 14, 15, 92, 7, 8, 9] * 8]
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 40, "block_size": 4}
    with LLM(folder, **options) as plain:
        exact, bytes_of_plain = prompt_logprobs(plain, prompts[1]), plain.memory[1].predicted
    answers = {}
    for backend in ("auto", "sdpa", "reference"):
        with LLM(folder, kv_cache_dtype=name, attention_backend=backend, **options) as small:
            predicted = small.memory[1].predicted
            assert predicted == small.memory[1].measured
            assert predicted * 4 * SIZE == bytes_of_plain * BYTES_OF_HEAD[name]  # of float32
            apart = (prompt_logprobs(small, prompts[1]) - exact).abs().mean()
            assert 0 < apart < (0.02 if name == "int8" else 0.15)
            first = [result.token_ids for result in small.generate(prompts, greedy)]
            again = [result.token_ids for result in small.generate(prompts, greedy)]
        assert first == again  # from cached prefixes the second time
        assert [len(ids) for ids in first] == [20, 20]
        answers[backend] = first
    assert answers["auto"] == answers["sdpa"] == answers["reference"]


# Of greedy tokens with those of a cache of 16 bits, each after the same tokens.
AGREEMENT = {"fp8": 0.98, "int8": 0.99, "int4": 0.97}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_the_bundled_model_says_the_same(name: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "num_blocks": 4000}
    with LLM("demo:chat", **options) as plain:
        asked, _ = questions(plain, list(TASKS), 12, 0)
        answered = ask(plain, asked, progress=False)
    with LLM("demo:chat", kv_cache_dtype=name, **options) as small:
        found = [same for row in matches(small, answered, progress=False) for same in row]
    assert len(found) > 3000
    assert sum(found) / len(found) >= AGREEMENT[name]
