"""Which paths does the lab have, and how does a page's answer reach the browser?

`GET /lab/api` tells all pages and their inputs. `POST /lab/api/NAME` takes inputs as JSON and gives
the Answer; that of a long page comes as server-sent events: {"progress": 0.4}, ..., then
{"answer": ...} or {"error": ...}. What the reader does not wait for any more is not computed on.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from anyio import to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.lab.page import PAGES, Answer, Page, controls, load, read_inputs

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 256 << 10  # a config.json that is pasted has a few thousand
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'{scripts}; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_INLINE = re.compile(r"<script(?: type=\"importmap\")?>(.*?)</script>", re.DOTALL)


class File(msgspec.Struct, frozen=True):
    """One static file, as it is sent."""

    body: bytes
    packed: bytes
    kind: str
    tag: str
    policy: str


@cache
def files() -> dict[str, File]:
    """All static files, by their path below /lab/."""
    found = {}
    for path in sorted(STATIC.rglob("*")):
        if path.suffix in TYPES:
            found[path.relative_to(STATIC).as_posix()] = _file(path)
    return found


def _file(path: Path) -> File:
    body = path.read_bytes()
    tag = f'"{sha256(body).hexdigest()[:16]}"'
    inline = _INLINE.findall(body.decode()) if path.suffix == ".html" else ()
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in inline)
    policy = POLICY.format(scripts="".join(f" 'sha256-{digest}'" for digest in digests))
    return File(body, gzip.compress(body, 9, mtime=0), TYPES[path.suffix], tag, policy)


def static(request: Request) -> Response:
    """A file of the lab's pages; they load nothing from elsewhere."""
    return static_file(request, request.path_params.get("path") or "index.html")


def static_file(request: Request, path: str) -> Response:
    file = files().get(path)
    if file is None:
        return _fault("there is no such file; the pages are at /lab/", 404)
    headers = {
        "content-security-policy": file.policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-cache",
        "etag": file.tag,
        "vary": "accept-encoding",
    }
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(file.packed, media_type=file.kind, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


def to_lab(request: Request) -> Response:
    """To the index, with a path below which relative names are right."""
    return RedirectResponse("/lab/", headers={"cache-control": "no-cache"})


# ---------------------------------------------------------------------- answers


def described(page: Page) -> dict[str, Any]:
    """A page as the browser needs to know it before it asks."""
    told = {name: getattr(page, name) for name in ("name", "title", "idea", "group", "long")}
    presets = [{"name": one.name, "inputs": one.inputs} for one in page.presets]
    return told | {"inputs": controls(page.inputs), "presets": presets}


def pages(request: Request) -> Response:
    """All pages of the lab: what each shows, and its inputs with bounds and defaults."""
    return _json({"pages": [described(load(name)) for name in PAGES]})


async def answer(request: Request) -> Response:
    """What a page shows for these inputs."""
    try:
        page = load(request.path_params["name"])
        inputs = read_inputs(page, await _body(request))
        if page.long:
            return StreamingResponse(_events(page, inputs), media_type="text/event-stream")
        return _json(await to_thread.run_sync(page.answer, inputs))
    except (RequestFault, ConfigError) as fault:
        return _fault(str(fault), 400, getattr(fault, "param", None))
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it


async def _body(request: Request) -> dict[str, Any]:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > MAX_BODY_BYTES:
            raise RequestFault(f"inputs have more than {MAX_BODY_BYTES} bytes; send less")
    try:
        return msgspec.json.decode(bytes(parts) or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise RequestFault(f"inputs must be a JSON object: {fault}") from None


async def _events(page: Page, inputs: msgspec.Struct) -> AsyncIterator[bytes]:
    """Closed when the reader is gone; the step that runs then is the last one."""
    steps: Iterator[Any] = iter(page.answer(inputs))  # type: ignore[arg-type]
    try:
        while (step := await to_thread.run_sync(next, steps, None)) is not None:
            name = "answer" if isinstance(step, Answer) else "progress"
            yield b"data: " + msgspec.json.encode({name: step}) + b"\n\n"
    except (RequestFault, ConfigError) as fault:
        yield b"data: " + msgspec.json.encode({"error": {"message": str(fault)}}) + b"\n\n"
    finally:
        steps.close()  # type: ignore[attr-defined]


def _json(value: object, status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(body, status, media_type="application/json", headers=headers)


def _fault(message: str, status: int, param: str | None = None) -> Response:
    return _json({"error": {"message": message, "param": param}}, status)


# (path, methods, endpoint, whether anybody may see it: these are the same files for all)
ENDPOINTS = (
    ("/lab", ["GET"], to_lab, True),
    ("/lab/api", ["GET"], pages, False),
    ("/lab/api/{name}", ["POST"], answer, False),
    ("/lab/{path:path}", ["GET"], static, True),
)
