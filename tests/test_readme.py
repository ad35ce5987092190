"""Does what the README prints work, and are its figures those of the result files?"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.server.running import PATIENCE_S, until
from tools.terminal_pictures import FOLDER, PICTURES

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="ascii")
MAX_BYTES = 7000
MAX_PICTURE_BYTES = 60_000
FIRST_SCREEN = TEXT.splitlines()[:40]
HUB_ID = re.compile(r"\b[A-Z]\w+/[\w.-]+")
PLAN = ROOT / "bench/cpu/results/2026-11-28-plan-of-the-readme.json"
GPU, CPU = "bench/gpu/results/latest.json", "bench/cpu/results/latest.json"
# Row of the table: result file, workload, and where the other engine's figure stands.
FIGURES = (
    (GPU, "A bf16 decode batch 1", "vllm"),
    (GPU, "A bf16 decode batch 256", "vllm"),
    (CPU, "A int4 decode b1", "peer_value"),
    (CPU, "A int4 prefill 512, beside llama.cpp", "peer_value"),
)


def blocks() -> list[str]:
    """The indented blocks, without their indentation, and what stands between back ticks."""
    found: list[list[str]] = [[]]
    for line in re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL).splitlines():
        if line.startswith("    "):
            found[-1].append(line[4:])
        elif found[-1]:
            found.append([])
    return ["\n".join(lines) for lines in found if lines]


def commands(program: str) -> list[str]:
    """As they are typed: without a `$` in front, a comment behind, or a broken line."""
    text = "\n".join(blocks()).replace("\\\n", " ")
    typed = re.findall(rf"^(?:\$ )?({program} .*?)(?: +#.*)?$", text, re.MULTILINE)
    return typed + re.findall(rf"`({program} [^`]*)`", TEXT)


def environment(**more: str) -> dict[str, str]:
    """No network, no key, tables in ASCII."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    plain.pop("RIDGELINE_API_KEY", None)
    path = os.pathsep.join([str(ROOT), *filter(None, [plain.get("PYTHONPATH")])])
    fixed = {"PYTHONPATH": path, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    return plain | fixed | {"HF_HUB_OFFLINE": "1"} | more


def argv(command: str) -> list[str]:
    return [sys.executable, "-m", "ridgeline.cli.main", *shlex.split(command)[1:]]


def run(command: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv(command), input=stdin, capture_output=True, text=True, env=environment(**more),
        cwd=ROOT, timeout=240,
    )  # fmt: skip


def only(name: str) -> str:
    """The one command of that name that needs no download."""
    (found,) = {
        command
        for command in commands("ridgeline")
        if command.split()[1] == name and not HUB_ID.search(command)
    }
    return found


def test_size() -> None:
    assert README.stat().st_size <= MAX_BYTES


def test_the_first_screen_answers() -> None:
    screen = "\n".join(FIRST_SCREEN)
    for wanted in ("Ridgeline runs", "**For you**", "**Not for you**", "vLLM", "make setup"):
        assert wanted in screen


def test_figures_are_those_of_the_result_files() -> None:
    rows = re.findall(r"^\| .* \| \*\*([\d.,]+)\*\* \| .*: ([\d.,]+) \|$", TEXT, re.MULTILINE)
    wanted = []
    for path, workload, other in FIGURES:
        results: list[dict[str, Any]] = json.loads((ROOT / path).read_text(encoding="utf-8"))
        (found,) = [result for result in results if result["workload"] == workload]
        pair = found["value"], found[other]
        wanted.append(tuple(f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in pair))
    assert rows == wanted


def test_every_command_is_tried_here() -> None:
    names = {command.split()[1] for command in commands("ridgeline")}
    assert names == {"chat", "generate", "serve", "inspect", "lab", "plan", "--help"}
    assert {command.split()[1] for command in commands("ridgeline") if HUB_ID.search(command)} == {
        "chat",
        "serve",
    }


@pytest.mark.parametrize("command", [c for c in commands("ridgeline") if HUB_ID.search(c)])
def test_hub_ids_are_taken_up_to_the_download(command: str, tmp_path: Path) -> None:
    port = " --port 0" if " serve " in command else ""
    done = run(command + port, HF_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "offline, and it is not complete in the cache" in done.stderr


def test_chat_answers_as_in_the_picture() -> None:
    (name,) = re.findall(r"\]\(docs/pictures/(\w+)\.svg\)", TEXT)
    picture = PICTURES[name]
    assert picture.command.startswith(only("chat"))
    shown = (FOLDER / f"{name}.svg").read_text(encoding="ascii")
    drawn = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", shown)))
    questions = [line for line in picture.typed if "story" not in line]
    done = run(picture.command, "\n".join(questions))
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == len(questions)
    for line in [f"$ {picture.command}", *(f"> {line}" for line in picture.typed), *answers]:
        assert line in drawn


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_fetch_nothing(name: str) -> None:
    svg = (FOLDER / f"{name}.svg").read_text(encoding="ascii")
    assert len(svg) < MAX_PICTURE_BYTES
    pages = [README, *(ROOT / "docs").rglob("*.md")]
    assert any(f"pictures/{name}.svg)" in page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"\w+://[^\"' )]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", svg))


@pytest.mark.parametrize("name", ["generate", "inspect", "--help"])
def test_commands_that_print(name: str) -> None:
    done = run(only(name))
    assert done.returncode == 0, done.stderr
    if name == "inspect":
        rows = done.stdout.splitlines()
        (promised,) = re.findall(r"one of over (\d+) names", TEXT)
        assert sum(" B " in row or " M " in row for row in rows) > int(promised)
    else:
        assert len(done.stdout.split()) > 50


def test_plan_prints_what_is_shown() -> None:
    """Line by line; `...` stands for what was left out, and the end may be missing."""
    (shown,) = [block for block in blocks() if block.startswith("$ ridgeline plan")]
    printed = "\n".join(line.rstrip() for line in run(only("plan")).stdout.splitlines())
    _, _, wanted = shown.partition("\n")
    at = 0
    for part in wanted.split("\n...\n"):
        assert part in printed[at:]
        at = printed.index(part, at) + len(part)


def test_the_plan_is_in_the_result_file() -> None:
    kept = json.loads(PLAN.read_text(encoding="utf-8"))
    assert json.loads(run(f"{only('plan')} --json").stdout) == kept


def test_the_python_example_prints_what_is_shown() -> None:
    code, printed = re.findall(r"```python\n([^`]*)```\n\n((?:    .*\n)+)", TEXT)[0]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        names: dict[str, Any] = {}
        exec(code, names)  # the README's own
    names["llm"].close()
    assert out.getvalue().split() == printed.split()


SERVERS = [
    one for one in commands("ridgeline") if one.split()[1] == "serve" and not HUB_ID.search(one)
]


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server that the README starts, on a free port; it must end well at SIGTERM."""
    command = f"{request.param} --port 0"
    with subprocess.Popen(
        argv(command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment(), cwd=ROOT,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            ready = f"{url}/health/ready"
            until(lambda: httpx.get(ready, trust_env=False).status_code == 200, "the server")
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 0


def test_the_server_answers_curl(url: str) -> None:
    (command,) = commands("curl")
    _, target, _, header, _, body = shlex.split(command)
    name, _, value = header.partition(": ")
    target = target.replace("http://127.0.0.1:8000", url)
    reply = httpx.post(target, headers={name: value}, content=body, trust_env=False, timeout=60)
    assert reply.json()["choices"][0]["message"]["content"] == "3854"


def test_the_server_answers_the_openai_client(url: str) -> None:
    (base,) = re.findall(r'`base_url="(.*?)"`', TEXT)
    base = base.replace("http://127.0.0.1:8000", url)
    with OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        question: Any = [{"role": "user", "content": "What is 12 + 30?"}]
        reply = client.chat.completions.create(model="demo:chat", messages=question, temperature=0)
    assert reply.choices[0].message.content == "42"


# Of a chat request. What is meant are 70 and 400.
MAX_FILES, MAX_FUNCTIONS = 94, 520


def test_the_path_of_a_request_is_as_long_as_told() -> None:
    (files, lines) = re.findall(r"about (\d+) files and ([\d,]+) lines", TEXT)[0]
    module = re.findall(r"`python -m ([\w.]+)`", TEXT)[0]
    told = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, env=environment(), cwd=ROOT,
        timeout=240,
    ).stdout  # fmt: skip
    num_files, functions, num_lines = re.findall(
        r"(\d+) files, (\d+) functions of (\d+) lines", told
    )[0]
    assert int(num_files) <= MAX_FILES
    assert int(functions) <= MAX_FUNCTIONS
    for said, found in zip((files, lines), (num_files, num_lines), strict=True):
        # Which kernels a processor has, and how many tokens a draft gets right, moves the count.
        assert int(said.replace(",", "")) == pytest.approx(int(found), rel=0.3)


def test_what_is_installed_with_is_there() -> None:
    for command in commands("make"):
        done = subprocess.run(
            [*shlex.split(command), "-n"], capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        assert done.returncode == 0, done.stderr
    (build,) = commands("docker")
    assert commands("make")
    words = shlex.split(build)
    dockerfile = (ROOT / words[words.index("-f") + 1]).read_text(encoding="utf-8")
    targets = [words[words.index("--target") + 1], *re.findall(r"--target (\w+) for", TEXT)]
    assert all(f" AS {target}\n" in dockerfile for target in targets)
