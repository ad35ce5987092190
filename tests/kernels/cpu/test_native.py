"""Which level the kernels work at, and that memory checkers find nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu import native

ROOT = Path(__file__).parents[3]
SHOW = (
    "from ridgeline.kernels.cpu import native; print(native.library() is not None, native.level())"
)

ANNOUNCE = "from ridgeline.kernels.cpu.native import announce; announce()"
WITHOUT_THE_LIBRARY = shutil.ignore_patterns("native_cpu.so", "demo", "__pycache__")

needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")


def test_the_environment_lowers_the_level() -> None:
    assert native.wanted_level({}, "bf16") == "bf16"
    assert native.wanted_level({native.VARIABLE: "none"}, "bf16") == "none"
    with pytest.raises(ConfigError, match="choose one of none, avx2, avx512, bf16, amx"):
        native.wanted_level({native.VARIABLE: "sse9"}, "bf16")
    with pytest.raises(ConfigError, match="amx: this processor has at most bf16"):
        native.wanted_level({native.VARIABLE: "amx"}, "bf16")


@needs_library
def test_a_process_without_the_kernels() -> None:
    environment = os.environ | {native.VARIABLE: "none"}
    command = [sys.executable, "-c", SHOW]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "none"], done.stderr


def test_missing_kernels_are_told_with_the_way_out(tmp_path: Path) -> None:
    """A copy of the package without the library, in a process that set up no log."""
    shutil.copytree(ROOT / "ridgeline", tmp_path / "ridgeline", ignore=WITHOUT_THE_LIBRARY)
    command = [
        sys.executable,
        "-c",
        "from ridgeline.kernels.cpu.native import announce; announce()",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 0
    if native.can_be_built():
        assert len(lines) == 1
        assert "166 tokens/s" in lines[0]
        assert "`make native`" in lines[0]
    else:
        assert lines == []


@needs_library
def test_a_level_holds_for_a_while() -> None:
    before = native.level()
    with native.at_level("avx2"):
        assert native.level() == "avx2"
    assert native.level() == before


@needs_library
@pytest.mark.skipif(native.best_level() == "amx", reason="this processor has every level")
def test_a_level_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot work at level 'amx'"), native.at_level("amx"):
        pass


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_sanitizers_find_nothing() -> None:
    command = [sys.executable, "tools/sanitize_native.py", "--cases", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
