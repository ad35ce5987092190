"""What is a flow of a client, and how does a client's script say how its flows went?

A script of this folder runs in its client's environment, so it imports nothing of ours but this.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

PATIENCE_S = 60.0  # for one flow


@dataclass(frozen=True)
class Server:
    """`url` without a slash at its end; `key` is any, for a server without keys. `model` answers in
    words of its own, and where a message begins with SAY, with what follows it."""

    url: str
    model: str
    key: str = "none-needed"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


SAY = "<<say>>"
Flow = Callable[[Server], Any]
FLOWS: list[tuple[str, str, bool, Flow]] = []


def flow(name: str, *, needs: str = "", scripted: bool = False) -> Callable[[Flow], Flow]:
    """`needs` is the part of the API that it is about, beside plain answers; `scripted` asks for
    the model that says what it is told to."""

    def add(run: Flow) -> Flow:
        FLOWS.append((name, needs, scripted, run))
        return run

    return add


def check(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(f"not as it should be: {what!r}")


def main(package: str) -> None:
    """Run the flows of a script: `SCRIPT URL MODEL URL MODEL`, first those of the bundled model and
    then those of the scripted one. A line of JSON for each."""
    bundled, scripted = Server(*sys.argv[1:3]), Server(*sys.argv[3:5])
    for name, needs, is_scripted, run in FLOWS:
        fault = ""
        try:
            found = run(scripted if is_scripted else bundled)
            if inspect.isawaitable(found):
                asyncio.run(asyncio.wait_for(_awaited(found), PATIENCE_S))
        except Exception as error:
            fault = traceback.format_exception_only(error)[-1].strip()[:300]
        line = {
            "client": package, "version": version(package), "flow": name, "needs": needs,
            "fault": fault,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


async def _awaited(found: Any) -> Any:
    return await found
