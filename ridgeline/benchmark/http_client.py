"""How fast does a running server answer? Streams from an OpenAI-compatible endpoint, open loop:
requests leave at their own times, whether or not earlier ones were answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ridgeline.benchmark.jobs import Job
from ridgeline.benchmark.run import JobTimes, Run
from ridgeline.errors import ConfigError, RidgelineError

MAX_LINE_BYTES = 1 << 20


class ServerFault(RidgelineError):
    """The server refused a request or broke off its answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An http or https server that offers /v1/completions. `api_key` None sends no key."""

    host: str
    port: int
    secure: bool
    path: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0


def endpoint(url: str, model: str, api_key: str | None = None) -> Endpoint:
    """The endpoint of "http://host:port" (a path before /v1 is kept). ConfigError if it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url} is no server; write http://127.0.0.1:8000")
    secure = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(
        parts.hostname, parts.port or (443 if secure else 80), secure, path, model, api_key
    )


def run_http(server: Endpoint, jobs: Sequence[Job]) -> tuple[Run, list[str]]:
    """Send the jobs at their times; the run and what went wrong with those that failed."""
    return asyncio.run(_run(server, jobs))


def served_models(server: Endpoint) -> list[str]:
    """Names that the server answers to. ServerFault when it cannot be asked."""
    return asyncio.run(_models(server))


def fetch(server: Endpoint, path: str) -> bytes:
    """The body of a GET. ServerFault unless it succeeds, OSError when nobody is there."""
    return asyncio.run(_get(server, path))


async def _get(server: Endpoint, path: str) -> bytes:
    return b"".join([part async for part in _exchange(server, "GET", path, None)])


async def _models(server: Endpoint) -> list[str]:
    body = await _get(server, "/v1/models")
    try:
        return [str(row["id"]) for row in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        raise ServerFault("the server's /v1/models is not what OpenAI's looks like") from None


async def _run(server: Endpoint, jobs: Sequence[Job]) -> tuple[Run, list[str]]:
    run = Run(time.monotonic())
    run.jobs = [JobTimes(run.started_s + job.arrival_s) for job in jobs]
    tasks = [
        asyncio.create_task(_one(server, job, times))
        for job, times in zip(jobs, run.jobs, strict=True)
    ]
    errors = [error for error in await asyncio.gather(*tasks) if error is not None]
    run.ended_s = time.monotonic()
    run.failed = len(errors)
    return run, errors


async def _one(server: Endpoint, job: Job, times: JobTimes) -> str | None:
    """Send one job when it is due; what went wrong, or None."""
    await asyncio.sleep(max(0.0, times.due_s - time.monotonic()))
    try:
        async with asyncio.timeout(server.timeout_s):
            await _stream(server, job, times)
    except (OSError, RidgelineError, TimeoutError, asyncio.IncompleteReadError) as error:
        times.token_s.clear()
        return str(error) or type(error).__name__
    return None


async def _stream(server: Endpoint, job: Job, times: JobTimes) -> None:
    body = {
        "model": server.model,
        "prompt": list(job.prompt),
        "max_tokens": job.num_output_tokens,
        "temperature": job.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    completed = 0
    async for event in _events(server, body):
        now = time.monotonic()
        if "error" in event:
            raise ServerFault(str(event["error"]))
        if event.get("choices"):
            times.token_s.append(now)
        if event.get("usage"):
            completed = int(event["usage"]["completion_tokens"])
    if not times.token_s:
        raise ServerFault("the answer had no tokens")
    _share_out(times, completed)


def _share_out(times: JobTimes, completed: int) -> None:
    """One event may carry several tokens (they came when it came) or, at the end, none."""
    if completed:
        times.token_s += [times.token_s[-1]] * (completed - len(times.token_s))
        del times.token_s[completed:]


async def _events(server: Endpoint, body: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of the server-sent events, up to [DONE]."""
    rest = b""
    payload = json.dumps(body).encode()
    async for part in _exchange(server, "POST", "/v1/completions", payload):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield json.loads(data)
    raise ServerFault("the answer broke off before [DONE]")


async def _exchange(
    server: Endpoint, method: str, path: str, payload: bytes | None
) -> AsyncIterator[bytes]:
    """One HTTP/1.1 request; the pieces of the response's body. ServerFault unless it is a 200."""
    reader, writer = await asyncio.open_connection(
        server.host, server.port, ssl=server.secure or None, limit=MAX_LINE_BYTES
    )
    try:
        writer.write(_head(server, method, path, payload) + (payload or b""))
        await writer.drain()
        status, headers = await _response_head(reader)
        body = _body(reader, headers)
        if status != 200:
            text = b"".join([part async for part in body])
            raise ServerFault(f"status {status}: {text[:300].decode(errors='replace')}")
        async for part in body:
            yield part
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _head(server: Endpoint, method: str, path: str, payload: bytes | None) -> bytes:
    lines = [
        f"{method} {server.path}{path} HTTP/1.1",
        f"Host: {server.host}:{server.port}",
        "Connection: close",
        "Accept: */*",
    ]
    if payload is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    if server.api_key:
        lines.append(f"Authorization: Bearer {server.api_key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _response_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await reader.readline()).decode("latin-1").split()
    if len(words) < 2 or not words[1].isdigit():
        raise ServerFault("the server does not speak HTTP")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip().lower()
    return int(words[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body, chunked or up to the end of the connection."""
    if "chunked" not in headers.get("transfer-encoding", ""):
        while part := await reader.read(65536):
            yield part
        return
    while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()
