"""Who gets in, and how does every reply leave? The outermost layer, around all routes.

Closed by default: a route is open without a key only if it is among OPEN_PATHS; so are the files of
our pages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any
from urllib.parse import quote as quoted

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.clock import Clock
from ridgeline.log import ACCESS, say
from ridgeline.observe.latency import Traffic
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.auth import Keys, Tenant
from ridgeline.server.errors import ApiError, internal_error, quote
from ridgeline.server.hosts import HostGuard
from ridgeline.server.http_protocol import EXTENSION, OPEN_PATHS, new_request_id
from ridgeline.server.ignored_fields import HEADER as IGNORED_HEADER
from ridgeline.server.json_body import ClientGone, header_values
from ridgeline.server.static_files import StaticPages

MAX_PATH = 200  # characters of a path that the access log repeats
CLIENT_ID = re.compile(rb"[!-~]{1,128}")  # a client's own x-request-id

logger = logging.getLogger(__name__)


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The same for the scripts of web pages of these origins too, of any with *."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-ignored-fields", "retry-after"],
    )


class Middleware:
    """Checks Host and key, gives each request our id, and turns every exception into a reply.
    `paths` are the methods and paths that there are, for whoever asks for another. `root` is what
    a proxy may have left in front of each."""

    def __init__(
        self, app: ASGIApp, keys: Keys, hosts: HostGuard, traffic: Traffic, clock: Clock,
        pages: StaticPages | None = None, paths: Sequence[tuple[str, str]] = (), root: str = "",
    ) -> None:  # fmt: skip
        self._paths = paths
        self._root = root.rstrip("/")
        self._app = app
        self._pages = pages
        self._clock = clock
        self._keys = keys
        self._hosts = hosts
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        _move(scope, _within(scope["path"], self._root))
        exit_ = _Exit(scope, send, self._clock.now())
        scope["app"] = self  # makes the router raise its 404 and 405 instead of answering itself
        try:
            self._hosts.check(header_values(scope, b"host"))
            if self._pages is not None and (page := self._pages.find(scope)) is not None:
                return await page(scope, receive, exit_.send)
            _move(scope, _plain(scope["path"]))
            scope["state"] = {"request_id": exit_.request_id, "tenant": self._tenant(scope)}
            await self._app(scope, receive, exit_.send)
        except ClientGone:
            self._traffic.refused["client_gone"] += 1
            exit_.error = "client_gone"
            exit_.hang_up()
        except ApiError as error:
            await self._refuse(error, scope, exit_)
        except HTTPException as fault:
            await self._refuse(_route_error(fault, scope, self._paths), scope, exit_)
        except Exception:
            say(
                logger, logging.ERROR, "a request handler failed", trace=True, **exit_.ids
            )  # fmt: skip
            await self._refuse(internal_error(), scope, exit_)
        finally:
            _tell_end(scope, exit_, self._clock.now())

    async def _refuse(self, error: ApiError, scope: Scope, exit_: _Exit) -> None:
        if scope["path"] not in OPEN_PATHS:  # a probe that hears no is not a refused request
            self._traffic.refused[error.code] += 1
            if error.status >= 500:
                say(
                    logger, logging.WARNING, "a request was refused",
                    **exit_.ids, code=error.code,
                )  # fmt: skip
        await exit_.refuse(error)

    def _tenant(self, scope: Scope) -> Tenant:
        if scope["path"] in OPEN_PATHS:
            return Tenant()
        given, client = header_values(scope, b"authorization"), scope.get("client")
        given = given or [b"Bearer " + key for key in header_values(scope, b"x-api-key")]
        address = client[0] if client else ""
        return self._keys.check(given[0] if len(given) == 1 else None, address)


def _tell_end(scope: Scope, exit_: _Exit, now: float) -> None:
    """To the access log and to the trace, where there are some."""
    state = scope.get("state", {})
    active: ActiveRequest | None = state.get("active")
    error = exit_.error
    if active is not None and active.error is not None:
        error = error or active.error.code
    if (trace := state.get("trace")) is not None:
        trace.end(exit_.status, error, active, now)
    if ACCESS.isEnabledFor(logging.INFO) and scope["path"] not in OPEN_PATHS:
        _note_access(scope, exit_, error, active, now)


def _note_access(
    scope: Scope, exit_: _Exit, error: str | None, active: ActiveRequest | None, now: float
) -> None:
    """One line for one request, but for probes, which would drown all others."""
    client = scope.get("client")
    values: dict[str, Any] = {
        **exit_.ids,
        "client": client and client[0],
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH],
        "status": exit_.status,
        "seconds": round(now - exit_.arrival, 6),
    }
    tenant: Tenant | None = scope.get("state", {}).get("tenant")
    if tenant is not None and tenant.label:
        values["key"] = tenant.label
    if active is not None:
        values |= active.summary()
    if error is not None:
        values["error"] = error
    say(ACCESS, logging.INFO, "request", **values)


def _within(path: str, root: str) -> str:
    """The path without what a proxy left in front of it."""
    return path[len(root) :] or "/" if root and f"{path}/".startswith(f"{root}/") else path


def _plain(path: str) -> str:
    """As the routes have it: some clients end a path with a slash, or double one."""
    if path.startswith("/lab/"):  # its pages are not ours to rename
        return path
    return re.sub("//+", "/", path).rstrip("/") or "/"


def _move(scope: Scope, path: str) -> None:
    """What is passed on to another server is the new path too."""
    if path != scope["path"]:
        scope["path"], scope["raw_path"] = path, quoted(path).encode()


def _route_error(fault: HTTPException, scope: Scope, paths: Sequence[tuple[str, str]]) -> ApiError:
    path = scope["path"]
    if fault.status_code == 405:
        methods = " and ".join(method for method, known in paths if known == path)
        error = ApiError(
            "method_not_allowed",
            f"this path is served with {methods}" if methods else "no method fits this path",
        )
        for name, value in (fault.headers or {}).items():
            error.headers.append((name.lower().encode(), value.encode()))
        return error
    names = list(dict.fromkeys(known for _, known in paths))
    near = [name for name in names if name == f"/v1{path}"]
    near = near or get_close_matches(path[:MAX_PATH], names, 1)
    words = f"there is nothing at {quote(path)}"
    if near:
        words += f"; perhaps {near[0]} is meant"
    return ApiError("not_found", f"{words}; there is {', '.join(names)}" if names else words)


class _Exit:
    """The way out of one request: our id on every reply, and one refusal at most."""

    def __init__(self, scope: Scope, send: Send, arrival: float) -> None:
        self.request_id = new_request_id()
        given = header_values(scope, b"x-request-id")
        self.given_id = given[0] if len(given) == 1 and CLIENT_ID.fullmatch(given[0]) else b""
        self.arrival = arrival
        self.status: int | None = None  # that the client was sent
        self.error: str | None = None  # the code of what ended it early
        self._scope = scope
        self._send = send
        self._started = False

    @property
    def ids(self) -> dict[str, Any]:
        """For the log: ours, and the client's own where it sent one."""
        own = {"client_request_id": self.given_id.decode()} if self.given_id else {}
        return {"request_id": self.request_id, **own}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            given = [value for name, value in headers if name == b"x-request-id"]
            if given and given[0] != self.given_id:
                # that of the server which a router asked: its log has the rest
                self.request_id = given[0].decode("latin-1")
            elif not given:
                shown = self.given_id or self.request_id.encode()
                headers.append((b"x-request-id", shown))
            if ignored := self._scope.get("state", {}).get("ignored"):
                headers.append((IGNORED_HEADER, ", ".join(ignored).encode()))
            message["headers"] = headers
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        self.error = error.code
        if self._started:
            say(
                logger, logging.ERROR, "a reply broke off",
                request_id=self.request_id, code=error.code,
            )  # fmt: skip
            self.hang_up()
            return
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *error.headers,
        ]
        if error.close:
            headers.append((b"connection", b"close"))
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    def hang_up(self) -> None:
        connection = self._scope.get("extensions", {}).get(EXTENSION)
        if connection is not None:
            connection.abort()
