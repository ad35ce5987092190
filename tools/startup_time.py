"""How long from the start of the process to the first token, and how much of it is torch?"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "tiny-random"
PARTS = ("interpreter", "import torch", "import ridgeline", "build the engine", "first token")
HTTP_TIMEOUT_S = 60.0
NAME = "model"

CHILD = """
import json, sys, time
marks = [time.monotonic()]
import torch
marks.append(time.monotonic())
from ridgeline import LLM, SamplingParams
marks.append(time.monotonic())
llm = LLM(sys.argv[1], load_format=sys.argv[2])
marks.append(time.monotonic())
next(iter(llm.stream([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))))
marks.append(time.monotonic())
print(json.dumps(marks))
"""


def offline(model: str, load_format: str) -> list[float]:
    """Seconds of each of PARTS in a fresh process."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, model, load_format],
        check=True,
        capture_output=True,
        text=True,
    )
    marks = [started, *json.loads(done.stdout.splitlines()[-1])]
    return [b - a for a, b in pairwise(marks)]


def over_http(model: str, load_format: str, port: int) -> float:
    """Seconds from the start of `ridgeline serve` to its first complete answer."""
    started = time.monotonic()
    command = [sys.executable, "-m", "ridgeline.cli.main", "serve", model, "--log-level", "ERROR"]
    with subprocess.Popen(
        [*command, "--load-format", load_format, "--port", str(port), "--served-model-name", NAME],
        stdout=subprocess.DEVNULL,
    ) as server:
        try:
            while not _answers(port):
                if server.poll() is not None or time.monotonic() - started > HTTP_TIMEOUT_S:
                    raise SystemExit("the server did not answer")
                time.sleep(0.02)
            return time.monotonic() - started
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request) as reply:
        return bool(json.load(reply)["choices"])
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--load-format", default="random")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--http-port", type=int, help="also time `ridgeline serve` on this port")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs = [offline(args.model, args.load_format) for _ in range(args.repeats)]
    seconds = {part: median(run[i] for run in runs) for i, part in enumerate(PARTS)}
    seconds["all"] = median(sum(run) for run in runs)
    if args.http_port:
        waits = [
            over_http(args.model, args.load_format, args.http_port) for _ in range(args.repeats)
        ]
        seconds["serve to first answer over HTTP"] = median(waits)
    if args.json:
        print(json.dumps({"repeats": args.repeats, "median_s": seconds}, indent=2))
    else:
        for name, value in seconds.items():
            print(f"{name:<34} {value:7.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
