"""Where and when was this measured? What every result file must say beside its figures."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ridgeline import __version__
from ridgeline.devices import open_device

PACKAGES = ("torch", "numpy", "tokenizers", "triton")


@dataclass(frozen=True, slots=True)
class Environment:
    date: str  # UTC
    command: str
    commit: str | None  # "+changes" when the checkout had local changes; None outside one
    ridgeline: str
    python: str
    packages: dict[str, str]
    system: str
    device: str
    device_name: str
    threads: int


def environment(device: torch.device) -> Environment:
    """What this process runs on."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["ridgeline", *sys.argv[1:]]),
        commit=_commit(),
        ridgeline=__version__,
        python=platform.python_version(),
        packages={name: found for name in PACKAGES if (found := _version(name))},
        system=f"{platform.system()} {platform.machine()}",
        device=str(device),
        device_name=open_device(str(device)).describe(),
        threads=torch.get_num_threads(),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        return commit + "+changes"
    return commit


def _git(*words: str) -> str | None:
    """What git says about the checkout this file is in, None where there is none."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
