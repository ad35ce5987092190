"""Which paths does the server have, who answers on each, and which right does it take?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

import ridgeline
from ridgeline.router.backend import Load
from ridgeline.server.auth import ADMIN, ANY, OPEN, Keys, Tenant
from ridgeline.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChat,
    TokenizeText,
)
from ridgeline.server.chat import read_chat
from ridgeline.server.errors import from_fault
from ridgeline.server.hosts import HostGuard
from ridgeline.server.http_protocol import READY_PATHS
from ridgeline.server.ignored_fields import Kind
from ridgeline.server.live import Live
from ridgeline.server.metrics import METRICS
from ridgeline.server.metrics_page import CONTENT_TYPE, render
from ridgeline.server.middleware import Middleware, with_origins
from ridgeline.server.model import ModelCard, ModelList, ServedModel, ServerInfo
from ridgeline.server.openapi import Page
from ridgeline.server.parsed_request import ParsedRequest, read_completion
from ridgeline.server.service import Body, Service, send_json, unless_gone
from ridgeline.server.static_files import StaticPages
from ridgeline.server.text_client import TextFault
from ridgeline.server.tokenize import detokenize, read_tokenize, tokenizer_info, tokens

Read = Callable[[Body, ServedModel], ParsedRequest]
Work = Callable[[Service, Scope, Body, int], Coroutine[Any, Any, bytes]]


class Route(routing.Route):
    """A path, and the right that its caller must have: an administrator's, unless it says another.
    What is OPEN stands among ridgeline.server.http_protocol.OPEN_PATHS too."""

    def __init__(
        self, path: str, endpoint: Callable[..., object], *, methods: list[str],
        right: str = ADMIN,
    ) -> None:  # fmt: skip
        super().__init__(path, endpoint, methods=methods)
        self.right = right

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant: Tenant = scope["state"]["tenant"]
        tenant.need(self.right)
        await super().handle(scope, receive, send)


class Answering:
    """POST of a question to the engine. What reads the body says what the path is for."""

    def __init__(self, service: Service, kind: Kind, read: Read) -> None:
        self.__doc__ = read.__doc__
        self._service = service
        self._kind = kind
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._service.answer(scope, receive, send, self._read, self._kind)


class Tokenizing:
    """POST of something that needs the tokenizer but not the engine."""

    def __init__(self, service: Service, kinds: Sequence[Kind], work: Work) -> None:
        self.__doc__ = work.__doc__
        self._service = service
        self._kinds = kinds
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        service.need_model()
        with service.aside.open(scope["state"]["tenant"]) as ticket:
            body, size = await service.read(scope, receive, ticket, self._kinds)
            work = self._work(service, scope, body, size)
            await send_json(send, await unless_gone(receive, work))


async def _tokenize(service: Service, scope: Scope, body: Body, size: int) -> bytes:
    """The token ids of a text or a conversation, and their number."""
    model, state = service.need_model(), scope["state"]
    question, wants_texts = await service.run(size, read_tokenize, body, model)
    try:
        encoded = await service.text.ids(question, state["tenant"].name, state["request_id"])
    except TextFault as fault:
        raise from_fault(fault) from None
    return await service.run(len(encoded[0]), tokens, encoded[0], model, wants_texts)


async def _detokenize(service: Service, scope: Scope, body: Body, size: int) -> bytes:
    """The text of token ids, special tokens shown."""
    return await service.run_aside(detokenize, body, service.need_model())


def make_app(service: Service, keys: Keys) -> ASGIApp:
    """The whole application, as ASGI, but for what has moved to the admin port."""
    routes = make_routes(service)
    service.admission.num_keys = service.aside.num_keys = len(keys)
    if service.config.admin_port is not None:
        routes = [route for route in routes if route.path != "/metrics"]
    pages = StaticPages(has_chat=service.config.ui, has_lab=service.config.lab)
    return _gate(service, keys, routes, service.config.host, pages)


def make_admin_app(service: Service, keys: Keys) -> ASGIApp:
    """What the admin port answers."""
    return _gate(service, keys, make_admin_routes(service), service.config.admin_host)


def _gate(
    service: Service, keys: Keys, routes: list[Route], host: str, pages: StaticPages | None = None
) -> ASGIApp:
    hosts = HostGuard(host, service.config.allowed_hosts)
    router: ASGIApp = Router(routes, redirect_slashes=False)
    if pages is not None and service.config.lab:
        router = _beside(router, Router(_lab_routes(service), redirect_slashes=False))
    config = service.config
    paths = [(method, path) for route in routes for path, method in _paths(route)]
    app = Middleware(
        router, keys, hosts, service.engine.traffic, service.clock, pages, paths, config.root_path
    )
    return with_origins(app, config.allowed_origins)


def _paths(route: Route) -> Iterator[tuple[str, str]]:
    for method in sorted((route.methods or set()) - {"HEAD"}):
        yield route.path.replace("{name:path}", "NAME"), method


def _beside(api: ASGIApp, lab: ASGIApp) -> ASGIApp:
    """The lab's paths apart from the API, of whose document they are no part."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (lab if scope["path"].startswith("/lab/") else api)(scope, receive, send)

    return app


