"""How do the tensors of a GGUF file come into memory: in the right order and unpacked, or as the
blocks that they are, bit by bit?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from ridgeline.architectures.quantization_scheme import WEIGHT
from ridgeline.architectures.scheme_methods import GGUF_BLOCKS
from ridgeline.errors import check
from ridgeline.formats import CHECKPOINT
from ridgeline.layers.piece import Piece
from ridgeline.loader.checkpoint import Checkpoint, is_damaged, refuse_damaged
from ridgeline.loader.gguf_layout import BY_NAME
from ridgeline.loader.gguf_model import GGUFModel, read_gguf_model
from ridgeline.loader.header import TensorEntry
from ridgeline.quantization.gguf_blocks import (
    AFFINE,
    fields,
    half,
    nibbles,
    pairs,
    single_bits,
    unpack,
)

PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

# Numbers unpacked at once, with a few copies of them in float32 on the way: on a CPU as many
# as its caches hold, on a GPU enough that its launches do not count.
CHUNK_VALUES = {"cpu": 1 << 18}
MANY_VALUES = 4 << 20


class GGUFCheckpoint(Checkpoint):
    """The tensors of one GGUF file, by the names and in the order of a safetensors checkpoint.

    `dtype` says how one is stored (Q4_K, F16, ...); what comes out of `tensor` and `slice` is the
    stored dtype where that is plain, and the exact values in float32 where it is packed. A name
    that ends in `GGUF_BLOCKS` in place of "weight" means the bytes of its blocks, row by row.
    """

    def __init__(self, model: GGUFModel, *, finite_only: bool = True) -> None:
        super().__init__(
            {name: (model.path, entry) for name, entry in model.entries.items()},
            finite_only=finite_only,
        )
        self._sources, self._keys = model.sources, model.keys

    def num_bytes(self, name: str) -> int:
        keys = self._keys.get(name)
        return super().num_bytes(name) + (0 if keys is None else keys.end - keys.start)

    def stored_types(self) -> dict[str, int]:
        """How many tensors are stored as what, the most frequent first."""
        return dict(Counter(self.dtype(name) for name in self.names()).most_common())

    def became(self, dtype: str, weight_format: str) -> str:
        """What is in the file and what it is served as, in words."""
        stored = ", ".join(f"{count} {kind}" for kind, count in self.stored_types().items())
        if weight_format == CHECKPOINT:
            return f"{stored}: some kept packed, all else became {dtype}"
        rounded = "" if weight_format == "plain" else f", matrices rounded to {weight_format}"
        return f"{stored} became {dtype}{rounded}"

    def shape(self, name: str) -> tuple[int, ...]:
        if not name.endswith(GGUF_BLOCKS):
            return super().shape(name)
        kind = BY_NAME[self.dtype(_whole(name))]
        rows, columns = super().shape(_whole(name))
        return rows, columns // kind.block * kind.num_bytes

    def tensor(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        return self.slice(name, 0, 0, shape[0])

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        shape = list(self.shape(name))
        inside = 0 <= dim < len(shape) and start >= 0 and length >= 0
        check(inside and start + length <= shape[dim], "slice outside its tensor", name=name)
        shape[dim] = length
        dtype = PLAIN.get(self.dtype(name), torch.float32)
        found = torch.empty(shape, dtype=dtype)
        self.fill(Piece(name, found, dim, start))
        return found

    def fill(self, piece: Piece) -> int:
        """Copy one piece to where it belongs, cast to the dtype there; its bytes in the file.
        Unpacked on the device of the target, a few million numbers at a time."""
        if piece.name.endswith(GGUF_BLOCKS):
            return self._fill_blocks(piece)
        shape, target = self.shape(piece.name), piece.target
        wanted = list(target.shape)
        if piece.dim is not None and len(wanted) == len(shape):
            check(piece.start + wanted[piece.dim] <= shape[piece.dim], "inside", name=piece.name)
            wanted[piece.dim] = shape[piece.dim]
        check(tuple(wanted) == shape, "a piece fits", name=piece.name, got=shape)
        bad: torch.Tensor | None = None
        for values, part in self._parts(piece):
            part.copy_(values.view(part.shape))
            if self._finite_only and (found := is_damaged(values)) is not None:
                bad = found if bad is None else bad | found
            self.release(piece.name)
        if bad is not None and bool(bad):
            refuse_damaged(self._sources[piece.name].name, self.file(piece.name))
        return self.num_bytes(piece.name) * target.numel() // math.prod(shape)

    def _fill_blocks(self, piece: Piece) -> int:
        """The bytes of blocks as they are; ConfigError if a scale of them is damaged."""
        name, target = _whole(piece.name), piece.target
        kind = BY_NAME[self.dtype(name)]
        first = piece.start if piece.dim != 1 else 0
        column = piece.start // kind.num_bytes * kind.block if piece.dim == 1 else 0
        width = target.shape[1] // kind.num_bytes * kind.block
        step = max(1, CHUNK_VALUES["cpu"] // width)
        for begin in range(0, len(target), step):
            part = target[begin : begin + step]
            raw, _ = self._raw(name, first + begin, len(part), column, width)
            part.copy_(raw)
            scales = half(raw.reshape(-1, kind.num_bytes), AFFINE[kind.name].half_at)
            if self._finite_only and bool(is_damaged(scales)):
                refuse_damaged(self._sources[name].name, self.file(name))
            self.release(name)
        return target.numel()

    def _parts(self, piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Numbers of some rows, and where they belong."""
        name, target = piece.name, piece.target
        if not target.numel():
            return
        if name in self._keys:
            yield from self._of_heads(piece)
            return
        first = piece.start if piece.dim == 0 else 0
        column = piece.start if piece.dim else 0
        kind, device, offset = self.dtype(name), target.device, self._sources[name].offset
        width = math.prod(target.shape[1:])
        step = max(1, CHUNK_VALUES.get(device.type, MANY_VALUES) // width)
        for begin in range(0, len(target), step):
            part = target[begin : begin + step]
            raw, skipped = self._raw(name, first + begin, len(part), column, width)
            values = decode(kind, raw.to(device))[:, skipped : skipped + width]
            yield values if not offset else values.float() - offset, part

    def _of_heads(self, piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """As `_parts`, head by head, of what makes keys and values and is in two tensors."""
        name, target = piece.name, piece.target
        (heads, cut), keys, values = self._sources[name].cuts, self._keys[name], self.entry(name)
        start = piece.start if piece.dim == 0 else 0
        columns = slice(piece.start, piece.start + target.shape[1]) if piece.dim else slice(None)
        each = values.shape[0] // heads
        for head in range(start // each, -(-(start + len(target)) // each)):
            down = self._of_head(name, keys, head, heads)
            up = self._of_head(name, values, head, heads).view(each - cut, -1)
            both = torch.cat((down.float().view(-1, cut).T, up.float()))[:, columns]
            low, high = max(start, head * each), min(start + len(target), (head + 1) * each)
            part = target[low - start : high - start]
            yield both[low - head * each : high - head * each].to(target.device), part

    def _of_head(self, name: str, entry: TensorEntry, head: int, heads: int) -> torch.Tensor:
        size = (entry.end - entry.start) // heads
        mapped, offset = self._map(self.file(name)), entry.start + head * size
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=offset)
        return decode(entry.dtype, raw.view(1, -1))

    def _raw(
        self, name: str, row: int, rows: int, column: int, width: int
    ) -> tuple[torch.Tensor, int]:
        """The bytes of whole blocks around these columns of these rows, and how many numbers
        stand before the first column in them."""
        shape, kind = self.shape(name), BY_NAME[self.dtype(name)]
        raw = self._bytes(name).view(shape[0], -1)
        if heads := self._sources[name].heads:
            order = stored_rows(row, rows, shape[0] // heads)
            raw = raw.index_select(0, order)
        else:
            raw = raw[row : row + rows]
        block, last = column // kind.block, -(-(column + width) // kind.block)
        raw = raw[:, block * kind.num_bytes : last * kind.num_bytes]
        return raw, column - block * kind.block

    def _bytes(self, name: str) -> torch.Tensor:
        entry, mapped = self.entry(name), self._map(self.file(name))
        size = entry.end - entry.start
        return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=entry.start)


def _whole(name: str) -> str:
    """The matrix whose blocks these are."""
    return name.removesuffix(GGUF_BLOCKS) + WEIGHT


def stored_rows(start: int, length: int, head_dim: int) -> torch.Tensor:
    """Where rows start .. start+length-1 of q or k are in a file with interleaved heads: there a
    head is 0, D/2, 1, D/2 + 1, ... so that the two numbers of a rotation are neighbours."""
    rows = torch.arange(start, start + length)
    within = rows % head_dim
    half = head_dim // 2
    return rows - within + 2 * (within % half) + within // half


def open_gguf(path: Path, *, finite_only: bool = True) -> GGUFCheckpoint:
    """The weights of a GGUF file, after a check of its header. ConfigError names the file."""
    return GGUFCheckpoint(read_gguf_model(path), finite_only=finite_only)


def decode(kind: str, raw_RB: torch.Tensor) -> torch.Tensor:
    """The numbers of rows of bytes, [R, C]: those of plain types in their dtype, others in
    float32. `kind` is in the words of the format, `raw_RB` uint8 with whole blocks in a row."""
    rows = len(raw_RB)
    if kind in PLAIN:
        return raw_RB.contiguous().view(PLAIN[kind])
    layout = BY_NAME[kind]
    check(raw_RB.shape[1] % layout.num_bytes == 0, "whole blocks", kind=kind, got=raw_RB.shape)
    blocks = raw_RB.reshape(-1, layout.num_bytes)
    return _DECODERS[kind](blocks).reshape(rows, -1)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return nibbles(blocks[:, 4:]).float().mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = nibbles(blocks[:, 8:]) | (single_bits(blocks[:, 4:8]) << 4)
    return q.float().mul_(half(blocks, 0)).add_(half(blocks, 2))


# The K types have 256 numbers in a block: 16 groups of 16, or 8 of 32, with scales of their own.


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    both = blocks[:, :16].unsqueeze(-1)
    scale = half(blocks, 80).unsqueeze(-1) * (both & 15).float()
    low = half(blocks, 82).unsqueeze(-1) * (both >> 4).float()
    return pairs(blocks[:, 16:80]).float().mul_(scale).sub_(low)


def _scales_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of 8 groups, [N, 8, 1] each: 6 bits in 12 bytes, and two float16."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    scale, low = half(blocks, 0) * scales.float(), half(blocks, 2) * minima.float()
    return scale.unsqueeze(-1), low.unsqueeze(-1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_k(blocks)
    q = fields(blocks[:, 16:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    return q.float().mul_(scale).sub_(low)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scale, low = _scales_k(blocks)
    lower = fields(blocks[:, 48:].reshape(-1, 4, 32), 4, 2).reshape(-1, 8, 32)
    upper = fields(blocks[:, 16:48], 1, 8).reshape(-1, 8, 32)
    return (lower | (upper << 4)).float().mul_(scale).sub_(low)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Numbers of e2m1 times a power of two, whose exponent has the bias 127."""
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    negative = (0.0, *(-number for number in positive[1:]))
    signed = torch.tensor((*positive, *negative), device=blocks.device)
    scale = torch.ldexp(blocks.new_ones(len(blocks), 1).float(), blocks[:, :1].int() - 127)
    return signed[nibbles(blocks[:, 1:]).int()].mul_(scale)


_DECODERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{kind: partial(unpack, kind) for kind in AFFINE},
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "MXFP4": _mxfp4,
}
check(BY_NAME.keys() == PLAIN.keys() | _DECODERS.keys(), "every type has a decoder")
