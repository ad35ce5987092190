"""By which paths, keys, names and encryption is the server reached?"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.errors import ConfigError
from ridgeline.server.config import Listening
from ridgeline.server.lifecycle import check_front
from tests.server.running import PATIENCE_S, Running, fake_config, running

CHAT = "/v1/chat/completions"
KEY = "a-key-for-the-tests"
ORIGIN = "https://app.example"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = fake_config(fake_model, root_path="/llm", allowed_origins=(ORIGIN,))
    with running(config, tmp_path_factory.mktemp("front"), KEY) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http as client:
        yield client


@pytest.fixture(scope="module")
def keyless(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


def test_probes_of_every_kind_want_no_key(keyless: httpx.Client) -> None:
    for path in ("/health", "/health/", "/ping", "/v1/health", "/health/live", "/llm/health"):
        assert keyless.get(path).status_code == 200, path
    assert keyless.get("/v1/models").status_code == 401


def test_a_key_in_the_header_of_other_clients(keyless: httpx.Client) -> None:
    for headers, status in (
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": "wrong-key-of-somebody"}, 401),
        ({"authorization": "Bearer wrong-key", "x-api-key": KEY}, 401),
    ):
        assert keyless.get("/v1/models", headers=headers).status_code == status


def test_slashes_and_what_a_proxy_leaves_in_front(http: httpx.Client) -> None:
    for path in (CHAT, f"{CHAT}/", "/v1//chat/completions", f"/llm{CHAT}", f"/llm/{CHAT}//"):
        assert http.post(path, json=BODY).status_code == 200, path
    for path in ("/v1/models/", "/v1/models/fake", "/v1/models/fake/", "/llm/v1/models/fake"):
        assert http.get(path).status_code == 200, path
    assert http.get("/llmx/v1/models").status_code == 404


def test_who_asks_for_nothing_hears_what_there_is(http: httpx.Client) -> None:
    for path, meant in (
        ("/chat/completions", CHAT),
        ("/models", "/v1/models"),
        ("/v1/chat/completion", CHAT),
    ):
        reply = http.get(path)
        message = reply.json()["error"]["message"]
        assert reply.status_code == 404
        assert f"perhaps {meant} is meant" in message
        assert "/v1/completions" in message
    refused = http.get(CHAT)
    assert refused.status_code == 405
    assert "served with POST" in refused.json()["error"]["message"]


def test_what_is_told_of_the_server_and_its_tokenizer(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert (info["model"], info["max_model_len"]) == (["fake"], 512)
    assert info["engine"]["max_num_seqs"] is None
    told = http.get("/tokenizer_info").json()
    assert "messages" in told["chat_template"]
    load = http.get("/load").json()
    assert load["server_load"] == load["running"] + load["waiting"] == 0


def test_scripts_of_a_page_that_is_allowed(http: httpx.Client, keyless: httpx.Client) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-y"}
    flight = keyless.options(CHAT, headers={"origin": ORIGIN, **asks})
    assert flight.status_code == 200
    assert flight.headers["access-control-allow-origin"] == ORIGIN
    reply = http.post(CHAT, json=BODY, headers={"origin": ORIGIN})
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    foreign = {"origin": "https://evil.example"}
    assert keyless.options(CHAT, headers={**foreign, **asks}).status_code == 400
    reply = http.post(CHAT, json=BODY, headers=foreign)
    assert "access-control-allow-origin" not in reply.headers


# ---------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    made = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "30", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-out", made[0], "-keyout", made[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


def test_https(fake_model: Path, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    config = fake_config(fake_model, ssl_certfile=cert, ssl_keyfile=key)
    with running(config, tmp_path, wait=False) as server:
        assert server.url.startswith("https://127.0.0.1:")
        server.wait_until_ready()
        trust = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.url, verify=trust, trust_env=False) as http:
            assert http.post(CHAT, json=BODY).status_code == 200
            with http.stream("POST", CHAT, json=BODY | {"stream": True}) as reply:
                assert reply.read().endswith(b"data: [DONE]\n\n")
            refused = http.post(CHAT, content=b"x" * (5 << 20), headers={
                "content-type": "application/json"})  # fmt: skip
            assert refused.status_code == 413
            with http.stream("POST", CHAT, json=BODY | {"max_tokens": 400, "stream": True}):
                pass  # left early
        server.wait_until_idle()
        assert server.stop() == 0
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_what_cannot_be_used_is_told_before_anything_begins(tmp_path: Path) -> None:
    broken = tmp_path / "cert.pem"
    broken.write_text("no certificate")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"ssl_certfile": str(broken)}, "ssl_certfile"),
        ({"ssl_certfile": str(tmp_path / "none.pem")}, "ssl_certfile"),
        ({"ssl_keyfile": str(broken)}, "ssl_keyfile needs ssl_certfile"),
        ({"root_path": "llm"}, "root_path"),
    )
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            check_front(Listening(**options))
