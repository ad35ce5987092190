"""How do weights come onto a GPU as fast as the file can be read?

A few threads read stretches of the files into a small ring of pinned buffers; a stream of its own
copies each to its final place, casts it there and looks for NaN there. The ring is all the memory
it takes, plus one buffer on the device for what must be cast or cut.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.errors import check
from ridgeline.layers.piece import Piece
from ridgeline.loader.checkpoint import (
    DTYPES,
    Checkpoint,
    CheckpointSource,
    is_damaged,
    refuse_damaged,
)
from ridgeline.loader.folder import refuse
from ridgeline.loader.header import ITEM_BYTES, TensorEntry
from ridgeline.log import say

CHUNK_BYTES = 16 << 20
MAX_READERS = 8  # one copies some 5 to 10 GB/s out of the page cache, a PCIe 5 link takes 50
SPARE_BUFFERS = 4  # full or on their way to the device while every reader fills one

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes [offset, offset + num_bytes) of a file, numbers of `dtype` for `target`. With `width`
    they are whole rows of so many numbers, of which those from `column` on are wanted."""

    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    target: torch.Tensor
    width: int | None = None
    column: int = 0


def chunks_of(piece: Piece, path: Path, entry: TensorEntry, limit: int) -> Iterator[Chunk]:
    """What to read for one piece, at most `limit` bytes at a time, in the order of the file."""
    shape, target = entry.shape, piece.target
    wanted = list(shape)
    if piece.dim is not None:
        wanted[piece.dim] = target.shape[piece.dim]
        check(piece.start + wanted[piece.dim] <= shape[piece.dim], "inside", name=piece.name)
    check(tuple(target.shape) == tuple(wanted), "a piece fits", name=piece.name, got=shape)
    if (piece.dim and wanted[piece.dim] != shape[piece.dim]) or not target.is_contiguous():
        check(len(shape) == 2, "columns of a matrix", name=piece.name, got=shape)
        yield from _columns(piece, path, entry, limit)
        return
    size, offset = ITEM_BYTES[entry.dtype], entry.start
    if piece.dim == 0:
        offset += piece.start * math.prod(shape[1:]) * size
    yield from _stretch(target, path, offset, entry.dtype, limit)


def _stretch(
    target: torch.Tensor, path: Path, offset: int, dtype: str, limit: int
) -> Iterator[Chunk]:
    """All of `target`, which lies in the file as it does in memory."""
    flat, size = target.view(-1), ITEM_BYTES[dtype]
    step = max(1, limit // size)
    for begin in range(0, len(flat), step):
        part = flat[begin : begin + step]
        yield Chunk(path, offset + begin * size, len(part) * size, DTYPES[dtype], part)


def _columns(piece: Piece, path: Path, entry: TensorEntry, limit: int) -> Iterator[Chunk]:
    """Whole rows, to be cut on the device; of rows beyond the limit just what is wanted."""
    rows, width = entry.shape
    size, target = ITEM_BYTES[entry.dtype], piece.target
    row_bytes = width * size
    if row_bytes > limit:
        for row in range(rows):
            offset = entry.start + row * row_bytes + piece.start * size
            yield from _stretch(target[row], path, offset, entry.dtype, limit)
        return
    step = limit // row_bytes
    for row in range(0, rows, step):
        part = target[row : row + step]
        offset, num_bytes = entry.start + row * row_bytes, len(part) * row_bytes
        dtype = DTYPES[entry.dtype]
        yield Chunk(path, offset, num_bytes, dtype, part, width, piece.start)


class Lane:
    """The way from host buffers to final places; on a GPU a stream of its own."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._stage: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # What was written to the places before, zeros say, comes first.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def buffer(self) -> torch.Tensor:
        """Host memory for one chunk; pinned, where the system grants it."""
        if self._stream is not None:
            try:
                return torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                say(logger, logging.WARNING, "weights pass unpinned memory, slower", reason=reason)
        return torch.empty(self._chunk_bytes, dtype=torch.uint8)

    def place(self, chunk: Chunk, buffer: torch.Tensor) -> torch.Tensor | None:
        """Send a chunk to where it belongs, without waiting; says there whether it is damaged."""
        with self._on_stream():
            return is_damaged(self._sent(chunk, buffer[: chunk.num_bytes]))

    def _sent(self, chunk: Chunk, raw: torch.Tensor) -> torch.Tensor:
        """The numbers on the device in their stored dtype; the target has them too."""
        target = chunk.target
        if chunk.dtype == target.dtype and chunk.width is None:
            target.copy_(raw.view(chunk.dtype).view(target.shape), non_blocking=True)
            return target
        if self._stage is None:
            self._stage = torch.empty(self._chunk_bytes, dtype=torch.uint8, device=self._device)
        stage = self._stage[: len(raw)]
        stage.copy_(raw, non_blocking=True)
        values = stage.view(chunk.dtype)
        if chunk.width is not None:
            values = values.view(-1, chunk.width).narrow(1, chunk.column, target.shape[1])
        target.copy_(values.view(target.shape))
        return values

    def mark(self) -> Callable[[], None]:
        """A call that waits until all that was sent so far has left its buffers. Any thread."""
        if self._stream is None:
            return _nothing
        event = self._stream.record_event()
        wait: Callable[[], None] = event.synchronize
        return wait

    def hand_over(self) -> None:
        """What the caller tells the device from here on comes after all that was sent so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self) -> None:
        """Wait for all that was sent."""
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _nothing() -> None:
    pass


