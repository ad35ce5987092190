"""How long until the command line answers, and until a new process has its first token?

    python -m bench.cpu.startup --rounds 7 --commit ID [--out bench/cpu/results/latest.json]
        [--raw FILE.jsonl.gz]

Each round starts, in turns, `ridgeline --version`, `import torch` and `ridgeline generate` for one
token of the bundled model, and takes the time from the start of the process to its end, of the last
one to its first byte. A round before that is not counted: it fills the cache of files.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from bench.cpu.latest import LATEST, merge, row, show, write_raw

RIDGELINE = (sys.executable, "-m", "ridgeline.cli.main")
COMMANDS = {
    "version": (*RIDGELINE, "--version"),
    "torch": (sys.executable, "-c", "import torch; print()"),
    "token": (*RIDGELINE, "generate", "-q", "-p", "Once upon a time", "--max-tokens", "1"),
}
VERSION_GOAL_S, TOKEN_GOAL_S = 0.1, 0.3


def seconds(command: tuple[str, ...], *, to_first_byte: bool) -> float:
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        if process.stdout is None or not process.stdout.read(1):
            raise SystemExit(f"{' '.join(command)} said nothing")
        first = time.perf_counter() - begin
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return first if to_first_byte else time.perf_counter() - begin


def measure(rounds: int) -> list[dict[str, float]]:
    found = []
    for number in range(rounds + 1):
        taken = {k: seconds(c, to_first_byte=k == "token") for k, c in COMMANDS.items()}
        if number:
            print(", ".join(f"{name} {value:.3f} s" for name, value in taken.items()), flush=True)
            found.append(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, default=LATEST)
    parser.add_argument("--raw", type=Path)
    args = parser.parse_args()
    found = measure(args.rounds)
    torch = [taken["torch"] for taken in found]
    beyond = [taken["token"] - taken["torch"] for taken in found]
    version = [taken["version"] for taken in found]
    rows = [
        row("ridgeline --version", "s", version, commit=args.commit, goal=VERSION_GOAL_S),
        row(
            "start to first token, demo:chat",
            "s",
            [taken["token"] for taken in found],
            commit=args.commit,
            peer="import torch",
            peer_values=torch,
        ),
        row(
            "start to first token, demo:chat, beyond import torch",
            "s",
            beyond,
            commit=args.commit,
            goal=TOKEN_GOAL_S,
        ),
    ]
    if args.raw is not None:
        write_raw(found, args.raw)
    merge(rows, args.out)
    show(rows)


if __name__ == "__main__":
    main()
