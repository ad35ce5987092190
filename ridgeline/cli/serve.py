"""`ridgeline serve`: an OpenAI-compatible HTTP server for one model."""

from __future__ import annotations

import argparse
import logging
from dataclasses import Field, fields
from typing import Any

from ridgeline import log
from ridgeline.cli.engine_flags import add_engine_flags, byte_size, engine_options
from ridgeline.cli.parser import Parser, Renamed
from ridgeline.config import EngineConfig
from ridgeline.server.config import Limits, ServeConfig

logger = logging.getLogger(__name__)

EXAMPLES = """It listens on this machine only. With another --host it also wants a key.
Stop it with Ctrl-C or SIGTERM: running answers are finished first.

examples:
  ridgeline serve                                       the bundled model
  ridgeline serve path/to/model
  ridgeline serve path/to/model --speculate ngram       for answers that repeat their prompts
  ridgeline serve user/model@revision --port 9000 --served-model-name my-model
  ridgeline serve --config serve.toml --port 9000       the file, but for the port
  ridgeline serve path/to/model --host 192.0.2.7 --api-key-file keys.txt
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"model": "my-model", "prompt": "Once upon a time", "max_tokens": 50}'
"""

LIMIT_HELP = {
    "max_body_bytes": "largest request body",
    "max_header_bytes": "largest request head",
    "max_headers": "most header lines",
    "max_json_depth": "deepest nesting of a body",
    "max_connections": "most open connections; one address may hold 8 times what is free",
    "max_sequences_per_request": "prompts times answers of one request",
    "max_queued_sequences": "waiting sequences beyond those that can run at once",
    "max_queued_cache_fills": "waiting prompt tokens, in sizes of the KV cache",
    "max_held_body_bytes": "memory for bodies, and for what is read from them, at once",
    "max_sequences_per_key": "sequences at once for one API key; 0: all that the server holds when "
    "it is the only one that asks, else a part of it",
    "max_stream_bytes": "bytes made for a stream that its client has not read yet",
    "header_timeout_s": "to receive the head of a request",
    "body_timeout_s": "to receive its body",
    "idle_connection_timeout_s": "an unused connection is closed after",
    "queue_timeout_s": "a request may wait for its first step, or twice as long as it was foretold",
    "run_timeout_s": "a request may take from its first step",
    "write_timeout_s": "a client may leave its stream unread",
    "keepalive_s": "between comments on a stream that has no news",
    "drain_s": "at the end, for running answers",
    "step_overdue_multiple": "a step that takes so many times what it should: not ready",
    "step_overdue_s": "but never before so long",
    "step_deadline_s": "pending work without a step for so long: not ready",
    "step_kill_s": "and for so long, longer than its price allows: the engine is started again",
    "first_step_kill_s": "the same for steps that may compile kernels or that have no price",
    "max_engine_restarts": "in a row before the server gives up",
    "tokenizer_processes": "processes that turn text into tokens, all but one for one client",
}


RENAMED = {
    "--max-requests-per-key": "max_sequences_per_key",
    "--tokenizer-threads": "tokenizer_processes",
}


