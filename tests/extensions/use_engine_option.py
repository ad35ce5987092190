"""Run in a copy of the package whose engine has the option `tiny_steps`: is it everywhere where an
option is?

See test_fields.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.build import build
from ridgeline.cli.flags import engine_options
from ridgeline.cli.main import parse
from ridgeline.cli.serve import serve_config
from ridgeline.config import EngineConfig, check_numbers, make_config
from ridgeline.errors import ConfigError
from ridgeline.frames import frame
from ridgeline.server.config import check_serve_numbers
from ridgeline.server.wire import Start, read_command
from tools import make_docs

GIVEN = {"tiny_steps": True}
ROW = "| `--tiny-steps` |  | at most 64 tokens in one step |"


def is_a_flag() -> None:
    for command in ("generate", "chat", "serve", "bench", "eval", "profile"):
        assert engine_options(parse([command, "m", "--tiny-steps"])) == GIVEN, command
        assert engine_options(parse([command, "m"])) == {}, command
    assert ROW in make_docs.PARTS["engine flags"]()


def is_a_key(folder: Path) -> None:
    file = folder / "serve.toml"
    for value in ("true", "false"):
        file.write_text(f"[engine]\ntiny_steps = {value}\n", encoding="utf-8")
        config = serve_config(parse(["serve", "m", "--config", str(file)]))
        assert option(config.engine) is (value == "true")
        check_serve_numbers(config)


def refusal(call: Any) -> str:
    try:
        call()
    except ConfigError as fault:
        return str(fault)
    raise AssertionError("it was taken")


def is_checked() -> None:
    for given in ("yes", 1, None):
        wrong = make_config({"model": "m", "tiny_steps": given})
        wanted = f"tiny_steps is {given!r}; it must be True or False"
        assert refusal(lambda wrong=wrong: check_numbers(wrong)) == wanted
    misspelt = refusal(lambda: make_config({"model": "m", "tiny_step": True}))
    assert misspelt == "there is no option tiny_step; did you mean tiny_steps?"


def option(config: EngineConfig) -> Any:
    return getattr(config, "tiny_steps")  # noqa: B009  mypy knows no such field


def main() -> None:
    print(ridgeline.__file__)
    is_a_flag()
    is_checked()
    with tempfile.TemporaryDirectory() as name:
        is_a_key(Path(name))
    for given, most in (({}, 2048), (GIVEN, 64)):
        config = make_config({"model": "demo:draft", "device": "cpu", "num_blocks": 16, **given})
        start = read_command(frame(Start(config, "INFO"))[4:])  # to the engine's process
        assert isinstance(start, Start)
        assert start.config == config
        assert build(start.config).resolved.max_num_batched_tokens == most


if __name__ == "__main__":
    main()
