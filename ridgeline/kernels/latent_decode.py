"""Latent attention of a few new tokens of each request, straight from the blocks of the cache.

The cached vectors are the one key of all heads, and their first C numbers the values (DeepSeek-V2,
arXiv 2405.04434, section 2.1): a query has C numbers for these and R for the rotated rest. This
file is the meaning, and what goes to the cache before; the Triton kernels are tested against it.
Letters: T packed query tokens, B requests, N blocks, S block size, H heads, W = C + R, n keys of a
request, L positions, P numbers of a query that are not rotated, V of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ridgeline.kernels.paged_decode import DecodeBatch, slots_of
from ridgeline.kernels.paged_kv import indexable
from ridgeline.kernels.qk_norm_rope_write import rotate_
from ridgeline.kernels.rms_norm import rms_norm_reference

if TYPE_CHECKING:
    from ridgeline.kernels.latent_decode_triton import LatentWork

MOST_ATTENDED = 4  # tokens


@dataclass(frozen=True, slots=True)
class LatentQueries:
    """[T, H, C] and [T, H, R], of any strides but contiguous rows."""

    latent_THC: torch.Tensor
    rotated_THR: torch.Tensor


def latent_decode(
    q: LatentQueries,
    cache_NSW: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    *,
    work: LatentWork | None = None,
) -> torch.Tensor:
    """[T, H, C] in the dtype of q, what heads mix of the vectors; as `paged_decode` otherwise.
    `work` is what `latent_work_for` gave; None: the reference."""
    if work is None:
        return latent_decode_reference(q, cache_NSW, batch, scale)
    from ridgeline.kernels.latent_decode_triton import latent_decode_triton

    return latent_decode_triton(q, cache_NSW, batch, scale, work)


def latent_attend(
    q_THD: torch.Tensor,
    keys_HPC: torch.Tensor,
    values_HVC: torch.Tensor,
    cache_NSW: torch.Tensor,
    batch: DecodeBatch,
    scale: float,
    *,
    work: LatentWork | None = None,
) -> torch.Tensor:
    """[T, H, V]: values that heads mix. `keys_HPC` makes the first P numbers of a query those of a
    query of latent vectors, `values_HVC` values of what is mixed of these. `work` as that of
    `latent_decode`. Few tokens whose keys are split are three launches of ours: no library."""
    if work is not None and work.splits > 1 and len(q_THD) <= MOST_ATTENDED:
        from ridgeline.kernels.latent_decode_triton import latent_attend_triton

        return latent_attend_triton(q_THD, keys_HPC, values_HVC, cache_NSW, batch, scale, work)
    plain = keys_HPC.shape[1]
    q_THC = torch.bmm(q_THD[..., :plain].transpose(0, 1), keys_HPC).transpose(0, 1)
    queries = LatentQueries(q_THC, q_THD[..., plain:])
    mixed_THC = latent_decode(queries, cache_NSW, batch, scale, work=work)
    return torch.bmm(mixed_THC.transpose(0, 1), values_HVC.mT).transpose(0, 1)


def latent_decode_reference(
    q: LatentQueries, cache_NSW: torch.Tensor, batch: DecodeBatch, scale: float
) -> torch.Tensor:
    """The definition, one request after the other, in float32."""
    out_THC = torch.zeros_like(q.latent_THC)
    size = q.latent_THC.shape[2]
    for row, length in enumerate(batch.seq_lens_B.tolist()):
        start, stop = batch.query_start_B1[row : row + 2].tolist()
        stop = min(stop, start + batch.max_new)
        if length == 0:
            continue
        table = row if batch.rows_B is None else batch.rows_B[row]
        slots_n = slots_of(batch.block_tables_BM[table], 0, length, cache_NSW.shape[1])
        keys_nW = indexable(cache_NSW)[slots_n].view(cache_NSW.dtype).float()
        asked = torch.cat((q.latent_THC[start:stop], q.rotated_THR[start:stop]), -1).float()
        scores = torch.einsum("qhw,nw->qhn", asked, keys_nW) * scale
        query = torch.arange(length - (stop - start), length, device=keys_nW.device)
        hidden = torch.arange(length, device=keys_nW.device) > query[:, None, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        values_nC = keys_nW[:, :size].nan_to_num(0.0)  # who sees NaN has NaN as its weights
        out_THC[start:stop] = torch.einsum("qhn,nc->qhc", weights, values_nC).to(out_THC.dtype)
    return out_THC


def write_latent_reference(
    kv_TW: torch.Tensor,
    q_THR: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    table_L2R: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cache_NSW: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Rotates `q_THR` in place, and puts the normed latent vector and the rotated key of each token
    into its slot. Pairs of numbers that lie side by side (`interleaved`) come out apart."""
    size = len(weight_C)
    both_T2R = table_L2R.index_select(0, positions_T)
    key_T1R = kv_TW[:, None, size:].clone()
    for x_TNR in (q_THR, key_T1R):
        if interleaved:
            x_TNR.copy_(torch.cat((x_TNR[..., ::2], x_TNR[..., 1::2]), -1))
        rotate_(x_TNR, both_T2R[:, :1], both_T2R[:, 1:])
    rows_TW = torch.cat((rms_norm_reference(kv_TW[:, :size], weight_C, eps), key_T1R[:, 0]), -1)
    if cache_NSW.dtype.itemsize == 1:
        largest = torch.finfo(cache_NSW.dtype).max
        rows_TW = rows_TW.clamp(-largest, largest)
    flat = indexable(cache_NSW).view(-1, cache_NSW.shape[2])
    flat.index_copy_(0, slots_T, indexable(rows_TW.to(cache_NSW.dtype)))
