"""e4m3 keys and values: never NaN for large numbers. What it shares is in test_coded."""

from __future__ import annotations

import torch

from ridgeline.kernels.qk_norm_rope_write import qk_norm_rope_write
from ridgeline.kernels.quantize_rows import E4M3
from ridgeline.kvcache.formats import Fp8KV
from tests.kvcache.test_coded import DEVICE, cache, rows, slots


def test_large_numbers_become_the_largest_and_nan_stays() -> None:
    layer, wide = cache("fp8").layers[0], rows(1)
    wide[0, :5] = torch.tensor([447.0, 465.0, -1e9, torch.inf, torch.nan])
    layer.write(slots(4), wide)
    found = layer.gather(slots(4)).flatten()
    assert found[:4].tolist() == [448.0, 448.0, -448.0, 448.0]
    assert bool(found[4].isnan())


def test_views_are_e4m3() -> None:
    views = cache("fp8").layers[2].views
    assert views is not None
    assert views.k_NSKD.dtype == views.v_NSKD.dtype == E4M3


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
