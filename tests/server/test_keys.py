"""Is every route closed without a key, but for the probes? And what does a key entitle to?"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.clock import WallClock
from ridgeline.server.app import Route, make_routes
from ridgeline.server.service import Service
from tests.server.running import Running, fake_config, running, until

WITHOUT_A_KEY = {"/health/live", "/health/ready", "/health", "/v1/health", "/ping"}
KEY, OTHER, THIRD = "key-of-the-first", "key-of-the-second", "key-of-the-third"  # KEY: operator's


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    hashed = sha256(THIRD.encode()).hexdigest()
    (folder / "keys").write_text(f"# two\n{OTHER} name=other\nsha256:{hashed} name=third\n")
    config = fake_config(
        fake_model, {"max_sequences_per_key": 3}, api_key_file=str(folder / "keys"), access_log=True
    )
    with running(config, folder, key=KEY) as started:
        yield started


@pytest.fixture(scope="module")
def routes(fake_model: Path) -> list[Route]:
    return make_routes(Service(fake_config(fake_model), WallClock()))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_the_probes_wants_a_key(server: Running, routes: list[Route]) -> None:
    assert len(routes) == 18
    paths = [route.path.replace("{name:path}", "fake") for route in routes]
    unknown = [
        "/lab/",
        "/lab/api",
        "/nothing",
        "/v1/completions/",
        "//v1/models",
        "/healthy",
    ]
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
            {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"x-api-key": KEY[:-1]},
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
        for key in (KEY, OTHER, THIRD):
            assert http.get("/v1/models", headers=bearer(key)).status_code == 200
            assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        assert http.get("/metrics", headers=bearer(KEY)).status_code == 200
        refused = http.get("/metrics", headers=bearer(OTHER))  # what all do is not for one of them
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "insufficient_permissions"
        assert "`metrics`" in refused.json()["error"]["message"]


def test_the_engine_process_does_not_know_the_key(server: Running) -> None:
    environment = Path(f"/proc/{server.engine_pid}/environ").read_bytes()
    arguments = Path(f"/proc/{server.engine_pid}/cmdline").read_bytes()
    assert KEY.encode() not in environment + arguments
    assert KEY not in server.log.read_text()


def test_the_access_log_has_the_name_of_a_key(server: Running) -> None:
    with httpx.Client(base_url=server.url, headers=bearer(OTHER)) as http:
        request_id = http.get("/version").headers["x-request-id"]
    lines = server.log.read_text
    until(lambda: request_id in lines(), "the line")
    [line] = [line for line in lines().splitlines() if request_id in line]
    assert "key=other" in line.split()
    assert OTHER not in lines()


def test_keys_do_not_see_each_other(server: Running) -> None:
    """Neither ids nor counts nor sizes nor prompts: each key's report is of its own requests, and
    the operator's of all."""
    ids: dict[str, set[str]] = {}
    for key, count in ((OTHER, 2), (THIRD, 3)):
        for i in range(count):
            body = {"model": "fake", "prompt": f"{key} {i}", "max_tokens": 2 + count}
            with httpx.Client(base_url=server.url, headers=bearer(key)) as http:
                reply = http.post("/v1/completions", json=body)
                assert reply.status_code == 200
                ids.setdefault(key, set()).add(reply.headers["x-request-id"].split("-")[1])

    def report(key: str) -> dict[str, Any]:
        with httpx.Client(base_url=server.url, headers=bearer(key), timeout=60) as http:
            found: dict[str, Any] = http.get("/explain").json()
        return found

    def known(found: dict[str, Any]) -> set[str]:
        return {row["request_id"].split("-")[1] for row in found["requests"]}

    for key, count in ((OTHER, 2), (THIRD, 3)):
        found = report(key)
        assert known(found) == ids[key]
        assert set(found) == {"model", "requests", "whole", "floor"}
        assert {request["num_output_tokens"] for request in found["requests"]} == {2 + count}
        text = json.dumps(found)
        assert not any(name in text for other in ids if other != key for name in ids[other])
    of_all = report(KEY)
    assert known(of_all) >= ids[OTHER] | ids[THIRD]
    assert of_all["server"]["num_finished"] >= 5


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
    with httpx.Client(base_url=server.url, headers=bearer(KEY)) as http:  # that is no answer
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
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


def test_several_keys_share_the_engine_fairly_and_the_log_says_why(server: Running) -> None:
    assert "policy=fair (nothing was asked; several keys)" in server.log.read_text().replace(
        '"', ""
    )
