"""`ridgeline route`: one address in front of several servers."""

from __future__ import annotations

import argparse

from ridgeline import log
from ridgeline.cli.flags import add_fields, given
from ridgeline.cli.parser import Parser
from ridgeline.declared import declared
from ridgeline.errors import ConfigError
from ridgeline.server.config import Limits, RouteConfig

EXAMPLES = """Backends are servers of `ridgeline serve`, or any with OpenAI's API. A request goes to
the one whose first token is predicted soonest: by what waits there, what of the prompt its cache
holds and how fast it reads. Keys of clients are passed on; RIDGELINE_BACKEND_KEY is for the
router's own questions.

examples:
  ridgeline route --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002
  ridgeline route --backend https://a.example:443 --port 9000 --api-key-file keys.txt
"""

FIELDS = {name: field for name, field in declared(RouteConfig).items() if name != "limits"}
# The others are about an engine.
NAMES = (
    "max_body_bytes",
    "max_header_bytes",
    "max_headers",
    "max_json_depth",
    "max_connections",
    "max_held_body_bytes",
    "header_timeout_s",
    "body_timeout_s",
    "idle_connection_timeout_s",
    "queue_timeout_s",
    "run_timeout_s",
    "write_timeout_s",
    "drain_s",
)
LIMITS = {name: field for name, field in declared(Limits).items() if name in NAMES}


def add_arguments(parser: Parser) -> None:
    parser.usage = "ridgeline route --backend URL [--backend URL ...] [options]"
    where = parser.add_argument_group("from where to where")
    add_fields(parser, where, FIELDS, "route_")
    group = parser.add_argument_group("limits", "Sizes as 4MiB or bytes, times in seconds.")
    add_fields(parser, group, LIMITS, "limit_", metavars={"integer": "N", "number": "N"})


def route_config(args: argparse.Namespace) -> RouteConfig:
    """What the command line asks for. Raises ConfigError."""
    fields = given(args, FIELDS, "route_")
    if "backends" not in fields:
        raise ConfigError("backends are missing: name each with --backend http://HOST:PORT")
    for name in ("backends", "allowed_hosts", "allowed_origins"):
        fields[name] = tuple(fields.get(name, ()))
    return RouteConfig(limits=Limits(**given(args, LIMITS, "limit_")), **fields)


def run(args: argparse.Namespace) -> int:
    from ridgeline.server.route import route

    config = route_config(args)
    log.set_up(config.log_level, config.log_format, access_log=config.access_log)
    return route(config, on_listening=lambda url: print(f"ridgeline: routing on {url}", flush=True))
