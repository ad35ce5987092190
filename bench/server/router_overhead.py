"""How much longer does an answer take through the router, over a backend that answers at once?

usage: python bench/server/router_overhead.py [--requests 2000] [--output FILE]

One client, one kept connection each way, direct and through the router in turn, so that both see
the same machine. Prompts are of 1,000 characters, half of them shared. Milliseconds; beside them
the router's own CPU time per request, which does not depend on what else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ANSWER = json.dumps({"choices": [{"text": "at once"}], "usage": {"prompt_tokens": 250}}).encode()
MODELS = json.dumps({"data": [{"id": "m"}]}).encode()
LOAD = json.dumps(
    {"running": 0, "waiting": 0, "wait_s": 0, "prompt_tokens_per_s": 1e4, "step_s": 0.01}
).encode()


def page(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class Backend(asyncio.Protocol):
    """Answers whatever comes in one read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        body = ANSWER if data.startswith(b"POST") else LOAD if b"/load" in data[:16] else MODELS
        self.transport.write(page(body))  # type: ignore[attr-defined]


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def ask(sock: socket.socket, number: int) -> float:
    """Milliseconds."""
    prompt = "shared " * 72 + f"{number:8} own" * 42
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    start = time.perf_counter()
    sock.sendall(request)
    got = b""
    while ANSWER not in got:
        got += sock.recv(65536)
    return 1000 * (time.perf_counter() - start)


def first_line(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise SystemExit("no output")
    return process.stdout.readline().strip()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(num_requests: int) -> dict[str, object]:
    backend = subprocess.Popen(
        [sys.executable, __file__, "--backend"], stdout=subprocess.PIPE, text=True
    )
    port = int(first_line(backend))
    command = (sys.executable, "-m", "ridgeline", "route", "--port", "0", "--backend")
    router = subprocess.Popen(
        [*command, f"http://127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True
    )
    routed_port = int(first_line(router).rpartition(":")[2])
    try:
        time.sleep(1.0)
        direct, routed = connect(port), connect(routed_port)
        times: dict[str, list[float]] = {"direct": [], "routed": []}
        used_s = 0.0
        for number in range(-200, num_requests):
            if number == 0:
                used_s = cpu_s(router.pid)
                times = {"direct": [], "routed": []}
            times["direct"].append(ask(direct, number))
            times["routed"].append(ask(routed, number))
        used_s = cpu_s(router.pid) - used_s
    finally:
        for process in (router, backend):
            process.terminate()
            process.wait()
    found: dict[str, object] = {
        f"{name}_ms": {
            "p50": round(statistics.median(values), 3),
            "p90": round(statistics.quantiles(values, n=10)[8], 3),
        }
        for name, values in times.items()
    }
    medians = {name: statistics.median(values) for name, values in times.items()}
    return found | {
        "overhead_p50_ms": round(medians["routed"] - medians["direct"], 3),
        "router_cpu_ms": round(1000 * used_s / num_requests, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--backend", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.backend:
        asyncio.run(serve())
        return
    load = os.getloadavg()[0]
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {cpu[0] if cpu else 'unknown'}",
        "load_average_1_minute": round(load, 1),
        "requests": asked.requests,
        **measure(asked.requests),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
