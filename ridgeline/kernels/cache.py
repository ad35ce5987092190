"""Where do compiled kernels lie between two starts, and how long did this one spend on them?

Triton keeps what it has compiled in a folder. Ours has one for each set of versions, so that one
that no longer serves can be told and removed.
"""
# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ridgeline
from ridgeline.log import say

VARIABLE = "TRITON_CACHE_DIR"
FOLDER = "ridgeline/kernels"
KEPT = 4  # sets of versions, ours among them
NAME = re.compile(r"ridgeline-[\w.+-]+-torch-[\w.+-]+-triton-[\w.+-]+-sm\d+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Versions:
    """All that kernels are compiled for; `capability` of the device, (9, 0) say."""

    ridgeline: str
    torch: str
    triton: str
    capability: tuple[int, int]

    @property
    def folder(self) -> str:
        major, minor = self.capability
        name = (
            f"ridgeline-{self.ridgeline}-torch-{self.torch}-triton-{self.triton}-sm{major}{minor}"
        )
        return re.sub(r"[^\w.+-]", "_", name)


def prepare_kernels(device: torch.device) -> KernelCounts | None:
    """Choose the folder and count from here on. None where nothing is compiled: on a CPU, and
    without Triton."""
    if device.type != "cuda":
        return None
    try:
        import triton
    except ImportError:
        return None
    capability = torch.cuda.get_device_capability(device)
    use_kernel_cache(
        Versions(ridgeline.__version__, torch.__version__, triton.__version__, capability)
    )
    return count_kernels()


def use_kernel_cache(versions: Versions, environ: MutableMapping[str, str] = os.environ) -> Path:
    """Let Triton keep its kernels in the folder of these versions, which is made; the folder.

    Comes before the first kernel is compiled. Whoever has set TRITON_CACHE_DIR keeps theirs. Where
    ours cannot be written, kernels live in a temporary folder for as long as this process; a
    damaged one is emptied. Both are said.
    """
    if named := environ.get(VARIABLE):
        return Path(named)
    home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / FOLDER
    folder = home / versions.folder
    try:
        _prepare(folder)
        _remove_old(home, folder)
    except OSError as error:
        folder = _temporary()
        say(
            logger, logging.WARNING, "compiled kernels cannot be kept", reason=error,
            until_exit=folder,
        )  # fmt: skip
    environ[VARIABLE] = str(folder)
    return folder


def _prepare(folder: Path) -> None:
    """Make it, see that it can be written to and that nothing in it is broken."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        os.utime(folder)  # used now
    if (broken := find_damage(folder)) is not None:
        say(logger, logging.WARNING, "the cache of kernels is damaged, starting afresh", at=broken)
        shutil.rmtree(folder)
        folder.mkdir()


def find_damage(folder: Path) -> Path | None:
    """The first file that cannot be what Triton wrote: JSON that is none, or a part of a kernel
    that is empty or gone."""
    for group in sorted(folder.glob("*/__grp__*.json")):
        try:
            parts = json.loads(group.read_text(encoding="utf-8"))["child_paths"].values()
        except (ValueError, KeyError, TypeError, AttributeError):
            return group
        for part in map(Path, parts):
            if not part.is_file() or not part.stat().st_size:
                return part
            if part.suffix == ".json" and not _is_json(part):
                return part
    return None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def _remove_old(home: Path, ours: Path) -> None:
    """All but the KEPT folders that were used last. Touches only what bears a name of ours."""
    others = [
        path
        for path in home.iterdir()
        if path != ours and NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[KEPT - 1 :]:
        say(logger, logging.INFO, "removing kernels of other versions", folder=path.name)
        shutil.rmtree(path, ignore_errors=True)


_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def _temporary() -> Path:
    _TEMPORARY.append(tempfile.TemporaryDirectory(prefix="ridgeline-kernels-"))
    return Path(_TEMPORARY[-1].name)


# ---------------------------------------------------------------------- what it took


@dataclass(slots=True)
class KernelCounts:
    """Kernels that Triton made ready in this process: compiled, or found in its folder."""

    num_compiled: int = 0
    compiled_s: float = 0.0
    num_found: int = 0
    found_s: float = 0.0

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton's CompilationListener; its times are in microseconds."""
        seconds = times.total / 1e6
        if cache_hit:
            self.num_found += 1
            self.found_s += seconds
            return
        self.num_compiled += 1
        self.compiled_s += seconds
        name = getattr(src, "name", "?")
        say(logger, logging.INFO, "compiled a kernel", name=name, seconds=f"{seconds:.2f}")

    def text(self) -> str:
        if not self.num_compiled and not self.num_found:
            return ""
        return (
            f"{self.num_compiled} kernels compiled in {self.compiled_s:.2f} s,"
            f" {self.num_found} found in {self.found_s:.2f} s"
        )


def count_kernels() -> KernelCounts:
    """Counts from here on; the same counts whoever asks in this process. None are counted beside
    a listener that somebody else has set."""
    from triton import knobs

    counts = knobs.compilation.listener
    if isinstance(counts, KernelCounts):
        return counts
    ours = KernelCounts()
    if counts is None:
        knobs.compilation.listener = ours
    return ours
