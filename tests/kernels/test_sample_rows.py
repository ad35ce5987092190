"""Sampling without sorting equals the sampler: what is kept, what is drawn, what is counted."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.cost import memory
from ridgeline.executor import device_rows
from ridgeline.executor.transfer import transfer_to
from ridgeline.kernels.draw_rows import Draws
from ridgeline.kernels.sample_rows import (
    COUNTS,
    KEY,
    LEVELS,
    NOISY,
    TEMPERATURE,
    Controls,
    Counts,
    SampleSpace,
    make_sample_space,
    sample_rows_reference,
)
from ridgeline.request import SamplingParams
from ridgeline.sampling.batch import build_batch
from ridgeline.sampling.controls import MAX_ENTRIES, row_controls
from ridgeline.sampling.penalties import Array, PenaltyCounts
from ridgeline.sampling.row import SamplingRow
from ridgeline.sampling.sampler import adjust, sample, threshold
from tests.sampling.build import open_rows, params, upload
from tests.thinning import slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
# NumPy, which the interpreter computes with, warns where a GPU wraps around or gives infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LIMIT = 1  # the line of `state_5R`


def ours(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    module = import_module("ridgeline.kernels.sample_rows_triton")
    ids, is_sound = module.sample_rows_triton(*args, **options)
    return ids.cpu(), is_sound.cpu()


def space_for(rows: int, size: int, chunk: int, listed: int = 64) -> SampleSpace:
    """Full of what would be seen if it were read before it is written."""
    made = make_sample_space(torch.device(DEVICE), rows, size, chunk=chunk, listed=listed)
    for tensor in (made.adjusted_RV, made.most_R, made.aims_2R, made.partial_R3C, made.masses_RCJ):
        tensor.fill_(torch.nan)
    for tensor in (made.state_5R, made.counts_RCJ, made.offsets_RC, made.listed_RL):
        tensor.fill_(1 << 20)
    return made


@dataclass
class Batch:
    """Rows, their counts and their positions, as the sampler and as the kernel want them."""

    rows: list[SamplingRow]
    counts: PenaltyCounts
    positions: Array
    size: int

    @property
    def controls(self) -> Controls:
        host = row_controls(self.rows, self.size)
        return Controls(
            *(
                torch.from_numpy(array).to(DEVICE)
                for array in (host.whole_5R, host.floats_7R, host.places_2N, host.values_N)
            )
        )

    @property
    def device_counts(self) -> Counts:
        """Copies."""
        return Counts(
            self.counts.counts_PV.clone().to(DEVICE), self.counts.prompt_PV.clone().to(DEVICE)
        )

    @property
    def device_positions(self) -> torch.Tensor:
        return upload(self.positions).to(DEVICE)


def make_batch(wanted: list[SamplingParams], size: int, seed: int = 0) -> Batch:
    rng = random.Random(seed)
    counts = PenaltyCounts(size, upload)
    histories = [
        ([rng.randrange(size) for _ in range(8)], [rng.randrange(size) for _ in range(i % 7)] * 2)
        for i in range(len(wanted))
    ]
    rows = open_rows([(p, *h) for p, h in zip(wanted, histories, strict=True)], counts)
    return Batch(rows, counts, np.array([8 + len(h[1]) for h in histories]), size)


def kept_by_sampler(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    tensors = build_batch(batch.rows, batch.size, upload)
    at = upload(batch.positions)
    adjusted = adjust(logits, tensors, at, batch.positions, batch.counts)
    scores = adjusted - adjusted.amax(-1, keepdim=True)
    if tensors.filters is None:
        return scores > -torch.inf
    scores = scores / tensors.filters.temperature_R1
    low = threshold(scores, tensors.filters)
    possible = scores > -torch.inf
    return possible if low is None else possible & (scores >= low)


def kept_by_kernel(space: SampleSpace, controls: Controls, rows: int) -> torch.Tensor:
    distances = (space.adjusted_RV - space.most_R[:, None])[:rows] / controls.floats_7R[
        TEMPERATURE, :, None
    ]
    keys = distances.abs().contiguous().view(torch.int32)
    return ((keys <= space.state_5R[LIMIT, :rows, None]) & distances.isfinite()).cpu()


def compare(
    logits: torch.Tensor,
    batch: Batch,
    *,
    chunk: int,
    listed: int = 64,
    margin: int = 0,
    times: int = 1,
) -> None:
    """All of it, against the sampler on a CPU; `margin`: choices that may differ,
    by a near tie."""
    rows, size = logits.shape
    space, controls, counted = space_for(rows, size, chunk, listed), batch.controls, None
    wide = torch.full((rows, size + 5), torch.nan, device=DEVICE)
    wide[:, :size] = logits
    tensors = build_batch(batch.rows, size, upload)
    at = upload(batch.positions)
    want = sample(logits, tensors, at, batch.positions, batch.counts)
    sound = want.is_sound_R
    for _ in range(times):  # the second time on what the first has left
        counted = batch.device_counts
        ids, is_sound = ours(wide[:, :size], at.to(DEVICE), controls, counted, space)
        assert torch.equal(is_sound, sound)
        kept = kept_by_kernel(space, controls, rows)
        # A GPU's exponentials differ by a rounding, and with them the last token of a nucleus.
        assert (kept != kept_by_sampler(logits, batch))[sound].sum() <= margin
        assert (ids != want.token_ids_R)[sound].sum() <= margin
        assert not ids[~sound].any()
        assert not space.arrivals_R.any()
    assert torch.equal(wide[:, :size].cpu().view(torch.int32), logits.view(torch.int32))
    assert counted is not None
    slots = controls.whole_5R[COUNTS].cpu()
    expected = batch.counts.counts_PV.clone()
    for row in (slots >= 0).nonzero()[:, 0].tolist():
        expected[slots[row], ids[row]] += 1
    assert torch.equal(counted.output_PV.cpu(), expected)
    again = batch.device_counts
    ref_ids, ref_sound = sample_rows_reference(wide[:, :size], at.to(DEVICE), controls, again)
    assert torch.equal(ref_sound.cpu(), sound)
    assert (ref_ids.cpu() != want.token_ids_R)[sound].sum() <= margin


def logits_of(kind: str, rows: int, size: int, seed: int) -> torch.Tensor:
    noise = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    if kind == "tied":  # halves of integers, as coarse as 16-bit models are
        return (noise * 6).round() / 2
    if kind == "flat":
        return noise * 1e-3
    if kind == "peaked":
        noise *= 3
        noise[torch.arange(rows), torch.arange(rows) * 7 % size] = 30.0
        return noise
    if kind == "equal":
        return torch.full((rows, size), 1.5)
    return noise * 4


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 17},
    {"top_k": 17, "top_p": 0.9},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.7},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.01, "temperature": 0.3},
    {"top_k": 1 << 29, "top_p": 0.7},
    {"top_k": 150, "temperature": 100.0},
    {"top_k": 150, "top_p": 0.99, "temperature": 3.0},
    {"temperature": 1e-6, "top_p": 0.5},
]


def compare_filters(
    kind: str, size: int, chunk: int, times: int = 1, some: slice = slice(None)
) -> None:
    wanted = [params(seed=i, **changes) for i, changes in enumerate(FILTERS[some])]
    logits = logits_of(kind, len(wanted), size, seed=size)
    compare(logits, make_batch(wanted, size), chunk=chunk, times=times)


@pytest.mark.parametrize(
    ("kind", "size", "chunk", "first"),
    [
        ("random", 33, 64, 0),
        ("tied", 211, 128, 1),
        ("flat", 130, 128, 0),
        ("peaked", 200, 256, 1),
        ("equal", 33, 32, 0),
        ("random", 900, 512, 1),
    ],
)
@pytest.mark.parametrize("step", [2, *slow(1)])
def test_filters_keep_what_the_sampler_keeps(
    kind: str, size: int, chunk: int, first: int, step: int
) -> None:
    """With every other filter, or with all."""
    compare_filters(kind, size, chunk, some=slice(first % step, None, step))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "tied", "flat", "peaked", "equal"])
@pytest.mark.parametrize(("size", "chunk"), [(33, 64), (211, 64), (1000, 256), (4096, 1024)])
def test_filters_at_length(kind: str, size: int, chunk: int) -> None:
    compare_filters(kind, size, chunk, times=2)


@pytest.mark.parametrize("listed", [1, 2000])
def test_large_vocabularies(listed: int) -> None:
    wanted = [params(seed=i, **FILTERS[i]) for i in (4, 5, 13)]
    logits = logits_of("random", 3, 4097, seed=3)
    compare(logits, make_batch(wanted, 4097), chunk=1024, listed=listed)


ADJUSTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.31, "presence_penalty": -0.7},
    {"frequency_penalty": -1.9, "top_p": 0.9},
    {"logit_bias": {0: 3.3, 64: -100.0, 199: 5.5, 999: 2.0}},
    {"logit_bias": {i: 0.01 * i for i in range(0, 200, 1)}, "presence_penalty": 1.0},
    {"min_tokens": 15, "stop_token_ids": [0, 1, 5, 998], "logit_bias": {1: 9.0, 2: 1.0}},
    {"min_tokens": 12, "stop_token_ids": [3, 4], "logit_bias": {3: 30.0}},
    {"min_tokens": 15, "stop_token_ids": range(180), "repetition_penalty": 1.4, "top_k": 9},
    {"temperature": 0.0, "logit_bias": {7: 100.0}, "frequency_penalty": 0.2},
]


@pytest.mark.parametrize(("kind", "size"), [("random", 200), ("tied", 211), ("random", 1000)])
def test_penalties_bias_and_bans(kind: str, size: int) -> None:
    wanted = [params(seed=i, **changes) for i, changes in enumerate(ADJUSTS + FILTERS[:3])]
    compare(logits_of(kind, len(wanted), size, seed=1), make_batch(wanted, size, 1), chunk=128)


def random_params(rng: random.Random, seed: int, size: int) -> SamplingParams:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.4 else off

    return params(
        seed=seed,
        temperature=maybe(0.0, rng.choice([0.3, 1.0, 2.0])),
        top_k=maybe(rng.randint(1, size + 50), 0),
        top_p=maybe(rng.uniform(0.1, 0.999), 1.0),
        min_p=maybe(rng.uniform(0.01, 0.3), 0.0),
        repetition_penalty=maybe(1.4, 1.0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(-0.3, 0.0),
        logit_bias=maybe({rng.randrange(size): rng.uniform(-5, 5) for _ in range(9)}, ()),
        min_tokens=maybe(15, 0),
        stop_token_ids=[4, 5],
    )


@pytest.mark.parametrize("seed", range(3))
def test_random_parameters(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([37, 128, 301, 520])
    wanted = [random_params(rng, i, size) for i in range(12)]
    kind = rng.choice(["random", "tied", "flat", "peaked"])
    print(f"seed {seed}: {kind}, {size}")
    batch = make_batch(wanted, size, seed)
    compare(logits_of(kind, 12, size, seed), batch, chunk=128, listed=rng.choice([8, 64, 600]))


@pytest.mark.parametrize("shift", [0, *slow(1, 2)])
def test_rows_that_cannot_be_drawn_from_harm_no_other(shift: int) -> None:
    size = 150
    logits = logits_of("random", 12, size, seed=4)
    logits[1, 149] = torch.nan
    logits[2, 70] = torch.inf
    logits[3] = -torch.inf
    logits[4, : size - 1] = -torch.inf
    logits[5, 20:] = -torch.inf
    logits[6, 0] = -torch.nan
    changes: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 30}, {"top_k": 30, "top_p": 0.9}]
    wanted = [params(seed=i, **changes[(i + shift) % 3]) for i in range(11)]
    wanted.append(params(min_tokens=15, stop_token_ids=range(size)))  # all tokens banned
    compare(logits, make_batch(wanted, size), chunk=128, times=2 if shift == 0 else 1)


def test_more_rows_than_at_once() -> None:
    wanted = [params(seed=i, **(FILTERS + ADJUSTS)[i * 5 % 24]) for i in range(7)]
    size, batch = 300, make_batch(wanted, 300)
    logits = logits_of("random", 7, size, seed=9)
    given = logits.to(DEVICE), batch.device_positions, batch.controls
    few = make_sample_space(torch.device(DEVICE), 7, size, chunk=128, at_once=2 * size)
    assert few.num_rows == 2
    counted, recounted = batch.device_counts, batch.device_counts
    got = ours(*given, counted, few)
    want = ours(*given, recounted, space_for(7, size, 128))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert torch.equal(counted.output_PV, recounted.output_PV)


@pytest.mark.parametrize("trials", [2, *slow(5)])
def test_rows_without_filters_draw_what_draw_rows_draws(trials: int) -> None:
    """To the last bit, so that a row's company does not matter: here, of scores that nearly tie."""
    size, chunk = 500, 64
    wanted = [params(seed=i, temperature=t) for i, t in enumerate((0.0, 0.3, 0.7, 1.0, 1.9))]
    batch, module = make_batch(wanted, size), import_module("ridgeline.kernels.draw_rows_triton")
    controls, space = batch.controls, space_for(5, size, chunk)
    floats = controls.floats_7R
    draws = Draws(controls.whole_5R[KEY], floats[TEMPERATURE], floats[NOISY])
    for trial in range(trials):
        logits = logits_of("random", 5, size, seed=trial).to(DEVICE)
        at = torch.arange(5, device=DEVICE) + 10 * trial
        ids, _ = ours(logits, at, controls, batch.device_counts, space)
        same, _ = module.draw_rows_triton(logits, at, draws, block=chunk)
        assert torch.equal(ids, same.cpu())


