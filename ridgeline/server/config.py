"""What may an operator ask of the server?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from ridgeline import log
from ridgeline.config import EngineConfig, check_numbers
from ridgeline.declared import check_fields, says
from ridgeline.errors import ConfigError
from ridgeline.parsers import PARSERS, REASONING
from ridgeline.router import POLICIES

REPLICAS = re.compile(r"(?P<least>\d{1,3})(:(?P<most>\d{1,3}))?")
MAX_REPLICAS = 64
DEFAULT_BUILDER = "ridgeline.build:build_without_text"

# What is below the least here would refuse everybody, or let the server end or kill what is well.
MOMENT_S = 0.1  # who has waited too long is looked for a few times a second
FOREVER_S = 1e9  # thirty years; timers do not take any number
SMALL_BYTES = 1 << 10  # the head of a plain request has some hundred bytes
MANY_BYTES = 1 << 40
MANY = 1 << 30

Size = Annotated[int, says(ge=SMALL_BYTES, le=MANY_BYTES)]
Positive = Annotated[int, says(ge=1, le=MANY)]
Number = Annotated[int, says(ge=0, le=MANY)]
Wait = Annotated[float, says(ge=MOMENT_S, le=FOREVER_S)]
Span = Annotated[float, says(ge=0.0, le=FOREVER_S)]
Port = Annotated[int, says(ge=0, le=65535)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client, or all together, may cost. Bytes, seconds and counts as the names say.

    Nothing here adjusts itself; a request over a limit is refused with the limit in the message.
    """

    max_body_bytes: Annotated[Size, says("largest request body")] = 4 << 20
    max_header_bytes: Annotated[Size, says("largest request head")] = 64 << 10
    max_headers: Annotated[
        int, says("most header lines", ge=8, le=MANY)  # ordinary clients send so many
    ] = 100
    max_json_depth: Annotated[
        int, says("deepest nesting of a body", ge=1, le=512)  # the parser calls itself for each
    ] = 64
    max_connections: Annotated[
        Positive, says("most open connections; one address may hold 8 times what is free")
    ] = 8192
    max_sequences_per_request: Annotated[Positive, says("prompts times answers of one request")] = (
        512
    )
    max_queued_sequences: Annotated[  # 0: who cannot run at once is refused
        Number, says("waiting sequences beyond those that can run at once")
    ] = 1024
    max_queued_cache_fills: Annotated[
        float, says("waiting prompt tokens, in sizes of the KV cache", ge=0.1, le=1e9)
    ] = 4.0
    max_held_body_bytes: Annotated[
        Size, says("memory for bodies, and for what is read from them, at once")
    ] = 256 << 20
    max_sequences_per_key: Annotated[
        Number,
        says(
            "sequences at once for one API key; 0: all that the server holds when it is the only "
            "one that asks, else a part of it"
        ),
    ] = 0
    max_stream_bytes: Annotated[
        Size, says("bytes made for a stream that its client has not read yet")
    ] = 256 << 10
    header_timeout_s: Annotated[Wait, says("to receive the head of a request")] = 10.0
    body_timeout_s: Annotated[Wait, says("to receive its body")] = 30.0
    idle_connection_timeout_s: Annotated[  # 0: a connection is for one request
        int, says("an unused connection is closed after", ge=0, le=int(FOREVER_S))
    ] = 30
    queue_timeout_s: Annotated[
        Wait, says("a request may wait for its first step, or twice as long as it was foretold")
    ] = 60.0
    run_timeout_s: Annotated[Wait, says("a request may take from its first step")] = 600.0
    write_timeout_s: Annotated[Wait, says("a client may leave its stream unread")] = 30.0
    keepalive_s: Annotated[Wait, says("between comments on a stream that has no news")] = 15.0
    drain_s: Annotated[Span, says("at the end, for running answers")] = 30.0
    step_overdue_multiple: Annotated[
        float, says("a step that takes so many times what it should: not ready", ge=1.0, le=1e9)
    ] = 20.0
    step_overdue_s: Annotated[Span, says("but never before so long")] = 10.0
    step_deadline_s: Annotated[Wait, says("pending work without a step for so long: not ready")] = (
        30.0
    )
    # Longer, and longer than step_overdue_multiple times its price: the engine is killed and
    # started again. The other limit is for the first step of each kind, which may compile kernels
    # or read weights from a disk, and for engines whose steps have no price.
    step_kill_s: Annotated[
        Wait, says("and for so long, longer than its price allows: the engine is started again")
    ] = 30.0
    first_step_kill_s: Annotated[
        Wait, says("the same for steps that may compile kernels or that have no price")
    ] = 300.0
    max_engine_restarts: Annotated[  # without a healthy minute between them
        int,
        says("in a row before the server gives up", ge=0, le=100),  # each pause is twice the last
    ] = 3
    tokenizer_processes: Annotated[
        int, says("processes that turn text into tokens, all but one for one client", ge=1, le=1024)
    ] = 3


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen and for whom, and what is said of it. Keys come from `api_key_file`, or from
    the environment variable RIDGELINE_API_KEY."""

    host: Annotated[str, says("address to listen on", is_common=True)] = "127.0.0.1"
    port: Annotated[Port, says("0 lets the system choose", is_common=True)] = 8000
    api_key_file: Annotated[
        str | None,
        says(
            "accepted keys, one a line, or sha256:HEX of one; behind it perhaps name=NAME, "
            "weight=W and rights=answer,tokenize,explain,metrics or rights=admin; or set "
            "RIDGELINE_API_KEY to one key",
            is_common=True,
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        says(
            "a further name that browsers may know this server by",
            flag="--allowed-host",
            metavar="NAME",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        says(
            "a web page whose scripts may ask, as https://app.example; * is any",
            flag="--allowed-origin",
            metavar="ORIGIN",
        ),
    ] = ()
    root_path: Annotated[
        str, says("what a proxy in front leaves before each path of the API, as /llm")
    ] = ""
    ssl_certfile: Annotated[
        str | None, says("serve HTTPS with this certificate, or chain of them, in PEM")
    ] = None
    ssl_keyfile: Annotated[
        str | None, says("its key, where that is in a file of its own", metavar="FILE")
    ] = None
    allow_anyone_on_the_network_without_a_key: Annotated[
        bool, says("listen beyond this machine although no key is set")
    ] = False
    need_window_s: Annotated[
        float,
        says(
            "of a router: how far back requests count for how many servers are needed",
            ge=1.0,
            le=3600.0,
        ),
    ] = 60.0
    log_level: Annotated[
        str,
        says(
            "the least important lines of the log that are written",
            choices=("DEBUG", "INFO", "WARNING", "ERROR"),
            is_common=True,
        ),
    ] = "INFO"
    log_format: Annotated[
        str, says("how lines of the log are written", choices=tuple(log.FORMATS))
    ] = "text"
    access_log: Annotated[
        bool, says("log a line for each request: sizes and times, no text", is_common=True)
    ] = False
    limits: Limits = Limits()


class ServeConfig(Listening, frozen=True, kw_only=True):
    """Where to listen, for whom, and what to serve. `builder` names the function that makes the
    engine ("module:function"): an extension seam."""

    engine: EngineConfig
    replicas: Annotated[
        str,
        says(
            "so many servers behind one address, at most 64; on Ray also MIN:MAX, as needed",
            metavar="N",
            is_common=True,
        ),
    ] = "1"
    admin_port: (
        Annotated[
            Port,
            says(
                "another port for /metrics and for /explain of everybody's requests, which --port "
                "then does not show; it has connections of its own"
            ),
        ]
        | None
    ) = None
    admin_host: Annotated[
        str, says("address of --admin-port; beyond this machine it wants a key with rights=admin")
    ] = "127.0.0.1"
    served_model_name: Annotated[
        str | None,
        says("what clients put into `model`; several with commas", is_common=True, metavar="NAME"),
    ] = None
    chat_template: Annotated[
        str | None,
        says("a file with the chat template, in place of the model's own", metavar="FILE"),
    ] = None
    tool_parser: Annotated[
        str | None,
        says(
            "the format of its calls of tools, if not what its chat template says", choices=PARSERS
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        says("the tags around its reasoning, if not those of its template", choices=REASONING),
    ] = None
    price_per_hour: (
        Annotated[
            float,
            says(
                "what the devices cost an hour, in your currency: puts money on the costs that "
                "requests with include_cost get",
                ge=0.0,
                le=1e12,
                metavar="P",
            ),
        ]
        | None
    ) = None
    otlp_endpoint: Annotated[
        str | None,
        says(
            "send a trace of each request to this OpenTelemetry collector, as "
            "http://127.0.0.1:4318 (pip install 'ridgeline[otel]')",
            metavar="URL",
            is_common=True,
        ),
    ] = None
    ui: Annotated[bool, says("serve a page at / to chat with the model in a browser")] = True
    lab: Annotated[
        bool, says("pages at /lab/ show how inference works, live too", is_common=True)
    ] = False
    strict_fields: Annotated[
        bool,
        says("refuse requests with a field that is not known; else a header names what is ignored"),
    ] = False
    tripwire: Annotated[
        bool,
        says(
            "end a process that serves when it starts a program, unpickles, or writes files where "
            "it never should"
        ),
    ] = True
    builder: str = DEFAULT_BUILDER

    @property
    def served_names(self) -> tuple[str, ...]:
        """Those asked for, perhaps none."""
        names = (self.served_model_name or "").split(",")
        return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))

    @property
    def num_replicas(self) -> tuple[int, int]:
        """The least and the most. Raises ConfigError."""
        found = REPLICAS.fullmatch(self.replicas)
        least = int(found["least"]) if found else 0
        most = int(found["most"] or least) if found else 0
        if not 1 <= least <= most <= MAX_REPLICAS:
            raise ConfigError(
                f"replicas is {self.replicas!r}; write a number from 1 to {MAX_REPLICAS}, or with"
                " launcher ray MIN:MAX"
            )
        if least < most and self.engine.launcher != "ray":
            raise ConfigError(f"replicas {self.replicas} needs launcher ray; else give one number")
        return least, most


class RouteConfig(Listening, frozen=True, kw_only=True):
    """Where to listen, for whom, and between which servers to choose."""

    backends: Annotated[
        tuple[str, ...],
        says(
            "a server to send requests to, as http://HOST:PORT",
            lengths=(1, None),
            flag="--backend",
            metavar="URL",
            is_common=True,
        ),
    ]
    policy: Annotated[
        str, says("how a server is chosen", choices=tuple(POLICIES), is_common=True)
    ] = "first-token"
    prefix_bytes: Annotated[
        Size, says("memory for what each server's prefix cache is thought to hold")
    ] = 32 << 20


def check_serve_numbers(config: ServeConfig) -> None:
    """What can be said of the settings before anything is started, the engine's among them;
    ConfigError names the first that is wrong."""
    check_numbers(config.engine)
    check_fields(config)
    check_fields(config.limits)
    for name, table in (("tool_parser", PARSERS), ("reasoning_parser", REASONING)):
        if getattr(config, name) not in (None, *table):
            known = ", ".join(table)
            raise ConfigError(f"unknown {name} {getattr(config, name)!r}; choose one of {known}")
    if config.chat_template is not None and not Path(config.chat_template).is_file():
        raise ConfigError(f"chat_template: there is no file {config.chat_template}")
    _ = config.num_replicas
