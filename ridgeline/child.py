"""What do the processes that we start have in common?"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Collection
from pathlib import Path

import ridgeline

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Where the kernel can do it, end us even if Python never runs again (an endless kernel)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def harden() -> None:
    os.umask(0o077)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # whoever started us asks where we are stuck
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold prompts
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # whoever started us says when to stop


def environment(private: Collection[str] = ()) -> dict[str, str]:
    """A child's: ours without what is for us alone, and with the place this package was found
    at."""
    env = {name: value for name, value in os.environ.items() if name not in private}
    home = str(Path(ridgeline.__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (home, env.get("PYTHONPATH"))))
    return env
