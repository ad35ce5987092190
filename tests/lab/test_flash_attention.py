"""Is attention by tiles what PyTorch says, and are its bytes those of the papers?"""

from __future__ import annotations

import pytest
import torch

from ridgeline.cost.attention_traffic import TiledAttention
from ridgeline.lab.page import read_inputs
from ridgeline.lab.pages.flash_attention import PAGE, TILE, Inputs, answer


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seed", [0, 7, 999])
def test_tiles_give_what_pytorch_gives(causal: bool, seed: int) -> None:
    drawing = answer(Inputs(causal=causal, seed=seed)).drawing
    scores = torch.tensor(
        [[-torch.inf if s is None else s for s in row] for row in drawing.scores],
        dtype=torch.float64,
    )
    wanted = torch.softmax(scores, -1) @ torch.tensor(drawing.values, dtype=torch.float64)
    for found in (drawing.tiled, drawing.exact):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted)
    assert drawing.error < 1e-14


@pytest.mark.parametrize("causal", [True, False])
def test_after_each_step_statistics_are_those_of_the_keys_so_far(causal: bool) -> None:
    drawing = answer(Inputs(causal=causal)).drawing
    assert len(drawing.visits) == (10 if causal else 16)
    for visit in drawing.visits:
        for row in range(TILE):
            seen = drawing.scores[visit.row_tile * TILE + row][: (visit.column_tile + 1) * TILE]
            shown = torch.tensor([s for s in seen if s is not None], dtype=torch.float64)
            assert visit.new_max[row] == shown.max()
            total = torch.logsumexp(shown, 0) - visit.new_max[row]
            assert visit.sums[row] == pytest.approx(float(total.exp()))


def test_the_factor_is_needed() -> None:
    """Teaching texts leave it out: wrong by 1.9 in one that was tried."""
    assert answer(Inputs()).drawing.error_without_factor > 0.1


def test_scores_at_128k_tokens_are_32_gib_a_head() -> None:
    assert answer(Inputs(tokens=131072)).drawing.score_bytes == 32 << 30


def test_bytes_by_hand() -> None:
    """n 1,024, d 64, tiles of 128 x 128, no mask: 8 passes over k and v; with a mask 1 + 2 + .. 8
    eighths of them."""
    plain = TiledAttention(1024, 64, 128, 128, is_causal=False)
    assert plain.tiled_bytes == 2 * (2 * 1024 * 64 + 2 * 8 * 1024 * 64)
    assert plain.unfused_bytes == 2 * (4 * 1024 * 64 + 4 * 1024 * 1024)
    causal = TiledAttention(1024, 64, 128, 128)
    assert causal.keys_read == 128 * 36
    assert causal.num_visits == 36


def test_traffic_grows_with_the_square_of_the_length_and_falls_with_the_tile() -> None:
    """Theta(n^2 d^2 / M), not O(n^2) to O(n d) and not n^2 / M, as teaching texts have it."""

    def passes(n: int, d: int, rows: int) -> int:
        one = TiledAttention(n, d, rows, 64, is_causal=False)
        return one.tiled_bytes - 4 * n * d

    assert passes(8192, 128, 128) == 4 * passes(4096, 128, 128)
    assert passes(8192, 128, 64) == 2 * passes(8192, 128, 128)
    # Twice the head size in the same memory: half the rows, so four times the traffic.
    assert passes(8192, 256, 64) == 4 * passes(8192, 128, 128)


def test_small_tiles_save_nothing() -> None:
    assert "times more" in answer(Inputs(rows=16, columns=16, causal=False)).sentence


def test_a_tile_that_is_too_large_says_so() -> None:
    found = answer(Inputs(rows=256, columns=256, head_dim=256))
    assert found.drawing.chip_bytes > found.drawing.chip_limit
    assert "take fewer" in found.sentence


@pytest.mark.parametrize("preset", [preset.name for preset in PAGE.presets])
def test_presets_are_inputs(preset: str) -> None:
    chosen = next(one for one in PAGE.presets if one.name == preset)
    assert answer(read_inputs(PAGE, chosen.inputs)).sentence  # type: ignore[arg-type]