def _lab_routes(service: Service) -> list[Route]:
    from ridgeline.lab.app import endpoints, what_if  # the laboratory, only where it was asked for

    live = Live(service, what_if)
    return [
        Route("/lab/live/state", live.state, methods=["GET"], right="explain"),
        Route("/lab/live/steps", live.steps, methods=["GET"], right="explain"),
        Route("/lab/live/what-if", live.what_if, methods=["POST"], right="metrics"),
        *(
            Route(path, ask, methods=[method], right=ANY)
            for path, method, ask in endpoints(has_live=True)
        ),
    ]


def make_routes(service: Service) -> list[Route]:
    """Each endpoint's docstring is its line in docs/http-api.md."""
    limits = service.limits

    def completion(body: Body, model: ServedModel) -> ParsedRequest:
        """An answer that continues a text or token ids, whole or streamed."""
        call = read_completion(body, model.defaults, limits.max_sequences_per_request)
        model.check_name(call.body.model)
        return call

    def chat(body: Body, model: ServedModel) -> ParsedRequest:
        """The next message of a conversation, whole or streamed."""
        call = read_chat(body, model.defaults, limits.max_sequences_per_request)
        model.check_name(call.body.model)
        return call

    return [
        Route("/v1/models", _get(service, _models), methods=["GET"], right=ANY),
        Route("/v1/models/{name:path}", _get(service, _model), methods=["GET"], right=ANY),
        *(
            Route(path, Answering(service, kind, read), methods=["POST"], right="answer")
            for path, kind, read in (
                ("/v1/completions", CompletionBody, completion),
                ("/v1/chat/completions", ChatBody, chat),
            )
        ),
        *(
            Route(path, Tokenizing(service, kinds, work), methods=["POST"], right="tokenize")
            for path, kinds, work in (
                ("/tokenize", (TokenizeChat, TokenizeText), _tokenize),
                ("/detokenize", (DetokenizeBody,), _detokenize),
            )
        ),
        Route("/tokenizer_info", _tokenizer_info(service), methods=["GET"], right="tokenize"),
        Route("/load", _get(service, _load), methods=["GET"], right=ANY),
        Route("/server_info", _get(service, _server_info), methods=["GET"]),
        Route("/explain", _explain(service), methods=["GET"], right="explain"),
        Route("/openapi.json", Page(service), methods=["GET"], right=ANY),
        *_everywhere(service),
    ]


def make_admin_routes(service: Service) -> list[Route]:
    return [Route("/explain", _explain_all(service), methods=["GET"]), *_everywhere(service)]


