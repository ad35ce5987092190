"""Does a real browser show every page as it should, and the chat with a real server?

With Playwright (`pip install -e '.[browser]'`) and a Chromium of the system; skipped without. What
is inaccessible is looked for by axe-core 4.14.1 (MPL 2.0, axe.min.js.gz: the npm package's
axe.min.js, unchanged but packed).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ridgeline.lab.page import PAGES
from tests.server.model_folder import write_model_folder
from tests.server.running import Running, fake_config, running, until

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE = Path(__file__).parent / "axe.min.js.gz"
AXE_SHA256 = "cda5e4385d9437c1fd009f2ff76f7e4049af354d2d6522da2a905c2a69ede4ec"
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")
PATIENCE_MS = 20_000
READY = ".sentence:not(:empty)"
MEASURES = {"decode_from_scratch": "?prompt=16&output=4"}  # this machine, anew each time
MOST_STOPS = 400  # of Tab on one page
KEYS = {
    "range": "ArrowRight",
    "radio": "ArrowRight",
    "select-one": "ArrowDown",
    "checkbox": "Space",
}
BACK = {"ArrowRight": "ArrowLeft", "ArrowDown": "ArrowUp", "Space": "Space"}
BACK |= {back: key for key, back in BACK.items()}

# Where the keyboard is: `shows` that it is there, `again` when it has been there before.
FOCUSED = """(() => {
  const at = document.activeElement;
  if (at === document.body) return null;
  const again = reached.has(at);
  const style = getComputedStyle(at.type === "radio" ? at.nextSibling : at);
  reached.add(at);
  const box = at.getBoundingClientRect(), control = at.closest(".control");
  const input = control?.querySelector("[id^=in-], [name^=in-]");
  return {
    again, type: at.type ?? at.localName, html: at.outerHTML.slice(0, 200),
    shows: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0 && box.width > 0
      && box.bottom > 0 && box.top < innerHeight,
    input: input && (input.id || input.name).slice(3),
  };
})()"""
# The address follows within some frames, which a busy machine may be slow to draw.
IS_ELSEWHERE = """async (before) => {
  for (let frame = 0; frame < 10 && location.hash === before; frame++)
    await new Promise((done) => setTimeout(done, 20));
  return location.hash !== before;
}"""
# What can be used and was not reached: of radio buttons of one name only one is to be.
MISSED = """(() => {
  const all = "a[href], button, select, input, textarea, summary, [tabindex='0'], [role=button]";
  const isIn = (name) => [...document.getElementsByName(name)].some((one) => reached.has(one));
  return [...document.querySelectorAll(all)]
    .filter((one) => !one.disabled && one.checkVisibility() && !reached.has(one))
    .filter((one) => !(one.type === "radio" && isIn(one.name)))
    .map((one) => one.outerHTML.slice(0, 200));
})()"""

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def lab() -> Iterator[str]:
    command = [sys.executable, "-m", "ridgeline", "lab", "--port", "0", "--no-browser"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        (url,) = re.findall(r"http://\S+", process.stdout.readline())
        yield url
        process.terminate()
        assert process.wait(10) == 0


class Tab:
    """A page of the browser that must say nothing on its console."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda told: self._hear(told.type, told.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.said.append(text)

    def open(self, link: str) -> None:
        """A page of the lab that is open, as its link has it."""
        self.page.evaluate("location.hash = ''")
        self.page.wait_for_selector(".card")
        self.page.evaluate(f"location.hash = {json.dumps(link)}")
        self.page.wait_for_selector(READY)
        self.page.wait_for_selector(".drawing[aria-busy=false] *")

    def seen(self) -> tuple[str, str]:
        """The drawing and the sentence, or why there is none."""
        return self.page.inner_html(".drawing"), self.page.inner_text(".sentence, .failed")

    def is_another(self, before: tuple[str, str]) -> bool:
        """Both have changed."""
        self.page.wait_for_selector(".drawing[aria-busy=false] *")
        return all(new != old for new, old in zip(self.seen(), before, strict=True))

    def faults(self) -> list[str]:
        """What axe-core finds that is serious, in light and in dark."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(gzip.decompress(AXE.read_bytes()).decode() + ";0")
        told = []
        for scheme, rules in (("light", ""), ("dark", ", runOnly: ['color-contrast']")):
            self.page.emulate_media(color_scheme=scheme)
            found = self.page.evaluate(f"axe.run({{resultTypes: ['violations']{rules}}})")
            told += [
                f"{scheme}: {one['id']}: {one['nodes'][0]['html'][:200]}"
                for one in found["violations"]
                if one["impact"] in ("serious", "critical")
            ]
        self.page.emulate_media(color_scheme="light")
        return told

    def walk(self) -> Iterator[Any]:
        """What Tab leads to, from the first part of the page to the last, as FOCUSED tells it."""
        self.page.evaluate("document.activeElement.blur(), window.reached = new Set(), 0")
        for _ in range(MOST_STOPS):
            self.page.keyboard.press("Tab")
            told = self.page.evaluate(FOCUSED)
            if told is None or told["again"]:
                return
            yield told
        pytest.fail(f"Tab goes on and on; at last it was at {told['html']}")


@contextmanager
def tab(browser: Any, **options: Any) -> Iterator[Tab]:
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
    tab = Tab(page)
    try:
        yield tab
        assert not tab.said
    finally:
        page.close()


@pytest.fixture(scope="module")
def page_tab(browser: Any, lab: str) -> Iterator[Tab]:
    with tab(browser, reduced_motion="reduce") as one:
        one.page.goto(lab)
        yield one


def test_axe_is_the_one_that_was_published() -> None:
    assert sha256(AXE.read_bytes()).hexdigest() == AXE_SHA256


def change_by_keyboard(tab: Tab) -> None:
    """Every input, and back again, but for the first one that changes drawing and sentence."""
    page, first, is_shown, held = tab.page, tab.seen(), False, set[str]()
    for told in tab.walk():
        name, key = told["input"], KEYS.get(told["type"])
        if not name or name in held or not key:
            continue
        before = page.evaluate("location.hash")
        for each in (key, BACK[key]):  # a slider may stand at its end
            page.keyboard.press(each)
            if page.evaluate(IS_ELSEWHERE, before):
                break
        else:
            pytest.fail(f"{key} changes nothing: {told['html']}")
        held.add(name)
        if not is_shown and tab.is_another(first):
            is_shown = True
        else:
            page.keyboard.press(BACK[each])
    assert is_shown, f"no input changes both drawing and sentence: {first[1]}"
    page.wait_for_selector(".drawing[aria-busy=false]")
    tab.said = [text for text in tab.said if "400" not in text]  # inputs that do not go together


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_changes_by_keyboard_alone_and_is_restored(page_tab: Tab, name: str) -> None:
    page = page_tab.page
    page_tab.open(f"#{name}{MEASURES.get(name, '')}")
    assert not page_tab.said, page_tab.said
    for told in page_tab.walk():
        assert told["shows"], told
        if told["type"] == "summary":
            page.keyboard.press("Enter")
    assert not page.evaluate(MISSED)
    assert page.locator("details:not([open])").count() == 0
    assert not page_tab.faults()  # of what was folded, too
    change_by_keyboard(page_tab)
    shared, sentence = page.url, page.inner_text(".sentence")
    assert "?" in shared
    page_tab.open(shared.partition("#")[2])
    assert page.inner_text(".sentence") == sentence or name in MEASURES
    for width in (320, 2560):
        page.set_viewport_size({"width": width, "height": 800})
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"at {width} it takes {wide} pixels"
    page.set_viewport_size({"width": 1280, "height": 900})
    assert not page_tab.said, page_tab.said


def test_a_click_on_a_draft_token_rejects_it_and_another_takes_that_back(page_tab: Tab) -> None:
    page = page_tab.page
    page_tab.open("#speculation")
    before = page.inner_text(".drawing")
    page.click("[aria-label='step 1: reject draft 1']")
    page.wait_for_selector("[aria-label='step 1: take back that draft 1 was rejected']")
    assert "rejected=0%3A0" in page.url
    assert "as you rejected some" in page.inner_text(".sentence")
    assert not page_tab.faults()
    page.focus("[aria-label='step 1: take back that draft 1 was rejected']")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='step 1: reject draft 1']")
    page.wait_for_selector(".drawing[aria-busy=false] *")
    assert page.inner_text(".drawing") == before


def test_a_busy_lab_is_asked_again(browser: Any, lab: str) -> None:
    busy = {"error": {"message": "the lab has had its share of this server's time"}}
    with tab(browser) as one:
        page = one.page
        page.goto(f"{lab}#memory_wall")
        page.wait_for_selector(READY)
        refuse = {"status": 503, "headers": {"retry-after": "1"}, "json": busy}
        page.route("**/lab/api/**", lambda route: route.fulfill(**refuse), times=1)
        page.focus("input[aria-label=batch]")
        page.keyboard.press("End")
        page.wait_for_selector(".sentence:has-text('The lab is busy')")
        page.wait_for_selector(".sentence:has-text('1,024')")
        one.said = [text for text in one.said if "503" not in text]


def test_a_server_that_is_gone_is_told(browser: Any, lab: str) -> None:
    page = browser.new_page()
    page.goto(f"{lab}#memory_wall")
    page.wait_for_selector(READY)
    page.route("**/lab/api/**", lambda route: route.abort())
    page.focus("input[aria-label=batch]")
    page.keyboard.press("End")
    assert "server is gone" in page.inner_text(".failed")
    page.unroute("**/lab/api/**")
    page.keyboard.press("Home")
    page.wait_for_selector(READY)
    page.close()


# ---------------------------------------------------------------------- the chat


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("chat")
    model = write_model_folder(folder / "fake")
    with running(fake_config(model, lab=True), folder) as started:
        yield started


def test_the_chat_streams_stops_and_survives_a_lost_connection(
    browser: Any, served: Running
) -> None:
    with tab(browser) as one:
        page = one.page
        page.goto(served.url)
        page.wait_for_selector(".empty h1:text('fake')")
        assert not one.faults()
        page.keyboard.type("!slow down")  # the field has the focus
        page.keyboard.press("Enter")
        until(lambda: len(page.inner_text(".assistant .text")) > 5, "the beginning of the answer")
        page.keyboard.press("Escape")
        page.wait_for_selector(".took b:text('stopped')")
        served.wait_until_idle()  # the engine was told
        page.click("summary:text('settings')")
        page.fill("#max_tokens", "12")
        page.fill("#temperature", "0")
        page.check("input[role=switch]")
        page.click("textarea[aria-label=message]")
        page.keyboard.type("hello")
        page.keyboard.press("Enter")
        page.wait_for_selector("article:nth-of-type(4) .took:has-text('12 tokens')")
        assert not one.faults()
        page.focus("article:nth-of-type(4) .tokens")
        page.keyboard.press("ArrowRight")
        assert page.inner_text(".likely .chosen").endswith("%")
    with tab(browser) as one:
        page = one.page
        page.goto(served.url)
        page.wait_for_selector(".empty h1:text('fake')")
        page.keyboard.type("!die")
        page.keyboard.press("Enter")
        page.wait_for_selector("article .failed")
        page.wait_for_selector("button:text('try again')")
        one.said = [text for text in one.said if "50" not in text]  # the engine was restarted


def number(page: Any, name: str) -> int:
    return int(page.inner_text(f"dd[data-name={name}]").replace(",", ""))


def test_the_live_page_watches_a_real_engine(browser: Any, served: Running) -> None:
    served.wait_until_ready()
    with tab(browser) as one:
        page = one.page
        page.goto(f"{served.url}/lab/live")
        page.wait_for_selector("dd[data-name=steps]")
        steps = number(page, "steps")
        with served.http as http:
            body = {"model": "fake", "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
        until(lambda: number(page, "steps") > steps, "the steps of the request")
        assert page.is_visible("svg[aria-label^=Roofline]")
        page.click("text=Replay the last minutes")
        page.wait_for_selector("text=This is the setting of today")
        page.fill("#in-max_num_seqs", "1")
        page.click("text=Replay again")
        page.wait_for_selector("text=With max_num_seqs 1 instead of 64")
        assert not one.faults()