def add_arguments(parser: Parser) -> None:
    defaults = {field.name: field.default for field in fields(ServeConfig)}
    where = parser.add_argument_group("where and for whom")
    where.add_argument(
        "--config",
        metavar="FILE",
        help="TOML or YAML with flags as keys, such as port = 8000, those of limits perhaps under "
        "[limits]; what is typed beats it",
    )
    where.add_argument(
        "--host", default=defaults["host"], help="address to listen on (default: %(default)s)"
    )
    where.add_argument(
        "--port",
        type=int,
        default=defaults["port"],
        help="0 lets the system choose (default: %(default)s)",
    )
    where.add_argument(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="another port for /metrics and for /explain of everybody's requests, which --port "
        "then does not show; it has connections of its own",
    )
    where.add_argument(
        "--admin-host",
        default=defaults["admin_host"],
        metavar="HOST",
        help="address of --admin-port; beyond this machine it wants a key with rights=admin "
        "(default: %(default)s)",
    )
    where.add_argument("--served-model-name", metavar="NAME", help="what clients put into `model`")
    where.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="accepted keys, one a line, or sha256:HEX of one; behind it perhaps name=NAME, "
        "weight=W and rights=answer,tokenize,explain,metrics or rights=admin; or set "
        "RIDGELINE_API_KEY to one key",
    )
    where.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that browsers may know this server by; may be repeated",
    )
    where.add_argument(
        "--allow-anyone-on-the-network-without-a-key",
        action="store_true",
        help="listen beyond this machine although no key is set",
    )
    where.add_argument(
        "--price-per-hour",
        type=float,
        metavar="P",
        help="what the devices cost an hour, in your currency: puts money on the costs that "
        "requests with include_cost get",
    )
    where.add_argument(
        "--log-level",
        default=defaults["log_level"],
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="default: %(default)s",
    )
    where.add_argument(
        "--log-format",
        default=defaults["log_format"],
        choices=tuple(log.FORMATS),
        help="how lines of the log are written (default: %(default)s)",
    )
    where.add_argument(
        "--access-log",
        action="store_true",
        help="log one line for each request: sizes and times, no text",
    )
    where.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector, as "
        "http://127.0.0.1:4318 (pip install 'ridgeline[otel]')",
    )
    where.add_argument(
        "--no-tripwire",
        action="store_true",
        help="go on when a process that serves starts a program, unpickles, or writes files where "
        "it never should; without this it ends, and the engine is started again",
    )
    add_engine_flags(parser)
    group = parser.add_argument_group("limits", "Sizes as 4MiB or bytes, times in seconds.")
    for field in fields(Limits):
        parser.mark_expert(*_add_limit(group, field).option_strings)
    for old, new in RENAMED.items():
        group.add_argument(
            old, type=int, action=Renamed, dest="limit_" + new, default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip
    parser.mark_expert(
        "--admin-host",
        "--admin-port",
        "--allowed-host",
        "--allow-anyone-on-the-network-without-a-key",
        "--no-tripwire",
    )


def _add_limit(group: argparse._ArgumentGroup, field: Field[Any]) -> argparse.Action:
    kinds = {"int": int, "float": float}
    kind = byte_size if field.name.endswith("_bytes") else kinds[str(field.type)]
    return group.add_argument(
        "--" + field.name.replace("_", "-"),
        type=kind,
        default=field.default,
        dest=f"limit_{field.name}",
        metavar="N",
        help=f"{LIMIT_HELP[field.name]} (default: %(default)s)",
    )


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """What the command line asks for."""
    limits = Limits(**{f.name: getattr(args, f"limit_{f.name}") for f in fields(Limits)})
    return ServeConfig(
        engine=EngineConfig(model=args.model, **engine_options(args)),
        host=args.host,
        port=args.port,
        admin_port=args.admin_port,
        admin_host=args.admin_host,
        served_model_name=args.served_model_name,
        api_key_file=args.api_key_file,
        allowed_hosts=tuple(args.allowed_host),
        allow_anyone_on_the_network_without_a_key=args.allow_anyone_on_the_network_without_a_key,
        price_per_hour=args.price_per_hour,
        log_level=args.log_level,
        log_format=args.log_format,
        access_log=args.access_log,
        otlp_endpoint=args.otlp_endpoint,
        tripwire=not args.no_tripwire,
        limits=limits,
    )


def run(args: argparse.Namespace) -> int:
    from ridgeline.server.lifecycle import serve

    log.set_up(args.log_level, args.log_format, access_log=args.access_log)
    if args.config is not None:
        words = (f"{flag[2:]}={value}" for flag, value in args.parser.settings(args))
        log.say(logger, logging.INFO, "settings", file=args.config, taken="; ".join(words))
    return serve(serve_config(args), on_listening=_announce)


def _announce(url: str) -> None:
    """On standard output, so that whoever asked for port 0 learns which it is."""
    print(f"ridgeline: listening on {url}", flush=True)
