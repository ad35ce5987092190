"""Does a real model, built by the real builder, say over HTTP what it is known to say?"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from ridgeline import LLM, SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.server import ServeConfig
from tests.conftest import TEST_DEVICE
from tests.server.running import Running, running, until

SEED = 20261121


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "models" / "stories260K"


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = EngineConfig(
        model=str(folder),
        device=TEST_DEVICE,
        dtype="float32",
        num_blocks=256,
        max_num_seqs=16,
        threads=1,
    )
    config = ServeConfig(engine=engine, port=0)
    with running(config, tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def known(folder: Path) -> dict[str, Any]:
    """A prompt, its ids and its greedy continuation, by another implementation."""
    prompts = json.loads((folder / "expected.json").read_text())["prompts"]
    found: dict[str, Any] = next(p for p in prompts if p["text"] and len(p["greedy_ids"]) >= 60)
    return found


def test_the_model_has_its_folders_name(client: OpenAI) -> None:
    assert [card.id for card in client.models.list().data] == ["stories260K"]


def test_greedy_is_the_default_here_and_is_right(
    client: OpenAI, server: Running, known: dict[str, Any]
) -> None:
    """Its generation_config says do_sample false, so a request without a temperature is greedy."""
    with server.http as http:
        ids = http.post("/tokenize", json={"prompt": known["text"]}).json()["tokens"]
        assert ids == known["prompt_ids"]
        wanted = known["greedy_ids"][:60]
        text = http.post("/detokenize", json={"tokens": ids + wanted}).json()["prompt"]
    for prompt in (known["text"], known["prompt_ids"]):
        reply = client.completions.create(model="stories260K", prompt=prompt, max_tokens=60)
        assert text.endswith(reply.choices[0].text)
        assert len(reply.choices[0].text) > 60
    pieces = client.completions.create(
        model="stories260K", prompt=known["text"], max_tokens=60, stream=True
    )
    assert "".join(c.choices[0].text for c in pieces) == reply.choices[0].text


def test_logprobs_add_up(client: OpenAI, known: dict[str, Any]) -> None:
    reply = client.completions.create(
        model="stories260K", prompt=known["text"], max_tokens=8, logprobs=5, echo=True
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    generated = logprobs.top_logprobs[len(known["prompt_ids"]) :]
    values = logprobs.token_logprobs[len(known["prompt_ids"]) :]
    assert [max(row.values()) for row in generated] == pytest.approx(values)
    assert all(v is not None and v <= 0 for v in logprobs.token_logprobs[1:])


def test_n_beams_and_best_of(client: OpenAI, server: Running) -> None:
    base: Any = {"model": "stories260K", "prompt": "Once upon a time", "max_tokens": 12}
    sampled = client.completions.create(**base, n=3, temperature=1.0, seed=1)
    assert len({choice.text for choice in sampled.choices}) > 1
    assert (
        sampled.model_dump()["choices"]
        == (client.completions.create(**base, n=3, temperature=1.0, seed=1).model_dump()["choices"])
    )
    best = client.completions.create(**base, n=1, best_of=4, temperature=1.0, seed=1)
    assert len(best.choices) == 1
    beams = client.completions.create(
        **base, n=2, extra_body={"use_beam_search": True, "beam_width": 3}
    )
    assert len({choice.text for choice in beams.choices}) == 2
    server.wait_until_idle()


def test_no_chat_template_is_said_plainly(server: Running) -> None:
    with server.http as http:
        body = {"model": "stories260K", "messages": [{"role": "user", "content": "hi"}]}
        reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "chat_template_missing"


def test_a_broken_model_folder_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    from tests.server.test_lifecycle import failed_start

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    engine = EngineConfig(model=str(tmp_path / "model"), device="cpu")
    code, log = failed_start(ServeConfig(engine=engine, port=0), tmp_path)
    assert code == 2
    assert "ConfigError: " in log
    assert "config.json" in log
    assert "restarting" not in log


def stream_bodies(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Completions of random length from the beginnings of real stories, greedy and seeded."""
    rng = random.Random(seed)
    prompts = [p["text"] for p in json.loads((folder / "expected.json").read_text())["prompts"]]
    return [
        {
            "model": "stories260K",
            "prompt": rng.choice(prompts) + rng.choice(["", " and", " was", " said"]),
            "max_tokens": rng.randint(1, 120),
            "temperature": rng.choice([0.0, 0.8]),
            "seed": rng.randrange(1 << 30),
            "stream": True,
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_concurrent_streams_equal_each_alone(server: Running, folder: Path, count: int) -> None:
    print(f"seed {SEED}")
    bodies = stream_bodies(folder, count, SEED)
    llm = LLM(str(folder), device=TEST_DEVICE, dtype="float32", num_blocks=256, threads=1)
    fields = ("max_tokens", "temperature", "seed")
    alone = [
        llm.generate(b["prompt"], SamplingParams(**{f: b[f] for f in fields}))[0].text
        for b in bodies
    ]

    async def one(client: AsyncOpenAI, body: dict[str, Any]) -> str:
        stream = await client.completions.create(**body)
        return "".join([event.choices[0].text async for event in stream])

    async def all_at_once() -> list[str]:
        url = f"{server.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies))

    assert asyncio.run(all_at_once()) == alone
    server.wait_until_idle()


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_streams_left_at_random_leave_nothing(server: Running, folder: Path, count: int) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    bodies = stream_bodies(folder, count, SEED)
    with server.http as http:
        http.post("/v1/completions", json=bodies[0] | {"stream": False})
    server.wait_until_idle()
    tasks = server.metric("ridgeline_http_tasks")

    async def leave(client: AsyncOpenAI, body: dict[str, Any], events: int) -> None:
        stream = await client.completions.create(**body, n=rng.choice([1, 1, 3]))
        async for _ in stream:
            events -= 1
            if events < 0:
                break
        await stream.close()

    async def in_groups() -> None:
        url = f"{server.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
            for start in range(0, count, 20):
                group = bodies[start : start + 20]
                await asyncio.gather(*(leave(client, b, rng.choice([0, 1, 5, 30])) for b in group))

    asyncio.run(in_groups())
    server.wait_until_idle()
    assert server.metric("ridgeline_kv_cache_usage_ratio") == 0
    until(lambda: server.metric("ridgeline_http_tasks") <= tasks, "tasks to end")
    with server.http as http:
        again = http.post("/v1/completions", json=bodies[0] | {"stream": False}).json()
    assert again["choices"][0]["finish_reason"] in ("length", "stop")
