"""The kernel that norms, turns and writes, into caches of fewer bits: as its definition, but for
codes on the border of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ridgeline.kernels.qk_norm_rope_write import HeadNorms, qk_norm_rope_write_reference
from tests.kernels.kv_formats import FORMATS, check_near, poisoned

if TYPE_CHECKING:
    from ridgeline.kernels import qk_norm_rope_write_triton as triton_kernel
else:
    triton_kernel = pytest.importorskip("ridgeline.kernels.qk_norm_rope_write_triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16][: 3 if DEVICE.type == "cuda" else 2]
BLOCK_SIZE, BLOCKS = 4, 5
# The interpreter rounds to e4m3 in a way of its own.
NAMES = ["int8", "int4", "fp8"][: 3 if DEVICE.type == "cuda" else 2]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 32), (18, 2, 128)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_writes(
    name: str, heads: tuple[int, int, int], has_norms: bool, dtype: torch.dtype
) -> None:
    num_heads, kv_heads, size = heads
    qkv = noise(5, (num_heads + 2 * kv_heads) * size).to(dtype).to(DEVICE)
    qkv[1, -3] = 200.0
    qkv[4, num_heads * size : (num_heads + 1) * size] = 0.0
    slots = torch.tensor([5, -1, 0, 13, 18], device=DEVICE)
    positions = torch.tensor([7, 0, 3, 11, 2], device=DEVICE)
    angles = noise(12, size // 2, seed=9)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(DEVICE)
    weights = noise(2, size, seed=4).to(dtype).to(DEVICE)
    norms = HeadNorms(weights[0], weights[1], 1e-5) if has_norms else None
    kind = FORMATS[name]()
    stores = [
        tuple(part.to(DEVICE) for part in poisoned(kind, (BLOCKS, BLOCK_SIZE, *heads[1:]), dtype))
        for _ in range(2)
    ]
    views = [kind.views(store, kv_heads, size) for store in stores]
    assert views[0] is not None
    assert views[1] is not None
    ours = triton_kernel.qk_norm_rope_write_triton(
        qkv, table, positions, slots, views[0], norms=norms
    )
    theirs = qk_norm_rope_write_reference(qkv, table, positions, slots, views[1], norms=norms)
    torch.testing.assert_close(
        ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-4
    )
    kept = slots >= 0
    untouched = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool, device=DEVICE)
    untouched[slots[kept]] = False
    for mine, other in zip(stores[0], stores[1], strict=True):
        a, b = (x.flatten(0, 1).flatten(1).view(torch.uint8) for x in (mine, other))
        assert torch.equal(a[untouched], b[untouched])
    assert not kind.gather(stores[0], slots[kept], kv_heads, size).isnan().any()
    check_near(stores[0], stores[1], slots[kept])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_is_not_finite_spoils_its_head_alone(name: str) -> None:
    kv_heads, size = 2, 32
    qkv = noise(1, (2 + 2 * kv_heads) * size).to(DEVICE)
    qkv[0, 2 * size + 3] = torch.nan  # of the first key
    qkv[0, -1] = torch.inf  # of the last value
    table = torch.stack((torch.ones(1, size), torch.zeros(1, size)), 1).to(DEVICE)
    origin = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kind = FORMATS[name]()
    store = kind.allocate(BLOCKS, BLOCK_SIZE, kv_heads, size, torch.float32, DEVICE)
    views = kind.views(store, kv_heads, size)
    assert views is not None
    triton_kernel.qk_norm_rope_write_triton(qkv, table, origin, origin + 6, views)
    found = kind.gather(store, origin + 6, kv_heads, size)
    assert found.isnan().all(-1).tolist() == [[[True, False], [False, True]]]
    assert found.isnan().any(-1).tolist() == [[[True, False], [False, True]]]
