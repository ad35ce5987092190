"""The flows of llm, a command for the terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flows import SAY, Server, check, flow, main

CALL = SAY + '<tool_call>\n{"name": "llm_version", "arguments": {}}\n</tool_call>'


def llm(server: Server, *words: str, reads_errors: bool = False) -> str:
    """What the command prints, with the server among its models; `reads_errors`: to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        card = {"model_id": "ours", "model_name": server.model, "api_base": server.v1,
                "supports_tools": True, "supports_schema": True}  # fmt: skip
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([card]))
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words, "-m", "ours"],
            env=os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": server.key},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    check(done.returncode == 0, done.stderr[-300:])
    return done.stderr if reads_errors else done.stdout


@flow("prompt, streamed")
def streamed(server: Server) -> None:
    check(llm(server, "What is 12 + 30?").strip(), "a text")


@flow("prompt, whole, with a system prompt and options")
def whole(server: Server) -> None:
    said = llm(server, "What is 12 + 30?", "--no-stream", "-s", "Be brief.", "-o", "temperature",
               "0", "-o", "max_tokens", "16")  # fmt: skip
    check(said.strip(), said)


@flow("--tool", needs="tools", scripted=True)
def tools(server: Server) -> None:
    said = llm(server, CALL, "--no-stream", "-T", "llm_version", "--td", reads_errors=True)
    check("Tool call: llm_version" in said, said)


@flow("--schema", needs="schema")
def schema(server: Server) -> None:
    said = llm(server, "Invent a dog", "--no-stream", "--schema", "name, age int")
    check(set(json.loads(said)) >= {"name", "age"}, said)


if __name__ == "__main__":
    main("llm")
