"""In what order does a fresh process import what an engine needs, so that it takes the least time?

A good part of torch's import is the linker's work on its libraries, which needs no Python: a thread
has that begun, while what needs no torch is imported. Nothing depends on it: a library that cannot
be loaded here says nothing, and torch's own import will say it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from ridgeline.startup import StartUp, without_collections

# In the order and the way in which torch's own import loads them.
LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch_cpu.so", os.RTLD_LOCAL))
WITHOUT_TORCH = (
    "numpy",
    "tokenizers",
    "ridgeline.answer",
    "ridgeline.cost.pricer",
    "ridgeline.cost.fit_suggestions",
    "ridgeline.engine",
    "ridgeline.generation",
    "ridgeline.observe.event_log",
    "ridgeline.observe.evidence",
    "ridgeline.records",
    "ridgeline.scheduler.policies.step_times",
    "ridgeline.scheduler.scheduler",
    "ridgeline.text.chat",
)


def import_engine(startup: StartUp, front: str) -> None:
    """All that the module `front` needs, torch among it; the phases become part of `startup`."""
    with without_collections():
        with startup.phase("imports without torch"):
            loading = load_beside()
            for name in WITHOUT_TORCH:
                import_module(name)
        with startup.phase("torch"):
            if loading is not None:
                loading.join()
            import_module("torch")
        with startup.phase("imports"):
            import_module(front)


def load_beside() -> Thread | None:
    """Begin to load torch's libraries; None where there is no torch."""
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "lib"
    paths = [(folder / name, mode) for name, mode in LIBRARIES]
    thread = Thread(target=_load, args=(paths,), name="torch's libraries")
    thread.start()
    return thread


def _load(paths: Iterable[tuple[Path, int]]) -> None:
    try:
        for path, mode in paths:
            ctypes.CDLL(str(path), mode=mode)
    except OSError:
        return
