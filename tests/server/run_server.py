"""Run one server in a process of its own: `python -m tests.server.run_server CONFIG.json`.

The first line on standard output is its URL; a start-up fault goes to standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.log import set_up
from ridgeline.server import Limits, ServeConfig, serve


def main() -> int:
    # As somebody's program gives it: nothing is checked before the server does.
    given = msgspec.json.decode(Path(sys.argv[1]).read_bytes())
    given["engine"] = EngineConfig(**given["engine"])
    given["limits"] = Limits(**given["limits"])
    config = ServeConfig(**given)
    set_up(config.log_level, config.log_format, access_log=config.access_log)
    try:
        return serve(config, on_listening=lambda url: print(url, flush=True))
    except ConfigError as fault:
        print(f"ConfigError: {fault}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
