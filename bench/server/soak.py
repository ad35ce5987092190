"""Does a server stay right, and as small as it was, for hours of traffic, aborts and faults?

    python -m bench.server.soak MODEL [MODEL ...] --minutes 120 --json out.json

Each MODEL has a server of its own with the default settings, in float32, with one compute thread,
and callers that pause only where an engine begins a new life. A caller asks for one of some dozens
of answers, whole or streamed, whose text is known: the server said it alone, at the beginning. One
in five leaves in the middle. Every `--fault-every` seconds the engine process is stopped for five
seconds, or, each fourth time of the first third, killed: the last life is then long enough to tell
warm-up from growth. Each life begins alike: every question alone, then a burst of more sequences
than the callers ever have open together. So what a shape of step needs when it is first met is
there before memory counts. Requests that end with an error that says "try again" are counted,
anything else is a fault.
Memory is read from /proc each second: all that a process has for itself but pages of files, which
are its own or not as other processes come and go. The slope is that of the straight line through a
life's values over the requests that had ended, from the warm-up on (`--warm` seconds from its
start); lives count by their requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import ridgeline

CALLERS = 12
NUM_QUESTIONS = 48
LEAVES = 0.2  # of the calls
WORDS = ("the", "a", "little", "dog", "cat", "ran", "to", "big", "tree", "and", "saw", "happy")
RETRYABLE = (503,)
READY_S = 120.0
KILL_EACH = 4  # of the faults
STOPPED_S = 5.0  # a sixth of what a server takes for stuck


@dataclass
class Memory:
    """Growth of one process over its lives, each from its warm-up on."""

    grown_bytes: float = 0.0
    num_requests: int = 0
    largest_bytes: int = 0

    @property
    def slope(self) -> float | None:
        return self.grown_bytes / self.num_requests if self.num_requests else None


@dataclass
class Life:
    """Of one process: when it was first seen, and what it held each second from warm-up on."""

    pid: int
    since: float
    ended: list[int] = field(default_factory=list)  # requests, by then
    held: list[int] = field(default_factory=list)  # bytes


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: dict[str, Memory] = field(
        default_factory=lambda: {"http": Memory(), "engine": Memory()}
    )
    fds: list[int] = field(default_factory=list)
    samples: list[tuple[int, str, int, int, int]] = field(default_factory=list)
    """Every ten seconds: second of the run, name, pid, its own bytes, requests that had ended."""

    @property
    def num_ended(self) -> int:
        return self.counts["right"] + self.counts["left"] + self.counts["wrong"]


class Soak:
    def __init__(self, model: str, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.rng = random.Random(args.seed)
        self.tally = Tally()
        self.known: dict[str, str] = {}
        self.url = ""
        self.since = time.monotonic()
        self.process: subprocess.Popen[str] | None = None
        self.may_call = asyncio.Event()

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        command = [sys.executable, "-m", "ridgeline", "serve", self.model, "--port", "0"]
        command += ["--served-model-name", "soak", "--dtype", "float32", "--threads", "1"]
        command += self.args.options.split()
        with open(os.devnull, "w") as nowhere:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=nowhere, text=True, start_new_session=True
            )
            self.process = process
            try:
                for line in process.stdout or ():
                    if "http://" in line:
                        self.url = "http://" + line.partition("http://")[2].split()[0].rstrip(".,")
                        break
                yield
            finally:
                process.send_signal(signal.SIGTERM)
                self.tally.counts[f"exit code {process.wait(60)}"] += 1

    async def run(self) -> Tally:
        with self.served():
            async with httpx.AsyncClient(
                base_url=self.url, timeout=READY_S, trust_env=False, limits=httpx.Limits()
            ) as http:
                await self._until_ready(http)
                await self._begin(http)
                end = time.monotonic() + 60 * self.args.minutes
                beside = [
                    asyncio.create_task(self._watch()),
                    asyncio.create_task(self._fault(http)),
                ]
                await asyncio.gather(*(self._call_until(http, end) for _ in range(CALLERS)))
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                await self._until_ready(http)
                metrics = (await http.get("/metrics")).text
                for name in ("kv_cache_used_blocks", "http_open_requests", "sequences_running"):
                    lines = [x for x in metrics.splitlines() if x.startswith(f"ridgeline_{name}")]
                    held = sum(float(x.split()[-1]) for x in lines)
                    self.tally.counts["left behind"] += int(held)
        return self.tally

    async def _until_ready(self, http: httpx.AsyncClient) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.process and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/health/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
        raise SystemExit(f"{self.model}: not ready within {READY_S:g} s")

    async def _begin(self, http: httpx.AsyncClient) -> None:
        """Of each life of an engine: one answer after the other, then the burst. The first life
        says what each question is answered with alone, the others must say the same."""
        self.may_call.clear()
        for text in list(self.known) or [
            json.dumps(self._question()) for _ in range(NUM_QUESTIONS)
        ]:
            reply = await self._answered(http, json.loads(text))
            if text in self.known:
                self._judge(text, _texts(reply.json()))
            else:
                self.known[text] = _texts(reply.json())
        await self._burst(http)
        self.may_call.set()

    async def _answered(self, http: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        """Just after a kill a server may not know yet that its engine is gone."""
        end = time.monotonic() + READY_S
        while True:
            reply = await http.post("/v1/completions", json=body)
            if reply.status_code not in RETRYABLE or time.monotonic() > end:
                return reply.raise_for_status()
            await asyncio.sleep(0.2)

    async def _burst(self, http: httpx.AsyncClient) -> None:
        """More at once, and longer, than the callers ever ask: what the largest step needs is part
        of what a process takes for itself, not of what it grows by."""
        asked = [self._question() | {"n": 3, "max_tokens": 60} for _ in range(NUM_QUESTIONS)]
        await asyncio.gather(*(http.post("/v1/completions", json=body) for body in asked))

    def _question(self) -> dict[str, Any]:
        rng = self.rng
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 4, 12, 40])))
        body: dict[str, Any] = {"model": "soak", "prompt": prompt, "seed": rng.randrange(1 << 30)}
        body |= {"max_tokens": rng.choice([1, 8, 24, 60]), "temperature": rng.choice([0.0, 1.0])}
        body |= {"n": rng.choice([1, 1, 1, 3]), "stop": rng.choice([None, "dog", " and"])}
        return body

    async def _call_until(self, http: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            await self.may_call.wait()
            question = self.rng.choice(list(self.known))
            try:
                await self._call(http, question)
            except httpx.TransportError as error:
                self.tally.counts[f"connection lost: {type(error).__name__} {error}"[:90]] += 1

    async def _call(self, http: httpx.AsyncClient, question: str) -> None:
        body, counts = json.loads(question), self.tally.counts
        leaves, streams = self.rng.random() < LEAVES, self.rng.random() < 0.5
        if not streams and not leaves:
            reply = await http.post("/v1/completions", json=body)
            if reply.status_code == 200:
                self._judge(question, _texts(reply.json()))
            else:
                await self._failed(reply.status_code, reply.text)
            return
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                await self._failed(reply.status_code, (await reply.aread()).decode())
                return
            texts = [""] * body["n"]
            async for event in _events(reply):
                if "error" in event:
                    counts[f"error event {event['error']['code']}"] += 1
                    return
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                if leaves:
                    counts["left"] += 1
                    return
            self._judge(question, "\0".join(texts))

    async def _failed(self, status: int, text: str) -> None:
        name = "try again" if status in RETRYABLE else "refused"
        self.tally.counts[f"{name}: {status} {json.loads(text)['error']['code']}"] += 1
        await asyncio.sleep(0.2)

    def _judge(self, question: str, texts: str) -> None:
        right = texts == self.known[question]
        self.tally.counts["right" if right else "wrong"] += 1
        if not right and len(self.tally.wrong) < 20:
            self.tally.wrong.append(f"{question}: {self.known[question]!r} and {texts!r}")

    async def _fault(self, http: httpx.AsyncClient) -> None:
        for number in itertools.count(1):
            await asyncio.sleep(self.args.fault_every or inf)
            if (pid := self._pids().get("engine")) is None:
                continue
            if number % KILL_EACH or time.monotonic() - self.since > 21 * self.args.minutes:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
                self.tally.counts["engine stopped and continued"] += 1
            else:
                os.kill(pid, signal.SIGKILL)
                self.tally.counts["engine killed"] += 1
                await self._until_ready(http)
                await self._begin(http)
            await self._until_ready(http)

    # ------------------------------------------------------------------ memory

    async def _watch(self) -> None:
        lives: dict[str, Life] = {}
        try:
            while True:
                await asyncio.sleep(1)
                for name, pid in self._pids().items():
                    self._look(lives, name, pid)
        finally:
            for name, life in lives.items():
                self._add(name, life)

    def _pids(self) -> dict[str, int]:
        """Of the server and of the engine, which is its child."""
        if self.process is None:
            return {}
        found = {"http": self.process.pid}
        children = Path(f"/proc/{found['http']}/task/{found['http']}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found["engine"] = int(child)
        return found

    def _look(self, lives: dict[str, Life], name: str, pid: int) -> None:
        life = lives.get(name)
        if life is None or life.pid != pid:
            if life is not None:
                self._add(name, life)
            life = lives[name] = Life(pid, time.monotonic())
        try:
            size = _own_bytes(pid)
        except (OSError, ValueError):
            return  # it has just ended
        memory = self.tally.memory[name]
        memory.largest_bytes = max(memory.largest_bytes, size)
        second = int(time.monotonic() - self.since)
        if not second % 10:
            self.tally.samples.append((second, name, pid, size, self.tally.num_ended))
        if time.monotonic() - life.since >= self.args.warm:
            life.held.append(size)
            life.ended.append(self.tally.num_ended)
        if name == "http":
            self.tally.fds = [*self.tally.fds[:1], len(os.listdir(f"/proc/{pid}/fd"))]

    def _add(self, name: str, life: Life) -> None:
        if len(set(life.ended)) > 1:
            num_requests = life.ended[-1] - life.ended[0]
            slope = float(np.polyfit(life.ended, life.held, 1)[0])
            memory = self.tally.memory[name]
            memory.grown_bytes += slope * num_requests
            memory.num_requests += num_requests


def _texts(reply: dict[str, Any]) -> str:
    return "\0".join(choice["text"] for choice in reply["choices"])


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _own_bytes(pid: int) -> int:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(
        int(row.split()[1]) for row in rows if row.startswith(("Anonymous", "SwapPss"))
    )


async def soak(soaks: Sequence[Soak]) -> None:
    await asyncio.gather(*(one.run() for one in soaks))


def show(found: dict[str, Tally]) -> None:
    for model, tally in found.items():
        print(f"{Path(model).name}: {tally.num_ended} requests, {tally.counts['wrong']} wrong")
        for name, count in sorted(tally.counts.items()):
            print(f"  {name:40} {count}")
        for name, memory in tally.memory.items():
            slope = "not known" if memory.slope is None else f"{memory.slope:.1f} bytes a request"
            print(f"  {name}: {slope}, at most {memory.largest_bytes >> 20} MiB")
        print(f"  open files of the server: {tally.fds}")


def record(args: argparse.Namespace, found: dict[str, Tally]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"ridgeline": ridgeline.__version__, "python": platform.python_version()},
        "minutes": args.minutes,
        "fault_every_s": args.fault_every,
        "models": {
            Path(model).name: asdict(tally)
            | {"counts": dict(tally.counts)}  # Python 3.11 makes a Counter of pairs of it
            | {"slopes": {name: m.slope for name, m in tally.memory.items()}}
            for model, tally in found.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", nargs="*", default=["demo:chat"])
    add("--minutes", type=float, default=120.0)
    add("--fault-every", type=float, default=300.0, help="seconds; 0: no faults")
    add("--warm", type=float, default=300.0, help="seconds of a process that do not count")
    add("--options", default="", help="further flags of ridgeline serve")
    add("--seed", type=int, default=random.randrange(1 << 30))
    add("--json", type=Path)
    args = parser.parse_args(arguments)
    print(f"seed {args.seed}", flush=True)
    soaks = [Soak(model, args) for model in args.models]
    found = {one.model: one.tally for one in soaks}
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell had them ignored
        signal.signal(number, signal.default_int_handler)
    try:
        asyncio.run(soak(soaks))
    finally:  # what was seen until a fault or Ctrl-C is worth hours
        show(found)
        if args.json:
            args.json.write_text(json.dumps(record(args, found), indent=1) + "\n")
    return 1 if any(t.counts["wrong"] or t.counts["left behind"] for t in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
