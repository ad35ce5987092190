"""How long do sliders and first loads take, and what do 50 live pages cost an engine?

python -m bench.lab.pages              each page's answers while a slider moves, and its first load
python -m bench.lab.pages --live 50    tokens/s of `ridgeline serve --lab` without and with pages

CPU times are those of the answers alone, measured in this process with one compute thread, as the
server has: what else the machine has to do does not change them much. Two threads on busy cores
wait for each other, and waiting counts as CPU time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from ridgeline.lab.page import answered, load, read_inputs

MOVES = 40  # of sliders, on each page whose answers are not streamed
TURNS = 3  # without and with pages, in turn
BODY = {"model": "demo:chat", "max_tokens": 700, "ignore_eos": True, "temperature": 0}


@contextmanager
def started(*command: str) -> Iterator[str]:
    """The URL that a command of ours says it listens on."""
    words = [sys.executable, "-m", "ridgeline", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        (url,) = re.findall(r"http://[\d.]+:\d+", (process.stdout or sys.stdin).readline())
        try:
            yield url
        finally:
            process.terminate()


def moves(inputs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Places of the sliders of a page, one slider after the other."""
    sliders = [one for one in inputs if one["low"] is not None and one["high"] is not None]
    for i in range(MOVES):
        one = sliders[i % len(sliders)]
        share = ((i // len(sliders)) * 0.37) % 1
        low, high = max(one["low"], 1e-3), one["high"]
        value = low * (high / low) ** share if one["scale"] == "log" else low + share * (high - low)
        yield {one["name"]: round(value) if one["kind"] == "integer" else value}


def sliders(url: str) -> None:
    print("page                     wall ms: median   95 %   CPU ms: median   95 %   largest kB")
    with httpx.Client(base_url=url, timeout=60) as http:
        for told in http.get("/lab/api").json()["pages"]:
            page = load(told["name"])
            if page.long:
                print(f"{page.name:24} streams its progress")
                continue
            wall, cpu, sizes = [], [], []
            for inputs in moves(told["inputs"]):
                began = time.perf_counter()
                reply = http.post(f"/lab/api/{page.name}", json=inputs)
                if reply.status_code != 200:
                    continue  # these inputs do not go together, and the page says why
                wall.append(1e3 * (time.perf_counter() - began))
                sizes.append(len(reply.content))
                began = time.thread_time()
                msgspec.json.encode(answered(page, read_inputs(page, inputs)))
                cpu.append(1e3 * (time.thread_time() - began))
            shown = (statistics.median(wall), late(wall), statistics.median(cpu), late(cpu))
            figures = "{:16.1f} {:6.1f} {:16.1f} {:6.1f}".format(*shown)
            print(f"{page.name:24} {figures} {max(sizes) / 1e3:12.1f}", flush=True)


def late(took: list[float]) -> float:
    return statistics.quantiles(took, n=20)[-1]


def first_load(url: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for path in ("/lab/", "/lab/#memory_wall"):
            took, sizes = [], []
            for _ in range(5):
                context = browser.new_context()
                page, moved = context.new_page(), [0]
                page.on("requestfinished", lambda request, moved=moved: count(request, moved))
                began = time.perf_counter()
                page.goto(url + path)
                page.wait_for_selector(".card, .drawing svg")
                took.append(1e3 * (time.perf_counter() - began))
                page.wait_for_timeout(200)
                sizes.append(moved[0])
                context.close()
            median = statistics.median(took)
            print(f"first load of {path}: {sizes[-1] / 1e3:.1f} kB, {median:.0f} ms (median of 5)")
        browser.close()


def count(request: Any, moved: list[int]) -> None:
    """What came over the wire, packed."""
    moved[0] += request.sizes()["responseBodySize"]


def live(num_pages: int) -> None:
    with started("serve", "--lab", "--port", "0") as url:
        while httpx.get(f"{url}/health/ready").status_code != 200:
            time.sleep(0.2)
        rates: dict[int, list[float]] = {0: [], num_pages: []}
        speed(url)
        for _ in range(TURNS):
            for num in rates:
                with watched(url, num) as told:
                    rates[num].append(speed(url))
                if num:
                    print(f"  each page got {sum(told) / len(told):.0f} records")
        for num, found in rates.items():
            shown = ", ".join(f"{rate:,.0f}" for rate in found)
            print(f"{num:3} pages: {shown} tokens/s, median {statistics.median(found):,.0f}")
        ratio = statistics.median(rates[num_pages]) / statistics.median(rates[0])
        print(f"with {num_pages} pages {100 * (ratio - 1):+.1f} %")


def speed(url: str) -> float:
    """Tokens/s of eight requests at once."""
    total = [0]

    def ask(i: int) -> None:
        said = [{"role": "user", "content": f"Tell me story number {i}"}]
        reply = httpx.post(
            f"{url}/v1/chat/completions", json=BODY | {"messages": said}, timeout=300
        )
        total[0] += msgspec.json.decode(reply.content)["usage"]["completion_tokens"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total[0] / (time.perf_counter() - began)


WATCH = """
import asyncio, sys
async def watch(port, told, i):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /lab/live/steps HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n")
    while line := await reader.readline():
        told[i] += line.startswith(b"data: ")
async def main():
    told = [0] * int(sys.argv[2])
    tasks = [asyncio.create_task(watch(int(sys.argv[1]), told, i)) for i in range(len(told))]
    await asyncio.to_thread(sys.stdin.read)
    print(*told)
asyncio.run(asyncio.wait_for(main(), 600))
"""


@contextmanager
def watched(url: str, num: int) -> Iterator[list[int]]:
    """So many readers of the live page's records, in a process of their own."""
    told: list[int] = []
    if not num:
        yield told
        return
    command = [sys.executable, "-c", WATCH, url.rpartition(":")[2], str(num)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        time.sleep(1)
        yield told
        told += map(int, process.communicate("")[0].split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--live", type=int, default=0)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server, and here before torch is loaded
    if args.live:
        live(args.live)
        return
    with started("lab", "--port", "0", "--no-browser") as url:
        sliders(url)
        first_load(url)


if __name__ == "__main__":
    main()
