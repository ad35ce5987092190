"""Is every route closed without a key, but for the probes? And what does a key entitle to?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from ridgeline.clock import WallClock
from ridgeline.server.app import make_routes
from ridgeline.server.service import Service
from tests.server.running import Running, fake_config, running, until

WITHOUT_A_KEY = {"/health/live", "/health/ready"}
KEY, OTHER = "key-of-the-first", "key-of-the-second"


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "keys").write_text(f"# two\n{OTHER}\n")
    config = fake_config(fake_model, {"max_requests_per_key": 3}, api_key_file=str(folder / "keys"))
    with running(config, folder, key=KEY) as started:
        yield started


@pytest.fixture(scope="module")
def routes(fake_model: Path) -> list[Route]:
    return make_routes(Service(fake_config(fake_model), WallClock()))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_the_probes_wants_a_key(server: Running, routes: list[Route]) -> None:
    assert len(routes) == 11
    paths = [route.path.replace("{name:path}", "fake") for route in routes]
    unknown = ["/", "/nothing", "/v1/completions/", "//v1/models", "/health", "/health/live/"]
    assert set(paths) >= WITHOUT_A_KEY
    with httpx.Client(base_url=server.url) as http:
        for path in (*paths, *unknown):
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                reply = http.request(method, path)
                if path in WITHOUT_A_KEY:
                    assert reply.status_code in (200, 405)
                else:
                    assert reply.status_code == 401, (method, path)
                    assert reply.headers["www-authenticate"] == "Bearer"
                    assert reply.headers["x-request-id"].startswith("req-")


def test_wrong_keys_get_the_same_words_as_none(server: Running) -> None:
    bodies = set()
    with httpx.Client(base_url=server.url) as http:
        wrong: list[dict[str, str]] = [
            {}, bearer("wrong"), bearer(KEY[:-1]), bearer(KEY + "x"),
            {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"x-api-key": KEY},
        ]  # fmt: skip
        for headers in wrong:
            reply = http.get("/v1/models", headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "authentication_error"
            assert reply.json()["error"]["code"] == "invalid_api_key"
            bodies.add(reply.text)
        assert len(bodies) == 1
        twice = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer x")]
        assert http.get("/v1/models", headers=twice).status_code == 401


def test_keys_of_file_and_environment_open(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        for key in (KEY, OTHER):
            assert http.get("/v1/models", headers=bearer(key)).status_code == 200
            assert http.get("/metrics", headers=bearer(key)).status_code == 200


def test_the_engine_process_does_not_know_the_key(server: Running) -> None:
    environment = Path(f"/proc/{server.engine_pid}/environ").read_bytes()
    arguments = Path(f"/proc/{server.engine_pid}/cmdline").read_bytes()
    assert KEY.encode() not in environment + arguments
    assert KEY not in server.log.read_text()


def test_a_key_has_a_limit_and_does_not_use_up_anothers(server: Running) -> None:
    def ask(key: str, prompt: str) -> httpx.Response:
        body: dict[str, Any] = {"model": "fake", "prompt": prompt, "max_tokens": 60}
        with httpx.Client(base_url=server.url, headers=bearer(key), timeout=60) as http:
            return http.post("/v1/completions", json=body)

    busy = [threading.Thread(target=ask, args=(KEY, "!slow")) for _ in range(3)]
    for thread in busy:
        thread.start()
    until(lambda: server.metric("ridgeline_sequences_running") == 3, "three to run")
    refused = ask(KEY, "x")
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(OTHER, "x").status_code == 200
    for thread in busy:
        thread.join(60)
    assert ask(KEY, "x").status_code == 200


def test_prefixes_are_not_shared_between_keys(server: Running) -> None:
    prompt = "a secret prompt that is certainly more than thirty-two bytes"

    def cached(key: str, salt: str | None = None) -> int:
        body = {"model": "fake", "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        with httpx.Client(base_url=server.url, headers=bearer(key)) as http:
            usage = http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0
    assert cached(KEY) == 48
    assert cached(OTHER) == 0
    assert cached(KEY, "mine") == 0
    assert cached(KEY, "mine") == 48
    assert cached(OTHER, "mine") == 0
