"""`ridgeline serve`: an OpenAI-compatible HTTP server for one model."""

from __future__ import annotations

import argparse
import logging

from ridgeline import log
from ridgeline.cli.flags import add_engine_flags, add_fields, engine_options, given
from ridgeline.cli.parser import Parser, Renamed
from ridgeline.config import EngineConfig
from ridgeline.declared import declared
from ridgeline.server.config import Limits, ServeConfig

logger = logging.getLogger(__name__)

EXAMPLES = """It listens on this machine only. With another --host it also wants a key.
Stop it with Ctrl-C or SIGTERM: running answers are finished first.

examples:
  ridgeline serve                                       the bundled model
  ridgeline serve path/to/model --speculate ngram       for answers that repeat their prompts
  ridgeline serve user/model@revision --port 9000 --served-model-name my-model
  ridgeline serve --plan plan.toml                      what ridgeline plan --out has written
  ridgeline serve path/to/model --host 192.0.2.7 --api-key-file keys.txt
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"model": "my-model", "prompt": "Once upon a time", "max_tokens": 50}'
"""

SERVER = {
    name: field
    for name, field in declared(ServeConfig).items()
    if name not in ("engine", "limits", "builder")
}
LIMITS = declared(Limits)
RENAMED = {
    "--max-requests-per-key": "max_sequences_per_key",
    "--tokenizer-threads": "tokenizer_processes",
}


def add_arguments(parser: Parser) -> None:
    where = parser.add_argument_group("where and for whom")
    where.add_argument(
        "--config",
        metavar="FILE",
        help="TOML or YAML with flags as keys, such as port = 8000, those of limits perhaps under "
        "[limits]; what is typed beats it",
    )
    where.add_argument(
        "--plan",
        metavar="FILE",
        help="start what ridgeline plan --out has written, replicas and router included; what is "
        "typed beats it",
    )
    add_fields(parser, where, SERVER, "server_")
    add_engine_flags(parser)
    group = parser.add_argument_group("limits", "Sizes as 4MiB or bytes, times in seconds.")
    add_fields(parser, group, LIMITS, "limit_", metavars={"integer": "N", "number": "N"})
    for old, new in RENAMED.items():
        group.add_argument(
            old, type=int, action=Renamed, dest="limit_" + new, default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """What the command line asks for."""
    server = given(args, SERVER, "server_")
    for name in ("allowed_hosts", "allowed_origins"):
        server[name] = tuple(server.get(name, ()))
    return ServeConfig(
        engine=EngineConfig(model=args.model, **engine_options(args)),
        limits=Limits(**given(args, LIMITS, "limit_")),
        **server,
    )


def run(args: argparse.Namespace) -> int:
    config = serve_config(args)
    log.set_up(config.log_level, config.log_format, access_log=config.access_log)
    if (file := args.config or args.plan) is not None:
        words = (f"{flag[2:]}={value}" for flag, value in args.parser.settings(args))
        log.say(logger, logging.INFO, "settings", file=file, taken="; ".join(words))
    if args.plan is not None:
        from ridgeline.cli.planned import check_machine

        check_machine(args.parser.planned, config, args.plan)
    if config.engine.launcher == "ray":
        from ridgeline.server.ray_app import serve_on_ray as serve
    elif config.num_replicas[1] > 1:
        from ridgeline.server.replicas import serve_replicas as serve
    else:
        from ridgeline.server.lifecycle import serve
    return serve(config, on_listening=_announce)


def _announce(url: str) -> None:
    """On standard output, so that whoever asked for port 0 learns which it is."""
    print(f"ridgeline: listening on {url}", flush=True)
