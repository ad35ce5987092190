"""Do very many streams at once say, byte for byte, what each says alone? Against `ridgeline serve`
as it is by default, with the bundled model and one compute thread.

usage: python bench/server/streams.py [--streams 1000] [--tokens 256] [--prompts 8]

Answers are greedy; each prompt's is asked for alone first. Larger batches round otherwise, and that
decides where two tokens are all but equal (docs/deterministic.md): so each is asked for once more
in one full batch, in which all copies must agree, and a stream may say either. Exit code 1 when one
was refused or wrong. Times are seconds from the request to its first text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter

import httpx

SUBJECTS = ("a fox", "the sea", "an old clock", "two sisters", "the moon", "a red door", "rain")
PATIENCE_S = 1800.0
FULL = 64  # sequences that run at once on a CPU


async def read(http: httpx.AsyncClient, body: dict[str, object]) -> tuple[str, float | None]:
    """The whole text and the seconds to its first piece; the text says what went wrong, if the time
    is None."""
    start, first, text, ended = time.monotonic(), None, "", False
    try:
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return f"status {reply.status_code}", None
            async for line in reply.aiter_lines():
                ended |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error {event['error']['code']}", None
                    text += "".join(choice["text"] for choice in event["choices"])
                    first = first or time.monotonic() - start
    except httpx.HTTPError as problem:
        return type(problem).__name__, None
    return (text, first) if ended else ("cut off", None)


async def ask(url: str, asked: argparse.Namespace) -> int:
    limits = httpx.Limits(max_connections=asked.streams)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=PATIENCE_S) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        bodies: list[dict[str, object]] = [
            {
                "model": model, "prompt": f"Story {i}, of {SUBJECTS[i % len(SUBJECTS)]}: once",
                "max_tokens": asked.tokens, "temperature": 0, "ignore_eos": True,
            }
            for i in range(asked.prompts)
        ]  # fmt: skip
        alone = [await read(http, body) for body in bodies]
        if any(first is None for _, first in alone):
            raise SystemExit(f"not even one at a time: {alone}")
        rows = await asyncio.gather(*(read(http, bodies[i % len(bodies)]) for i in range(FULL)))
        batched = [{text for text, _ in rows[i :: len(bodies)]} for i in range(len(bodies))]
        if any(len(texts) != 1 for texts in batched):
            raise SystemExit(f"copies in one batch differ: {batched}")
        right = [{text} | texts for (text, _), texts in zip(alone, batched, strict=True)]
        start = time.monotonic()
        found = await asyncio.gather(
            *(read(http, bodies[i % len(bodies)]) for i in range(asked.streams))
        )
        seconds = time.monotonic() - start
    seen: Counter[str] = Counter()
    firsts = sorted(first for _, first in found if first is not None)
    for i, (text, first) in enumerate(found):
        is_right = text in right[i % len(right)]
        seen[text if first is None else "ok" if is_right else "wrong"] += 1
    at = [firsts[int(share * (len(firsts) - 1))] if firsts else 0.0 for share in (0.5, 0.99)]
    print(f"{asked.streams} streams of {asked.tokens} tokens in {seconds:.0f} s: {dict(seen)}")
    print(f"{sum(len(texts) > 1 for texts in right)} of {len(right)} prompts end in a near tie")
    print(f"first text: p50 {at[0]:.1f} s, p99 {at[1]:.1f} s")
    return 0 if seen["ok"] == asked.streams else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=8)
    asked = parser.parse_args()
    command = [sys.executable, "-m", "ridgeline", "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next(iter(server.stdout or ())).rpartition(" ")[2].strip()
            while httpx.get(f"{url}/health/ready").status_code != 200:
                time.sleep(0.5)
            return asyncio.run(ask(url, asked))
        finally:
            server.terminate()


if __name__ == "__main__":
    raise SystemExit(main())
