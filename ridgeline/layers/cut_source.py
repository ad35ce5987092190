"""How do the parameters of a model come out of tensors that hold several of them, or hold them in
another order?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ridgeline.architectures.spec import ModelSpec
from ridgeline.architectures.tensor_layouts import MXFP4_BLOCK, Cut, cuts
from ridgeline.errors import check
from ridgeline.layers.piece import Piece, TensorSource, fill


def of_parameters(source: TensorSource, spec: ModelSpec) -> TensorSource:
    """The same checkpoint by the names of the model's parameters. One that has a parameter as a
    tensor of its own, as GGUF files do, is asked for that."""
    names = set(source.names())
    found: dict[str, Cut] = {}
    for name, cut in cuts(spec).items():
        if cut.name in names or (cut.mxfp4 and cut.blocks in names):
            found[name] = cut
        elif cut.order:
            found[name] = Cut(name, 0, cut.length, cut.length, cut.order)
    return CutSource(source, found) if found else source


class CutSource(TensorSource):
    """Of a parameter with a `Cut` the rows asked for are those of whole heads."""

    def __init__(self, source: TensorSource, found: Mapping[str, Cut]) -> None:
        self._source, self._cuts = source, found
        self._expert: tuple[str, int, torch.Tensor] | None = None  # what was asked for last
        self._in_turn = any(one.expert is not None for one in found.values())

    def names(self) -> list[str]:
        cut = {key for one in self._cuts.values() for key in (one.name, one.blocks, one.scales)}
        return [*(name for name in self._source.names() if name not in cut), *self._cuts]

    def shape(self, name: str) -> tuple[int, ...]:
        cut = self._cuts.get(name)
        if cut is None:
            return self._source.shape(name)
        if not cut.mxfp4:
            return cut.part(tuple(self._source.shape(cut.name)))
        *rows, groups = self._source.shape(cut.scales)
        return cut.part((*rows, groups * MXFP4_BLOCK))

    def tensor(self, name: str) -> torch.Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return self._source.tensor(name)
        if cut.expert is None:
            return cut_out(self._source.tensor(cut.name), cut)
        if self._expert is None or self._expert[:2] != (cut.name, cut.expert):
            self._expert = cut.name, cut.expert, self._of_expert(cut, cut.expert)
        return cut_out(self._expert[2], cut)

    def _of_expert(self, cut: Cut, expert: int) -> torch.Tensor:
        names = (cut.blocks, cut.scales) if cut.mxfp4 else (cut.name,)
        found = [self._source.slice(name, 0, expert, 1)[0] for name in names]
        return unpack_mxfp4(*found) if cut.mxfp4 else found[0]

    def slice(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        if name not in self._cuts:
            return self._source.slice(name, dim, start, length)
        return self.tensor(name).narrow(dim, start, length)

    @contextmanager
    def bring(self, pieces: Iterable[Piece]) -> Iterator[Iterator[int]]:
        if self._in_turn:
            yield (fill(piece, self) for piece in pieces)
            return
        waiting: deque[tuple[int, Piece]] = deque()

        def stretches() -> Iterator[Piece]:
            for piece in pieces:
                cut = self._cuts.get(piece.name)
                own = [piece] if cut is None else list(_stretches(piece, cut))
                waiting.append((len(own), piece))
                yield from own

        with self._source.bring(stretches()) as sizes:
            yield self._wholes(sizes, waiting)

    def _wholes(self, sizes: Iterator[int], waiting: deque[tuple[int, Piece]]) -> Iterator[int]:
        for size in sizes:
            count, piece = waiting.popleft()
            total = size + sum(next(sizes) for _ in range(count - 1))
            cut = self._cuts.get(piece.name)
            if cut is not None and cut.order:
                piece.target.copy_(_ordered(piece.target, cut, cut.order))
            del piece  # who asked for it may give up its place
            yield total


def cut_out(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The parameter in a tensor of the checkpoint."""
    whole = whole.T if cut.transposed else whole
    rest = whole.shape[1:]
    kept = whole.reshape(-1, cut.stride, *rest)[:, cut.start : cut.start + cut.length]
    rows = kept.reshape(-1, *rest)
    return _ordered(rows, cut, cut.order) if cut.order else rows.contiguous()


def unpack_mxfp4(blocks_NGB: torch.Tensor, scales_NG: torch.Tensor) -> torch.Tensor:
    """[N, K] in bfloat16, which holds all of them: 4-bit numbers (e2m1), the lower half of a byte
    first, times two to the scale, whose bias is 127 (OCP Microscaling Formats 1.0)."""
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.bfloat16)
    signed, byte = torch.cat((table, -table)), torch.arange(256)
    pairs = torch.stack((signed[byte & 15], signed[byte >> 4]), -1).view(torch.int32).flatten()
    found = pairs.to(blocks_NGB.device).index_select(0, blocks_NGB.flatten().int())
    factor = torch.ldexp(torch.ones(scales_NG.shape, device=found.device), scales_NG.int() - 127)
    numbers = found.view(torch.bfloat16).view(*scales_NG.shape, -1)
    return numbers.mul_(factor.to(torch.bfloat16)[..., None]).flatten(-2)


def join(own: Sequence[tuple[torch.Tensor, Cut]]) -> torch.Tensor:
    """The tensor of the checkpoint that these parameters are cut from, all of it."""
    parts = []
    for rows, cut in own:
        places = sorted(range(len(cut.order)), key=cut.order.__getitem__)
        stored = _ordered(rows, cut, places) if places else rows
        parts.append(stored.reshape(-1, cut.length, *rows.shape[1:]))
    whole = torch.cat(parts, 1).reshape(-1, *parts[0].shape[2:])
    return whole.T.contiguous() if own[0][1].transposed else whole


def _ordered(rows: torch.Tensor, cut: Cut, order: Sequence[int]) -> torch.Tensor:
    """The numbers of each head in another order."""
    places = torch.tensor(order, device=rows.device)
    if cut.in_columns:
        return rows.index_select(1, places)
    by_head = rows.reshape(-1, len(order), *rows.shape[1:])
    return by_head.index_select(1, places).view_as(rows)


def _stretches(piece: Piece, cut: Cut) -> Iterator[Piece]:
    """What is read of the tensor for a piece of the parameter: rows that lie together in both."""
    target, dim = piece.target, piece.dim or 0
    if dim == 1:
        check(cut.is_all, "columns of a whole tensor", name=piece.name)
        yield _of_tensor(replace(piece, name=cut.name), cut)
        return
    if cut.order and not cut.in_columns:
        heads = len(target) % len(cut.order) == piece.start % len(cut.order) == 0
        check(heads, "rows of whole heads", name=piece.name)
    at, end = piece.start, piece.start + len(target)
    while at < end:
        block, within = (0, at) if cut.is_all else divmod(at, cut.length)
        stop = end if cut.is_all else min(end, at + cut.length - within)
        rows = target[at - piece.start : stop - piece.start]
        start = block * cut.stride + cut.start + within
        yield _of_tensor(Piece(cut.name, rows, 0, start), cut)
        at = stop


def _of_tensor(piece: Piece, cut: Cut) -> Piece:
    if not cut.transposed:
        return piece
    return Piece(piece.name, piece.target.T, 1 - (piece.dim or 0), piece.start)
