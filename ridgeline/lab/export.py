"""What does a static edition of the lab consist of? The same pages, with answers made beforehand.

Any host of files can serve it. It knows the answers of each page's defaults and presets; with
Pyodide beside it (the files of its npm package, and a wheel of msgspec for it) the browser runs the
pages' own Python for all other inputs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import msgspec

from ridgeline.errors import ConfigError
from ridgeline.lab.app import described
from ridgeline.lab.page import PAGES, Page, answered, load, read_inputs
from ridgeline.server.static_files import CHAT, LAB, files

PACKAGE = Path(__file__).parents[1]
# What pages import that know no device; the package's own modules come beside them.
ROOMS = (
    "architectures", "cost", "lab", "observe", "planner", "router", "scheduler", "simulator",
    "speculation",
)  # fmt: skip
PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip",
           "pyodide-lock.json")  # fmt: skip
WHEEL = "msgspec-*emscripten*.whl"


def export(folder: Path, pyodide: Path | None = None) -> Iterator[str]:
    """Write the edition; what was written, in words. Raises ConfigError."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name a new folder")
    wheel = None if pyodide is None else _wheel_of(pyodide)
    for path, file in files().items():
        if path != CHAT and not path.startswith("chat/"):
            body = file.body if path != LAB else _index(file.body.decode()).encode()
            _write(folder / path, body)
    loaded = [load(name) for name in PAGES]
    told = {"pages": [described(page) for page in loaded], "live": False}
    _write(folder / "api" / "index.json", msgspec.json.encode(told))
    for page in loaded:
        answers = _answers(page)
        _write(folder / "api" / f"{page.name}.json", msgspec.json.encode(answers))
        yield f"{page.title}: {len(answers)} answers"
    if pyodide is not None and wheel is not None:
        for name in PYODIDE:
            shutil.copyfile(pyodide / name, _made(folder / "pyodide" / name))
        shutil.copyfile(wheel, folder / "pyodide" / wheel.name)
        _write_package(folder / "pyodide" / "ridgeline.zip")
        _write(folder / "pyodide" / "edition.json", json.dumps({"wheel": wheel.name}).encode())
        yield f"Python for the browser, with {wheel.name}"


def _answers(page: Page) -> list[dict[str, object]]:
    """Of the defaults and of each preset, once each."""
    found: dict[bytes, dict[str, object]] = {}
    for given in ({}, *(preset.inputs for preset in page.presets)):
        inputs = read_inputs(page, given)
        key = msgspec.json.encode(inputs)
        if key not in found:
            found[key] = {"inputs": inputs, "answer": answered(page, inputs)}
    return list(found.values())


def _index(html: str) -> str:
    """The shell's page, told that no server stands behind it."""
    (inline,) = re.findall(r"<script type=\"importmap\">.*?</script>", html, re.DOTALL)
    policy = files()[LAB].policy.replace(
        "script-src 'self'", "script-src 'self' 'wasm-unsafe-eval'"
    )
    policy = policy.replace("; frame-ancestors 'none'", "")  # which stands in headers alone
    marks = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    marks += '<meta name="ridgeline-edition" content="static">\n'
    return html.replace(inline, marks + inline)


def _wheel_of(pyodide: Path) -> Path:
    missing = [name for name in PYODIDE if not (pyodide / name).is_file()]
    if missing:
        raise ConfigError(
            f"{pyodide} has no {', '.join(missing)}; --pyodide wants the files of the npm package "
            "pyodide (npm pack pyodide)"
        )
    wheels = sorted(pyodide.glob(WHEEL))
    if not wheels:
        raise ConfigError(
            f"{pyodide} has no {WHEEL}; put msgspec's wheel for Pyodide there (pip download "
            "msgspec --no-deps --only-binary=:all: --platform pyemscripten_2026_0_wasm32)"
        )
    return wheels[-1]


def _write_package(path: Path) -> None:
    """The Python that pages need, as one archive."""
    sources = [*PACKAGE.glob("*.py")]
    for room in ROOMS:
        sources += (each for end in ("py", "json") for each in (PACKAGE / room).rglob(f"*.{end}"))
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for source in sorted(sources):
            archive.write(source, source.relative_to(PACKAGE.parent).as_posix())


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write(path: Path, body: bytes) -> None:
    _made(path).write_bytes(body)
