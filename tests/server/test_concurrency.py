"""Do many streams at once say exactly what each would say alone?

How many: RIDGELINE_TEST_STREAMS (50 by default, 200 in the slow run).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.answer import sample_seed
from tests.server.fake_build import reference
from tests.server.model_folder import byte_ids
from tests.server.running import PATIENCE_S, Running, fake_config, running

STREAMS = int(os.environ.get("RIDGELINE_TEST_STREAMS", "50"))


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A small cache, so that many streams mean queues and preemptions."""
    engine = {"max_num_seqs": 24, "num_blocks": 200, "max_num_batched_tokens": 128}
    config = fake_config(fake_model, {"max_queued_cache_fills": 100.0}, engine)
    with running(config, tmp_path_factory.mktemp("server")) as made:
        yield made


@dataclass(frozen=True)
class Case:
    body: dict[str, Any]
    texts: list[str]
    finish: list[str]


def random_case(rng: random.Random) -> Case:
    prompt = rng.choice(["", "shared beginning of a prompt. "]) + "".join(
        rng.choice("abcdefgh ") for _ in range(rng.choice([1, 15, 16, 17, 60, 150]))
    )
    count, n = rng.choice([1, 20, 80, 150]), rng.choice([1, 1, 1, 2, 3])
    seed = rng.randrange(1 << 30)
    ids = [reference(byte_ids(prompt), count, sample_seed(seed, i)) for i in range(n)]
    texts = [bytes(sample).decode("utf-8", "replace") for sample in ids]
    finish = ["length"] * n
    stop = texts[0][count // 2 : count // 2 + 3] if rng.random() < 0.4 and count > 10 else None
    if stop and "\ufffd" not in stop:
        finish = ["stop" if stop in text else "length" for text in texts]
        texts = [text.partition(stop)[0] for text in texts]
    else:
        stop = None
    body = {
        "model": "fake", "prompt": prompt, "max_tokens": count, "n": n, "seed": seed,
        "temperature": 1.0, "stop": stop, "stream": True,
    }  # fmt: skip
    return Case(body, texts, finish)


async def read_stream(http: httpx.AsyncClient, case: Case) -> tuple[list[str], list[str], int]:
    texts, finish = [""] * len(case.texts), [""] * len(case.texts)
    num_done = 0
    async with http.stream("POST", "/v1/completions", json=case.body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            assert num_done == 0 or not line, "something after [DONE]"
            if line == "data: [DONE]":
                num_done += 1
            elif line.startswith("data: "):
                for choice in json.loads(line[6:])["choices"]:
                    assert not finish[choice["index"]], "something after the finish"
                    texts[choice["index"]] += choice["text"]
                    finish[choice["index"]] = choice["finish_reason"] or ""
    return texts, finish, num_done


async def read_whole(http: httpx.AsyncClient, case: Case) -> list[str]:
    reply = await http.post("/v1/completions", json=case.body | {"stream": False})
    return [choice["text"] for choice in reply.json()["choices"]]


async def run_all(server: Running, cases: list[Case]) -> None:
    limits = httpx.Limits(max_connections=2 * len(cases))
    async with httpx.AsyncClient(
        base_url=server.url, limits=limits, timeout=PATIENCE_S * 5
    ) as http:
        streams = asyncio.gather(*(read_stream(http, case) for case in cases))
        wholes = asyncio.gather(*(read_whole(http, case) for case in cases[::5]))
        for case, (texts, finish, num_done) in zip(cases, await streams, strict=True):
            assert texts == case.texts
            assert (finish, num_done) == (case.finish, 1)
        for case, texts in zip(cases[::5], await wholes, strict=True):
            assert texts == case.texts


def check_streams(server: Running, count: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    asyncio.run(run_all(server, [random_case(rng) for _ in range(count)]))
    server.wait_until_idle()
    assert server.metric("ridgeline_late_outputs_total") >= 0
    assert "Traceback" not in server.log.read_text()


def test_concurrent_streams_are_byte_exact(server: Running) -> None:
    check_streams(server, STREAMS)


@pytest.mark.slow
def test_two_hundred_concurrent_streams_are_byte_exact(server: Running) -> None:
    check_streams(server, 200)


def test_one_bad_request_among_many(server: Running) -> None:
    """What goes wrong for one is the same as without it for all others."""
    seed = 5
    rng = random.Random(seed)
    cases = [random_case(rng) for _ in range(20)]

    async def poison(http: httpx.AsyncClient, body: dict[str, Any]) -> int:
        return (await http.post("/v1/completions", json=body)).status_code

    async def go() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            bad = asyncio.gather(
                *(poison(http, {"model": "fake", "prompt": "!nan x", "n": n}) for n in (1, 2, 3)),
                poison(http, {"model": "fake", "prompt": "\u0000"}),
                poison(http, {"model": "fake", "prompt": "a", "stop_token_ids": [5000]}),
            )
            await run_all(server, cases)
            return await bad

    assert asyncio.run(go()) == [500, 500, 500, 400, 400]
    server.wait_until_idle()
