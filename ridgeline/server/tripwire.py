"""What does a process that serves never do? One that does it ends: it is broken, or taken over.

A tripwire, not a sandbox: whoever runs native code, or knows of it, gets past it. It watches the
interpreter's audit events: programs and forks, pickled objects, code and connections from outside,
files written in unknown places. An engine on a GPU is not watched: it compiles kernels when it
needs them (Triton, NVRTC), so it starts compilers, runs made code and writes caches, and the
address of each argument of a kernel is an audit event. Elsewhere a request makes one event and a
step none; an event costs about a microsecond.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any
from urllib.parse import urlsplit

import ridgeline
from ridgeline.log import say
from ridgeline.server.outlet import drain

EXIT_TRIPPED = 70  # EX_SOFTWARE
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HOME = os.path.join(os.path.dirname(ridgeline.__file__), "")
PORTS = {"http": 80, "https": 443}
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR")

logger = logging.getLogger("ridgeline.server.tripwire")

_programs: set[tuple[str, ...]] = set()
_checks: dict[str, Callable[[tuple[Any, ...]], bool]] = {}


def allow_spawn(argv: Sequence[str]) -> None:
    """Programs whose arguments begin with exactly these may be started."""
    _programs.add(tuple(argv))


def arm(collector: str | None = None) -> None:
    """From here on, until the process ends. The port of the URL `collector` may be connected to."""
    if _checks:
        return
    entries = [os.path.abspath(entry) for entry in (*sys.path, sys.prefix, sys.base_prefix)]
    code = tuple(_folder(entry) for entry in {*entries, *map(os.path.realpath, entries)})
    files = [tempfile.gettempdir(), "/dev", os.path.expanduser("~/.cache")]
    files += (os.environ[name] for name in CACHES if name in os.environ)
    places = tuple(_folder(os.path.realpath(name)) for name in files)
    url = urlsplit(collector or "")
    port = url.port or PORTS.get(url.scheme)
    never = ("os.system", "os.fork", "os.forkpty", "os.exec", "os.spawn", "pickle.find_class")
    _checks.update(dict.fromkeys(never, _never))
    _checks["os.posix_spawn"] = _checks["subprocess.Popen"] = lambda args: _is_allowed(args[1])
    _checks["exec"] = lambda args: _is_ours(args[0], code)
    _checks["open"] = lambda args: _may_open(args, places)
    _checks["socket.connect"] = lambda args: _port(args[1]) == port is not None
    sys.addaudithook(_hook)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    check = _checks.get(event)
    if check is not None and not check(args):
        _checks.clear()  # nothing that follows is looked at
        _end(event)


def _end(event: str) -> None:
    frame = sys._getframe(2)
    say(
        logger, logging.CRITICAL, "this process did what a server never does, and ends",
        act=event, at=f"{frame.f_code.co_filename}:{frame.f_lineno}",
    )  # fmt: skip
    drain()
    os._exit(EXIT_TRIPPED)


def _folder(name: str) -> str:
    return os.path.join(name, "")


def _never(args: tuple[Any, ...]) -> bool:
    return False


def _port(address: object) -> int | None:
    return address[1] if isinstance(address, tuple) else None


def _is_allowed(argv: object) -> bool:
    if not isinstance(argv, list | tuple):
        return False
    words = tuple(os.fsdecode(word) for word in argv)
    return any(words[: len(program)] == program for program in _programs)


def _is_ours(code: CodeType, roots: tuple[str, ...]) -> bool:
    """From a file of the installation; or made by a library, as methods of dataclasses are."""
    if code.co_filename.startswith("<"):
        return not sys._getframe(3).f_code.co_filename.startswith(HOME)
    return code.co_filename.startswith(roots)


def _may_open(args: tuple[Any, ...], places: tuple[str, ...]) -> bool:
    """To read anything; to write in places for files that do not last, and what is compiled of our
    own sources."""
    path, _, flags = args
    if not flags & WRITES or isinstance(path, int):
        return True
    found = os.path.realpath(os.fsdecode(path))
    return (
        _folder(found).startswith(places)
        or os.path.basename(os.path.dirname(found)) == "__pycache__"
    )
