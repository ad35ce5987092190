"""Attention of pieces of prompts, of any lengths, straight from the blocks of the cache.

One launch answers every piece of a step: each has its own number of new tokens and its own cached
prefix, is causal, and may look back through a window only. The keys and values of the new tokens
are in the cache already. The query heads of a KV head are rows of one product: row
`token * G + member` of a piece, cut into tiles of `block_m` rows. The host, which knows all
lengths, makes a small array of the tiles once a step and window (`work_items`), longest first, so
that the last programs to run are short ones. Where there are fewer tiles than a device runs at a
time, the keys of a tile are dealt out to several programs.
Letters: T packed query tokens of the step, B requests, M blocks per table row, N blocks of the
pool, S block size, H query heads, K KV heads, G = H / K, D head size, W work items, P pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.errors import check
from ridgeline.kernels.launching import Workspace
from ridgeline.kernels.paged_decode import HEAD_DIMS, DecodeBatch, paged_decode_reference
from ridgeline.kernels.paged_kv import PagedKV

# int32 per work item: row of the block table, first row of q, new tokens, tokens with all before
# them, first row of the tile, its first and last + 1 tile of keys, first part of the tile in the
# workspace, index of this part, number of parts
RECORD = 10
MOST_PROGRAMS = 132  # that keys are dealt out to: the multiprocessors of an H100 or H200
LEAST_KEYS = 512  # of a part, where a tile's keys are dealt out
SMALL_ROWS = 64  # of the longest piece, up to which tiles have 64 rows
NUM_LONE = 256  # lengths of pieces alone in their step whose items are remembered
REFERENCE_ROWS = 256  # queries that the reference answers at once

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Config:
    """What tuning may change."""

    block_m: int = 128  # rows of q, which are tokens times G
    block_n: int = 64  # keys of a step
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Who asks over what. `work_WR` is what `work_items` gave for the same config and window.

    `config` None: the reference. `workspace` is needed where a tile has several parts; launches
    that share it must not overlap.
    """

    block_tables_BM: torch.Tensor  # int32
    work_WR: torch.Tensor  # [W, RECORD] int32, on the device
    window: int | None
    config: Config | None
    workspace: Workspace | None = None


