"""The Triton kernels of latent attention equal their definitions, on ragged batches with NaN
wherever nothing may be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ridgeline.kernels.latent_decode import (
    LatentQueries,
    latent_attend,
    latent_decode_reference,
    write_latent_reference,
)
from ridgeline.kernels.paged_decode import DecodeBatch
from tests.kernels import INTERPRETED

if TYPE_CHECKING:
    from ridgeline.kernels import latent_decode_triton as triton_kernel
else:
    triton_kernel = pytest.importorskip("ridgeline.kernels.latent_decode_triton")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def scene(
    lengths: list[int], new: int, heads: int, size: int, rotated: int, dtype: torch.dtype
) -> tuple[LatentQueries, torch.Tensor, DecodeBatch]:
    """Tables in shuffled order, of rows that are named; a block of 4 tokens."""
    noise = torch.Generator().manual_seed(sum(lengths) + new)
    width, needed = size + rotated, [-(-n // 4) for n in lengths]
    cache = torch.full((sum(needed) + 1, 4, width), torch.nan)
    free = torch.randperm(sum(needed), generator=noise).add_(1).tolist()
    rows = torch.randperm(len(lengths), generator=noise)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for row, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(needed[row])]
        tables[rows[row], : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for place in range(length):
            cache[blocks[place // 4], place % 4] = torch.randn(width, generator=noise)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * new
    wide = torch.randn(len(lengths) * new, heads, width + 3, generator=noise).to(DEVICE, dtype)
    batch = DecodeBatch(
        tables.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        starts.to(DEVICE),
        new,
        None,
        rows.to(DEVICE),
    )
    queries = LatentQueries(wide[..., :size], wide[..., size : size + rotated])
    return queries, cache.to(DEVICE, dtype), batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("processors", [1, 24])
@pytest.mark.parametrize(
    ("lengths", "new", "heads", "size", "rotated"),
    [
        ([1, 70, 33, 0], 1, 4, 32, 8),
        ([9, 40], 3, 6, 24, 16),
        ([130, 5], 1, 20, 48, 4),
        ([66, 3, 17], 2, 40, 64, 32),
    ],
)
def test_equals_the_definition(
    lengths: list[int],
    new: int,
    heads: int,
    size: int,
    rotated: int,
    processors: int,
    dtype: torch.dtype,
) -> None:
    """In one piece, and split."""
    queries, cache, batch = scene(lengths, new, heads, size, rotated, dtype)
    work = triton_kernel.work_of(
        DEVICE,
        num_heads=heads,
        size=size,
        max_requests=len(lengths),
        max_new=new,
        processors=processors,
    )
    scale = (size + rotated) ** -0.5
    got = triton_kernel.latent_decode_triton(queries, cache, batch, scale, work)
    want = latent_decode_reference(queries, cache, batch, scale)
    assert (got.float() - want.float()).abs().max() <= TOLERANCE[dtype]


def test_a_new_token_without_a_block_does_not_reach_those_before_it() -> None:
    queries, cache, batch = scene([33, 6], 2, 4, 32, 8, torch.float32)
    assert batch.rows_B is not None
    cache[batch.block_tables_BM[batch.rows_B[0], 8], 0] = torch.nan
    work = triton_kernel.work_of(
        DEVICE, num_heads=4, size=32, max_requests=2, max_new=2, processors=24
    )
    got = triton_kernel.latent_decode_triton(queries, cache, batch, 0.2, work)
    want = latent_decode_reference(queries, cache, batch, 0.2)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()
    assert torch.equal(got.isnan(), want.isnan())
    assert (got[[0, 2, 3]] - want[[0, 2, 3]]).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "new", "heads", "size", "rotated"),
    [([70], 1, 4, 32, 8), ([300], 3, 6, 24, 16), ([5, 0, 130], 1, 20, 80, 4)],
)
def test_products_before_and_behind(
    lengths: list[int], new: int, heads: int, size: int, rotated: int, dtype: torch.dtype
) -> None:
    """Queries and weights as they lie in what the layer has: parts of other tensors."""
    queries, cache, batch = scene(lengths, new, heads, size, rotated, dtype)
    plain, width = 12, 20
    noise = torch.Generator().manual_seed(heads)
    weight_HOC = torch.randn(heads, plain + width, size, generator=noise).to(DEVICE, dtype) / 4
    own = torch.randn(len(lengths) * new, heads, plain, generator=noise).to(DEVICE, dtype)
    q_THD = torch.cat((own, queries.rotated_THR), -1)
    given = weight_HOC[:, :plain], weight_HOC[:, plain:], cache, batch, 0.2
    work = triton_kernel.work_of(
        DEVICE, num_heads=heads, size=size, max_requests=len(lengths), max_new=new, processors=24
    )
    got = triton_kernel.latent_attend_triton(q_THD, *given, work)
    want = latent_attend(q_THD, *given)
    assert (got.float() - want.float()).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_written(dtype: torch.dtype, interleaved: bool) -> None:
    noise = torch.Generator().manual_seed(3)
    size, rotated, heads = 24, 8, 5
    kv_TW = torch.randn(3, 50, generator=noise).to(DEVICE, dtype)[:, 7 : 7 + size + rotated]
    wide = torch.randn(3, heads, 20, generator=noise).to(DEVICE, dtype)
    angles = torch.rand(9, rotated // 2, generator=noise)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(DEVICE)
    weight = torch.rand(size, generator=noise).to(DEVICE, dtype)
    positions, slots = torch.tensor([[4, 0, 8], [7, 2, 11]]).to(DEVICE)
    found = []
    for write in (write_latent_reference, triton_kernel.write_latent_triton):
        cache = torch.zeros(3, 4, size + rotated, dtype=dtype, device=DEVICE)
        q_THR = wide.clone()[..., 12:]
        write(
            *(kv_TW, q_THR, weight, 1e-6, table, positions, slots, cache), interleaved=interleaved
        )
        found.append((q_THR, cache))
    for got, want in zip(*found, strict=True):
        assert (got.float() - want.float()).abs().max() <= TOLERANCE[dtype]
    assert (found[0][1].flatten(0, 1).abs().sum(1) > 0).nonzero().flatten().tolist() == [2, 7, 11]
