"""May a key do what its rights say, and nothing else, on every path and both ports?"""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from ridgeline.clock import WallClock
from ridgeline.server.app import Route, make_admin_app, make_admin_routes, make_app, make_routes
from ridgeline.server.auth import ADMIN, ANY, OPEN, RIGHTS, Keys, Tenant
from ridgeline.server.config import ServeConfig
from ridgeline.server.http_protocol import OPEN_PATHS
from ridgeline.server.service import Service
from tests.server.running import fake_config

# A new path must be put here too: who may ask it is to be thought of twice.
EXPECTED = {
    "/v1/models": ANY,
    "/v1/models/{name:path}": ANY,
    "/v1/completions": "answer",
    "/v1/chat/completions": "answer",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
    "/health/live": OPEN,
    "/health/ready": OPEN,
    "/health": OPEN,
    "/v1/health": OPEN,
    "/ping": OPEN,
    "/server_info": ADMIN,
    "/tokenizer_info": "tokenize",
    "/load": ANY,
    "/metrics": "metrics",
    "/explain": "explain",
    "/openapi.json": ANY,
    "/version": ANY,
}
EXPECTED_OF_ADMINS = {
    path: right
    for path, right in EXPECTED.items()
    if right == OPEN or path in ("/metrics", "/version")
} | {"/explain": ADMIN}
HOLDERS = (*RIGHTS, ADMIN)


def key_with(right: str) -> str:
    return f"key-with-{right}"


KEYS = Keys(
    tuple(
        Tenant(digest, digest, rights=frozenset({right}))
        for right in HOLDERS
        for digest in [sha256(key_with(right).encode()).digest()]
    )
)


def statuses(app: ASGIApp, path: str, key: str | None) -> list[tuple[int, Any]]:
    """With the right method and with a wrong one: the status and the error."""

    async def ask() -> list[tuple[int, Any]]:
        transport = httpx.ASGITransport(app=app)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=headers
        ) as http:
            replies = [await http.get(path), await http.post(path), await http.delete(path)]
        return [(r.status_code, r.json().get("error")) for r in replies if r.content[:1] == b"{"]

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def config(fake_model: Path) -> ServeConfig:
    return fake_config(fake_model, admin_port=0)


@pytest.fixture(scope="module")
def service(config: ServeConfig) -> Service:
    return Service(config, WallClock())


def test_each_path_has_the_right_that_was_meant(service: Service) -> None:
    assert {route.path: route.right for route in make_routes(service)} == EXPECTED
    assert {r.path: r.right for r in make_admin_routes(service)} == EXPECTED_OF_ADMINS
    for table in (EXPECTED, EXPECTED_OF_ADMINS):
        assert {path for path, right in table.items() if right == OPEN} == OPEN_PATHS


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("path", EXPECTED)
def test_a_key_without_the_right_is_refused(path: str, holder: str, fake_model: Path) -> None:
    service = Service(fake_config(fake_model), WallClock())
    check(make_app(service, KEYS), path, EXPECTED[path], holder)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("path", EXPECTED_OF_ADMINS)
def test_and_so_it_is_on_the_admin_port(path: str, holder: str, service: Service) -> None:
    check(make_admin_app(service, KEYS), path, EXPECTED_OF_ADMINS[path], holder)


def check(app: ASGIApp, path: str, right: str, holder: str) -> None:
    asked = path.replace("{name:path}", "fake")
    for status, error in statuses(app, asked, key_with(holder)):
        if right in (ANY, OPEN, holder) or holder == ADMIN:
            assert status in (200, 405, 503)  # there is no engine
        else:
            assert status == 403
            assert error == {
                "message": f"this key does not have the right `{right}`",
                "type": "authentication_error",
                "param": None,
                "code": "insufficient_permissions",
            }
    for status, _ in statuses(app, asked, None):
        assert status in ((200, 405, 503) if right == OPEN else (401,))


def test_a_path_without_a_declared_right_is_for_administrators(service: Service) -> None:
    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    class Endpoint:
        __call__ = staticmethod(endpoint)

    app = make_app(service, KEYS)
    app._app.routes.append(Route("/new", Endpoint(), methods=["GET"]))  # type: ignore[attr-defined]
    for right in RIGHTS:
        assert statuses(app, "/new", key_with(right))[0][0] == 403
    assert statuses(app, "/new", key_with(ADMIN))[0] == (200, None)


def test_metrics_move_to_the_admin_port(service: Service) -> None:
    assert statuses(make_app(service, KEYS), "/metrics", key_with(ADMIN))[0][0] == 404


def test_without_keys_everything_is_open(service: Service) -> None:
    for path in EXPECTED_OF_ADMINS:
        assert all(
            status in (200, 405, 503)
            for status, _ in statuses(make_admin_app(service, Keys()), path, None)
        )
