"""How does a file of the hub come here whole? Resumed where it stopped, and checked by its hash.

The hub's own client drops what an interrupted transfer has got. So large files come into
`blobs/HASH.incomplete` first, where the next run goes on, and get their name in the cache once
their hash is right; the client then finds them there and links them.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.figures import scaled

RESERVE_BYTES = 1 << 20  # for links and notes beside the files
BLOB_HASH = "sha256"


@dataclass(frozen=True, slots=True)
class HubFile:
    """As the hub describes it: large files have a sha256, small ones their id in git."""

    name: str
    size: int
    sha256: str | None = None
    git_id: str | None = None

    def why_wrong(self, path: Path) -> str | None:
        """None when the file at `path` is what the hub has."""
        if (size := path.stat().st_size) != self.size:
            return f"it has {size} bytes, the hub says {self.size}"
        wanted = self.sha256 or self.git_id
        found = self._digest(path)
        if wanted is None or found == wanted:
            return None
        return f"its hash is {found[:16]}..., the hub says {wanted[:16]}..."

    def _digest(self, path: Path) -> str:
        if self.sha256 is None:  # git's id of a blob
            data = path.read_bytes()
            head = f"blob {len(data)}\0".encode()
            return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, BLOB_HASH).hexdigest()


@dataclass(frozen=True, slots=True)
class Blobs:
    """The large files of one model in the cache."""

    store: Path  # of the model

    def path(self, file: HubFile) -> Path:
        return self.store / "blobs" / str(file.sha256)

    def incomplete(self, file: HubFile) -> Path:
        return self.path(file).with_name(f"{file.sha256}.incomplete")

    def num_bytes(self, file: HubFile) -> int:
        """What is here of it."""
        for path in (self.path(file), self.incomplete(file)):
            if file.sha256 is not None and path.is_file():
                return min(path.stat().st_size, file.size)
        return 0

    def fetch(self, file: HubFile, url: str, bar: type) -> None:
        """Go on where the last transfer stopped. ConfigError for a wrong hash: then nothing of the
        file stays. Any other exception leaves what has come."""
        client: Any = import_module("huggingface_hub.utils")
        lock = self.store.parent / ".locks" / self.store.name / f"{file.sha256}.lock"
        for folder in (lock.parent, self.path(file).parent):
            folder.mkdir(parents=True, exist_ok=True)
        with client.WeakFileLock(lock):
            if self.path(file).is_file():
                return
            part = self.incomplete(file)
            if part.is_file() and part.stat().st_size > file.size:
                part.unlink()
            _transfer(file, url, part, bar)
            if why := file.why_wrong(part):
                part.unlink()
                raise ConfigError(f"{file.name}: {why}; it was removed, start again")
            os.replace(part, self.path(file))


def _transfer(file: HubFile, url: str, part: Path, bar: type) -> None:
    from huggingface_hub.file_download import http_get

    client: Any = import_module("huggingface_hub.utils")
    options: dict[str, Any] = {}
    if "tqdm_class" in inspect.signature(http_get).parameters:
        options["tqdm_class"] = bar
    with part.open("ab") as out:
        http_get(
            url,
            out,
            resume_size=out.tell(),
            headers={**client.build_hf_headers(), "Accept-Encoding": "identity"},
            expected_size=file.size,
            displayed_filename=file.name,
            **options,
        )


def check_room(store: Path, files: Iterable[HubFile], blobs: Blobs) -> None:
    """ConfigError when these files do not fit on the disk of the cache."""
    needed = sum(file.size - blobs.num_bytes(file) for file in files)
    here = next(path for path in (store, *store.parents) if path.exists())
    free = shutil.disk_usage(here).free
    if needed and needed + RESERVE_BYTES > free:
        raise ConfigError(
            f"it needs {scaled(needed, 'B')} more at {store}, where {scaled(free, 'B')} are free; "
            "make room there, or name another folder with HF_HOME"
        )
