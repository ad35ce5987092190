"""Does a browser get the pages that were asked for, without a key, and the rest only with one?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.clock import WallClock
from ridgeline.server.app import make_app
from ridgeline.server.auth import Keys, load_keys
from ridgeline.server.service import Service
from tests.server.running import fake_config

KEY = "the-key-of-the-pages"


def client(fake_model: Path, keys: Keys, **options: Any) -> httpx.AsyncClient:
    service = Service(fake_config(fake_model, **options), WallClock())
    transport = httpx.ASGITransport(app=make_app(service, keys))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "open_paths", "closed"),
    [
        ({}, {"/", "/ui/shell/style.css"}, {"/lab/", "/lab/api", "/ui/no_such.js"}),
        ({"ui": False}, set(), {"/", "/ui/shell/style.css"}),
        ({"ui": False, "lab": True}, {"/lab/", "/lab/pages/memory_wall.js"}, {"/lab/api", "/ui/"}),
    ],
)
async def test_pages_are_open_and_what_they_ask_is_not(
    fake_model: Path, options: dict[str, Any], open_paths: set[str], closed: set[str]
) -> None:
    async with client(fake_model, load_keys(None, KEY), **options) as http:
        for path in open_paths:
            reply = await http.get(path)
            assert reply.status_code == 200, path
            assert "default-src 'none'" in reply.headers["content-security-policy"]
            assert (await http.post(path)).status_code == 401
        for path in closed:
            assert (await http.get(path)).status_code == 401, path


@pytest.mark.anyio
async def test_the_lab_answers_with_a_key(fake_model: Path) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with client(fake_model, load_keys(None, KEY), lab=True) as http:
        told = await http.get("/lab/api", headers=headers)
        assert "memory_wall" in {page["name"] for page in told.json()["pages"]}
        answer = await http.post("/lab/api/memory_wall", headers=headers, json={"batch": 0})
        assert answer.status_code == 400
        document = (await http.get("/openapi.json", headers=headers)).json()
        assert not [path for path in document["paths"] if "lab" in path]


@pytest.mark.anyio
async def test_other_names_of_this_machine_get_no_page(fake_model: Path) -> None:
    async with client(fake_model, Keys(), lab=True) as http:
        reply = await http.get("/lab/", headers={"host": "rebound.example"})
        assert reply.status_code in (400, 403, 421)
        assert "Host" in reply.text
