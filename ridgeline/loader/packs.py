"""Where do packed weights lie between two starts?

To round and to order the numbers of a checkpoint takes seconds, so what came of it is kept in a
file of its own, and the next start maps that file: nothing is read or computed again, and processes
that serve the same model share its memory. A file belongs to one checkpoint (where its files are,
how long they are and when they were written), one configuration and one build of the kernels; it is
written under another name first, checked from end to end when it is opened, and made again when
anything is wrong with it. What was used longest ago goes first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.errors import ConfigError, check
from ridgeline.kernels.cpu import native
from ridgeline.loader.checkpoint import DTYPES, Checkpoint
from ridgeline.loader.folder import refuse
from ridgeline.loader.header import ITEM_BYTES, TensorEntry, read_header
from ridgeline.log import say

FOLDER = "ridgeline/packed"
LAYOUT = 2  # of the file, and of what the layers keep
WORTH_BYTES = 64 << 20  # less is packed sooner than found
MOST_BYTES = 64 << 30  # of all files
FREE_BYTES = 2 << 30  # are left on the disk
STALE_S = 24 * 3600  # a file that is being written is finished or given up by then
ALIGNMENT = 64
PAGE = 4096

_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_UNFINISHED = re.compile(r"unfinished-\w+")
_FILLER, _SUMS, _DIGEST = "filler.", "sums", "digest"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

logger = logging.getLogger(__name__)


def pack_key(checkpoint: Checkpoint, served: Iterable[str]) -> str:
    """Names the pack of a checkpoint, as long as neither its files change nor the words of `served`
    (all else that decides what the layers keep) nor the kernels. ConfigError if a file is gone."""
    entries = [checkpoint.entry(name) for name in checkpoint.names()]
    files = sorted({checkpoint.file(name) for name in checkpoint.names()})
    told = json.dumps([LAYOUT, native.fingerprint(), *served, *map(_told, files), repr(entries)])
    return hashlib.sha256(told.encode()).hexdigest()


def _told(file: Path) -> list[object]:
    try:
        known = file.resolve().stat()
    except OSError as error:
        refuse(file, f"cannot be read ({error.strerror})")
    return [str(file.resolve()), known.st_size, known.st_mtime_ns, known.st_ino]


def open_packs(way: str, environ: Mapping[str, str] = os.environ) -> Packs | None:
    """The packs of this user, None if they are `off`; `clear` removes all there are first."""
    if way == "off":
        return None
    home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / FOLDER
    packs = Packs(home)
    if way == "clear":
        packs.clear()
    return packs


@dataclass(frozen=True, slots=True)
class Packs:
    """A folder of packs that together take at most `most_bytes`."""

    folder: Path
    most_bytes: int = MOST_BYTES
    worth_bytes: int = WORTH_BYTES

    def find(self, key: str) -> dict[str, torch.Tensor] | None:
        """The tensors of a pack, mapped from its file; None if there is none. A damaged file is
        removed and said."""
        path = self._path(key)
        if path.is_symlink() or not path.exists():
            return None
        try:
            found = _read(path, key)
        except ConfigError as error:
            say(logger, logging.WARNING, "packed weights are damaged, packing again", at=error)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # of a disk that is read only
            os.utime(path)
        return found

    def keep(self, key: str, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write a pack for the next start; its bytes, 0 if it is not kept. What prevents it is
        said and harms nothing."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size < self.worth_bytes:
            return 0
        if size > self.most_bytes:
            reason = f"{size} bytes, and all packs may take {self.most_bytes}"
            say(logger, logging.INFO, "packed weights are not kept", reason=reason)
            return 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(size, self._path(key))
            _write(self._path(key), key, tensors)
        except OSError as error:
            say(
                logger, logging.WARNING, "packed weights cannot be kept for the next start",
                reason=error, way_out="free space there, or --pack-cache off",
            )  # fmt: skip
            return 0
        say(logger, logging.INFO, "packed weights are kept", bytes=size, at=self._path(key))
        return size

    def clear(self) -> None:
        """Remove every pack."""
        for path in self._files(_NAME, _UNFINISHED):
            _remove(path)

    def _path(self, key: str) -> Path:
        name = f"{key}.safetensors"
        check(_NAME.fullmatch(name) is not None, "a key is a SHA-256", key=key)
        return self.folder / name

    def _make_room(self, size: int, ours: Path) -> None:
        """For `size` more bytes, by what was used longest ago; OSError if the disk is full."""
        os.utime(self.folder)
        before = self.folder.stat().st_mtime - STALE_S  # by the clock of that disk
        for path in self._files(_UNFINISHED):
            if path.stat().st_mtime < before:
                _remove(path)
        others = [path for path in self._files(_NAME) if path != ours]
        known = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in others)
        total = size + sum(taken for _, taken, _ in known)
        for _, taken, path in known:
            lacking = size + FREE_BYTES - shutil.disk_usage(self.folder).free
            if total <= self.most_bytes and lacking <= 0:
                break
            _remove(path)
            total -= taken
        free = shutil.disk_usage(self.folder).free
        if free < size + FREE_BYTES:
            raise OSError(f"{size} bytes, and the disk of {self.folder} has {free} left")

    def _files(self, *names: re.Pattern[str]) -> Iterator[Path]:
        """Those of ours, and nothing that a link leads to."""
        with suppress(OSError):
            for path in sorted(self.folder.iterdir()):
                is_ours = any(name.fullmatch(path.name) for name in names)
                if is_ours and path.is_file() and not path.is_symlink():
                    yield path


def _remove(path: Path) -> None:
    say(logger, logging.INFO, "removing packed weights", file=path.name)
    with suppress(OSError):  # another process was first, or may and we may not
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- the file


def _write(path: Path, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file whose data begin at lines of 64 bytes, with the sum of each tensor and a
    digest of all else at its end."""
    sums = b"".join(checksum(tensor).to_bytes(8, "little") for tensor in tensors.values())
    head = _head(tensors, len(sums))
    parts: list[memoryview | bytes] = [head]
    for tensor in tensors.values():
        parts += [_bytes(tensor), bytes(-tensor.nbytes % ALIGNMENT)]
    parts += [sums, _digest(key, head, sums)]
    handle, name = tempfile.mkstemp(prefix="unfinished-", dir=path.parent)
    unfinished = Path(name)
    try:
        with open(handle, "wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left:
                    left = left[file.write(left) :]
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _head(tensors: Mapping[str, torch.Tensor], sums_bytes: int) -> bytes:
    header: dict[str, object] = {}
    at = 0

    def add(name: str, dtype: str, shape: list[int], size: int) -> None:
        nonlocal at
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size

    for name, tensor in tensors.items():
        add(name, _NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes)
        if gap := -tensor.nbytes % ALIGNMENT:
            add(f"{_FILLER}{name}", "U8", [gap], gap)
    add(_SUMS, "U8", [sums_bytes], sums_bytes)
    add(_DIGEST, "U8", [32], 32)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def _digest(key: str, head: bytes, sums: bytes) -> bytes:
    return hashlib.sha256(key.encode() + head + sums).digest()


def _read(path: Path, key: str) -> dict[str, torch.Tensor]:
    """ConfigError if it is not, to the last byte, what was written for this key."""
    entries = read_header(path)
    if not {_SUMS, _DIGEST} <= set(entries):
        refuse(path, "has no sums; it is no pack")
    names = [n for n in entries if n not in (_SUMS, _DIGEST) and not n.startswith(_FILLER)]
    pack = Checkpoint({name: (path, entry) for name, entry in entries.items()}, finite_only=False)
    sums, digest = (_bytes(pack.tensor(name)).tobytes() for name in (_SUMS, _DIGEST))
    if digest != _digest(key, _read_head(path, entries), sums):
        refuse(path, "its header is not the one that was written")
    found = {name: pack.tensor(name) for name in names}
    kept = [int.from_bytes(sums[at : at + 8], "little") for at in range(0, len(sums), 8)]
    for (name, tensor), wanted in zip(found.items(), kept, strict=True):
        if checksum(tensor) != wanted:
            refuse(path, f"the numbers of {name} are not those that were written")
    pack.close()
    return found


def _read_head(path: Path, entries: Mapping[str, TensorEntry]) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(min(entry.start for entry in entries.values()))
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})")


def checksum(tensor: torch.Tensor) -> int:
    """64 bits of a tensor on the CPU: as fast as memory where it is large."""
    if tensor.nbytes >= PAGE and native.takes_words(tensor):
        return native.mixed_words(tensor)
    return zlib.crc32(_bytes(tensor))


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.nbytes:
        return memoryview(b"")
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


check(set(_NAMES.values()) == set(ITEM_BYTES), "every dtype has one name")
