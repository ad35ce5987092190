"""`ridgeline lab`: pages in a browser that show how inference works, computed on this machine."""

from __future__ import annotations

import argparse
import asyncio
import signal
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.cli.parser import Parser
from ridgeline.cli.values import whole
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from ridgeline.server.lifecycle import Http

PORT = 8321

EXAMPLES = """No model is needed, and nothing is loaded from elsewhere. It listens on this machine
only, unless --host says another address. Ctrl-C ends it.

examples:
  ridgeline lab
  ridgeline lab --port 0 --no-browser      any free port; open the address yourself
  ridgeline lab --export site              the same pages for a host of files
"""


def add_arguments(parser: Parser) -> None:
    parser.usage = "ridgeline lab [options]"
    parser.flag("--host ADDRESS", "where to listen (default: %(default)s)", default="127.0.0.1")
    parser.flag("--port N", "0: any free one (default: %(default)s)", whole(0, 65535), default=PORT)
    parser.flag("--no-browser", "print the address, open nothing")
    parser.flag("--export DIR", "write a static edition there, which any host can serve", Path)
    parser.flag(
        "--pyodide DIR",
        "with --export: the files of the npm package pyodide and a wheel of msgspec for it, with "
        "which the browser computes what was not computed beforehand",
        Path,
    )


def run(args: argparse.Namespace) -> int:
    if args.export is not None:
        from ridgeline.lab.export import export

        for line in export(args.export, args.pyodide):
            print(line, flush=True)
        print(f"written to {args.export}; try: python -m http.server --directory {args.export}")
        return 0
    if args.pyodide is not None:
        raise ConfigError("pyodide is for a static edition; give export a folder too")
    return _serve_pages(args)


def _serve_pages(args: argparse.Namespace) -> int:
    from starlette.routing import Route, Router

    from ridgeline.clock import WallClock
    from ridgeline.lab.app import endpoints
    from ridgeline.observe.latency import Traffic
    from ridgeline.server.auth import Keys
    from ridgeline.server.config import Limits
    from ridgeline.server.hosts import HostGuard
    from ridgeline.server.lifecycle import Http, listen, url_of, uvicorn_config
    from ridgeline.server.middleware import Middleware
    from ridgeline.server.static_files import StaticPages

    router = Router([Route(path, ask, methods=[method]) for path, method, ask in endpoints()])
    guard, pages = HostGuard(args.host, ()), StaticPages(has_chat=False, has_lab=True)
    app = Middleware(router, Keys(), guard, Traffic(), WallClock(), pages)
    with listen(args.host, args.port) as sock:
        url = f"{url_of(sock)}/lab/"
        print(f"ridgeline: the lab is at {url} (Ctrl-C ends it)", flush=True)
        if not args.no_browser:
            webbrowser.open(url)
        http = Http(uvicorn_config(Limits(), app))
        asyncio.run(_serve(http, sock))
    return 0


async def _serve(http: Http, sock: socket.socket) -> None:
    """Until Ctrl-C or SIGTERM."""
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, setattr, http, "should_exit", True)
    await http._serve([sock])
