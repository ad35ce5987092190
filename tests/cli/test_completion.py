"""Do shells complete commands, flags and choices?"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

BASH = """
set -e
source "$1"; shift
COMP_WORDS=(ridgeline "$@"); COMP_CWORD=$#
_shtab_ridgeline
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def script(cli: Cli, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    pytest.importorskip("shtab")
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    code, out, _ = cli("completion", request.param)
    path = tmp_path / f"ridgeline.{request.param}"
    path.write_text(out, encoding="utf-8")
    assert code == 0
    return path


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("s",), {"serve", "simulate"}),
        (("serve", "--max-num-b"), {"--max-num-batched-tokens"}),
        (("serve", "--dtype", "b"), {"bfloat16"}),
        (("serve", "--port", "1", "--sp"), {"--speculate"}),
        (("quantize", "--method", "g"), {"gptq"}),
        (("completion", "f"), {"fish"}),
        (("serve", "--event-log", "pyproject.t"), {"pyproject.toml"}),
    ],
)
def test_bash(script: Path, words: tuple[str, ...], offered: set[str]) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", str(script), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish(script: Path) -> None:
    line = f"source {script}; complete -C 'ridgeline serve --max-num-b'"
    done = subprocess.run(["fish", "--no-config", "-c", line], capture_output=True, text=True)
    assert done.stdout.split("\t")[0] == "--max-num-batched-tokens"


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_reads_it(script: Path) -> None:
    assert subprocess.run(["zsh", "-n", str(script)]).returncode == 0
    assert "--max-num-batched-tokens" in script.read_text(encoding="utf-8")


def test_without_shtab_it_names_the_way_out(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = cli("completion", "bash")
    assert (code, out) == (2, "")
    assert 'pip install "ridgeline[completion]"' in err
