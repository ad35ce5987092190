"""How late does a bystander get its answer while somebody attacks the HTTP server?

    python -m bench.server.attacks [--only NAME ...] [--seconds S] [--processes N] [--json FILE]

Starts a server with a fake engine, or attacks the one at --port. For each attack, N
processes repeat it for S seconds while another client asks for /health/live twenty times a second
over one connection; how late an answer is counts from when it should have been asked for.
Exit code 1 if the 99th percentile of any attack is more than LIMIT_MS above that of no attack.

An attack is a line of ATTACKS: a function that does one round of it at a port, until the server
ends it or MAX_BYTES are sent, and returns how many bytes it sent.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.benchmark.run import percentile
from tests.server.model_folder import write_model_folder
from tests.server.running import PATIENCE_S, fake_config, running

LIMIT_MS = 250.0
PERIOD_S = 0.05
PIECE = 1 << 16
MAX_BYTES = 64 << 20
GET = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"

Attack = Callable[[int], int]


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def _endless(first: bytes, filler: bytes, port: int) -> int:
    """One connection that says `first` and then `filler` for ever, and reads nothing."""
    piece = filler * (PIECE // len(filler))
    num_sent = 0
    with _connect(port) as sock, contextlib.suppress(ConnectionError, TimeoutError):
        sock.settimeout(1.0)
        sock.sendall(first)
        while num_sent < MAX_BYTES:
            num_sent += sock.send(piece)
    return num_sent


def _many(first: bytes, count: int, port: int) -> int:
    """Connections that say half of something, then a byte now and then."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(_connect(port)) for _ in range(count)]
        num_sent = 0
        for piece in (first, b"a", b"a", b"a", b"a"):
            for sock in socks:
                with contextlib.suppress(ConnectionError):
                    num_sent += sock.send(piece)
            time.sleep(0.2)
    return num_sent


def _connects(port: int) -> int:
    """Connections that say nothing and are closed at once."""
    for _ in range(100):
        _connect(port).close()
    return 0


ATTACKS: dict[str, Attack] = {
    "request line": functools.partial(_endless, b"GET /", b"a"),
    "header name": functools.partial(_endless, GET, b"a"),
    "header value": functools.partial(_endless, GET + b"x: ", b"a"),
    "headers": functools.partial(_endless, GET, b"x: y\r\n"),
    "empty lines": functools.partial(_endless, b"", b"\r\n"),
    "chunk size": functools.partial(_endless, CHUNKED, b"0"),
    "chunk extension": functools.partial(_endless, CHUNKED + b"3;", b"a"),
    "small chunks": functools.partial(_endless, CHUNKED, b"1\r\n \r\n"),
    "trailer name": functools.partial(_endless, CHUNKED + b"0\r\n", b"a"),
    "trailer value": functools.partial(_endless, CHUNKED + b"0\r\nX: ", b"a"),
    "trailers": functools.partial(_endless, CHUNKED + b"0\r\n", b"x: y\r\n"),
    "large body": functools.partial(_endless, POST + b"content-length: 99999999\r\n\r\n", b"a"),
    "pipelined requests": functools.partial(_endless, b"", GET + b"\r\n"),
    "junk after the last": functools.partial(_endless, GET + b"connection: close\r\n\r\n", b"a"),
    "behind an upgrade": functools.partial(
        _endless, GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", b"a"
    ),
    "slow heads": functools.partial(_many, GET + b"x: ", 1000),
    "slow trailers": functools.partial(_many, CHUNKED + b"0\r\nX: ", 1000),
    "connections": _connects,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds that the bystander's answers were late."""

    attack: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    num_asked: int
    num_rounds: int = 0
    num_bytes: int = 0


def bystand(port: int, seconds: float) -> list[float]:
    """Milliseconds of each answer."""
    late: list[float] = []
    with _connect(port) as sock:
        start = time.monotonic()
        while (due := start + PERIOD_S * len(late)) < start + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            sock.sendall(GET + b"\r\n")
            data = b""
            while not data.endswith(b'{"status":"live"}'):
                if not (part := sock.recv(PIECE)):
                    raise RuntimeError(f"the bystander was answered {data!r}")
                data += part
            late.append(1e3 * (time.monotonic() - due))
    return late


def _attack(name: str, port: int, rounds: Any, num_bytes: Any) -> None:
    """In a process of its own, for ever."""
    while True:
        sent = ATTACKS[name](port)
        with rounds.get_lock():
            rounds.value += 1
            num_bytes.value += sent


def measure(name: str, port: int, seconds: float, num_processes: int) -> Row:
    spawn = multiprocessing.get_context("spawn")
    rounds, num_bytes = spawn.Value("Q", 0), spawn.Value("Q", 0)
    attackers = [
        spawn.Process(target=_attack, args=(name, port, rounds, num_bytes), daemon=True)
        for _ in range(num_processes if name in ATTACKS else 0)
    ]
    for attacker in attackers:
        attacker.start()
    if attackers:
        time.sleep(1.0)  # they import, and are in full swing
    late = bystand(port, seconds)
    for attacker in attackers:
        attacker.kill()
        attacker.join()
    p50, p99 = percentile(late, 0.5), percentile(late, 0.99)
    return Row(name, p50, p99, max(late), len(late), rounds.value, num_bytes.value)


@contextlib.contextmanager
def fake_server() -> Iterator[int]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "fake")
        with running(fake_config(model), Path(folder)) as server:
            yield server.port


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", choices=ATTACKS, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, help="of a server on this machine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    server = contextlib.nullcontext(args.port) if args.port else fake_server()
    rows: list[Row] = []
    print(f"{'attack':20} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'rounds':>8} {'MB sent':>8}")
    with server as port:
        for name in ("none", *(args.only or ATTACKS)):
            row = measure(name, port, args.seconds, args.processes)
            rows.append(row)
            print(
                f"{name:20} {row.p50_ms:8.2f} {row.p99_ms:8.2f} {row.max_ms:8.2f} "
                f"{row.num_rounds:8} {row.num_bytes / 1e6:8.0f}", flush=True,
            )  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.p99_ms > rows[0].p99_ms + LIMIT_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
