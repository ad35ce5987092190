"""Each way of checking drafts by their odds gives the tokens of the reference."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
import torch

from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.drafts import verified_rows
from ridgeline.kernels.cpu.recorder import Arena, Replay, record
from ridgeline.kernels.draw_rows import Draws, draw_rows
from ridgeline.kernels.launching import make_workspace
from ridgeline.kernels.noise import draft_keys, stream_key
from ridgeline.kernels.verified_rows import DraftOdds, verified_rows_reference
from ridgeline.kernels.verified_rows import verified_rows as checked_rows_of_any

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
# NumPy, which Triton's interpreter computes with, warns where a GPU wraps around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BEST = native.LEVELS.index(native.best_level())
LEVELS = [level for level in ("avx2", "avx512") if native.LEVELS.index(level) <= BEST]
Case = tuple[torch.Tensor, torch.Tensor, Draws, DraftOdds]


def case(
    rows: int,
    draft_tokens: int,
    size: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    likeness: float = 0.7,
    device: str = "cpu",
) -> Case:
    """Greedy, seeded and checked rows at temperatures of 0.3 to 1.5; drafts drawn by the draft."""
    rng = torch.Generator().manual_seed(seed)
    logits_BqV = torch.randn(rows, draft_tokens + 1, size, generator=rng)
    other = torch.randn(rows, draft_tokens, size, generator=rng)
    draft_logits = likeness * logits_BqV[:, :draft_tokens] + (1 - likeness) * other
    logits_BqV, draft_logits = (3 * logits_BqV).to(dtype), (3 * draft_logits).to(dtype)
    kinds_B = torch.arange(rows) % 4  # greedy, seeded, checked, checked
    is_verified_B = kinds_B >= 2
    keys_B = torch.tensor([stream_key(1000 * seed + b) for b in range(rows)])
    hot_B = (0.3 + 1.2 * torch.rand(rows, generator=rng)).where(kinds_B > 0, 1.0)
    noisy_B = (kinds_B > 0).float()
    positions_Bq = torch.randint(3, 1000, (rows, 1), generator=rng) + torch.arange(draft_tokens + 1)

    def per_draft(x_B: torch.Tensor, num: int) -> torch.Tensor:
        return x_B.repeat_interleave(num)

    drafted_by = Draws(
        per_draft(draft_keys(keys_B, ~is_verified_B), draft_tokens),
        per_draft(hot_B, draft_tokens),
        per_draft(noisy_B, draft_tokens),
    )
    positions_O = positions_Bq[:, :draft_tokens].flatten().contiguous()
    ids, _ = draw_rows(draft_logits.reshape(-1, size), positions_O, drafted_by)
    inputs_Bq = torch.cat([ids.new_zeros(rows, 1), ids.view(rows, draft_tokens)], 1).to(device)
    draws = Draws(*(per_draft(x, draft_tokens + 1).to(device) for x in (keys_B, hot_B, noisy_B)))
    # Strides such as buffers with room for more have.
    wide = torch.full((rows, draft_tokens + 2, size + 5), torch.nan, dtype=dtype, device=device)
    wide[:, :draft_tokens, :size] = draft_logits
    odds = DraftOdds(inputs_Bq[:, 1:], wide[:, :draft_tokens, :size], is_verified_B.to(device))
    padded = torch.full(
        (rows * (draft_tokens + 1), size + 3), torch.nan, dtype=dtype, device=device
    )
    padded[:, :size] = logits_BqV.flatten(0, 1)
    return padded[:, :size], positions_Bq.flatten().to(device), draws, odds


def reached(ids_T: torch.Tensor, odds: DraftOdds) -> torch.Tensor:
    """[T]: positions that come into question, up to the first token that was not drafted."""
    ids_Bq = ids_T.view(len(odds.is_verified_B), -1)
    is_right_Bk = ids_Bq[:, :-1] == odds.drafts_Bk
    first_B1 = torch.ones_like(ids_Bq[:, :1])
    return torch.cat([first_B1, is_right_Bk.long()], 1).cumprod(1).bool().flatten()


def assert_same(got: tuple[torch.Tensor, torch.Tensor], some: Case) -> None:
    want_ids, want_sound = verified_rows_reference(*some)
    is_reached = reached(want_ids, some[3]) & want_sound
    assert torch.equal(got[1][is_reached], want_sound[is_reached])
    assert torch.equal(got[0][is_reached], want_ids[is_reached])


SHAPES = ((1, 1, 2), (1, 4, 31), (4, 3, 1000), (9, 2, 257), (6, 5, 64), (3, 1, 5000), (5, 8, 4096))


@pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
class TestNative:
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_tokens(self, shape: tuple[int, int, int], dtype: torch.dtype, level: str) -> None:
        for seed in range(8):
            some = case(*shape, dtype=dtype, seed=seed, likeness=0.2 + 0.1 * seed)
            with native.at_level(level):
                ids, is_sound = verified_rows(*some)
            assert_same((ids, is_sound), some)
            is_reached = reached(ids, some[3])
            assert not ids[~is_reached].any()
            assert bool(is_sound[~is_reached].all())

    def test_drafts_of_another_dtype(self) -> None:
        for dtypes in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            logits, positions, draws, odds = case(8, 3, 333, seed=2)
            odds = DraftOdds(odds.drafts_Bk, odds.logits_BkV.to(dtypes[1]), odds.is_verified_B)
            some = logits.to(dtypes[0]), positions, draws, odds
            assert_same(verified_rows(*some), some)

    def test_numbers_gone_wrong(self) -> None:
        some = broken_case("cpu")
        got = verified_rows(*some)
        assert_same(got, some)
        assert_broken(got)

    def test_recorded_and_run_again(self) -> None:
        logits, positions, draws, odds = case(8, 3, 333, seed=3)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        recording = record(
            lambda: found.append(verified_rows(logits, positions, draws, odds)), Arena()
        )
        first = found[0][0].clone()
        logits.copy_(case(8, 3, 333, seed=4)[0])
        Replay(recording)()
        assert not torch.equal(found[0][0], first)
        assert_same(found[0], (logits, positions, draws, odds))


def triton_tokens(some: Case, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pytest.importorskip("triton")
    function = import_module("ridgeline.kernels.verified_rows_triton").verified_rows_triton
    found: tuple[torch.Tensor, torch.Tensor] = function(*some, block=64, **more)
    return found


class TestTriton:
    @pytest.mark.parametrize("shape", [(1, 1, 2), (1, 4, 31), (4, 3, 64), (4, 2, 257)])
    def test_tokens(self, shape: tuple[int, int, int]) -> None:
        num = shape[0] * (shape[1] + 1)
        space = make_workspace(torch.device(DEVICE), 3 * num * (shape[2] // 64 + 1), num)
        for seed in range(3):
            some = case(*shape, seed=seed, likeness=0.2 + 0.3 * seed, device=DEVICE)
            space.partial_P.fill_(torch.nan)
            got = triton_tokens(some, workspace=space)
            assert torch.equal(got[0], verified_rows_reference(*some)[0])
            assert bool(got[1].all())
            assert not space.arrivals_A.any()

    def test_without_a_workspace_and_in_half_precision(self) -> None:
        some = case(5, 3, 300, dtype=torch.float16, seed=6, device=DEVICE)
        assert_same(triton_tokens(some), some)

    def test_numbers_gone_wrong(self) -> None:
        some = broken_case(DEVICE)
        got = triton_tokens(some)
        assert_same(got, some)
        assert_broken(got)


def broken_case(device: str) -> Case:
    """One row each (checked): p has a NaN; p an infinity; q a NaN; q an infinity; q is nothing;
    no draft; p is q; p cannot be the draft; the lowest temperature; all is well."""
    logits, positions, draws, odds = case(10, 2, 100, seed=5, device=device)
    logits, draft_tokens, q = logits.clone(), odds.drafts_Bk.clone(), odds.logits_BkV.clone()
    logits[0, 7], logits[3, 7] = torch.nan, torch.inf
    q[2, 0, 9], q[3, 0, 9], q[4] = torch.nan, torch.inf, -torch.inf
    draft_tokens[5] = -1
    q[6] = logits.view(10, 3, 100)[6, :2]
    logits[21, draft_tokens[7, 0]] = -torch.inf
    hot = draws.temperatures_R.clone()
    hot[24:27] = 1e-30
    draws = Draws(draws.keys_R, hot, torch.ones_like(hot))
    return logits, positions, draws, DraftOdds(draft_tokens, q, torch.ones_like(odds.is_verified_B))


def assert_broken(got: tuple[torch.Tensor, torch.Tensor]) -> None:
    ids_Bq, is_sound_Bq = (x.view(10, 3) for x in got)
    assert is_sound_Bq[:, 0].tolist() == [False, False, *[True] * 8]
    assert ids_Bq[:2, 0].tolist() == [0, 0]
    some = broken_case(str(ids_Bq.device))
    odds = some[3]
    assert torch.equal(ids_Bq[6, :2], odds.drafts_Bk[6]), "the same odds are always kept"
    assert ids_Bq[7, 0] != odds.drafts_Bk[7, 0]
    plain, _ = draw_rows(some[0], some[1], some[2])
    assert torch.equal(ids_Bq[2:6, 0], plain.view(10, 3)[2:6, 0]), "their own draws"


def test_the_reference_with_numbers_gone_wrong() -> None:
    assert_broken(verified_rows_reference(*broken_case(DEVICE)))


@pytest.mark.gpu
def test_captured_by_a_graph_and_run_again() -> None:
    some, other = (case(4, 3, 9000, seed=seed, device="cuda") for seed in (7, 8))
    space = make_workspace(torch.device("cuda"), 3 * 16 * 3, 16)
    logits, positions, draws, odds = some
    checked_rows_of_any(logits, positions, draws, odds, workspace=space)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = checked_rows_of_any(logits, positions, draws, odds, workspace=space)
    kept = [(x[0].clone(), x[3].drafts_Bk.clone(), x[3].logits_BkV.clone()) for x in (some, other)]
    for again in (kept[0], kept[1], kept[0]):
        for buffer, numbers in zip((logits, odds.drafts_Bk, odds.logits_BkV), again, strict=True):
            buffer.copy_(numbers)
        graph.replay()
        now = logits, positions, draws, odds
        assert torch.equal(ids, verified_rows_reference(*now, workspace=space)[0])
