"""`python -m ridgeline`: the same as the command, where no script is installed."""

from __future__ import annotations

import sys

from ridgeline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
