"""Attention of a few new tokens of each request, straight from the blocks of the cache.

For decodes and for the verification of drafts: a request has between one and `max_new` query
tokens, causal among themselves, over all that is cached of it.
Letters: T packed query tokens, B requests, M blocks per table row, N blocks of the pool, S block
size, H query heads, K KV heads, G = H / K, D head size, Q queries of a request, n its keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ridgeline.errors import check
from ridgeline.kernels.paged_kv import PagedKV, read_tokens

if TYPE_CHECKING:
    from ridgeline.kernels.paged_decode_triton import Schedule

HEAD_DIMS = (16, 32, 64, 128, 256)  # that tensor cores take as they are


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Who asks over what, on the device. Under a captured graph the contents may change, the
    shapes, `max_new` and `window` may not.

    Request b asks for the rows of q from query_start[b] to query_start[b + 1], but for no more
    than the first `max_new`: what is behind them is another's. Its last
    query is token seq_lens[b] - 1. A request of length 0 is padding: its rows, at most the first
    `max_new`, become zeros. `rows_B`: which row of the tables is request b's; None: row b.
    Positions past the end of the tables are in block 0; a new token that has no numbers in the
    cache, but NaN, does not reach those before it.
    `window` tokens back, the query's own included, are visible; None: all.
    """

    block_tables_BM: torch.Tensor  # int32
    seq_lens_B: torch.Tensor  # int32
    query_start_B1: torch.Tensor  # int32, B + 1
    max_new: int
    window: int | None
    rows_B: torch.Tensor | None = None  # int64


def paged_decode(
    q_THD: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    scale: float,
    *,
    schedule: Schedule | None = None,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H, D] in the dtype of q. K and V have any strides but contiguous rows of D, the same for
    both. Rows of no request are not written.

    `schedule` is what `schedule_for` gave, refreshed for these lengths; None: the reference.
    """
    out_THD = (
        torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        if (out_THD is None)
        else out_THD
    )
    if schedule is None:
        paged_decode_reference(q_THD, kv, batch, scale, out_THD)
    else:
        from ridgeline.kernels.paged_decode_triton import paged_decode_triton

        paged_decode_triton(q_THD, kv, batch, scale, schedule, out_THD)
    return out_THD


def schedule_for(
    device: torch.device,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_requests: int,
    max_new: int,
) -> Schedule | None:
    """What the Triton kernel needs beside its inputs, shared by all layers of these shapes that
    run one after the other; None where it cannot run."""
    if device.type != "cuda" or head_dim not in HEAD_DIMS:
        return None
    from ridgeline.kernels.paged_decode_triton import make_schedule

    return make_schedule(
        device,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_requests=max_requests,
        max_new=max_new,
    )


def paged_decode_reference(
    q_THD: torch.Tensor,
    kv: PagedKV,
    batch: DecodeBatch,
    scale: float,
    out_THD: torch.Tensor,
) -> None:
    """The definition, one request after the other, in float32."""
    starts = batch.query_start_B1.tolist()
    check(len(starts) == batch.seq_lens_B.shape[0] + 1, "query_start has one row more than lengths")
    for row, length in enumerate(batch.seq_lens_B.tolist()):
        start = starts[row]
        stop = min(starts[row + 1], start + batch.max_new)
        first = _first_visible(length, stop - start, batch.window)
        table = row if batch.rows_B is None else batch.rows_B[row]
        slots_n = slots_of(batch.block_tables_BM[table], first, length, kv.k_NSKD.shape[1])
        k_nKD, v_nKD = read_tokens(kv, slots_n)
        answer = _one_request(q_THD[start:stop], k_nKD, v_nKD, scale, batch.window)
        out_THD[start:stop] = answer.to(out_THD.dtype)


def _first_visible(length: int, num_new: int, window: int | None) -> int:
    return 0 if window is None else max(0, length - num_new - window + 1)


def slots_of(
    table_M: torch.Tensor, first: int, length: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(first, length, device=table_M.device)
    place = position // block_size
    block = table_M[place.clamp_max(len(table_M) - 1)].long()
    return block.where(place < len(table_M), 0), position % block_size


def _one_request(
    q_QHD: torch.Tensor,
    k_nKD: torch.Tensor,
    v_nKD: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of the last Q of the tokens behind k and v; a query without keys gets zeros. A
    value that is no number reaches only those that see it."""
    num_new, num_heads, head_dim = q_QHD.shape
    num_keys, num_kv_heads = k_nKD.shape[:2]
    q_QKGD = q_QHD.float().view(num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,nkd->kgqn", q_QKGD, k_nKD) * scale
    query = torch.arange(num_keys - num_new, num_keys, device=q_QHD.device)[:, None]
    key = torch.arange(num_keys, device=q_QHD.device)
    hidden = key > query if window is None else (key > query) | (key <= query - window)
    sound_nK = v_nKD.isfinite().all(-1)
    scores.masked_fill_(~sound_nK.T[:, None, None, :], torch.nan).masked_fill_(hidden, -torch.inf)
    weights = scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    v_nKD = v_nKD.masked_fill(~sound_nK[:, :, None], 0.0)
    return torch.einsum("kgqn,nkd->qkgd", weights, v_nKD).reshape(num_new, num_heads, head_dim)
