"""Attention by torch's own fused kernel, on what is gathered from the cache.

Requests with few new tokens (decodes above all) are padded to one length and answered by one call;
the places behind a request's end repeat its own last token, so nothing foreign is ever read, and a
bias of -inf hides them. Longer pieces go one by one, in tiles of query rows once a mask is needed.
Query heads that share a KV head are rows of one product: K and V are never repeated in memory.
Letters: T packed tokens, B requests of a tile, L keys of each, Q new tokens of each, H query heads,
K KV heads, G = H / K, D head size, V that of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.backend import AttentionBackend, AttentionCase, Supports, softmax_scale
from ridgeline.attention.layout import AttentionLayout, slots_of_range, slots_of_ranges
from ridgeline.kvcache import LayerKV

QUERY_TILE = 256  # rows of a masked piece that are answered by one call
FEW_TOKENS = 8  # up to so many new tokens, requests of a kind are answered together
MAX_GATHERED = 1 << 16  # tokens that one call gathers for several requests
# And on a CPU few enough for its cache: beyond it the copy goes through memory, and beyond 32 MiB
# through fresh pages at every call.
MAX_GATHERED_CPU = 1 << 11
MAX_PADDING = 1 << 11  # tokens of padding in a call before another call is cheaper
LONG_PIECE = 1024  # tokens from which cuDNN's kernel is worth a plan of its own
# cuDNN spends tens of milliseconds of the host on every shape that it has not seen, so that prompts
# are filled up to few lengths; nothing real looks at what is behind its end.
PIECE_STEP = 512
CUDNN_CAPABILITY = (8, 0)  # older GPUs have no such kernel
SINK_COLUMNS = 8  # of queries and keys; one would do, and kernels of GPUs read rows of 16 bytes
BIAS_ALIGNMENT = 16  # keys; torch copies a bias of another width at every call on a GPU


@dataclass(slots=True)
class Bias:
    """0 where a query may look and -inf elsewhere, kept in each dtype it is asked for."""

    hidden: torch.Tensor
    kept: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self.kept:
            blank = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            self.kept[dtype] = blank.masked_fill_(self.hidden, -torch.inf)
        return self.kept[dtype]


@dataclass(frozen=True, slots=True)
class ShortTile:
    """Requests with `num_new` new tokens each. `rows_T` None: the whole step, in its order."""

    rows_T: torch.Tensor | None
    num_requests: int
    num_new: int
    length: int
    slots: torch.Tensor  # [B * L]
    hidden: Bias | None  # [B, 1, Q, L]


@dataclass(frozen=True, slots=True)
class LongPiece:
    """The new tokens [start, stop) of the step, all of one request, over the keys at `slots`,
    the last of which is the last query's own. `plain`: causal alone, nothing cached before."""

    start: int
    stop: int
    slots: torch.Tensor  # [num_keys], and the last again up to `padded`
    num_keys: int
    plain: bool
    padded: int = 0  # for cuDNN; 0: not for it

    @property
    def from_start(self) -> LongPiece:
        """The same of tensors that begin with its first token."""
        return replace(self, start=0, stop=self.stop - self.start)


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    window: int | None
    short: tuple[ShortTile, ...]
    long: tuple[LongPiece, ...]
    band: Bias | None

    @property
    def lone(self) -> LongPiece | None:
        """All that there is, if it is one piece."""
        return self.long[0] if len(self.long) == 1 and not self.short else None


