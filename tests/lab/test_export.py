"""Does the static edition answer as the server does?"""

from __future__ import annotations

import json
import os
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.errors import ConfigError
from ridgeline.lab import export as exporting
from ridgeline.lab.page import PAGES, answer_json, answered, load, read_inputs
from ridgeline.server.static_files import files

SOME = ("memory_wall", "kv_growth")
# A folder with the files of the npm package pyodide, and msgspec's wheel for it.
PYODIDE = os.environ.get("RIDGELINE_PYODIDE")


@pytest.fixture
def edition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pages = {name: PAGES[name] for name in PAGES if PYODIDE or name in SOME}
    monkeypatch.setattr(exporting, "PAGES", pages)
    list(exporting.export(tmp_path / "site", Path(PYODIDE) if PYODIDE else None))
    return tmp_path / "site"


def test_it_has_the_answers_of_defaults_and_presets(edition: Path) -> None:
    for name in SOME:
        page = load(name)
        known = json.loads((edition / "api" / f"{name}.json").read_text())
        own = json.loads(msgspec.json.encode(answered(page, read_inputs(page, {}))))
        assert known[0]["answer"] == own
        assert len(known) >= len(page.presets)
    told = json.loads((edition / "api" / "index.json").read_text())
    assert {page["name"] for page in told["pages"]} >= set(SOME)


def test_it_has_the_files_of_the_pages_under_their_policy(edition: Path) -> None:
    for path, file in files().items():
        if path not in ("index.html", "chat.html") and not path.startswith("chat/"):
            assert (edition / path).read_bytes() == file.body
    html = (edition / "index.html").read_text()
    (digest,) = re.findall(r"'(sha256-[^']+)'", html)
    assert digest in files()["index.html"].policy
    assert "frame-ancestors" not in html


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        list(exporting.export(tmp_path))
    with pytest.raises(ConfigError, match="npm pack pyodide"):
        list(exporting.export(tmp_path / "new", tmp_path))


def test_python_in_a_browser_answers_in_json() -> None:
    told = json.loads(answer_json("memory_wall", '{"batch": 32}'))["answer"]
    assert "32 requests" in told["sentence"]
    assert "batch" in json.loads(answer_json("memory_wall", '{"batch": 0}'))["error"]["message"]


COMPARE = """async () => {
  const { pages } = await (await fetch("api/index.json")).json();
  const worker = new Worker("shell/worker.js", { type: "module" });
  worker.postMessage(await (await fetch("pyodide/edition.json")).json());
  const found = {};
  for (const page of pages.filter((one) => !one.needs_model)) {
    const [known] = await (await fetch(`api/${page.name}.json`)).json();
    const text = await new Promise((done) => {
      worker.addEventListener("message", (event) => done(event.data.text), { once: true });
      worker.postMessage({ id: 1, name: page.name, inputs: JSON.stringify(known.inputs) });
    });
    found[page.name] = [known.answer, JSON.parse(text)];
  }
  return found;
}"""


@pytest.mark.skipif(PYODIDE is None, reason="RIDGELINE_PYODIDE names no folder")
def test_python_in_a_browser_gives_the_server_s_answers(edition: Path) -> None:
    """Up to rounding: later Pythons add up floats more exactly."""
    from tests.lab.test_browser import CHROMIUM, OPTIONS, playwright

    handler = partial(SimpleHTTPRequestHandler, directory=str(edition))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        playwright.sync_playwright() as driver,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        found = page.evaluate(COMPARE)
        browser.close()
        server.shutdown()
    assert len(found) > len(PAGES) // 2
    for name, (known, told) in found.items():
        assert "answer" in told, (name, told)
        assert numbers(told["answer"]["drawing"]) == pytest.approx(
            numbers(known["drawing"]), rel=1e-9, abs=1e-12
        ), name


def numbers(value: Any) -> list[float]:
    """All of them, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [float(value)] if isinstance(value, int | float) else []
