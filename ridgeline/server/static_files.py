"""Which pages does a browser get from us, and what may they load? Files of the package, in memory.

They are the same for everybody and hold nothing of this server, so they want no key; what they then
ask for does. `/` is the chat, `/lab/` the lab.
"""

from __future__ import annotations

import gzip
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "lab" / "static"
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
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}
CHAT, LAB = "chat.html", "index.html"
_INLINE = re.compile(r"<script type=\"importmap\">(.*?)</script>", re.DOTALL)


class File(msgspec.Struct, frozen=True):
    """One file, as it is sent."""

    body: bytes
    packed: bytes
    kind: str
    tag: str
    policy: str


@cache
def files() -> dict[str, File]:
    """All of them, by their path in the folder."""
    paths = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): _file(path) for path in paths}


def _file(path: Path) -> File:
    body = path.read_bytes()
    inline = _INLINE.findall(body.decode()) if path.suffix == ".html" else ()
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in inline)
    policy = POLICY.format(scripts="".join(f" 'sha256-{digest}'" for digest in digests))
    tag = f'"{sha256(body).hexdigest()[:16]}"'
    return File(body, gzip.compress(body, 9, mtime=0), TYPES[path.suffix], tag, policy)


class StaticPages:
    """`has_chat`: at `/`; `has_lab`: at `/lab/`."""

    def __init__(self, *, has_chat: bool, has_lab: bool) -> None:
        self._has_chat = has_chat
        self._has_lab = has_lab

    def find(self, scope: Scope) -> Response | None:
        """The reply, if this asks for one of our files."""
        if scope["method"] not in ("GET", "HEAD"):
            return None
        path = scope["path"]
        if path in ("/lab", "/lab/live") and self._has_lab:
            return RedirectResponse(f"/lab/{path[4:].replace('/', '#')}")
        if path == "/":
            if not self._has_chat:
                return RedirectResponse("/lab/") if self._has_lab else None
            return _reply(scope, files()[CHAT])
        _, first, rest = path.split("/", 2) if path.count("/") > 1 else ("", "", "")
        if (first == "lab" and self._has_lab) or (first == "ui" and self._has_chat):
            file = files().get(rest or LAB)
            return None if file is None else _reply(scope, file)
        return None


def _reply(scope: Scope, file: File) -> Response:
    asked = Headers(scope=scope)
    headers = {**HEADERS, "content-security-policy": file.policy, "etag": file.tag}
    if asked.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in asked.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(file.packed, media_type=file.kind, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)
