"""Causal attention of one request over its paged keys and values, a tile at a time.

The online softmax of FlashAttention in plain PyTorch: the score matrix never exists beyond one
tile. Only slots that hold a visible token are gathered, so what lies in the others (NaN included)
cannot reach the result. Query heads that share a KV head are folded into the query rows.
Letters: T new tokens, n keys of a tile, H query heads, K KV heads, G = H / K, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

QUERY_TILE = 64
KEY_TILE = 256

# positions [start, stop) of the request -> its keys and values, [n, 2, K, D]
GatherRange = Callable[[int, int], torch.Tensor]


def paged_attention_reference(
    q_THD: torch.Tensor,
    gather: GatherRange,
    *,
    seq_len: int,
    num_kv_heads: int,
    scale: float,
    window: int | None,
    out_THD: torch.Tensor,
    scores_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Attention of the last T of `seq_len` tokens over all before them, written to `out_THD`.
    `sinks_H`: a further score of each head, whose value is zero.

    `window` tokens back, the query's own included, are visible; None: all. Accumulates in float32.
    `scores_cap`: see AttentionSpec.
    """
    num_new = q_THD.shape[0]
    for start in range(0, num_new, QUERY_TILE):
        stop = min(start + QUERY_TILE, num_new)
        first = seq_len - num_new + start  # position of the tile's first query
        out_THD[start:stop] = _query_tile(
            q_THD[start:stop], gather, first, num_kv_heads, scale, window, scores_cap, sinks_H
        )


def _query_tile(
    q_THD: torch.Tensor,
    gather: GatherRange,
    first: int,
    num_kv_heads: int,
    scale: float,
    window: int | None,
    scores_cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    rows, num_heads, head_dim = q_THD.shape
    share = num_heads // num_kv_heads
    q_KRD = (
        (q_THD.float() * scale)
        .view(rows, num_kv_heads, share, head_dim)
        .permute(1, 2, 0, 3)
        .reshape(num_kv_heads, share * rows, head_dim)
    )
    best = q_KRD.new_full((num_kv_heads, share * rows, 1), -torch.inf)
    total = torch.zeros_like(best)
    mixed = torch.zeros_like(q_KRD)
    begin = 0 if window is None else max(0, first - window + 1)
    for key_start in range(begin, first + rows, KEY_TILE):
        key_stop = min(key_start + KEY_TILE, first + rows)
        k_KDn, v_KnD = _keys_and_values(gather(key_start, key_stop))
        scores = torch.bmm(q_KRD, k_KDn)
        if scores_cap is not None:
            scores.div_(scores_cap).tanh_().mul_(scores_cap)
        hidden = _hidden(first, rows, key_start, key_stop, window, scores.device)
        if hidden is not None:
            scores.masked_fill_(hidden.repeat(share, 1), -torch.inf)
        best, total, mixed = _accumulate(scores, v_KnD, best, total, mixed)
    if sinks_H is not None:  # seen last, with nothing to mix in
        sinks_KR1 = sinks_H.float().repeat_interleave(rows).view(num_kv_heads, share * rows, 1)
        best, total, mixed = _accumulate(
            sinks_KR1, torch.zeros_like(mixed[:, :1]), best, total, mixed
        )
    out = (mixed / total).view(num_kv_heads, share, rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(rows, num_heads, head_dim).to(q_THD.dtype)


def _keys_and_values(kv_n2KD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k_nKD, v_nKD = kv_n2KD.float().unbind(1)
    return k_nKD.permute(1, 2, 0), v_nKD.permute(1, 0, 2)


def _hidden(
    first: int, rows: int, key_start: int, key_stop: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """[rows, n], true where a query may not look; None when it may look everywhere."""
    ahead = key_stop - 1 > first
    behind = window is not None and key_start <= first + rows - 1 - window
    if not ahead and not behind:
        return None
    query = torch.arange(first, first + rows, device=device)[:, None]
    key = torch.arange(key_start, key_stop, device=device)[None]
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)


def _accumulate(
    scores: torch.Tensor,
    v_KnD: torch.Tensor,
    best: torch.Tensor,
    total: torch.Tensor,
    mixed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of the online softmax. A row that has seen nothing yet keeps -inf as its best, and
    0 as the reference to subtract, so that it stays at zero instead of becoming NaN."""
    new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
    reference = torch.where(new_best == -torch.inf, torch.zeros_like(new_best), new_best)
    weights = torch.exp(scores - reference)
    fade = torch.exp(best - reference)
    total = total * fade + weights.sum(-1, keepdim=True)
    mixed = torch.baddbmm(mixed * fade, weights, v_KnD)
    return new_best, total, mixed
