"""Two hosts on one machine: network namespaces, joined by a line that delays each packet.

Their devices are TUN, and a process of ours carries packets from one to the other: the kernels of
the machines that tests run on have no netem, with which `tc` would delay them.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

ADDRESSES = ("198.18.77.1", "198.18.77.2")  # of the block for tests between own networks
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MOST_BYTES = 1 << 16
PR_SET_PDEATHSIG, SIGKILL = 1, 9


def why_not() -> str:
    """What is in the way of two hosts here; "" where there can be."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts(0.0, "why"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"no network namespaces here: {said}".strip()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(delay_s: float, name: str = "hosts") -> Iterator[tuple[list[str], list[str]]]:
    """What to put before a command to run it on the first of them, and on the second; packets take
    `delay_s` from one to the other."""
    hosts = [f"rl-{name}-{os.getpid()}-{number}" for number in (1, 2)]
    line = None
    try:
        for host in hosts:
            _ip("netns", "add", host)
        fds = [_tun(f"rl{os.getpid() % 10**8}n{number}") for number in (1, 2)]
        line = subprocess.Popen(
            [sys.executable, "-m", __name__, str(delay_s), *map(str, fds)], pass_fds=fds
        )
        for number, (host, address) in enumerate(zip(hosts, ADDRESSES, strict=True)):
            device = f"rl{os.getpid() % 10**8}n{number + 1}"
            _ip("link", "set", device, "netns", host)
            _ip("-n", host, "addr", "add", f"{address}/30", "dev", device)
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "link", "set", device, "up")
            os.close(fds[number])
        yield ["ip", "netns", "exec", hosts[0]], ["ip", "netns", "exec", hosts[1]]
    finally:
        if line is not None:
            line.kill()
            line.wait()
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host)


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    os.set_blocking(fd, False)
    return fd


def carry(delay_s: float, fds: list[int]) -> None:
    """Until we are killed, or whoever started us ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(0.0, under_way[0][0] - monotonic()) if under_way else None
        for fd in select.select(fds, [], [], wait)[0]:
            with suppress(BlockingIOError, OSError):
                packet = os.read(fd, MOST_BYTES)
                other = fds[1 - fds.index(fd)]
                under_way.append((monotonic() + delay_s, other, packet))
        while under_way and under_way[0][0] <= monotonic():
            _, fd, packet = under_way.popleft()
            with suppress(OSError):
                os.write(fd, packet)


if __name__ == "__main__":
    carry(float(sys.argv[1]), [int(fd) for fd in sys.argv[2:]])
