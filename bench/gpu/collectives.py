"""What do sums over ranks take on GPUs of this host, within captured steps?

    PYTHONPATH=. python3 bench/gpu/collectives.py --out out.json [--ranks 2]

Of each size the sum, and where rows are short enough the sum that goes to the residual and is
normed, by NCCL and by our kernel whatever its limits say; beside them the sum of a captured graph
of 100 sums, divided by 100. Times are those of rank 0, in us: the median of 20 replays.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
from functools import partial
from typing import Any

import torch

from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.peer import Peer
from ridgeline.distributed.placement import Collective

HIDDEN = 4096  # bfloat16 numbers of a row
SIZES = [1 << power for power in range(13, 27)]  # bytes
CALLS, REPLAYS = 100, 20
TIMEOUT_S = 60.0
Row = dict[str, Any]


class Unlimited(Peer):
    most_summed = most_gathered = 1 << 40


def times_us(collective: Collective, num_bytes: int) -> Row:
    rows = num_bytes // (2 * HIDDEN)
    x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    residual, weight = torch.zeros_like(x), torch.ones_like(x[0])
    gathered = torch.zeros(num_bytes // 4, device="cuda")
    found = {
        "sum": captured_us(partial(collective.all_reduce, x)),
        "gather": captured_us(partial(collective.all_gather, gathered)),
    }
    if num_bytes <= 4 << 20:
        norm = partial(collective.all_reduce_norm, x, residual, weight, 1e-5)
        found["sum_norm"] = captured_us(norm)
    return found


def captured_us(call: Any) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times[2:])


@torch.inference_mode()
def measure(rank: int, size: int, addresses: list[str]) -> list[Row]:
    torch.cuda.set_device(rank)
    found: list[Row] = []
    opened: list[tuple[str, Collective]] = [
        ("nccl", open_collective("nccl", rank, size, addresses[0], timeout_s=TIMEOUT_S)),
        ("peer", Unlimited(rank, size, addresses[1], timeout_s=TIMEOUT_S)),
    ]
    for name, collective in opened:
        for num_bytes in SIZES:
            times = times_us(collective, num_bytes)
            found.append({"collective": name, "bytes": num_bytes} | times)
            if rank == 0:
                texts = (f"{key} {value:.2f}" for key, value in times.items())
                print(f"{name} {num_bytes}: {', '.join(texts)}", flush=True)
    for _, collective in opened:
        collective.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    addresses = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            addresses.append(f"127.0.0.1:{free.getsockname()[1]}")
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=measure, args=(rank, args.ranks, addresses), daemon=True)
        for rank in range(1, args.ranks)
    ]
    for other in others:
        other.start()
    rows = measure(0, args.ranks, addresses)
    with open(args.out, "w") as out:
        json.dump({"device": torch.cuda.get_device_name(), "us": rows}, out, indent=1)
    for other in others:
        other.join(TIMEOUT_S)


if __name__ == "__main__":
    main()
