"""Latent attention agrees with its definition in float64: keys and values of every head from the
cached vectors, then attention head by head."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import is_expanded
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.spec import AttentionSpec, LatentSpec, RopeSpec
from ridgeline.attention import ATTENTION_BACKENDS, AttentionBackend, choose_backend, latent
from ridgeline.attention.backend import LatentUp
from ridgeline.attention.layout import AttentionLayout
from ridgeline.cost.memory import block_bytes
from ridgeline.cost.setup import Setup
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache, LatentKV, bytes_per_block
from ridgeline.kvcache.formats import PlainKV
from ridgeline.registry import load
from tests.conftest import TEST_DEVICE
from tests.cost.random_setups import DEEPSEEK_V3, device
from tests.layers.reference_models import tiny_config

CPU = torch.device("cpu")
NAMES = [
    name
    for name in ATTENTION_BACKENDS
    if TEST_DEVICE in load(ATTENTION_BACKENDS, name, "attention backend")().supports.device_types
    and name.startswith("latent")
]
SIZES = ((1, 16, 4, 8, 8), (3, 24, 8, 7, 10), (4, 10, 2, 16, 6), (6, 48, 16, 12, 20))


@dataclass(frozen=True)
class Case:
    lengths: tuple[tuple[int, int], ...]
    spec: AttentionSpec
    layout: AttentionLayout
    q_THD: torch.Tensor
    up: LatentUp
    layer_kv: LatentKV
    cached: list[torch.Tensor]  # [n, C + R] of each request


def make_case(seed: int, dtype: torch.dtype = torch.float32) -> Case:
    """Ragged lengths, shuffled blocks, NaN wherever nothing may be read."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, rank, rotated, plain, value = rng.choice(SIZES)
    spec = AttentionSpec(
        heads, heads, plain + rotated, RopeSpec(), latent=LatentSpec(rank, rotated, plain, value)
    )
    lengths = tuple(
        (rng.choice((0, 1, 30, 90)), rng.choice((1, 1, 1, 3, 8, 9, 70)))
        for _ in range(rng.randint(1, 6))
    )
    size = rng.choice((1, 4, 16))
    needed = [-(-sum(one) // size) for one in lengths]
    free = torch.randperm(sum(needed), generator=noise).add_(1).tolist()
    kind = PlainKV()
    store = kind.allocate_latent(sum(needed) + 1, size, rank + rotated, dtype, CPU)
    store[0].fill_(torch.nan)
    table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    cached, slots_T = [], []
    for row, (before, new) in enumerate(lengths):
        blocks = [free.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        slots = torch.tensor([blocks[i // size] * size + i % size for i in range(before + new)])
        vectors = torch.randn(before + new, rank + rotated, generator=noise).to(dtype)
        kind.write(store, slots, vectors)
        cached.append(vectors)
        slots_T.append(slots[before:])
    starts = [sum(new for _, new in lengths[:row]) for row in range(len(lengths) + 1)]
    there = torch.device(TEST_DEVICE)
    layout = AttentionLayout(
        [new for _, new in lengths],
        [sum(one) for one in lengths],
        starts,
        (table.to(there),),
        (torch.cat(slots_T).to(there),),
        size,
    )
    q_THD = torch.randn(starts[-1], heads, plain + rotated, generator=noise).to(dtype)
    weight = torch.randn(heads, plain + value, rank, generator=noise).mul(rank**-0.5).to(dtype)
    layer_kv = LatentKV(kind, (store[0].to(there),), 0, rank + rotated)
    up = LatentUp(weight.to(there), plain)
    return Case(lengths, spec, layout, q_THD.to(there), up, layer_kv, cached)


def attend(name: str, case: Case) -> torch.Tensor:
    backend: AttentionBackend = load(ATTENTION_BACKENDS, name, "attention backend")()
    plan = backend.plan(case.layout, 0, None)
    return backend.attend_latent(case.q_THD, case.up, case.layer_kv, plan, case.spec).cpu()


def naive(case: Case) -> torch.Tensor:
    weight_HOC, plain, outs = case.up.weight_HOC.cpu().double(), case.up.num_plain, []
    for row, (before, new) in enumerate(case.lengths):
        start = case.layout.query_start[row]
        q = case.q_THD[start : start + new].cpu().double()
        vectors = case.cached[row].double()
        rank = weight_HOC.shape[2]
        kv_nHO = torch.einsum("nc,hoc->nho", vectors[:, :rank], weight_HOC)
        rotated = vectors[:, None, rank:].expand(-1, q.shape[1], -1)
        keys = torch.cat((kv_nHO[..., :plain], rotated), -1)
        scores = torch.einsum("qhd,nhd->hqn", q, keys) * case.spec.head_dim**-0.5
        hidden = torch.arange(before + new) > torch.arange(before, before + new)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqn,nhv->qhv", weights, kv_nHO[..., plain:]))
    return torch.cat(outs)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_cases(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed and expanded pieces, the latter of a few heads at a time, decodes among them."""
    monkeypatch.setattr(latent, "EXPANDED_BYTES", 1 << 14)
    for seed in range(80):
        case = make_case(seed)
        error = (attend(name, case).double() - naive(case)).abs().max().item()
        assert error < 1e-5, f"seed {seed}: {error} {case.lengths} {case.spec.latent}"


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str) -> None:
    for seed in range(20):
        case = make_case(seed, torch.bfloat16)
        exact = naive(case)
        error = (attend(name, case).double() - exact).abs().max().item()
        assert error < 0.02 * exact.abs().max().item(), f"seed {seed}: {error}"


def test_both_ways_are_taken() -> None:
    spec = make_case(3).spec
    found = {is_expanded(spec, *one) for one in ((70, 0), (9, 90))}
    assert found == {True, False}


# ------------------------------------------------------------------------ the cache


def test_deepseek_v3_takes_70272_bytes_a_token() -> None:
    """As the pool holds them and the memory contract says, in bfloat16: 576 numbers in each of 61
    layers."""
    spec = read_spec(DEEPSEEK_V3)
    kv = KVCache(spec, kv_groups(spec), 3, 16, torch.bfloat16, torch.device("meta"))
    assert kv.num_bytes == 4 * 16 * 70_272
    assert block_bytes(Setup(spec, device()), 16) == 16 * 70_272
    assert bytes_per_block(spec, 16, 2) == 16 * 70_272 == 16 * 61 * 576 * 2
    assert bytes_per_block(spec, 16, 2, kv_format="fp8") == 16 * 70_272 // 2


@pytest.mark.parametrize("kv_format", ["auto", "fp8", "int8"])
def test_vectors_are_found_again(kv_format: str) -> None:
    spec = read_spec(tiny_config("deepseek_v3"))
    kv = KVCache(spec, kv_groups(spec), 6, 4, torch.float32, CPU, kv_format=kv_format)
    x_TC = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    kv.layers[1].write(torch.tensor([5, 27, 8]), x_TC)
    found = kv.layers[1].gather(torch.tensor([8, 5, 27]))
    allowed = {"auto": 0.0, "fp8": 1 / 16, "int8": 1 / 60}[kv_format]
    assert ((found - x_TC[[2, 0, 1]]).abs() <= allowed * x_TC.abs().max()).all()
    assert kv.num_bytes == 7 * bytes_per_block(spec, 4, 4, kv_format=kv_format)


def test_formats_without_room_say_which_have_some() -> None:
    spec = read_spec(tiny_config("deepseek_v3"))
    with pytest.raises(ConfigError, match="int4 does not keep the vectors of latent attention"):
        bytes_per_block(spec, 16, 2, kv_format="int4")


def test_backends_say_whether_they_serve_it() -> None:
    latent_spec, plain = read_spec(tiny_config("deepseek_v3")), read_spec(tiny_config("llama"))
    assert choose_backend("auto", latent_spec, torch.float32, CPU).name == "latent_cpu"
    with pytest.raises(ConfigError, match="sdpa does not serve latent attention; use auto"):
        choose_backend("sdpa", latent_spec, torch.float32, CPU)
    with pytest.raises(ConfigError, match="latent_cpu serves latent attention alone; use auto"):
        choose_backend("latent_cpu", plain, torch.float32, CPU)
