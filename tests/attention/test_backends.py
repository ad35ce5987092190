"""Every attention backend agrees with the definition in float64 on ragged, poisoned steps."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.spec import AttentionSpec, RopeSpec
from ridgeline.attention import ATTENTION_BACKENDS, AttentionBackend, choose_backend, sdpa
from ridgeline.attention.backend import AttentionCase, Pieces, Supports
from ridgeline.attention.paged import PagedAttention
from ridgeline.errors import ConfigError
from ridgeline.kernels import paged_attention
from ridgeline.kernels.cpu import native
from ridgeline.registry import load
from tests.attention.cases import Case, Shape, make_case, naive, random_shape
from tests.conftest import TEST_DEVICE
from tests.layers.reference_models import tiny_config

NUM_CASES = 220
NAMES = [  # of those that serve keys and values by head; tests/attention/test_latent.py: the others
    name for name in ATTENTION_BACKENDS if not name.startswith("latent")
]
COMPILED = TEST_DEVICE != "cpu"  # each shape of a case is a kernel of its own there
CPU = torch.device("cpu")


def backend_of(name: str) -> AttentionBackend:
    if name in ("flashinfer", "flash_attention"):
        pytest.skip("tests/gpu/test_installed_backends.py: few shapes, on a GPU that has it")
    if name == "native" and (COMPILED or native.library() is None):
        pytest.skip("native kernels need their library, and a CPU")
    backend: AttentionBackend = load(ATTENTION_BACKENDS, name, "attention backend")()
    return backend


def sunk(name: str, case: Case, sinks_H: torch.Tensor) -> torch.Tensor:
    backend, spec = backend_of(name), case.shape.spec
    plan = backend.plan(case.layout, 0, spec.window)
    sinks = sinks_H.to(case.q_THD.device)
    return backend.attend_with_sinks(case.q_THD, sinks, case.layer_kv, plan, spec).cpu()


def attend(name: str, case: Case) -> torch.Tensor:
    backend, spec = backend_of(name), case.shape.spec
    plan = backend.plan(case.layout, 0, spec.window)
    return backend.attend(case.q_THD, case.layer_kv, plan, spec).cpu()


@pytest.mark.parametrize("name", NAMES)
def test_ragged_cases(name: str) -> None:
    for seed in range(20 if COMPILED and name == "triton" else NUM_CASES):
        case = make_case(random_shape(random.Random(seed)), seed)
        error = (attend(name, case).double() - naive(case)).abs().max().item()
        assert error < 1e-5, f"seed {seed}: {error} {case.shape}"


@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("name", ["reference", "native"])
def test_soft_caps_of_scores(name: str, cap: float) -> None:
    for seed in range(8):
        shape = random_shape(random.Random(900 + seed))
        spec = replace(shape.spec, scale=1.5, scores_cap=cap)
        case = make_case(replace(shape, spec=spec), seed)
        reason = backend_of(name).supports.why_not(spec, torch.float32, torch.device(TEST_DEVICE))
        assert reason is None
        error = (attend(name, case).double() - naive(case)).abs().max().item()
        assert error < 2e-5, f"seed {seed}: {error} {case.shape}"


@pytest.mark.parametrize("name", ["reference", "sdpa", "native"])
def test_sinks(name: str) -> None:
    """Small beside the scores, like them, and above all of them."""
    assert backend_of(name).supports.sinks
    for seed in range(60):
        case = make_case(random_shape(random.Random(seed)), seed)
        noise = torch.Generator().manual_seed(seed)
        heads = case.shape.spec.num_heads
        sinks_H = 10.0 ** (seed % 3) * torch.randn(heads, generator=noise)
        error = (sunk(name, case, sinks_H).double() - naive(case, sinks_H=sinks_H)).abs().max()
        assert error < 1e-5, f"seed {seed}: {error} {case.shape}"


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("name", ["reference", "sdpa", "native"])
def test_sinks_in_bfloat16_of_long_requests(name: str, window: int | None) -> None:
    spec = AttentionSpec(8, 2, 64, RopeSpec(), window=window)
    case = make_case(Shape(((3000, 1), (0, 300), (700, 4)), spec, 16), 9, torch.bfloat16)
    sinks_H = torch.linspace(-2, 3, 8)
    exact = naive(case, sinks_H=sinks_H)
    ours = (sunk(name, case, sinks_H).double() - exact).abs().max().item()
    theirs = (naive(case, torch.bfloat16, sinks_H).double() - exact).abs().max().item()
    assert ours <= 2 * theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_error_is_at_most_twice_that_of_pytorch(
    name: str, dtype: torch.dtype
) -> None:
    if dtype not in backend_of(name).supports.dtypes:
        pytest.skip(f"{name} does not serve {dtype}")
    for seed in range(15 if COMPILED and name == "triton" else 60):
        case = make_case(random_shape(random.Random(1000 + seed)), seed, dtype)
        exact = naive(case)
        ours = (attend(name, case).double() - exact).abs().max().item()
        theirs = (naive(case, dtype).double() - exact).abs().max().item()
        floor = torch.finfo(dtype).eps * exact.abs().max().item() / 2  # rounding the exact result
        assert ours <= max(2 * theirs, floor), f"seed {seed}: {ours} vs {theirs} {case.shape}"


@pytest.mark.parametrize("name", NAMES)
def test_one_query_beyond_a_tile_of_a_kernel(name: str) -> None:
    for window in (None, 1, 2, 40):
        spec = AttentionSpec(4, 1, 16, RopeSpec(), window=window)
        lengths = ((0, 65), (30, 65), (2, 129), (0, 64), (9, 257))
        case = make_case(Shape(lengths, spec, 4), 7)
        error = (attend(name, case).double() - naive(case)).abs().max().item()
        assert error < 1e-5, f"window {window}: {error}"


def test_reference_in_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny tiles the running maximum changes, and tiles lie before, on and behind an edge."""
    monkeypatch.setattr(paged_attention, "QUERY_TILE", 7)
    monkeypatch.setattr(paged_attention, "KEY_TILE", 5)
    for seed in range(60):
        case = make_case(random_shape(random.Random(seed)), seed)
        error = (attend("reference", case).double() - naive(case)).abs().max().item()
        assert error < 1e-5, f"seed {seed}: {error} {case.shape}"


