"""Do the clients that people use get on with this server? `python -m tools.clients`, or `make
test-clients`.

Each client gets an environment of its own, in .clients/, with the version pinned here, and runs its
commonest flows unmodified against a server with the bundled model, and those that no small model
carries against a scripted one behind the same server. A flow that needs a part of the API which
stands in OPEN may fail; whoever builds that part takes it out. `model` there is what
the bundled model cannot carry.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.server.model_folder import write_model_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".clients"
INSTALL_S, FLOWS_S, START_S = 900, 300, 120
OPEN = frozenset({"embeddings", "messages", "model", "reasoning", "responses"})


@dataclass(frozen=True, slots=True)
class Client:
    """`script` in this folder; `pins` are what pip or npm installs."""

    script: str
    pins: tuple[str, ...]


CLIENTS = {
    "openai": Client("openai_flows.py", ("openai==3.57.0",)),
    "openai-js": Client("openai_flows.mjs", ("openai@6.49.0",)),
    "langchain-openai": Client("langchain_flows.py", ("langchain-openai==1.7.4",)),
    "pydantic-ai": Client("pydantic_ai_flows.py", ("pydantic-ai-slim[openai]==2.26.0",)),
    "instructor": Client("instructor_flows.py", ("instructor==1.17.0",)),
    "llm": Client("llm_flows.py", ("llm==0.36",)),
    "anthropic": Client("anthropic_flows.py", ("anthropic==2.14.0",)),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    client: str
    version: str
    flow: str
    needs: str
    fault: str

    @property
    def state(self) -> str:
        if not self.fault:
            return "ok"
        return "open" if self.needs in OPEN else "FAILED"


def command_of(name: str, client: Client) -> list[str]:
    """The client's own interpreter and script, its environment made first if need be."""
    folder, is_js = ENVIRONMENTS / name, client.script.endswith(".mjs")
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != " ".join(client.pins):
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {' '.join(client.pins)}", file=sys.stderr, flush=True)
        if is_js:
            folder.mkdir(parents=True)
            install = ["npm", "install", "--silent", "--prefix", str(folder), *client.pins]
        else:
            venv.create(folder, with_pip=True)
            install = [str(folder / "bin/python"), "-m", "pip", "install", "-q", *client.pins]
        subprocess.run(install, check=True, timeout=INSTALL_S)
        stamp.write_text(" ".join(client.pins))
    if is_js:  # Node looks for packages beside the script
        shutil.copy(HERE / client.script, folder / client.script)
        return ["node", str(folder / client.script)]
    return [str(folder / "bin/python"), str(HERE / client.script)]


def outcomes(
    name: str, client: Client, command: Sequence[str], urls: Sequence[str]
) -> list[Outcome]:
    """Of each flow; a script that ends early is one more that failed."""
    done = subprocess.run(
        [*command, *urls], capture_output=True, text=True, timeout=FLOWS_S, check=False
    )
    found = [Outcome(**json.loads(line)) for line in done.stdout.splitlines() if line[:1] == "{"]
    if done.returncode or not found:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        found.append(Outcome(name, " ".join(client.pins), "the script itself", "", words[0]))
    return found


@contextlib.contextmanager
def serving(name: str, *program: str) -> Iterator[list[str]]:
    """URL and model name of a server, which `python -m program` is, for the time of a `with`
    block."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env.pop("RIDGELINE_API_KEY", None)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            line = b"" if process.stdout is None else process.stdout.readline()
            url = line.decode().strip().rpartition(" ")[2]
            if not url.startswith("http"):
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{log.read().decode()}")
            wait_until_ready(url)
            yield [url, name]
        finally:
            process.terminate()
            process.wait(START_S)
            if process.stdout is not None:
                process.stdout.close()


def wait_until_ready(url: str) -> None:
    with httpx.Client(trust_env=False) as http:
        deadline = time.monotonic() + START_S
        while http.get(f"{url}/health").status_code != 200:
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} was not ready within {START_S} s")
            time.sleep(0.1)


@contextlib.contextmanager
def both_servers() -> Iterator[list[str]]:
    """URL and name of the bundled model, then of the scripted one."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_model_folder(Path(folder, "scripted"))
        config = {
            "engine": {"model": str(Path(folder, "scripted"))}, "limits": {}, "port": 0,
            "served_model_name": "scripted", "builder": "tools.clients.scripted:build",
        }  # fmt: skip
        Path(folder, "serve.json").write_text(json.dumps(config))
        programs = {
            "bundled": ("ridgeline", "serve", "demo:chat", "--port", "0", "--no-ui",
                        "--served-model-name", "bundled"),
            "scripted": ("tests.server.run_server", str(Path(folder, "serve.json"))),
        }  # fmt: skip
        yield [
            word
            for name, program in programs.items()
            for word in stack.enter_context(serving(name, *program))
        ]


def table(found: Sequence[Outcome]) -> str:
    rows = ["| client | version | flow | needs | |", "|---|---|---|---|---|"]
    rows += [f"| {o.client} | {o.version} | {o.flow} | {o.needs} | {o.state} |" for o in found]
    served = sum(o.state == "ok" for o in found)
    faults = [f"{o.client}, {o.flow}: {o.fault}" for o in found if o.fault]
    return "\n".join([*rows, "", f"{served} of {len(found)} flows pass", "", *faults])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each flow")
    args = parser.parse_args()
    if unknown := set(args.clients) - set(CLIENTS):
        parser.error(
            f"no such client: {', '.join(sorted(unknown))}; choose of {', '.join(CLIENTS)}"
        )
    chosen = {name: CLIENTS[name] for name in args.clients or CLIENTS}
    commands = {name: command_of(name, client) for name, client in chosen.items()}
    with both_servers() as urls:
        found = [
            outcome
            for name, client in chosen.items()
            for outcome in outcomes(name, client, commands[name], urls)
        ]
    if args.json:
        for outcome in found:
            record = {field: getattr(outcome, field) for field in Outcome.__slots__}
            print(json.dumps(record | {"state": outcome.state}))
    else:
        print(table(found))
    return int(any(outcome.state == "FAILED" for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