class ParallelSource(CheckpointSource):
    """A checkpoint whose pieces come many at once.

    At most `max_buffers` (readers and SPARE_BUFFERS) of `chunk_bytes` are pinned; afterwards they
    are torch's, for other transfers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        *,
        num_readers: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__(checkpoint)
        self._device = device
        self._chunk_bytes = chunk_bytes
        self.num_readers = num_readers or max(1, min(MAX_READERS, os.cpu_count() or 1))
        self.max_buffers = self.num_readers + SPARE_BUFFERS

    @contextmanager
    def bring(self, pieces: Iterable[Piece]) -> Iterator[Iterator[int]]:
        """Raises ConfigError when a file cannot be read, or a tensor holds NaN or infinity."""
        lane = Lane(self._device, self._chunk_bytes)
        say(
            logger, logging.INFO, "reading weights", readers=self.num_readers,
            pinned_bytes=self.max_buffers * self._chunk_bytes,
        )  # fmt: skip
        damage: list[tuple[str, torch.Tensor]] = []
        with ExitStack() as stack:
            stack.callback(lane.finish)  # last: buffers and places are in use until then
            pool = ThreadPoolExecutor(self.num_readers, thread_name_prefix="weights")
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            ring = _Ring(lane, pool, self.max_buffers, damage)
            try:
                yield ring.arrivals(self._jobs(pieces))
            except Exception:
                lane.finish()
                self._refuse_damaged(damage)  # whatever else failed, failed because of this
                raise
        self._refuse_damaged(damage)

    def _jobs(self, pieces: Iterable[Piece]) -> Iterator[_Job]:
        for piece in pieces:
            entry, path = self._checkpoint.entry(piece.name), self._checkpoint.file(piece.name)
            size = piece.target.numel() * ITEM_BYTES[entry.dtype]
            last: Chunk | None = None
            for chunk in chunks_of(piece, path, entry, self._chunk_bytes):
                if last is not None:
                    yield _Job(piece.name, last, None)
                last = chunk
            yield _Job(piece.name, last, size)

    def _refuse_damaged(self, damage: list[tuple[str, torch.Tensor]]) -> None:
        if not damage:
            return
        for (name, _), bad in zip(
            damage, torch.stack([b for _, b in damage]).tolist(), strict=True
        ):
            if bad:
                refuse_damaged(name, self._checkpoint.file(name))


@dataclass(frozen=True, slots=True)
class _Job:
    """`size` in bytes is that of the piece that ends with this chunk, None within one."""

    name: str
    chunk: Chunk | None
    size: int | None


@dataclass(slots=True)
class _Slot:
    """A buffer, made by who first needs it, and the wait until it may be written to."""

    buffer: torch.Tensor | None = None
    wait: Callable[[], None] = _nothing


class _Ring:
    """Chunks are read by any thread and sent off by the caller's alone, in order."""

    def __init__(
        self,
        lane: Lane,
        pool: ThreadPoolExecutor,
        num_slots: int,
        damage: list[tuple[str, torch.Tensor]],
    ) -> None:
        self._lane, self._pool, self._damage = lane, pool, damage
        self._free = deque(_Slot() for _ in range(num_slots))
        self._under_way: deque[tuple[_Job, _Slot, Future[torch.Tensor]]] = deque()

    def arrivals(self, jobs: Iterator[_Job]) -> Iterator[int]:
        self._start(jobs)
        while self._under_way:
            job, slot, reading = self._under_way.popleft()
            buffer = reading.result()
            if job.chunk is not None:
                self._note(job.name, self._lane.place(job.chunk, buffer))
                slot.wait = self._lane.mark()
            self._free.append(slot)
            size = job.size
            del job, reading  # they hold the place, which may be given up after its last chunk
            self._start(jobs)
            if size is not None:
                self._lane.hand_over()
                yield size

    def _start(self, jobs: Iterator[_Job]) -> None:
        """As many chunks as there are free buffers are being read."""
        while self._free and (job := next(jobs, None)) is not None:
            slot = self._free.popleft()
            reading = self._pool.submit(_read, self._lane, slot, job.chunk)
            self._under_way.append((job, slot, reading))

    def _note(self, name: str, bad: torch.Tensor | None) -> None:
        if bad is not None:
            self._damage.append((name, bad))


def _read(lane: Lane, slot: _Slot, chunk: Chunk | None) -> torch.Tensor:
    """In a thread: the slot's buffer, filled."""
    slot.wait()
    if slot.buffer is None:
        slot.buffer = lane.buffer()
    if chunk is not None:
        read_into(slot.buffer[: chunk.num_bytes], chunk.path, chunk.offset)
    return slot.buffer


def read_into(buffer: torch.Tensor, path: Path, offset: int) -> None:
    """Fill the bytes of `buffer` from `offset` of the file on. ConfigError when it cannot be read
    or ends before."""
    left = memoryview(buffer.numpy())  # type: ignore[arg-type]
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while left:
                count = file.readinto(left)
                if not count:
                    refuse(path, f"ends at byte {file.tell()}, inside a tensor; get it again")
                left = left[count:]
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")
