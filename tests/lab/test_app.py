"""Does the lab answer over HTTP as its pages do, refuse what is wrong, and load nothing foreign?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Annotated, Any

import msgspec
import pytest
from starlette.routing import Route, Router
from starlette.testclient import TestClient

from ridgeline.cli import main
from ridgeline.clock import WallClock
from ridgeline.errors import RequestFault
from ridgeline.lab.app import endpoints
from ridgeline.lab.page import PAGES, Answer, Page, control, controls, load, read_inputs
from ridgeline.observe.latency import Traffic
from ridgeline.server.auth import Keys
from ridgeline.server.hosts import HostGuard
from ridgeline.server.middleware import Middleware
from ridgeline.server.static_files import FOLDER, StaticPages, files


@pytest.fixture(scope="module")
def client() -> TestClient:
    router = Router([Route(path, ask, methods=[method]) for path, method, ask in endpoints()])
    guard, pages = HostGuard("127.0.0.1", ()), StaticPages(has_chat=True, has_lab=True)
    app = Middleware(router, Keys(), guard, Traffic(), WallClock(), pages)
    return TestClient(app, base_url="http://localhost")


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_whole(name: str) -> None:
    page = load(name)
    assert page.name == name
    assert {f"pages/{name}.js", f"pages/{name}.html"} <= files().keys()
    shown = [one for one in controls(page.inputs) if not one.is_hidden]
    assert sum(not one.is_folded for one in shown) <= 6
    for one in controls(page.inputs):
        assert one.kind, f"{one.name} is of no kind that a browser can show"
    for preset in page.presets:
        read_inputs(page, preset.inputs)


@pytest.mark.parametrize("name", [name for name in PAGES if not load(name).long])
def test_the_api_gives_the_page_s_own_answer(client: TestClient, name: str) -> None:
    page = load(name)
    own: Any = page.answer(read_inputs(page, {}))
    assert client.post(f"/lab/api/{name}").json() == json.loads(msgspec.json.encode(own))
    assert re.search(r"\d", own.sentence), "a conclusion has figures"
    assert 2 <= len(own.questions) <= 3
    assert own.tables, "a plot without its table"
    for figure in own.figures:
        module, _, function = figure.where.rpartition(".")
        assert module.startswith("ridgeline."), figure
        assert figure.formula, figure
        assert function, figure


def test_all_pages_are_told(client: TestClient) -> None:
    told = client.get("/lab/api").json()["pages"]
    assert [page["name"] for page in told] == list(PAGES)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"batch": 0}, "batch must be between 1 and 1024"),
        ({"model": "no-such-model"}, "choose one of"),
        ({"no_such": 1}, "unknown field 'no_such'"),
        ([], "inputs must be a JSON object"),
        ({"model": "x" * 300_000}, "bytes; send less"),
    ],
)
def test_bad_inputs_are_named(client: TestClient, body: object, words: str) -> None:
    reply = client.post("/lab/api/memory_wall", json=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


def test_an_unknown_page_is_refused_with_those_there_are(client: TestClient) -> None:
    reply = client.post("/lab/api/no_such")
    assert reply.status_code == 400
    assert "memory_wall" in reply.json()["error"]["message"]
    assert client.get("/lab/pages/no_such.js").status_code == 404
    assert client.get("/lab/../page.py").status_code == 404


class _Steps(msgspec.Struct, frozen=True):
    num: Annotated[int, control("steps", ge=0, le=9)] = 3


def test_a_long_answer_tells_its_progress(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def steps(inputs: Any) -> Iterator[float | Answer[str]]:
        try:
            for i in range(inputs.num):
                yield i / inputs.num
            yield Answer("3 steps", "drawn")
        finally:
            closed.append(True)

    page = Page("slow", "Slow", "It takes long.", "test", _Steps, steps, long=True)
    monkeypatch.setattr("ridgeline.lab.app.load", lambda name: page)
    reply = client.post("/lab/api/slow", json={"num": 2})
    told = [json.loads(line[6:]) for line in reply.text.splitlines() if line]
    assert told[:2] == [{"progress": 0.0}, {"progress": 0.5}]
    assert told[2]["answer"]["drawing"] == "drawn"
    assert closed == [True]


def test_too_many_answers_of_one_client_are_refused_for_a_second(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each answer gives its place back, a streamed and a faulty one too."""
    monkeypatch.setattr("ridgeline.lab.turns.MAX_OF_ONE", 1)
    for name, body, status in (
        ("memory_wall", {}, 200),
        ("memory_wall", {"batch": 0}, 400),
        ("speculation", {}, 200),
        ("speculation", {"rejected": "x"}, 200),  # the stream tells the fault
        ("serving", {"gpus": 3}, 200),
        ("memory_wall", {}, 200),
    ):
        assert client.post(f"/lab/api/{name}", json=body).status_code == status
    monkeypatch.setattr("ridgeline.lab.turns.MAX_OF_ONE", 0)
    reply = client.post("/lab/api/memory_wall")
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert "ask again in 1 s" in reply.json()["error"]["message"]


def test_pages_load_nothing_from_elsewhere(client: TestClient) -> None:
    for path in ("/", "/lab/", "/lab/shell/main.js"):
        policy = client.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    for path, file in files().items():
        if not path.startswith("vendor/"):
            foreign = re.findall(
                rb"""(?:src|href|import|from|url)\W{1,3}(https?://\S+)""", file.body
            )
            assert not foreign, (path, foreign)


def test_files_are_packed_and_kept(client: TestClient) -> None:
    whole = client.get("/lab/shell/main.js", headers={"accept-encoding": "identity"})
    packed = client.get("/lab/shell/main.js", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.text == whole.text
    again = client.get("/lab/shell/main.js", headers={"if-none-match": whole.headers["etag"]})
    assert again.status_code == 304


def test_what_others_wrote_is_unchanged() -> None:
    lines = (FOLDER / "vendor/SHA256SUMS.txt").read_text().splitlines()
    sums = {name: digest for digest, name in map(str.split, lines)}
    found = {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in (FOLDER / "vendor").iterdir()
        if path.name not in ("SHA256SUMS.txt", "README.txt")
    }
    assert found == sums


def test_all_files_are_in_the_package() -> None:
    from fnmatch import fnmatch
    from tomllib import loads

    project = loads((FOLDER.parents[2] / "pyproject.toml").read_text())
    kept = project["tool"]["setuptools"]["package-data"]["ridgeline.lab"]
    for path in FOLDER.rglob("*.*"):
        name = path.relative_to(FOLDER.parent).as_posix()
        assert any(fnmatch(name, each) for each in kept), name


def test_a_page_that_is_not_there_says_which_are() -> None:
    with pytest.raises(RequestFault, match="memory_wall"):
        load("no_such")


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "x"])
def test_a_port_that_none_is_gets_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.parse(["lab", f"--port={port}"])
    assert "--port" in (said := capsys.readouterr().err)
    assert "from 0 to 65535" in said
