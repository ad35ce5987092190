"""Ridgeline's server and llama.cpp's on one machine, in turns: tokens a second, TTFT and ITL.

    python -m bench.cpu.serve --models DIR --peer LLAMA_SERVER --rounds 5 --commit ID
        [--streams 1,8,64] [--only demo,bf16,int8] [--out bench/cpu/results/latest.json]
        [--raw FILE.jsonl.gz]

DIR has a folder `B-hf` (15 M parameters, bfloat16), and files `B-bf16.gguf` and `B-q8_0.gguf` with
the same weights; LLAMA_SERVER is the program llama-server. Our server also serves the bundled chat
model, that nobody else here can read. All requests of a number of streams are sent at once by one
client (`ridgeline.benchmark.http_client`), which runs on the same processors: prompts of random
token ids, greedy answers of a forced length. Each contender is started anew in each round, and has
answered as many requests before it is measured.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cpu.latest import LATEST, Row, merge, row, show, write_raw
from bench.gpu.processes import MODEL_NAME, READY_LIMIT_S, STOP_LIMIT_S, served
from ridgeline.benchmark.http_client import Endpoint, ServerFault, endpoint, fetch, run_http
from ridgeline.benchmark.jobs import Job
from ridgeline.benchmark.run import Run, percentile

PROMPT, NEW = 128, 128  # tokens
WAVES = {1: 4, 8: 2}  # runs of so many streams; 1 of all others
VOCABULARY = {"demo": 4096, "B": 32000}
LOWEST_ID = 300
METRICS = ("tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms")


@dataclass(frozen=True, slots=True)
class Contender:
    """`start` makes a server for so many streams; what it yields is its URL."""

    case: str
    engine: str
    model: str
    start: Callable[[int], AbstractContextManager[str]]


def contenders(args: argparse.Namespace) -> Iterator[Contender]:
    wanted = args.only.split(",")
    folder, peer = str(args.models / "B-hf"), args.peer
    for case, model, peer_file in (
        ("demo", "demo:chat", None),
        ("bf16", folder, "B-bf16.gguf"),
        ("int8", folder, "B-q8_0.gguf"),
    ):
        if case not in wanted:
            continue
        shape = "demo" if case == "demo" else "B"
        options: dict[str, Any] = {"threads": args.threads} if args.threads else {}
        options |= {"weight_format": "int8"} if case == "int8" else {}
        yield Contender(case, "ridgeline", shape, ours(model, options))
        if peer is not None and peer_file is not None:
            yield Contender(
                case, "llama.cpp", shape, theirs(peer, args.models / peer_file, args.peer_threads)
            )


def ours(model: str, options: dict[str, Any]) -> Callable[[int], AbstractContextManager[str]]:
    return lambda streams: served(model, {"max_num_seqs": max(8, streams)} | options)


def theirs(
    program: Path, model: Path, threads: int | None
) -> Callable[[int], AbstractContextManager[str]]:
    def start(streams: int) -> AbstractContextManager[str]:
        return llama_server(program, model, threads or (2 if streams == 1 else 1), streams)

    return start


@contextmanager
def llama_server(program: Path, model: Path, threads: int, streams: int) -> Iterator[str]:
    """The URL of a llama-server that is ready, with a slot for each stream."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--ctx-size", str(streams * (PROMPT + NEW + 64)), "--parallel", str(streams)]
    words += ["--threads", str(threads), "--threads-batch", str(threads), "--alias", MODEL_NAME]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, endpoint(url, MODEL_NAME))
            yield url
        finally:
            process.terminate()
            process.wait(STOP_LIMIT_S)


def _wait(process: subprocess.Popen[bytes], server: Endpoint) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, ServerFault):
            fetch(server, "/health")
            return
        time.sleep(0.05)
    raise SystemExit("llama-server did not start")


def jobs(rng: random.Random, streams: int, vocabulary: int, new: int) -> list[Job]:
    def prompt() -> tuple[int, ...]:
        return tuple(rng.randrange(LOWEST_ID, vocabulary) for _ in range(PROMPT))

    return [Job(prompt(), new) for _ in range(streams)]


def wave(server: Endpoint, work: Sequence[Job]) -> Run:
    run, errors = run_http(server, work)
    if errors:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")
    return run


def measure(one: Contender, streams: int, seed: int) -> dict[str, float]:
    """Medians over all tokens of all waves, but for tokens a second: of all of them together."""
    rng, vocabulary = random.Random(seed), VOCABULARY[one.model]
    with one.start(streams) as url:
        server = endpoint(url, MODEL_NAME)
        wave(server, jobs(rng, streams, vocabulary, 16))
        runs = [
            wave(server, jobs(rng, streams, vocabulary, NEW)) for _ in range(WAVES.get(streams, 1))
        ]
    first = [job.ttft_s * 1e3 for run in runs for job in run.jobs]
    gaps = [gap * 1e3 for run in runs for job in run.jobs for gap in job.gaps_s]
    rate = sum(run.num_tokens for run in runs) / sum(run.wall_s for run in runs)
    spread = [percentile(values, share) for values in (first, gaps) for share in (0.5, 0.99)]
    return dict(zip(METRICS, (rate, *spread), strict=True))


def rounds(args: argparse.Namespace) -> list[dict[str, Any]]:
    records = []
    for number in range(args.rounds):
        for streams in map(int, args.streams.split(",")):
            for one in contenders(args):
                found = measure(one, streams, number)
                told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
                print(f"{number} {one.case} {one.engine} {streams}: {told}", flush=True)
                key = {"round": number, "case": one.case, "engine": one.engine, "streams": streams}
                records.append(key | found)
    return records


def rows(records: Sequence[dict[str, Any]], commit: str) -> Iterator[Row]:
    taken: dict[tuple[str, int, str, str], list[float]] = defaultdict(list)
    for record in records:
        for name in METRICS:
            key = record["case"], record["streams"], record["engine"], name
            taken[key].append(record[name])
    for (case, streams, engine, name), values in taken.items():
        if engine != "ridgeline":
            continue
        peer = taken.get((case, streams, "llama.cpp", name), ())
        what = "demo:chat" if case == "demo" else f"B {case}"
        plural = "s" if streams > 1 else ""
        found = row(
            f"serve {what}, {streams} stream{plural}",
            name,
            values,
            commit=commit,
            peer="llama-server " + {"bf16": "bf16", "int8": "q8_0", "demo": ""}[case],
            peer_values=peer,
        )
        yield found | {"goal": found["peer_value"]}  # to be no slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--peer", type=Path, help="the program llama-server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--only", default="demo,bf16,int8")
    parser.add_argument("--threads", type=int, help="of ours; when not given, what it chooses")
    parser.add_argument(
        "--peer-threads", type=int, help="when not given, what was best: 2 for one stream, else 1"
    )
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--raw", type=Path)
    args = parser.parse_args()
    records = rounds(args)
    found = list(rows(records, args.commit))
    if args.raw is not None:
        write_raw(records, args.raw)
    merge(found, args.out)
    show(found)


if __name__ == "__main__":
    main()
