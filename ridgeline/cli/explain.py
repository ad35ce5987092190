"""`ridgeline explain`: where did the time of each request go, what binds, and what would help?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ridgeline.cli.parser import Parser
from ridgeline.cli.values import whole
from ridgeline.errors import ConfigError

EXAMPLES = """A run is explained from its event log (--event-log of serve, generate and bench), a
living server by itself. Each request's parts sum to its latency; floors are what the same work is
expected to take alone. Expectations are those of the engine: calibrated, or called assumed.

examples:
  ridgeline serve --event-log events.jsonl
  ridgeline explain --url http://127.0.0.1:8000
  ridgeline explain --log events.jsonl --requests 5
  ridgeline explain --log events.jsonl --request cmpl-1 --json
"""


def add_arguments(parser: Parser) -> None:
    parser.usage = "ridgeline explain (--log FILE | --url URL) [options]"
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--log", metavar="FILE", help="an event log; its last engine is explained")
    source.add_argument("--url", help="a running server")
    parser.add_argument("--api-key-file", metavar="FILE", help="holds the key that --url wants")
    parser.add_argument(
        "--requests",
        type=whole(0),
        default=10,
        metavar="N",
        help="show the N slowest (default: 10)",
    )
    parser.add_argument("--request", metavar="ID", help="show those whose id has this in it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    report = _of_log(args.log) if args.log else _of_server(args.url, args.api_key_file)
    if args.request:
        report["requests"] = [r for r in report["requests"] if args.request in r["request_id"]]
        if not report["requests"]:
            raise ConfigError(f"no request that is known has {args.request!r} in its id")
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        from ridgeline.cli.explain_tables import show

        show(report, args.requests)
    return 0


def _of_log(name: str) -> dict[str, Any]:
    from ridgeline.observe.event_log_reader import read_event_log
    from ridgeline.observe.evidence import evidence_of
    from ridgeline.observe.explain import explain

    return explain(evidence_of(read_event_log(Path(name)))).to_json()


def _of_server(url: str, api_key_file: str | None) -> dict[str, Any]:
    from ridgeline.benchmark.http_client import endpoint, fetch
    from ridgeline.cli.bench import first_key

    server = endpoint(url, "", first_key(api_key_file))
    try:
        report = json.loads(fetch(server, "/explain"))
    except OSError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    except ValueError:
        raise ConfigError(f"--url {url}: /explain is not what a ridgeline server says") from None
    if not isinstance(report, dict) or "requests" not in report:
        raise ConfigError(f"--url {url}: /explain is not what a ridgeline server says")
    return report