def test_where_captured_steps_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In buffers with room for more rows, the others being padding; for other rows each time."""
    size, more = 90, 8
    monkeypatch.setattr(device_rows, "sample_rows", ours)
    transfer = transfer_to(torch.device(DEVICE))
    counts = PenaltyCounts(size, transfer.send)
    there = device_rows.DeviceControls(size, more, counts, transfer)
    changes = FILTERS[3:6] + ADJUSTS[:5]
    for first, num, bucket in ((0, 3, 4), (5, 3, 8), (2, 5, 8)):
        wanted = [params(seed=i, **changes[i]) for i in range(first, first + num)]
        rows = open_rows([(p, [1, 2, 3], [4, 4]) for p in wanted], counts)
        before = counts.counts_PV.cpu().clone()
        here = np.full(bucket, 5)
        positions = upload(here).to(DEVICE)
        logits = logits_of("random", bucket, size, seed=first)
        there.clear()
        there.take(row_controls(rows, size))
        ids, is_sound = there.draw(logits.to(DEVICE), positions)
        assert is_sound.all()
        batch, prompts = build_batch(rows, size, upload), counts.prompt_PV.cpu()
        held = PenaltyCounts(size, upload)
        held.counts_PV, held.prompt_PV = before, prompts
        want = sample(logits[:num], batch, upload(here[:num]), here[:num], held).token_ids_R
        assert torch.equal(ids[:num], want)
        assert torch.equal(ids[num:], logits[num:].argmax(-1))
        for row, token in zip(rows, want.tolist(), strict=True):
            if row.counts_slot >= 0:
                before[row.counts_slot, token] += 1
        assert torch.equal(counts.counts_PV.cpu(), before)


@pytest.mark.parametrize(("size", "rows"), [(1000, 3), (151_936, 60), (40_000, 512)])
def test_the_memory_contract_knows_the_scratch(size: int, rows: int) -> None:
    space = make_sample_space(torch.device("meta"), rows, size)
    tensors = [v for name in space.__slots__ if torch.is_tensor(v := getattr(space, name))]
    made = sum(tensor.nbytes for tensor in tensors)
    made += MAX_ENTRIES * (8 + 8 + 4) + rows * (5 * 8 + 7 * 4)
    assert abs(memory.sampling_bytes(size, rows) - made) <= 64


def test_levels_rise() -> None:
    pivots = make_sample_space(torch.device("cpu"), 1, 8).pivots_J
    assert len(pivots) == LEVELS
    assert (pivots.diff() > 0).all()
    assert pivots[-1] == torch.tensor(torch.inf).view(torch.int32)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["random", "tied", "flat", "peaked", "equal"])
@pytest.mark.parametrize("size", [32_000, 151_936])
def test_large_vocabularies_on_a_gpu(kind: str, size: int) -> None:
    wanted = [params(seed=i, **changes) for i, changes in enumerate(FILTERS + ADJUSTS)]
    logits = logits_of(kind, len(wanted), size, seed=size)
    compare(logits, make_batch(wanted, size), chunk=4096, listed=1 << 14, margin=2)
