"""Who gets in, and how does every reply leave? The outermost layer, around all routes.

Closed by default: a route is open without a key only if it is among OPEN_PATHS; so are the files of
our pages.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.clock import Clock
from ridgeline.log import ACCESS, say
from ridgeline.observe.latency import Traffic
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.auth import Keys, Tenant
from ridgeline.server.errors import ApiError, internal_error
from ridgeline.server.hosts import HostGuard
from ridgeline.server.http_protocol import EXTENSION, OPEN_PATHS, new_request_id
from ridgeline.server.ignored_fields import HEADER as IGNORED_HEADER
from ridgeline.server.json_body import ClientGone, header_values
from ridgeline.server.static_files import StaticPages

MAX_PATH = 200  # characters of a path that the access log repeats

logger = logging.getLogger(__name__)


class Middleware:
    """Checks Host and key, gives each request our id, and turns every exception into a reply."""

    def __init__(
        self, app: ASGIApp, keys: Keys, hosts: HostGuard, traffic: Traffic, clock: Clock,
        pages: StaticPages | None = None,
    ) -> None:  # fmt: skip
        self._app = app
        self._pages = pages
        self._clock = clock
        self._keys = keys
        self._hosts = hosts
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exit_ = _Exit(scope, send, self._clock.now())
        scope["app"] = self  # makes the router raise its 404 and 405 instead of answering itself
        try:
            self._hosts.check(header_values(scope, b"host"))
            if self._pages is not None and (page := self._pages.find(scope)) is not None:
                return await page(scope, receive, exit_.send)
            scope["state"] = {"request_id": exit_.request_id, "tenant": self._tenant(scope)}
            await self._app(scope, receive, exit_.send)
        except ClientGone:
            self._traffic.refused["client_gone"] += 1
            exit_.error = "client_gone"
            exit_.hang_up()
        except ApiError as error:
            await self._refuse(error, scope, exit_)
        except HTTPException as fault:
            await self._refuse(_route_error(fault), scope, exit_)
        except Exception:
            say(
                logger, logging.ERROR, "a request handler failed", trace=True,
                request_id=exit_.request_id,
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
                    request_id=exit_.request_id, code=error.code,
                )  # fmt: skip
        await exit_.refuse(error)

    def _tenant(self, scope: Scope) -> Tenant:
        if scope["path"] in OPEN_PATHS:
            return Tenant()
        given, client = header_values(scope, b"authorization"), scope.get("client")
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
        "request_id": exit_.request_id,
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


def _route_error(fault: HTTPException) -> ApiError:
    if fault.status_code == 405:
        error = ApiError("method_not_allowed", "this method is not served on this path")
        for name, value in (fault.headers or {}).items():
            error.headers.append((name.lower().encode(), value.encode()))
        return error
    return ApiError("not_found", "there is nothing at this path")


class _Exit:
    """The way out of one request: our id on every reply, and one refusal at most."""

    def __init__(self, scope: Scope, send: Send, arrival: float) -> None:
        self.request_id = new_request_id()
        self.arrival = arrival
        self.status: int | None = None  # that the client was sent
        self.error: str | None = None  # the code of what ended it early
        self._scope = scope
        self._send = send
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            headers = list(message.get("headers", ()))
            given = [value for name, value in headers if name == b"x-request-id"]
            if given:  # that of the server which a router asked: its log has the rest
                self.request_id = given[0].decode("latin-1")
            else:
                headers.append((b"x-request-id", self.request_id.encode()))
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
