"""How fast is `ridgeline` as processes of its own: a server under load, and a fresh start?"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.benchmark.http_client import endpoint, run_http
from ridgeline.benchmark.jobs import Job

if TYPE_CHECKING:
    import aiohttp

COMMAND = (sys.executable, "-m", "ridgeline.cli.main")
MODEL_NAME = "measured"  # what clients call it
READY_LIMIT_S = 240.0
STOP_LIMIT_S = 30.0
SHARD_BYTES = 4 << 30
PATTERN = 1 << 22  # random numbers that all weights are cut from
POLL_S = 0.05
WAYS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def flags(options: Mapping[str, Any]) -> list[str]:
    """Fields of EngineConfig as flags of the command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words


# ---------------------------------------------------------------------- a server


@contextmanager
def served(model: str, options: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a `ridgeline serve` that is ready; it is stopped at the end."""
    words = [*COMMAND, "serve", model, "--port", "0", "--served-model-name", MODEL_NAME]
    words += ["--log-level", "WARNING", *flags(options)]
    with tempfile.TemporaryFile("w+") as errors:
        server = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            url = _url(server, errors)
            _wait_until_ready(server, url, errors)
            yield url
        finally:
            _stop(server)


def _url(server: subprocess.Popen[str], errors: IO[str]) -> str:
    if server.stdout is None or not _readable(server.stdout, READY_LIMIT_S):
        raise RuntimeError(f"the server said nothing: {_tail(errors)}")
    match = re.search(r"https?://\S+", server.stdout.readline())
    if match is None:
        raise RuntimeError(f"the server did not start: {_tail(errors)}")
    return match[0]


def _wait_until_ready(server: subprocess.Popen[str], url: str, errors: IO[str]) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError, urllib.error.URLError):
            direct.open(url + "/health/ready", timeout=5).close()
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"the server is not ready: {_tail(errors)}")


def _stop(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _readable(stream: IO[Any], seconds: float) -> bool:
    return bool(select.select([stream], [], [], seconds)[0])


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-600:].strip() or "no message"


def load_server(
    work: ModuleType, url: str, rate: float, count: int, sizes: tuple[int, int], seed: int
) -> dict[str, Any]:
    """One row: `count` requests of (prompt, output) `sizes` at Poisson times, through HTTP."""
    if find_spec("aiohttp") is not None:
        row: dict[str, Any] = asyncio.run(
            work.poisson_http(url, MODEL_NAME, rate, count, *sizes, seed=seed)
        )
        return row | {"client": "workload file"}
    return _own_client(work, url, rate, count, sizes, seed)


def load_callers(
    work: ModuleType, url: str, callers: int, rounds: int, sizes: tuple[int, int]
) -> dict[str, Any]:
    """One row: `callers` who each send a request of (prompt, output) `sizes` as soon as they have
    the last answer, `rounds` times. The first round, in which all come at once, is not counted."""
    prompt_len, out_len = sizes
    prompts = [[work.fresh_ids(prompt_len) for _ in range(rounds)] for _ in range(callers)]
    calls = asyncio.run(_call_in_turn(url, prompts, out_len))
    begin = max(own[1].sent_s for own in calls)
    end = min(own[-1].sent_s for own in calls)
    num_tokens = sum(  # a line has several of them where drafts were right
        out_len / len(call.line_s) * sum(begin <= when < end for when in call.line_s)
        for own in calls
        for call in own
    )
    counted = [call for own in calls for call in own[1:]]
    ttft = [call.line_s[0] - call.sent_s for call in counted]
    itl = [b - a for call in counted for a, b in pairwise(call.line_s)]
    return {
        "workload": "callers_http",
        "callers": callers,
        "rounds": rounds,
        "prompt_len": prompt_len,
        "out_len": out_len,
        "window_s": end - begin,
        "tok_s": num_tokens / (end - begin),
        "ttft_ms_p50": 1e3 * work.pct(ttft, 0.5),
        "ttft_ms_p99": 1e3 * work.pct(ttft, 0.99),
        "itl_ms_p50": 1e3 * work.pct(itl, 0.5),
        "itl_ms_p99": 1e3 * work.pct(itl, 0.99),
    }


@dataclass
class Call:
    """One request, times by the clock that all processes of this machine share."""

    prompt: list[int]
    due_s: float
    sent_s: float = 0.0
    line_s: list[float] = field(default_factory=list)


async def send(session: aiohttp.ClientSession, url: str, call: Call, out_len: int) -> None:
    """As the workload file sends it, with all times kept."""
    body = {
        "model": MODEL_NAME, "prompt": call.prompt, "max_tokens": out_len, "temperature": 0.0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    call.sent_s = time.monotonic()
    async with session.post(url + "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if json.loads(line[6:]).get("choices"):
                    call.line_s.append(now)


async def _call_in_turn(
    url: str, prompts: Sequence[Sequence[list[int]]], out_len: int
) -> list[list[Call]]:
    """What each caller sends, one after the other; the callers side by side."""
    import aiohttp  # `_own_client` does without

    async def one(own: Sequence[list[int]]) -> list[Call]:
        calls: list[Call] = []
        for prompt in own:
            calls.append(Call(prompt, time.monotonic()))
            await send(session, url, calls[-1], out_len)
        return calls

    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        return await asyncio.gather(*map(one, prompts))


def _own_client(
    work: ModuleType, url: str, rate: float, count: int, sizes: tuple[int, int], seed: int
) -> dict[str, Any]:
    """The same figures by our own client, where the workload file's cannot be imported. Its times
    to the first token count from when a request was due."""
    rng, due, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        due += rng.expovariate(rate)
        jobs.append(Job(tuple(work.fresh_ids(sizes[0])), sizes[1], due))
    run, errors = run_http(endpoint(url, MODEL_NAME), jobs)
    done = [job for job in run.jobs if job.token_s]
    ttft, itl = [job.ttft_s for job in done], [gap for job in done for gap in job.gaps_s]
    return {
        "workload": "poisson_http",
        "client": "ridgeline",
        "rate": rate,
        "n": count,
        "prompt_len": sizes[0],
        "out_len": sizes[1],
        "ok": len(done),
        "failed": run.failed,
        "errors": errors[:3],
        "wall_s": run.wall_s,
        "out_tokens": run.num_tokens,
        "ttft_ms_p50": 1e3 * work.pct(ttft, 0.5),
        "ttft_ms_p99": 1e3 * work.pct(ttft, 0.99),
        "itl_ms_p50": 1e3 * work.pct(itl, 0.5),
        "itl_ms_p99": 1e3 * work.pct(itl, 0.99),
    }


# ---------------------------------------------------------------------- a start


def write_weights(model: Path, folder: Path, dtype: str) -> int:
    """Write a checkpoint of the shape of `model`/config.json to `folder`; its bytes.

    The numbers are cut from one stretch of random ones, each tensor from another place of it:
    drawing 8 G numbers afresh would take minutes and no kernel's speed depends on them."""
    config = json.loads((model / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    pattern = (torch.randn(PATTERN, generator=torch.Generator().manual_seed(0)) * 0.02).to(
        WAYS[dtype]
    )
    where: dict[str, str] = {}
    shapes = expected_tensors(read_spec(config))
    total = 0
    for number, names in enumerate(_shards(shapes, pattern.element_size()), start=1):
        tensors = {name: _weights(pattern, name, shapes[name]) for name in names}
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        where |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _shards(shapes: Mapping[str, tuple[int, ...]], size: int) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        names.append(name)
        held += math.prod(shape) * size
        if held >= SHARD_BYTES:
            yield names
            names, held = [], 0
    if names:
        yield names


def _weights(pattern: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=pattern.dtype)
    count, first = math.prod(shape), random.Random(name).randrange(len(pattern))
    times = -(-(first + count) // len(pattern))
    return pattern.repeat(times)[first : first + count].reshape(shape).contiguous()


def first_token(model: Path, options: Mapping[str, Any], ids: Sequence[int]) -> dict[str, float]:
    """Seconds from starting a fresh `ridgeline generate` to the first byte of its answer, which
    the folder's lack of a tokenizer makes the first token's id; and the phases of its start-up
    report. To draw that (-v) takes it some 0.1 s, which are counted."""
    words = [*COMMAND, "generate", str(model), "--token-ids", ",".join(map(str, ids)), "-v"]
    words += ["--max-tokens", "1", "--temperature", "0", *flags(options)]
    with tempfile.TemporaryFile("w+") as errors:
        started = time.monotonic()
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors)
        try:
            if process.stdout is None or not _readable(process.stdout, READY_LIMIT_S):
                raise RuntimeError(f"no token came: {_tail(errors)}")
            first = os.read(process.stdout.fileno(), 1)
            seconds = time.monotonic() - started
            if not first or process.wait(STOP_LIMIT_S):
                raise RuntimeError(f"ridgeline generate failed: {_tail(errors)}")
        finally:
            process.kill()
            process.wait()
        done = time.monotonic() - started
        errors.seek(0)
        report = errors.read()
    return {"first_token_s": seconds, "process_s": done} | start_report(report)


def start_report(text: str) -> dict[str, float]:
    """What `generate -v` says of its start, as numbers: seconds until it was ready, of each phase
    (`start_NAME_s`) and of the process at its first token, and what became of kernels."""
    ready = re.search(r'start-up total_s=([\d.]+) phases="(.*)"', text)
    row = {"engine_ready_s": float(ready[1]) if ready else math.nan}
    for name, seconds in re.findall(r"(\w[\w ]*) ([\d.]+) s\b", ready[2] if ready else ""):
        row[f"start_{name.replace(' ', '_').lower()}_s"] = float(seconds)
    token = re.search(r"first token process_age_s=([\d.]+)", text)
    row["first_token_age_s"] = float(token[1]) if token else math.nan
    kernels = re.search(r"(\d+) kernels compiled in ([\d.]+) s, (\d+) found in ([\d.]+) s", text)
    names = ("kernels_compiled", "kernels_compiled_s", "kernels_found", "kernels_found_s")
    values = kernels.groups() if kernels else (0.0,) * len(names)
    return row | dict(zip(names, map(float, values), strict=True))