@pytest.mark.parametrize("window", [None, 20])
def test_sdpa_in_several_calls(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """With tiny limits every step needs several padded calls and several query tiles."""
    monkeypatch.setattr(sdpa, "QUERY_TILE", 7)
    monkeypatch.setattr(sdpa, "MAX_GATHERED", 100)
    monkeypatch.setattr(sdpa, "MAX_PADDING", 11)
    spec = AttentionSpec(4, 2, 16, RopeSpec(), window=window)
    lengths = ((90, 1), (3, 1), (0, 40), (70, 1), (50, 30), (8, 1), (20, 3), (2, 3), (0, 9))
    case = make_case(Shape(lengths, spec, 4), 5)
    plan = sdpa.SdpaAttention().plan(case.layout, 0, window)
    assert len(plan.short) >= 3
    assert len(plan.long) == 3
    torch.testing.assert_close(attend("sdpa", case).double(), naive(case), atol=1e-5, rtol=0)


def test_sdpa_does_not_pad_a_long_request_onto_many_short_ones() -> None:
    spec = AttentionSpec(1, 1, 8, RopeSpec())
    lengths = ((9000, 1), *[(10, 1)] * 20)
    case = make_case(Shape(lengths, spec, 16), 6)
    plan = sdpa.SdpaAttention().plan(case.layout, 0, None)
    assert sorted(tile.num_requests for tile in plan.short) == [1, 20]
    assert sum(tile.slots.numel() for tile in plan.short) < 9500
    torch.testing.assert_close(attend("sdpa", case).double(), naive(case), atol=1e-5, rtol=0)


def test_auto_takes_the_first_that_serves_the_model() -> None:
    spec = read_spec(tiny_config("llama"))
    best = "sdpa" if native.library() is None else "native"
    assert choose_backend("auto", spec, torch.float32, CPU).name == best
    assert choose_backend("auto", spec, torch.float16, CPU).name == "sdpa"
    assert choose_backend("reference", spec, torch.bfloat16, CPU).name == "reference"


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("flash", torch.float32, "unknown attention backend 'flash'; choose one of flash_attent"),
        ("sdpa", torch.float64, "sdpa does not serve torch.float64"),
        ("flashinfer", torch.bfloat16, "flashinfer runs on cuda, not on cpu; use auto"),
        ("flash_attention", torch.bfloat16, "flash_attention runs on cuda, not on cpu; use auto"),
        ("auto", torch.float64, "no attention backend serves torch.float64 on cpu"),
    ],
)
def test_what_cannot_be_had_is_a_config_error(name: str, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        choose_backend(name, read_spec(tiny_config("llama")), dtype, CPU)


def test_supports_says_why_not() -> None:
    narrow = Supports(("cuda",), (torch.bfloat16,), max_head_dim=64, windows=False)
    cuda, half = torch.device("cuda"), torch.bfloat16
    plain = AttentionSpec(1, 1, 64, RopeSpec())
    assert narrow.why_not(plain, half, cuda) is None
    assert "not on cpu" in (narrow.why_not(plain, half, CPU) or "")
    assert "float32" in (narrow.why_not(plain, torch.float32, cuda) or "")
    wide = AttentionSpec(1, 1, 128, RopeSpec())
    assert "up to 64, not 128" in (narrow.why_not(wide, half, cuda) or "")
    windowed = AttentionSpec(1, 1, 64, RopeSpec(), window=4)
    assert "sliding windows" in (narrow.why_not(windowed, half, cuda) or "")


@pytest.mark.parametrize(
    ("name", "device", "dtype", "head_dim", "message"),
    [
        ("auto", "cpu", torch.float32, 128, "which runs on cuda, not on cpu; leave out"),
        ("sdpa", "cuda", torch.float32, 128, "attention_backend triton, not sdpa; use auto"),
        ("triton", "cuda", torch.float64, 128, "which does not serve torch.float64"),
        ("auto", "cuda", torch.float32, 80, "which serves head sizes .* not 80"),
    ],
)
def test_deterministic_needs_the_paged_kernels(
    name: str, device: str, dtype: torch.dtype, head_dim: int, message: str
) -> None:
    spec = read_spec(tiny_config("llama") | {"head_dim": head_dim})
    with pytest.raises(ConfigError, match=f"deterministic needs .*{message}"):
        choose_backend(name, spec, dtype, torch.device(device), deterministic=True)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_deterministic_is_the_paged_kernels_cut_in_one_way(name: str) -> None:
    spec = read_spec(tiny_config("llama") | {"head_dim": 128})
    backend = choose_backend(name, spec, torch.bfloat16, torch.device("cuda"), deterministic=True)
    assert isinstance(backend, PagedAttention)
    assert backend.is_invariant
    assert not PagedAttention().is_invariant
    case = AttentionCase(spec.layers[0].attention, torch.bfloat16, torch.device("cuda"))
    for num_tokens in (8, 512, 2048):
        decodes = Pieces(*(np.arange(num_tokens) for _ in range(2)), *2 * [np.full(num_tokens, 1)])
        work = backend.prefill_work(decodes, num_tokens, None, case)
        assert len(work) == num_tokens
        fits = len(work) <= backend.work_width(case, num_tokens)
        assert fits is (num_tokens <= 512)
        assert set(work[:, 9].tolist()) == {1}, "keys are dealt out"
