"""Drawing in one launch equals the sampler; the inputs of a captured step equal their reference."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
import torch

from ridgeline.kernels.draw_rows import Draws, draw_rows_reference
from ridgeline.kernels.launching import Workspace, make_workspace
from ridgeline.kernels.noise import stream_key
from ridgeline.kernels.step_inputs import make_step_inputs, step_inputs_reference
from tests.thinning import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton: Any = pytest.importorskip("triton")
tl: Any = import_module("triton.language")
minus_log_of_rest = import_module("ridgeline.kernels.draw_rows_triton").minus_log_of_rest
# NumPy, which the interpreter computes with, warns where a GPU wraps around or gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit  # type: ignore[untyped-decorator]
def _minus_logs_of_rest(u_ptr, y_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    tl.store(y_ptr + i, minus_log_of_rest(tl.load(u_ptr + i)))


def triton_of(name: str) -> Any:
    return getattr(import_module(f"ridgeline.kernels.{name}_triton"), f"{name}_triton")


def noise(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, size, generator=generator).to(DEVICE)


def poisoned() -> Workspace:
    space = make_workspace(torch.device(DEVICE), 1 << 12, 64)
    space.partial_P.fill_(torch.nan)
    return space


def hard_rows(size: int) -> torch.Tensor:
    """Equals near and far, every kind of number that is not finite, and banned tokens."""
    rows = noise(9, size)
    rows[1, [size // 3, size - 1]] = 50.0
    rows[2] = 0.0
    rows[2, 0] = -0.0
    rows[3, size - 1] = torch.nan
    rows[4, size // 2] = torch.inf
    rows[5] = -torch.inf
    rows[6, : size - 1] = -torch.inf
    rows[7, 0] = -torch.nan
    rows[8, size // 2 :] = -torch.inf
    return rows


@pytest.mark.every_pair
@pytest.mark.parametrize("span", [1, 3])
@pytest.mark.parametrize("with_workspace", [False, True])
@pytest.mark.parametrize("size", [2, 31, 64, 65, 1000])
def test_greedy_rows(size: int, with_workspace: bool, span: int) -> None:
    wide = torch.full((9, size + 3), torch.nan, device=DEVICE)
    logits = wide[:, :size].copy_(hard_rows(size))
    positions = torch.zeros(9, dtype=torch.int64, device=DEVICE)
    space = poisoned() if with_workspace else None
    for _ in range(2):  # the second time on what the first has left
        ids, is_sound = triton_of("draw_rows")(
            logits, positions, None, workspace=space, block=64, span=span
        )
        assert is_sound.tolist() == [True, True, True, False, False, False, True, False, True]
        assert ids[1] == size // 3
        assert ids[2] == 0
        assert torch.equal(ids[is_sound], logits[is_sound].argmax(-1))
        assert not ids[~is_sound].any()
        want_ids, want_sound = draw_rows_reference(logits, positions, None)
        assert torch.equal(ids, want_ids)
        assert torch.equal(is_sound, want_sound)
    assert space is None or not space.arrivals_A.any()


def draws(temperatures: list[float], noisy: list[float]) -> Draws:
    keys = [stream_key(seed) for seed in range(len(noisy))]
    return Draws(
        torch.tensor(keys, dtype=torch.int64, device=DEVICE),
        torch.tensor(temperatures, device=DEVICE),
        torch.tensor(noisy, device=DEVICE),
    )


@pytest.mark.parametrize("trials", [6, *slow(20)])
@pytest.mark.parametrize("rounds", [None, 3])
@pytest.mark.parametrize("size", [3, 64, 300])
def test_random_rows_draw_what_the_sampler_draws(
    size: int, rounds: int | None, trials: int
) -> None:
    temperatures = [1.0, 0.6, 1.5, 1.0, 1e-30, 100.0]
    random = draws(temperatures, [1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    differences = 0
    for trial in range(trials):
        logits = noise(6, size, seed=trial)
        positions = torch.arange(6, device=DEVICE) * 1000 + trial
        ids, is_sound = triton_of("draw_rows")(logits, positions, random, block=64, rounds=rounds)
        differences += int((ids != draw_rows_reference(logits, positions, random)[0]).sum())
        assert is_sound.all()
        assert ids[3] == logits[3].argmax()
        assert ids[4] == logits[4].argmax()  # so cold that noise does not matter
    assert differences <= 1  # two scores within a rounding of each other


@pytest.mark.parametrize("rounds", [1, 3, 4])
def test_a_random_row_of_banned_tokens_draws_from_the_others(rounds: int) -> None:
    logits = hard_rows(200)
    random = draws([0.7] * 9, [1.0] * 9)
    positions = torch.arange(9, device=DEVICE)
    space = poisoned()
    ids, is_sound = triton_of("draw_rows")(
        logits, positions, random, workspace=space, block=64, rounds=rounds
    )
    assert not space.arrivals_A.any()
    assert is_sound.tolist() == [True, True, True, False, False, False, True, False, True]
    assert ids[6] == 199
    assert ids[8] < 100


def test_logarithms_of_what_is_left_of_one() -> None:
    """With u's own precision where it is small: the tail that tokens are drawn from."""
    u = torch.cat((2.0 ** -torch.linspace(1, 33, 700), torch.linspace(0.2, 1 - 2.0**-24, 324)))
    got = torch.empty(1024, device=DEVICE)
    _minus_logs_of_rest[(1,)](u.to(DEVICE), got, SIZE=1024)
    want = -torch.log1p(-u.double())
    assert ((got.cpu() / want - 1).abs() < 1e-6).all()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_step_inputs(num_rows: int, num_groups: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    room, width, size = 2 * num_rows, 8, 4
    shape = (num_groups, room, width)
    tables = torch.randint(1, 999, shape, dtype=torch.int32, generator=generator).to(DEVICE)
    last_ids = torch.randint(0, 999, (room,), generator=generator).to(DEVICE)
    rows = torch.randperm(room, generator=generator)[:num_rows]
    positions = torch.randint(0, width * size, (num_rows,), generator=generator)
    new = torch.randint(1000, 2000, (num_groups, num_rows), generator=generator)
    new[:, ::2] = -1
    sent = torch.cat((rows[None], positions[None], new)).to(DEVICE)
    got, want = (make_step_inputs(num_groups, num_rows, torch.device(DEVICE)) for _ in range(2))
    got_tables, want_tables = tables.clone(), tables.clone()
    triton_of("step_inputs")(sent, last_ids, got_tables, got, size)
    step_inputs_reference(sent, last_ids, want_tables, want, size)
    assert torch.equal(got_tables, want_tables)
    for name in type(got).__slots__:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.token_ids_B.tolist() == [int(last_ids[row]) for row in rows]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 256])
