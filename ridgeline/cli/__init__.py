"""What does a server do that is told to stop while it still imports? It ends with status 0."""

import os
import signal
import sys

if sys.argv[1:2] == ["serve"]:  # here, because all that is imported later takes most of that time
    for _name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(_name, lambda number, frame: os._exit(0))
