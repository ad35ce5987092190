"""How long do ranks on the CPUs of one host take for a sum? Each collective, by bytes.

usage: python -m bench.cpu.collectives [--ranks 2] [--calls 2000]

A line has microseconds of rank 0: the best tenth of the calls, half of them and 99 of 100. The
load of the machine stands beside them: with fewer free cores than ranks they wait for turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time

import torch

from ridgeline.distributed.collectives import COLLECTIVES, open_collective

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20)


def times(name: str, rank: int, size: int, address: str, calls: int) -> list[list[float]]:
    """Of each of SIZES, in order."""
    torch.set_num_threads(1)
    collective = open_collective(name, rank, size, address, timeout_s=60.0)
    found = []
    for num_bytes in SIZES:
        x, taken = torch.zeros(num_bytes // 4), []
        for _ in range(max(20, min(calls, calls * (64 << 10) // num_bytes))):
            begin = time.perf_counter()
            collective.all_reduce(x)
            taken.append(time.perf_counter() - begin)
        found.append(sorted(taken[5:]))
    collective.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=2000)
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for name in COLLECTIVES:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = asked.ranks, address, asked.calls
        others = [
            context.Process(target=times, args=(name, rank, *arguments))
            for rank in range(1, asked.ranks)
        ]
        for process in others:
            process.start()
        found = times(name, 0, *arguments)
        load = os.getloadavg()[0]
        for num_bytes, taken in zip(SIZES, found, strict=True):
            parts = {p: taken[len(taken) * p // 100] * 1e6 for p in (10, 50, 99)}
            told = "  ".join(f"p{p} {us:8.1f} us" for p, us in parts.items())
            cores = f"load {load:.1f} on {os.cpu_count()} cores"
            print(f"{name:8} {num_bytes:8} bytes  {told}  {cores}")
        for process in others:
            process.join()


if __name__ == "__main__":
    main()