def test_large_vocabularies_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    logits = noise(rows, 151936).bfloat16().to(dtype)  # many equals
    logits[rows // 2, 100_000] = torch.nan
    space = make_workspace(torch.device(DEVICE))
    positions = torch.arange(rows, device=DEVICE)
    random = draws([0.7] * rows, [1.0] * rows)
    for chosen in (None, random):
        want_ids, want_sound = draw_rows_reference(logits, positions, chosen)
        for pdl in (False, True):
            ids, is_sound = triton_of("draw_rows")(
                logits, positions, chosen, workspace=space, pdl=pdl
            )
            assert torch.equal(is_sound, want_sound)
            assert (ids != want_ids).sum() <= (0 if chosen is None else 1)
        assert is_sound.sum() == rows - 1


@pytest.mark.parametrize("num_rows", [1, 63, 130])
def test_what_is_remembered(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(1 << 40, (num_rows,), generator=generator).to(DEVICE)
    is_sound = (torch.rand(num_rows, generator=generator) < 0.8).to(DEVICE)
    places = torch.randperm(2 * num_rows, generator=generator)[:num_rows].to(DEVICE)
    last_ids = torch.full((2 * num_rows,), -7, device=DEVICE)
    out = torch.full((num_rows,), -8, device=DEVICE)
    ours = import_module("ridgeline.kernels.step_inputs_triton")
    ours.remember_triton(ids, is_sound, places, last_ids, out)
    want = torch.full((2 * num_rows,), -7, device=DEVICE)
    want[places] = ids
    assert torch.equal(last_ids, want)
    assert torch.equal(out, ids.where(is_sound, -1))