class SdpaAttention(AttentionBackend):
    name = "sdpa"
    supports = Supports(
        ("cpu", "cuda", "meta"), (torch.float32, torch.bfloat16, torch.float16), sinks=True
    )

    def __init__(self) -> None:
        # Not for lengths as they come; see PIECE_STEP.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> SdpaPlan:
        return self.plan_rows(layout, group, window, range(len(layout.query_lens)))

    def plan_rows(
        self, layout: AttentionLayout, group: int, window: int | None, rows: Sequence[int]
    ) -> SdpaPlan:
        """For these requests alone."""
        table_BM = layout.block_tables_BM[group]
        is_cpu = table_BM.device.type == "cpu"
        most = min(MAX_GATHERED, MAX_GATHERED_CPU) if is_cpu else MAX_GATHERED
        short: dict[int, list[int]] = {}
        long: list[LongPiece] = []
        for row in rows:
            num_new = layout.query_lens[row]
            if num_new <= FEW_TOKENS:
                short.setdefault(num_new, []).append(row)
            else:
                long.append(_long_piece(layout, table_BM, row, window))
        tiles = (
            _short_tile(layout, table_BM, rows, num_new, window)
            for num_new, kind in short.items()
            for rows in _by_length(layout, kind, num_new, window, most)
        )
        return SdpaPlan(window, tuple(tiles), tuple(long), _band(long, window, table_BM.device))

    def attend(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: SdpaPlan, spec: AttentionSpec
    ) -> torch.Tensor:
        if len(plan.short) == 1 and plan.short[0].rows_T is None:
            return _attend_short(q_THD, layer_kv, plan.short[0], softmax_scale(spec))
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        self.attend_rows(q_THD, layer_kv, plan, spec, out_THD)
        return out_THD

    def attend_with_sinks(
        self,
        q_THD: torch.Tensor,
        sinks_H: torch.Tensor,
        layer_kv: LayerKV,
        plan: SdpaPlan,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """A sink is one more key: queries have a further column, the score that is wanted of it,
        where that key has a one and all others zeros."""
        scale = softmax_scale(spec)
        sinks_HD = functional.pad((sinks_H / scale)[:, None], (0, SINK_COLUMNS - 1))
        sinks_THD = sinks_HD.to(q_THD.dtype).expand(len(q_THD), -1, -1)
        q_THD = torch.cat((q_THD, sinks_THD), -1)
        out_THD = q_THD.new_empty(*q_THD.shape[:2], spec.head_dim)
        for tile in plan.short:
            rows = slice(None) if tile.rows_T is None else tile.rows_T
            kv = layer_kv.gather(tile.slots)
            split = kv.view(tile.num_requests, tile.length, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
            seen = tile.hidden and Bias(functional.pad(tile.hidden.hidden, (1, 0)))
            own = replace(tile, length=tile.length + 1, hidden=seen)
            out_THD[rows] = attend_tile(q_THD[rows], *_behind_sink(*split), own, scale)
        for piece in plan.long:
            kv_n2KD = layer_kv.gather(piece.slots)[: piece.num_keys]
            _attend_behind_sink(q_THD, kv_n2KD.permute(1, 2, 0, 3), piece, plan, scale, out_THD)
        return out_THD

    def attend_last(
        self, q_1HD: torch.Tensor, layer_kv: LayerKV, plan: SdpaPlan, spec: AttentionSpec
    ) -> torch.Tensor | None:
        if (piece := plan.lone) is None:
            return None
        length = piece.num_keys if plan.window is None else min(piece.num_keys, plan.window)
        slots = piece.slots[piece.num_keys - length : piece.num_keys]
        alone = ShortTile(None, 1, 1, length, slots, None)
        return _attend_short(q_1HD, layer_kv, alone, softmax_scale(spec))

    def attend_single(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: SdpaPlan, spec: AttentionSpec
    ) -> torch.Tensor | None:
        """Of a step that is one prompt, by cuDNN, whose result `attend_rows` copies. None: it is
        not, or not for cuDNN."""
        piece, case = plan.lone, AttentionCase(spec, q_THD.dtype, q_THD.device)
        if piece is None or not piece.padded or not suits_cudnn(case):
            return None
        return _attend_cudnn(q_THD, layer_kv.gather(piece.slots), piece, softmax_scale(spec))

    def attend_rows(
        self,
        q_THD: torch.Tensor,
        layer_kv: LayerKV,
        plan: SdpaPlan,
        spec: AttentionSpec,
        out_THD: torch.Tensor,
    ) -> None:
        """Writes the rows of the plan's requests, and no others."""
        scale = softmax_scale(spec)
        for tile in plan.short:
            rows = slice(None) if tile.rows_T is None else tile.rows_T
            out_THD[rows] = _attend_short(q_THD[rows], layer_kv, tile, scale)
        for piece in plan.long:
            _attend_long(q_THD, layer_kv, piece, plan, spec, out_THD)


def suits_cudnn(case: AttentionCase) -> bool:
    """cuDNN's kernel takes such heads on this device."""
    size, is_cuda = case.spec.head_dim, case.device.type == "cuda"
    is_served = is_cuda and case.dtype != torch.float32 and size <= 128 and size % 8 == 0
    return is_served and torch.cuda.get_device_capability(case.device) >= CUDNN_CAPABILITY


def attend_whole(
    q_THD: torch.Tensor, layer_kv: LayerKV, slots_T: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Of one prompt with nothing before it, whose keys are at `slots_T`, by cuDNN: [T, H, D]. What
    is behind the last token that counts must be finite, and may be anything else."""
    return _by_cudnn(q_THD, layer_kv.gather(slots_T), softmax_scale(spec))


def _visible(seq_len: int, num_new: int, window: int | None) -> int:
    """How many of a request's tokens any of its new tokens may look at."""
    return seq_len if window is None else min(seq_len, window + num_new - 1)


def _by_length(
    layout: AttentionLayout, rows: list[int], num_new: int, window: int | None, most: int
) -> Iterator[list[int]]:
    """Requests that share a call: all of them, unless padding to the longest costs too much."""
    lengths = {row: _visible(layout.seq_lens[row], num_new, window) for row in rows}
    longest = max(lengths.values())
    padding = longest * len(rows) - sum(lengths.values())
    if padding <= MAX_PADDING and longest * len(rows) <= most:
        yield rows
        return
    batch: list[int] = []
    padding = 0
    for row in sorted(rows, key=lengths.__getitem__, reverse=True):
        longest = lengths[batch[0]] if batch else lengths[row]
        padding += longest - lengths[row]
        if batch and (padding > MAX_PADDING or longest * (len(batch) + 1) > most):
            yield batch
            batch, padding = [], 0
        batch.append(row)
    yield batch


def _short_tile(
    layout: AttentionLayout,
    table_BM: torch.Tensor,
    rows: list[int],
    num_new: int,
    window: int | None,
) -> ShortTile:
    device = table_BM.device
    ends = [layout.seq_lens[row] for row in rows]
    lengths = [_visible(end, num_new, window) for end in ends]
    length = max(lengths)
    whole = rows == list(range(len(layout.seq_lens)))
    if device.type == "cuda" and min(lengths) < length:
        length += -length % BIAS_ALIGNMENT
    if len(rows) == 1:
        slots = slots_of_range(table_BM[rows[0]], ends[0] - length, ends[0], layout.block_size)
    else:
        starts = [end - n for end, n in zip(ends, lengths, strict=True)]
        tables = table_BM if whole else table_BM[rows]
        slots = slots_of_ranges(tables, starts, lengths, length, layout.block_size).view(-1)
    return ShortTile(
        rows_T=None if whole else _token_rows(layout, rows, num_new, device),
        num_requests=len(rows),
        num_new=num_new,
        length=length,
        slots=slots,
        hidden=_short_bias(lengths, length, num_new, window, device),
    )


def _token_rows(
    layout: AttentionLayout, rows: list[int], num_new: int, device: torch.device
) -> torch.Tensor:
    starts = [layout.query_start[row] for row in rows]
    return torch.tensor([s + i for s in starts for i in range(num_new)], device=device)


def _short_bias(
    lengths: list[int], length: int, num_new: int, window: int | None, device: torch.device
) -> Bias | None:
    """Query j of a request with n of `length` places sees those up to place n - num_new + j, and
    `window` of them. None when nothing is hidden."""
    if num_new == 1 and min(lengths) == length:
        return None
    place_L = torch.arange(length, device=device)
    lengths_B11 = torch.tensor(lengths, device=device)[:, None, None]
    own_BQ1 = lengths_B11 + torch.arange(-num_new, 0, device=device)[:, None]
    hidden_BQL = place_L > own_BQ1
    if window is not None and num_new > 1:
        hidden_BQL |= place_L <= own_BQ1 - window
    return Bias(hidden_BQL[:, None])


def _attend_short(
    q_THD: torch.Tensor, layer_kv: LayerKV, tile: ShortTile, scale: float
) -> torch.Tensor:
    kv = layer_kv.gather(tile.slots)
    split = kv.view(tile.num_requests, tile.length, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
    k_BKLD, v_BKLD = split.unbind(0)
    return attend_tile(q_THD, k_BKLD, v_BKLD, tile, scale)


def attend_tile(
    q_THD: torch.Tensor, k_BKLD: torch.Tensor, v_BKLV: torch.Tensor, tile: ShortTile, scale: float
) -> torch.Tensor:
    """[T, H, V] of its tokens, over the keys and values of its requests."""
    num_kv_heads, head_dim = k_BKLD.shape[1], k_BKLD.shape[3]
    batch, num_new, share = tile.num_requests, tile.num_new, q_THD.shape[1] // num_kv_heads
    bias = None if tile.hidden is None else tile.hidden.of(q_THD.dtype)
    if num_new == 1:
        q_BKRD = q_THD.view(batch, num_kv_heads, share, head_dim)
        out = functional.scaled_dot_product_attention(
            q_BKRD, k_BKLD, v_BKLV, attn_mask=bias, scale=scale
        )
        return out.reshape(*q_THD.shape[:2], -1)
    q_BQKGD = q_THD.view(batch, num_new, num_kv_heads, share, head_dim)
    out = functional.scaled_dot_product_attention(
        q_BQKGD.permute(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, share * num_new, head_dim),
        k_BKLD,
        v_BKLV,
        attn_mask=None if bias is None else bias.repeat(1, 1, share, 1),
        scale=scale,
    )
    out_BKGQV = out.reshape(batch, num_kv_heads, share, num_new, -1)
    return out_BKGQV.permute(0, 3, 1, 2, 4).reshape(*q_THD.shape[:2], -1)


def _long_piece(
    layout: AttentionLayout, table_BM: torch.Tensor, row: int, window: int | None
) -> LongPiece:
    num_new, seq_len = layout.query_lens[row], layout.seq_lens[row]
    num_keys = _visible(seq_len, num_new, window)
    slots = slots_of_range(table_BM[row], seq_len - num_keys, seq_len, layout.block_size)
    plain, padded = seq_len == num_new and (window is None or window >= num_new), 0
    if plain and table_BM.device.type == "cuda" and num_new >= LONG_PIECE:
        padded = -(-num_new // PIECE_STEP) * PIECE_STEP
        slots = torch.cat((slots, slots[-1:].expand(padded - num_new)))
    return LongPiece(
        start=layout.query_start[row],
        stop=layout.query_start[row + 1],
        slots=slots,
        num_keys=num_keys,
        plain=plain,
        padded=padded,
    )


def _band(pieces: Sequence[LongPiece], window: int | None, device: torch.device) -> Bias | None:
    """[QUERY_TILE, keys]: what the last query rows may not see of the last keys. Every tile of
    every piece is its lower right corner, because all tiles end with their last query's key.
    None where no piece needs it, or where torch has a kernel for causal pieces behind others."""
    masked = [piece.num_keys for piece in pieces if not piece.plain]
    if not masked or (window is None and device.type == "cuda"):
        return None
    keys = max(masked) if window is None else min(max(masked), window + QUERY_TILE - 1)
    query_R1 = torch.arange(-QUERY_TILE, 0, device=device)[:, None]
    key_n = torch.arange(-keys, 0, device=device)
    hidden = key_n > query_R1
    return Bias(hidden if window is None else hidden | (key_n <= query_R1 - window))


def _attend_long(
    q_THD: torch.Tensor,
    layer_kv: LayerKV,
    piece: LongPiece,
    plan: SdpaPlan,
    spec: AttentionSpec,
    out_THD: torch.Tensor,
) -> None:
    kv_n2KD, scale = layer_kv.gather(piece.slots), softmax_scale(spec)
    if piece.padded and suits_cudnn(AttentionCase(spec, q_THD.dtype, q_THD.device)):
        out_THD[piece.start : piece.stop] = _attend_cudnn(q_THD, kv_n2KD, piece, scale)
        return
    k_nKD, v_nKD = kv_n2KD[: piece.num_keys].unbind(1)
    attend_piece(q_THD, k_nKD, v_nKD, piece, plan, scale, out_THD)


def attend_piece(
    q_THD: torch.Tensor,
    k_nKD: torch.Tensor,
    v_nKV: torch.Tensor,
    piece: LongPiece,
    plan: SdpaPlan,
    scale: float,
    out_THV: torch.Tensor,
) -> None:
    """Writes its tokens' rows, over these keys and values."""
    num_kv_heads = k_nKD.shape[1]
    num_new, share = piece.stop - piece.start, q_THD.shape[1] // num_kv_heads
    # G stands where torch wants the batch: its memory-efficient GPU kernel takes heads of stride 0
    # for a special case and then reads a bias wrongly (seen when one query is left over 64).
    k_GKnD, v_GKnV = (x.transpose(0, 1).expand(share, -1, -1, -1) for x in (k_nKD, v_nKV))
    q_GKQD, out_GKQV = (
        x[piece.start : piece.stop].view(num_new, num_kv_heads, share, -1).permute(2, 1, 0, 3)
        for x in (q_THD, out_THV)
    )
    if plan.band is None or piece.plain:
        causal = None if piece.plain else _behind_others(num_new, piece.num_keys)
        out_GKQV.copy_(
            functional.scaled_dot_product_attention(
                q_GKQD, k_GKnD, v_GKnV, attn_mask=causal, is_causal=piece.plain, scale=scale
            )
        )
        return
    band = plan.band.of(q_THD.dtype)
    for start, stop, key_start, key_stop in _tiles(num_new, piece.num_keys, plan.window):
        bias = band[start - stop :, key_start - key_stop :]
        if bias.is_cuda:  # the kernel reads vectors, so rows must start where vectors do
            bias = bias.clone(memory_format=torch.contiguous_format)
        out_GKQV[:, :, start:stop] = functional.scaled_dot_product_attention(
            q_GKQD[:, :, start:stop],
            k_GKnD[:, :, key_start:key_stop],
            v_GKnV[:, :, key_start:key_stop],
            attn_mask=bias,
            scale=scale,
        )


def _behind_sink(k_KnD: torch.Tensor, v_KnD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with those of a sink in front, the keys with its columns."""
    k_KnD = functional.pad(k_KnD, (0, SINK_COLUMNS, 1, 0))
    k_KnD[..., 0, -SINK_COLUMNS] = 1.0
    return k_KnD, functional.pad(v_KnD, (0, 0, 1, 0))


def _attend_behind_sink(
    q_THD: torch.Tensor,
    kv_2KnD: torch.Tensor,
    piece: LongPiece,
    plan: SdpaPlan,
    scale: float,
    out_THD: torch.Tensor,
) -> None:
    """Writes the rows of a piece; `q_THD` has the columns of sinks."""
    num_new, own_THD = piece.stop - piece.start, q_THD[piece.start : piece.stop]
    query_T = torch.arange(piece.num_keys - num_new, piece.num_keys, device=q_THD.device)
    key_n = torch.arange(piece.num_keys, device=q_THD.device)
    for start, stop, key_start, key_stop in _tiles(num_new, piece.num_keys, plan.window):
        hidden = key_n[key_start:key_stop] > query_T[start:stop, None]
        if plan.window is not None:
            hidden |= key_n[key_start:key_stop] <= query_T[start:stop, None] - plan.window
        tile = ShortTile(
            rows_T=None,
            num_requests=1,
            num_new=stop - start,
            length=key_stop - key_start + 1,
            slots=piece.slots,
            hidden=Bias(functional.pad(hidden, (1, 0))[None, None]),
        )
        keys = kv_2KnD[:, None, :, key_start:key_stop]
        out_THD[piece.start + start : piece.start + stop] = attend_tile(
            own_THD[start:stop], *_behind_sink(*keys), tile, scale
        )


def _attend_cudnn(
    q_THD: torch.Tensor, kv_n2KD: torch.Tensor, piece: LongPiece, scale: float
) -> torch.Tensor:
    """[Q, H, D]"""
    num_new = piece.stop - piece.start
    q_QHD = q_THD[piece.start : piece.stop]
    if piece.padded > num_new:
        q_QHD = torch.cat((q_QHD, q_QHD[-1:].expand(piece.padded - num_new, -1, -1)))
    return _by_cudnn(q_QHD, kv_n2KD, scale)[:num_new]


def _by_cudnn(q_QHD: torch.Tensor, kv_n2KD: torch.Tensor, scale: float) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    k_1KnD, v_1KnD = kv_n2KD.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        out_1HQD = functional.scaled_dot_product_attention(
            q_QHD.transpose(0, 1)[None],
            k_1KnD,
            v_1KnD,
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
    return out_1HQD[0].transpose(0, 1)


def _behind_others(num_new: int, num_keys: int) -> torch.Tensor:
    """The causal mask of queries that are the last of the keys. Imported where it is used: the
    module pulls in torch's compiler, a second of start-up that a CPU never needs."""
    from torch.nn.attention.bias import causal_lower_right

    mask: torch.Tensor = causal_lower_right(num_new, num_keys)
    return mask


def _tiles(num_new: int, num_keys: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Query rows [start, stop) and the keys that any of them may see."""
    cached = num_keys - num_new
    for start in range(0, num_new, QUERY_TILE):
        stop = min(start + QUERY_TILE, num_new)
        key_start = 0 if window is None else max(0, cached + start - window + 1)
        yield start, stop, key_start, cached + stop
