"""A model hub on the loopback, with the few routes that huggingface_hub asks for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

INFO = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+?)(/revision/(?P<revision>[^?]+))?(\?.*)?")
FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)(\?.*)?")


@dataclass
class HubModel:
    """A model on the hub: its commits (each a folder of files) and what its branches mean."""

    commits: dict[str, Path]
    branches: dict[str, str]
    gated: bool = False


@dataclass
class HubServer:
    """What the hub holds, what was asked of it, and the faults it is to show."""

    url: str
    models: dict[str, HubModel] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cut_after: dict[str, int] = field(default_factory=dict)  # file: bytes, then close; once each
    always_cut: bool = False
    down_after_cut: bool = False  # answer 503 from then on
    wrong_hash: str = ""  # of this file
    status: int | None = None  # answer everything with this
    stop: Any = None

    def add(self, name: str, folder: Path, commit: str = "a" * 40, branch: str = "main") -> None:
        model = self.models.setdefault(name, HubModel({}, {}))
        model.commits[commit] = folder
        model.branches[branch] = commit

    def files_asked_for(self) -> set[str]:
        found = (FILE.fullmatch(line.split(" ")[1]) for line in self.requests)
        return {match["file"] for match in found if match}


def _described(name: str, data: bytes, is_wrong: bool) -> dict[str, Any]:
    """As the hub tells of a file: weights have a sha256, the others their id in git."""
    told = b"other" + data if is_wrong else data
    size = {"rfilename": name, "size": len(data)}
    if name.endswith((".safetensors", ".bin")):
        digest = hashlib.sha256(told).hexdigest()
        lfs = {"sha256": digest, "size": len(data), "pointerSize": 134}
        return {**size, "blobId": "0" * 40, "lfs": lfs}
    head = f"blob {len(data)}\0".encode()
    return {**size, "blobId": hashlib.sha1(head + told, usedforsecurity=False).hexdigest()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[HubServer]

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def end_headers(self) -> None:
        self.send_header("Connection", "close")  # else a stopped server goes on answering old ones
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self, *, body: bool) -> None:
        hub = self.hub
        hub.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if hub.status is not None:
            self._error(hub.status, "")
        elif found := INFO.fullmatch(self.path):
            self._info(found["name"], (found["revision"] or "main").replace("%2F", "/"))
        elif found := FILE.fullmatch(self.path):
            self._file(found["name"], found["revision"], found["file"], body=body)
        else:
            self._error(404, "EntryNotFound")

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _commit(self, name: str, revision: str) -> tuple[str, Path] | None:
        """The commit and its folder, or None after an error was sent."""
        model = self.hub.models.get(name)
        if model is None:
            self._error(404, "RepoNotFound")
            return None
        if model.gated:
            self._error(403, "GatedRepo")
            return None
        commit = model.branches.get(revision, revision)
        if commit not in model.commits:
            self._error(404, "RevisionNotFound")
            return None
        return commit, model.commits[commit]

    def _info(self, name: str, revision: str) -> None:
        if (found := self._commit(name, revision)) is None:
            return
        commit, folder = found
        files = [
            _described(path.name, path.read_bytes(), self.hub.wrong_hash == path.name)
            for path in sorted(folder.iterdir())
        ]
        answer = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": files})
        data = answer.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, name: str, revision: str, file: str, *, body: bool) -> None:
        if (found := self._commit(name, revision)) is None:
            return
        commit, folder = found
        if not (folder / file).is_file():
            self._error(404, "EntryNotFound")
            return
        data = (folder / file).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if body:
            self._send(file, data[start:])

    def _send(self, file: str, data: bytes) -> None:
        cut = self.hub.cut_after.get(file)
        if cut is not None and not self.hub.always_cut:
            del self.hub.cut_after[file]
        self.wfile.write(data if cut is None else data[:cut])
        if cut is not None and self.hub.down_after_cut:
            self.hub.status = 503


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    """A hub that runs in a thread; `stop()` takes it down before the end."""

    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}")
    Handler.hub = hub
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stopped = threading.Event()

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            server.shutdown()
            server.server_close()
            thread.join()

    hub.stop = stop
    try:
        yield hub
    finally:
        stop()
