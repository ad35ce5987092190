"""What do the processes that the server starts have in common?"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys
from pathlib import Path

import ridgeline
from ridgeline.server.auth import KEY_VARIABLE
from ridgeline.server.service_manager import VARIABLES as MANAGER_VARIABLES

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Where the kernel can do it, end us even if Python never runs again (an endless kernel)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def harden() -> None:
    os.umask(0o077)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the HTTP side asks where we are stuck
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold prompts
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the HTTP side says when to stop


def environment() -> dict[str, str]:
    """A child's: ours without the key and the service manager's words, which are for us alone,
    and with the place this package was found at."""
    private = {KEY_VARIABLE, *MANAGER_VARIABLES}
    env = {name: value for name, value in os.environ.items() if name not in private}
    home = str(Path(ridgeline.__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (home, env.get("PYTHONPATH"))))
    return env
