"""Does the admin port show the operator everything, whatever goes on at the other one?"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ridgeline.errors import ConfigError
from ridgeline.server.config import check_serve_numbers
from ridgeline.server.lifecycle import ADMIN_CONNECTIONS, serve
from tests.server.running import Running, fake_config, running, until
from tests.server.test_lifecycle import Asking

MOST = 8  # connections of the public port


def admin_url(server: Running) -> str:
    found = re.search(r"admin port: listening on (http://\S+)", server.log.read_text())
    assert found is not None
    return found[1]


def get(url: str, path: str, **headers: str) -> httpx.Response:
    return httpx.get(url + path, headers=headers, timeout=60, trust_env=False)


@contextlib.contextmanager
def connections(url: str, count: int) -> Iterator[list[socket.socket]]:
    """So many that say nothing."""
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        yield [
            stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(count)
        ]


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = {"max_connections": MOST, "header_timeout_s": 600.0}
    config = fake_config(fake_model, limits, admin_port=0)
    with running(config, tmp_path_factory.mktemp("server")) as started:
        yield started


def test_what_is_where(server: Running) -> None:
    admin = admin_url(server)
    body = {"model": "fake", "prompt": "hello", "max_tokens": 2}
    assert httpx.post(server.url + "/v1/completions", json=body, trust_env=False).is_success
    for path in ("/health/live", "/health/ready", "/version"):
        assert get(server.url, path).status_code == get(admin, path).status_code == 200
    assert get(server.url, "/metrics").status_code == 404
    assert "ridgeline_requests_total{" in get(admin, "/metrics").text
    assert "server" not in get(server.url, "/explain").json()
    assert get(admin, "/explain").json()["server"]["num_finished"] == 1
    for path in ("/v1/models", "/v1/completions", "/tokenize", "/nothing"):
        assert get(admin, path).status_code == 404


def test_it_answers_while_the_other_is_full(server: Running) -> None:
    admin = admin_url(server)
    full = re.compile(rf"^ridgeline_http_connections {MOST}\.0$", re.MULTILINE)
    with connections(server.url, MOST + 4):  # some may be refused while older ones are closed
        until(lambda: full.search(get(admin, "/metrics").text) is not None, "a full port")
        assert get(server.url, "/health/live").json()["error"]["code"] == "overloaded"
        for path in ("/metrics", "/explain", "/health/live"):
            assert get(admin, path).status_code == 200


def test_it_has_limits_of_its_own(server: Running) -> None:
    """The same hardening: of connections, of Host and of what is no HTTP."""
    admin = admin_url(server)
    assert get(admin, "/metrics", host="evil.example").status_code == 421
    with connections(admin, ADMIN_CONNECTIONS + 4):
        assert get(admin, "/health/live").json()["error"]["code"] == "overloaded"
        assert get(server.url, "/health/live").status_code == 200
    until(lambda: get(admin, "/health/live").status_code == 200, "a place")
    with connections(admin, 1) as [sock]:
        sock.sendall(b"NONSENSE\r\n\r\n")
        assert b"invalid_http" in sock.makefile("rb").read()


def test_it_wants_the_same_keys(fake_model: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ordinary-key\nmetrics-key rights=metrics\n")
    config = fake_config(fake_model, admin_port=0, api_key_file=str(tmp_path / "keys"))
    with running(config, tmp_path, key="operators-key") as server:
        admin = admin_url(server)
        asked = {
            key: [
                get(admin, path, authorization=f"Bearer {key}").status_code
                for path in ("/version", "/metrics", "/explain")
            ]
            for key in ("wrong-key", "ordinary-key", "metrics-key", "operators-key")
        }
        assert asked == {
            "wrong-key": [401, 401, 401],
            "ordinary-key": [200, 403, 403],
            "metrics-key": [200, 200, 403],
            "operators-key": [200, 200, 200],
        }
        own = get(server.url, "/explain", authorization="Bearer operators-key").json()
        assert "server" not in own


def test_it_drains_and_stops_with_the_server(fake_model: Path, tmp_path: Path) -> None:
    with running(fake_config(fake_model, admin_port=0), tmp_path) as server:
        admin = admin_url(server)
        stream = Asking(server, "!slow", max_tokens=60)
        stream.first.wait(60)
        server.process.terminate()
        until(lambda: get(admin, "/health/ready").status_code == 503, "the drain")
        assert "ridgeline_ready" in get(admin, "/metrics").text
        stream.wait()
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.TransportError):
            get(admin, "/health/live")


def test_a_port_or_address_that_cannot_be_had_is_told(fake_model: Path) -> None:
    with pytest.raises(ConfigError, match="admin_port"):
        check_serve_numbers(fake_config(fake_model, admin_port=70000))
    with pytest.raises(ConfigError, match=r"admin_host 0\.0\.0\.0 can be reached"):
        serve(fake_config(fake_model, admin_port=0, admin_host="0.0.0.0"))
