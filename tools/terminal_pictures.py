"""What does a user see? Pictures of the terminal, made from real runs, for README and docs.

Run from the checkout: python -m tools.terminal_pictures [NAME ...]; it needs tmux, which is the
terminal. Each picture is docs/pictures/NAME.svg: the screen as tmux holds it after the commands,
drawn by rich. No font or other file is fetched when a picture is looked at.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
FONT = '"DejaVu Sans Mono", Menlo, Consolas, monospace'
HEIGHT = 80  # lines of the terminal; empty ones at the end are cut
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Picture:
    """A command, and what is typed into it at its prompt."""

    command: str
    width: int
    typed: Sequence[str] = ()


PICTURES = {
    "chat": Picture(
        "ridgeline chat --seed 1",
        100,
        (
            "Hello! Who are you?",
            "What is 4821 - 967?",
            "Tell me a story about a fox and a lantern.",
            "What is the capital of France?",
        ),
    ),
    "plan": Picture(
        "ridgeline plan llama-3.1-8b --rate 10 --input 500 --output 200 --ttft 500ms --tpot 30ms"
        " --devices l40s,a100-80-sxm,h100-sxm",
        110,
    ),
    "bench": Picture("ridgeline bench --batch 1,8 --prompt-len 64 --output-len 64", 110),
}


class Terminal:
    """A tmux server of its own with one window."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.socket = f"ridgeline-picture-{os.getpid()}"
        words = shlex.split(picture.command)
        command = [sys.executable, "-m", "ridgeline.cli.main", *words[1:]]
        screen = ["-x", str(picture.width), "-y", str(HEIGHT)]
        keep = [";", "set-option", "-g", "remain-on-exit", "on"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        environment.pop("TMUX", None)
        subprocess.run(
            [*self._tmux(), "new-session", "-d", *screen, "sleep 1; " + shlex.join(command), *keep],
            env=environment,
            check=True,
        )

    def _tmux(self) -> list[str]:
        return ["tmux", "-L", self.socket, "-f", "/dev/null"]

    def ask(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux(), *words], check=True, capture_output=True, text=True
        ).stdout

    def screen(self) -> str:
        """With colours; a line that the terminal broke stays broken."""
        lines = self.ask("capture-pane", "-e", "-p").rstrip().split("\n")
        return "\n".join(line for line in lines if not line.startswith("Pane is dead"))

    def wait_for(self, prompts: int) -> None:
        """Until the command has ended, or asks for input for the nth time."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            plain = self.ask("capture-pane", "-p").rstrip("\n")
            asked = len(re.findall(r"^> ?", plain, re.MULTILINE))
            dead = self.ask("display-message", "-p", "#{pane_dead}").strip() == "1"
            if dead or (prompts and asked >= prompts and plain.rstrip().endswith(">")):
                return
            time.sleep(0.1)
        raise TimeoutError(f"{self.picture.command}: no end after {PATIENCE_S:g} s")

    def run(self) -> str:
        for number, line in enumerate(self.picture.typed, 1):
            self.wait_for(number)
            self.ask("send-keys", "-l", line)
            self.ask("send-keys", "Enter")
        self.wait_for(len(self.picture.typed) + 1 if self.picture.typed else 0)
        return self.screen().removesuffix("\n>").rstrip()

    def close(self) -> None:
        self.ask("kill-server")


def drawn(name: str, picture: Picture, screen: str) -> str:
    console = Console(record=True, width=picture.width, file=io.StringIO(), legacy_windows=False)
    console.print(Text(f"$ {picture.command}\n", style="bold"), Text.from_ansi(screen), sep="")
    svg = console.export_svg(title="", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;]*;", f"font-family: {FONT};", svg)
    lines = (
        line.rstrip() for line in svg.encode("ascii", "xmlcharrefreplace").decode().split("\n")
    )
    return "\n".join(line for line in lines if line) + "\n"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        terminal = Terminal(PICTURES[name])
        try:
            screen = terminal.run()
        finally:
            terminal.close()
        path = FOLDER / f"{name}.svg"
        path.write_text(drawn(name, PICTURES[name], screen), encoding="ascii")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
