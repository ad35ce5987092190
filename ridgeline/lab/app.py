"""Which paths does the lab have, and how does a page's answer reach the browser?

`GET /lab/api` tells all pages and their inputs. `POST /lab/api/NAME` takes inputs as JSON and gives
the Answer; that of a long page comes as server-sent events: {"progress": 0.4}, ..., then
{"answer": ...} or {"error": ...}. What the reader does not wait for any more is not computed on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ridgeline.errors import ConfigError, RequestFault
from ridgeline.lab.page import PAGES, Answer, Page, controls, load, read_inputs
from ridgeline.lab.turns import SHARE, Place, Refused, Turns
from ridgeline.lab.what_if import what_if

__all__ = ["answer", "described", "endpoints", "pages", "what_if"]

MAX_BODY_BYTES = 256 << 10  # a config.json that is pasted has a few thousand


SHOWN = ("name", "title", "idea", "group", "long", "needs_model")


def described(page: Page) -> dict[str, Any]:
    """A page as the browser needs to know it before it asks."""
    told = {name: getattr(page, name) for name in SHOWN}
    presets = [{"name": one.name, "inputs": one.inputs} for one in page.presets]
    return told | {"inputs": controls(page.inputs), "presets": presets}


def pages(has_live: bool, request: Request) -> Response:
    """All pages of the lab: what each shows, and its inputs with bounds and defaults."""
    return _json({"pages": [described(load(name)) for name in PAGES], "live": has_live})


async def answer(turns: Turns, request: Request) -> Response:
    """What a page shows for these inputs."""
    tenant = request.scope.get("state", {}).get("tenant")
    try:
        place = turns.take((request.client and request.client.host, getattr(tenant, "key", b"")))
    except Refused as refused:
        return _fault(str(refused), refused.status, retry_s=refused.retry_s)
    try:
        page = await place.run(load, request.path_params["name"])
        inputs = read_inputs(page, await _body(request))
        if page.long:
            return _Stream(page, inputs, place)
        if await request.is_disconnected():
            raise ClientDisconnect
        return _json(await place.run(page.answer, inputs))
    except (RequestFault, ConfigError) as fault:
        return _fault(str(fault), 400, getattr(fault, "param", None))
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    finally:
        place.close()


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


class _Stream(StreamingResponse):
    """Closed when the reader is gone; the step that runs then is the last one."""

    def __init__(self, page: Page, inputs: msgspec.Struct, place: Place) -> None:
        self._place = place.passed_on()
        super().__init__(_events(page, inputs, self._place), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._place.close()


async def _events(page: Page, inputs: msgspec.Struct, place: Place) -> AsyncIterator[bytes]:
    steps: Iterator[Any] = iter(page.answer(inputs))  # type: ignore[arg-type]
    try:
        while (step := await place.run(next, steps, None)) is not None:
            name = "answer" if isinstance(step, Answer) else "progress"
            yield b"data: " + msgspec.json.encode({name: step}) + b"\n\n"
    except (RequestFault, ConfigError) as fault:
        yield b"data: " + msgspec.json.encode({"error": {"message": str(fault)}}) + b"\n\n"
    finally:
        steps.close()  # type: ignore[attr-defined]


def _json(value: object, status: int = 200, **headers: str) -> Response:
    body = msgspec.json.encode(value)
    headers |= {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(body, status, media_type="application/json", headers=headers)


def _fault(message: str, status: int, param: str | None = None, retry_s: int = 0) -> Response:
    headers = {"retry-after": str(retry_s)} if retry_s else {}
    return _json({"error": {"message": message, "param": param}}, status, **headers)


def endpoints(*, has_live: bool = False) -> tuple[tuple[str, str, Callable[..., Any]], ...]:
    """(path, method, what answers). `has_live`: a server's engine can be watched."""
    turns = Turns(SHARE) if has_live else Turns()
    return (
        ("/lab/api", "GET", partial(pages, has_live)),
        ("/lab/api/{name}", "POST", partial(answer, turns)),
    )