def _everywhere(service: Service) -> list[Route]:
    return [
        Route("/health/live", _get(service, _live), methods=["GET"], right=OPEN),
        *(Route(path, _get(service, _ready), methods=["GET"], right=OPEN) for path in READY_PATHS),
        Route("/metrics", _metrics(service), methods=["GET"], right="metrics"),
        Route("/version", _get(service, _version), methods=["GET"], right=ANY),
    ]


def _get(
    service: Service, answer: Callable[[Service, Request], Response]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return answer(service, request)

    endpoint.__doc__ = answer.__doc__
    return endpoint


def _explain(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        """Where the time of the latest requests went: what `ridgeline explain --url` shows. Of the
        key's own requests alone, unless it is an administrator's."""
        tenant: Tenant = request.scope["state"]["tenant"]
        of_all = ADMIN in tenant.rights and service.config.admin_port is None
        service.need_model()
        with service.aside.open(tenant):
            return _json_bytes(await service.reports.read(None if of_all else tenant.name))

    return endpoint


def _explain_all(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        service.need_model()
        return _json_bytes(await service.reports.read(None))

    return endpoint


def _json(value: object) -> Response:
    return _json_bytes(msgspec.json.encode(value))


def _json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _card(name: str, model: ServedModel) -> ModelCard:
    return ModelCard(name, "model", model.created, "ridgeline", model.max_model_len)


def _models(service: Service, request: Request) -> Response:
    """The names of the served model, with its longest context."""
    model = service.need_model()
    return _json(ModelList("list", [_card(name, model) for name in model.names]))


def _model(service: Service, request: Request) -> Response:
    """The same for one name."""
    model = service.need_model()
    model.check_name(name := request.path_params["name"])
    return _json(_card(name, model))


def _live(service: Service, request: Request) -> Response:
    """200 while the process runs."""
    return _json({"status": "live"})


def _ready(service: Service, request: Request) -> Response:
    """200 while requests are served; 503 with the reason else."""
    service.check_ready()
    return _json({"status": "ready"})


def _load(service: Service, request: Request) -> Response:
    """Who runs and waits, and how fast prompts are read: what a router asks, while requests are
    served."""
    service.check_ready()
    gauges, ready, costs = service.engine.gauges, service.engine.ready, service.engine.gauges.costs
    rate = step_s = answer_s = None
    if ready is not None and ready.speeds:
        rate, step_s = ready.speeds[min(gauges.num_running.bit_length(), len(ready.speeds) - 1)]
        answer_s = (
            service.engine.service_rate.answer_tokens * ready.speeds[-1][1] / ready.max_num_seqs
        )
        if costs is not None:
            now = service.clock.now()
            late = service.correction.ratio(now, costs.measured_s, costs.expected_s)
            rate, step_s, answer_s = rate / late, step_s * late, answer_s * late
    wait_s = service.engine.service_rate.wait_s(gauges.num_waiting) if gauges.num_waiting else 0.0
    running, waiting = gauges.num_running, gauges.num_waiting
    return _json(Load(running, waiting, wait_s, rate, step_s, answer_s, running + waiting))


def _metrics(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        """Counters and times in Prometheus' text format."""
        page = await render(service, METRICS)
        return Response(page, headers={"content-type": CONTENT_TYPE})

    return endpoint


def _server_info(service: Service, request: Request) -> Response:
    """What is served, and what was asked of the engine, null where that chooses."""
    model, engine = service.need_model(), service.config.engine
    info = ServerInfo(ridgeline.__version__, model.names, model.max_model_len, engine)
    return _json_bytes(msgspec.json.encode(info, enc_hook=str))


def _tokenizer_info(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        """The model's tokenizer_config.json, with its chat template."""
        model = service.need_model()
        with service.aside.open(request.scope["state"]["tenant"]):
            return _json_bytes(await service.run_aside(tokenizer_info, model))

    return endpoint


def _version(service: Service, request: Request) -> Response:
    """The version of Ridgeline."""
    versions: Mapping[str, str] = {"version": ridgeline.__version__}
    return _json(versions)