def paged_prefill(
    q_THD: torch.Tensor,
    kv: PagedKV,
    batch: PrefillBatch,
    scale: float,
    *,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H, D] in the dtype of q. Rows of tokens that no work item covers are not written.

    K and V have any strides but contiguous rows of D, the same for both; q and the result too
    need contiguous rows of D only. `scale` is positive.
    """
    if out_THD is None:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if batch.work_WR.shape[0] == 0:
        return out_THD
    if batch.config is None:
        paged_prefill_reference(q_THD, kv, batch, scale, out_THD)
    else:
        from ridgeline.kernels.paged_prefill_triton import paged_prefill_triton

        paged_prefill_triton(q_THD, kv, batch, batch.config, scale, out_THD)
    return out_THD


def prefill_config(
    device: torch.device,
    *,
    head_dim: int,
    num_rows: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Config | None:
    """The tuning for a step whose longest piece has `num_rows` = tokens * G rows; None where there
    is no kernel.

    On one H200, with 8 KV heads of 128 and no early launches, a layer took these microseconds with
    tiles of 64x64 and 4 warps, of 128x64 and 8 warps, and of 128x128 and 8 warps:

        pieces, tokens           G = 4               G = 2
        128 of 16              31,   49,   80      27,  44,  74
        512                  16.4, 16.4, 18.7    13.6, 15.9, 17.9
        64 of 64 behind 2048  395,  370,  384     206, 190, 198
        512 behind 7680       184,  169,  164     128,  90,  89
        2048                  110,  100,  112      56,  50,  56
        8192                 1421, 1271, 1255     694, 634, 627

    So 64x64 is for very short pieces: behind prefixes, which are this kernel's main work, it loses
    from 64 rows on. 128x128 gains 3 % at best, behind long prefixes, and is not taken.
    """
    if device.type != "cuda" or head_dim not in HEAD_DIMS:
        return None
    if dtype == torch.float32:
        return Config(block_m=64, block_n=32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Config(num_stages=2)
    if num_rows <= SMALL_ROWS:
        return Config(block_m=64, num_warps=4)
    return Config()


def work_items(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    requests: Sequence[int] | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    config: Config | None,
    num_programs: int = 0,
) -> npt.NDArray[np.int32]:
    """[W, RECORD] int32: the tiles of these requests (None: all), longest first.

    `query_lens` and `seq_lens` are those of the whole step, as in an AttentionLayout.
    `num_programs`: how many programs the device runs at a time, and the greatest number after
    keys have been dealt out; 0: they never are. Zeros may be appended: such an item does nothing.
    """
    new_B, length_B = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    pieces_4P = np.array([np.arange(len(new_B)), new_B.cumsum() - new_B, new_B, length_B])
    return piece_items(
        pieces_4P if requests is None else pieces_4P[:, np.asarray(requests, np.int64)],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        window=window,
        config=config,
        num_programs=num_programs,
    )


def piece_items(
    pieces_4P: Integers,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    config: Config | None,
    num_programs: int = 0,
) -> npt.NDArray[np.int32]:
    """As `work_items`, of pieces by the first four numbers of a record: row of the block table,
    first row of q, new tokens, tokens with all before them."""
    if pieces_4P.shape[1] != 1:
        return _items(pieces_4P, num_heads, num_kv_heads, window, config, num_programs)
    row, start, num_new, length = pieces_4P[:, 0].tolist()
    items = _items_of_one(
        num_new, length, num_heads, num_kv_heads, window, config, num_programs
    ).copy()
    items[:, 0], items[:, 1] = row, start
    return items


@lru_cache(maxsize=NUM_LONE)
def _items_of_one(
    num_new: int,
    length: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    config: Config | None,
    num_programs: int,
) -> npt.NDArray[np.int32]:
    """Of a piece at row 0 of both. A prompt alone waits for this, and its chunks are often as long
    as those of others."""
    piece_41 = np.array([[0], [0], [num_new], [length]], np.int64)
    return _items(piece_41, num_heads, num_kv_heads, window, config, num_programs)


def _items(
    pieces_4P: Integers,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    config: Config | None,
    num_programs: int,
) -> npt.NDArray[np.int32]:
    check(num_heads % num_kv_heads == 0, "query heads are a multiple of KV heads")
    check(num_programs <= MOST_PROGRAMS, "keys are dealt out to few", programs=num_programs)
    _, _, new_P, length_P = pieces_4P
    group = num_heads // num_kv_heads
    block_m = int(new_P.max(initial=1)) * group if config is None else config.block_m
    block_n = int(length_P.max(initial=1)) if config is None else config.block_n
    tiles_P = (new_P * group + (block_m - 1)) // block_m
    pieces_4W, first_P = pieces_4P.repeat(tiles_P, axis=1), tiles_P.cumsum() - tiles_P
    index_W = np.arange(pieces_4W.shape[1])
    row_W = (index_W - first_P.repeat(tiles_P)) * block_m
    begin_W, end_W = _key_tiles(row_W, pieces_4W, group, block_m, block_n, window)
    items = np.empty((len(index_W), RECORD), np.int32)
    items[:, :4], items[:, 4], items[:, 5], items[:, 6] = pieces_4W.T, row_W, begin_W, end_W
    items[:, 7], items[:, 8:] = index_W, (0, 1)  # every tile has one part
    least = -(-LEAST_KEYS // block_n)
    if (parts_W := _parts(end_W - begin_W, num_programs // num_kv_heads, least)) is not None:
        items = _cut(items, parts_W)
    return items[(items[:, 5] - items[:, 6]).argsort(kind="stable")]


def _key_tiles(
    row_W: Integers,
    pieces_4W: Integers,
    group: int,
    block_m: int,
    block_n: int,
    window: int | None,
) -> tuple[Integers | int, Integers]:
    """First and last + 1 tile of keys that a tile of rows may see anything of."""
    _, _, new_W, length_W = pieces_4W
    cached_W = length_W - new_W
    last_W = np.minimum(row_W + block_m, new_W * group) - 1
    end_W = (cached_W + last_W // group) // block_n + 1
    if window is None:
        return 0, end_W
    first_W = np.maximum(cached_W + row_W // group - window + 1, 0)
    return first_W // block_n, end_W


def _parts(num_tiles: Integers, room: int, least: int) -> Integers | None:
    """To how many programs of a KV head each item's tiles of keys are dealt out, at most `room` in
    all: the smallest load of at least `least` that no program exceeds. None: all to one each."""
    if len(num_tiles) == 0 or len(num_tiles) > room // 2:
        return None
    tiles = num_tiles.tolist()  # so few that numpy is slower
    load = max(least, -(-sum(tiles) // room))
    if load >= max(tiles):
        return None
    while sum([-(-num // load) for num in tiles]) > room:
        load += 1 + load // 32
    return np.array([-(-num // load) for num in tiles], np.int64)


def _cut(items: npt.NDArray[np.int32], parts_W: Integers) -> npt.NDArray[np.int32]:
    """A record for each part of the items' keys."""
    records = items.repeat(parts_W, axis=0)
    count_w = parts_W.repeat(parts_W)
    first_w = (parts_W.cumsum() - parts_W).repeat(parts_W)
    index_w = np.arange(len(records)) - first_w
    begin_w = records[:, 5].astype(np.int64)
    tiles_w = records[:, 6] - begin_w
    records[:, 5] = begin_w + tiles_w * index_w // count_w
    records[:, 6] = begin_w + tiles_w * (index_w + 1) // count_w
    records[:, 7], records[:, 8], records[:, 9] = first_w, index_w, count_w
    return records


def paged_prefill_reference(
    q_THD: torch.Tensor,
    kv: PagedKV,
    batch: PrefillBatch,
    scale: float,
    out_THD: torch.Tensor,
) -> None:
    """The definition in float32, some queries of a piece after the other."""
    for record in batch.work_WR.tolist():
        request, start, num_new, length, first_row, *_, index, _ = record
        if first_row == 0 and index == 0:
            for done in range(0, num_new, REFERENCE_ROWS):
                stop = min(done + REFERENCE_ROWS, num_new)
                rows = slice(start + done, start + stop)
                paged_decode_reference(
                    q_THD[rows],
                    kv,
                    _alone(batch, request, stop - done, length - num_new + stop),
                    scale,
                    out_THD[rows],
                )


def _alone(batch: PrefillBatch, request: int, num_new: int, length: int) -> DecodeBatch:
    """Some queries of a request, without what comes behind them."""
    return DecodeBatch(
        batch.block_tables_BM[request : request + 1],
        torch.tensor([length], dtype=torch.int32),
        torch.tensor([0, num_new], dtype=torch.int32),
        num_new,
        batch.window,
    )
