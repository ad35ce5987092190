"""Who started us, and what does it want to hear? systemd's protocol sd_notify: datagrams that say
that we are ready, that we stop, and, where it asked for that, that we are alive."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from math import inf

from ridgeline.log import say
from ridgeline.server.auth import KEY_VARIABLE

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # see sd_notify(3)
PRIVATE = {KEY_VARIABLE, *VARIABLES}  # what no process that we start is told
SIGNS_PER_LIMIT = 3  # of life, in the time after which it takes us for dead

logger = logging.getLogger(__name__)


class ServiceManager:
    """Says nothing where nobody listens; a listener that is gone harms nobody."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        socket_name, limit_us, pid = (environment.get(name, "") for name in VARIABLES)
        # A name that begins with @ is of Linux's abstract namespace.
        self._address = "\0" + socket_name[1:] if socket_name.startswith("@") else socket_name
        is_for_us = pid in ("", str(os.getpid()))
        watched = is_for_us and limit_us.isascii() and limit_us.isdigit() and int(limit_us) > 0
        self._period_s = int(limit_us) / 1e6 / SIGNS_PER_LIMIT if watched else inf
        self._next_sign = -inf if watched else inf

    def ready(self) -> None:
        """Requests are served from now on."""
        self._tell("READY=1\nSTATUS=serving")

    def stopping(self) -> None:
        self._tell("STOPPING=1\nSTATUS=finishing what is open")

    def alive(self, now: float) -> None:
        """To be called often; what is not due is not sent."""
        if now >= self._next_sign:
            self._next_sign = now + self._period_s
            self._tell("WATCHDOG=1")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(state.encode(), self._address)
        except OSError as problem:
            say(logger, logging.WARNING, "the service manager does not listen", reason=problem)
