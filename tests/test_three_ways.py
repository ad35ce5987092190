"""Each small real model says the same through Python, the shell and HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from ridgeline.cli.main import main
from ridgeline.config import EngineConfig
from ridgeline.llm import GenerationResult
from ridgeline.server import ServeConfig
from tests.conftest import TEST_DEVICE
from tests.server.running import Running, running
from tests.test_models import MODELS, expected, greedy, load
from tests.tiny_model import make_tiny_model

SLOW = ("babyllama-char105", "babyllama-char105-partner")  # as the others, and as large


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in MODELS],
)
def name(request: pytest.FixtureRequest, shared: Path) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(name: str, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    engine = EngineConfig(
        model=str(shared / "models" / name), device=TEST_DEVICE, dtype="float32", num_blocks=256
    )
    folder = tmp_path_factory.mktemp("server")
    with running(ServeConfig(engine=engine, port=0), folder) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_shell(name: str, shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = expected(name)["prompts"]
    argv = ["generate", str(shared / "models" / name), "--device", TEST_DEVICE]
    for prompt in prompts:
        argv += ["-p", prompt["text"]]
    argv += ["--dtype", "float32", "--temperature", "0", "--max-tokens", "200", "--json"]
    assert main(argv) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    for prompt, result in zip(prompts, results, strict=True):
        assert result["prompt_token_ids"] == prompt["prompt_ids"]
        assert result["outputs"][0]["token_ids"] == prompt["greedy_ids"]


def test_http(name: str, client: OpenAI) -> None:
    """All at once: the prompts as text, as ids, and streamed."""
    prompts = expected(name)["prompts"]
    from_python = load(name).generate([p["prompt_ids"] for p in prompts], greedy(logprobs=0))
    options: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 200, "logprobs": 0}
    options["extra_body"] = {"return_token_ids": True}

    def whole(prompt: dict[str, Any], local: GenerationResult, form: str) -> None:
        reply = client.completions.create(prompt=prompt[form], **options)
        (choice,) = reply.model_dump()["choices"]
        assert choice["prompt_token_ids"] == prompt["prompt_ids"]
        assert choice["token_ids"] == prompt["greedy_ids"]
        assert choice["text"] == local.text
        assert local.logprobs is not None
        logprobs = [entry.logprob for entry in local.logprobs]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
        assert reply.usage is not None
        assert reply.usage.completion_tokens == len(prompt["greedy_ids"])

    def streamed(prompt: dict[str, Any], local: GenerationResult) -> None:
        stream = client.completions.create(prompt=prompt["prompt_ids"], stream=True, **options)
        pieces = [choice for event in stream for choice in event.model_dump()["choices"]]
        assert [i for piece in pieces for i in piece["token_ids"]] == prompt["greedy_ids"]
        assert "".join(piece["text"] for piece in pieces) == local.text

    with ThreadPoolExecutor(8) as pool:
        calls = []
        for prompt, local in zip(prompts, from_python, strict=True):
            calls += [pool.submit(whole, prompt, local, form) for form in ("text", "prompt_ids")]
            calls.append(pool.submit(streamed, prompt, local))
        for call in calls:
            call.result()


def test_the_text_that_llama2c_requires_over_http(name: str, client: OpenAI) -> None:
    want = expected(name).get("llama2c_own_expectation")
    if want is None:
        assert name != "stories260K"
        return
    reply = client.completions.create(
        model=name, prompt=want["prompt_ids"], max_tokens=want["new_tokens"], temperature=0
    )
    assert reply.choices[0].text.lstrip() == want["text"]


def test_a_model_without_tokenizer_streams_token_ids(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "bare", tokenizer=False)
    engine = EngineConfig(model=str(folder), device=TEST_DEVICE, num_blocks=64)
    ask: dict[str, Any] = {"model": "bare", "prompt": [3, 4, 5], "max_tokens": 9, "temperature": 0}
    with (
        running(ServeConfig(engine=engine, port=0), tmp_path) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = client.completions.create(**ask, extra_body={"ignore_eos": True})
        events = list(
            client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
        )
        with pytest.raises(BadRequestError, match="token"):
            client.completions.create(model="bare", prompt="text")
    ids = whole.model_dump()["choices"][0]["token_ids"]
    assert len(ids) == 9
    pieces = [choice["token_ids"] for e in events for choice in e.model_dump()["choices"]]
    assert [i for piece in pieces for i in piece] == ids
    assert len(pieces) > 1
